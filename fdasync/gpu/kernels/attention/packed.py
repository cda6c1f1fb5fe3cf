"""Attention over whole sequences whose tensors are packed one behind the other, as a trainer has them.

The prefill kernel attends them over a paged copy of their keys and values, so with the fixed order (`fixed.py`) their
bits are those of a rollout over paged KV. Forward only. Knows tensors and lengths; knows no pool and no model. Called
by trainers' attention.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from fdasync.errors import BadInput
from fdasync.gpu.kernels.attention.prefill import attend_prefill, prefill_tiles

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from fdasync.gpu.kernels.attention.fixed import Grain
    from fdasync.gpu.kernels.attention.tile import ReachKind

# tokens of a page: any that Hopper's copy engine takes, since pages change no bit
_PAGE = 16


def attend_packed(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor | None,
    offsets: Sequence[int] | NDArray[np.integer],
    *,
    scale: float,
    reach_kind: ReachKind = "full",
    reach_size: int = 0,
    sinks: torch.Tensor | None = None,
    value_dim: int | None = None,
    fixed: bool = True,
    grain: Grain | None = None,
) -> torch.Tensor:
    """Attend every token to the tokens of its sequence up to itself; returns [T, H, Dv] in the type of the query.

    `query` [T, H, Dk], `keys` [T, KH, Dk] and `values` [T, KH, Dv] of one dtype, strided but in the query's last
    dimension; `offsets` are host integers [S + 1] from 0 to T, where each sequence begins and the last one ends.
    `values` None: latents, whose value is the first `value_dim` elements of the key. Reach, sinks, `scale` and errors
    are as in `attend_prefill`. `fixed`: in the order of `fixed.py`; a query's bits are then those that `attend_decode`
    gives it, and for latents `attend_latents`. Allocates a copy of keys and values, whose sequences begin at pages of
    16 tokens; enqueues on the current stream and waits for nothing. Also raises BadInput for offsets that do not cut T
    tokens.
    """
    ends = np.asarray(offsets, dtype=np.int64)
    counts = np.diff(ends)
    tokens = len(query)
    if not len(ends) or ends[0] or ends[-1] != tokens or (counts < 0).any() or len(keys) != tokens:
        raise BadInput("offsets", f"do not cut {tokens} queries and {len(keys)} keys")
    width = value_dim if values is None else values.shape[2]
    if width is None:
        raise BadInput("value_dim", "must say how much of a latent key is the value", limit=keys.shape[2])
    out = query.new_empty(tokens, query.shape[1], width)
    if not tokens:
        return out
    pages = -(-counts // _PAGE)
    # memory that is not pinned is read before `to` returns, and nothing waits for the stream
    numbers = np.stack((np.cumsum(pages) - pages, ends[:-1], counts))
    first_pages, first_rows, sizes = torch.from_numpy(numbers).to(query.device, non_blocking=True)
    tiles = torch.from_numpy(prefill_tiles(counts)).to(query.device, non_blocking=True)
    lanes = torch.arange(len(counts), dtype=torch.int32, device=query.device)
    # entries behind a sequence's own pages are not read
    tables = (first_pages[:, None] + torch.arange(int(pages.max()), device=query.device)).int()
    shift = torch.repeat_interleave(first_pages * _PAGE - first_rows, sizes, output_size=tokens)
    places = shift + torch.arange(tokens, device=query.device)

    def paged(packed: torch.Tensor) -> torch.Tensor:
        pool = packed.new_empty(int(pages.sum()), _PAGE, *packed.shape[1:])
        # places are distinct: nothing is added, and the order of writes changes no bit
        pool.flatten(0, 1).index_copy_(0, places, packed)
        return pool

    attend_prefill(
        query, paged(keys), None if values is None else paged(values), tables,
        lanes, torch.zeros_like(sizes), first_rows, sizes, tiles,
        scale=scale, reach_kind=reach_kind, reach_size=reach_size, sinks=sinks, out=out, value_dim=width,
        fixed=fixed, grain=grain,
    )  # fmt: skip
    return out
