"""Attention over whole sequences whose tensors are packed in rows, one behind the other, as a trainer has them.

The prefill kernel attends them over a paged copy of their keys and values, so with the fixed order (`fixed.py`) they
have the bits of a rollout over paged KV. Forward only. Knows tensors and lengths; knows no pool and no model. Called by
trainers' attention.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

import numpy as np
import torch

from fdasync.errors import BadInput
from fdasync_kernels.attention.prefill import attend_prefill, prefill_tiles
from fdasync_kernels.registry import operation

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from fdasync_kernels.attention.fixed import Grain
    from fdasync_kernels.attention.tile import ReachKind

# tokens of a page: any that Hopper's copy engine takes, since pages change no bit
_PAGE = 16
# what that engine wants a pool to begin at
_ALIGNED_NBYTES = 16


class PackedLayout:
    """Where sequences stand in the rows of their tensors, and in pages: made once for a batch, read by each layer.

    `firsts` and `counts` are host integers [S], each sequence's first row and number of rows; sequences do not overlap.
    `rows` counts all rows, also rows of no sequence. Tensors are put on `device`, on the current stream; nothing waits
    for it. Raises BadInput for sequences outside of the rows.

    Attributes:
        rows: as given.
        whole: whether each row belongs to a sequence.
    """

    def __init__(
        self, firsts: NDArray[np.integer], counts: NDArray[np.integer], rows: int, device: torch.device
    ) -> None:
        begins, sizes = (np.asarray(part, dtype=np.int64) for part in (firsts, counts))
        if (sizes < 0).any() or (begins < 0).any() or (begins + sizes > rows).any() or sizes.sum() > rows:
            raise BadInput("counts", f"sequences that do not lie within {rows} rows")
        self.rows = rows
        self.whole = int(sizes.sum()) == rows
        pages = -(-sizes // _PAGE)
        first_pages = np.cumsum(pages) - pages
        # slots behind a sequence's end repeat its last row; no query sees them
        slots = np.arange(pages.sum() * _PAGE) - np.repeat(first_pages * _PAGE, pages * _PAGE)
        sources = np.repeat(begins, pages * _PAGE) + np.minimum(slots, np.repeat(sizes - 1, pages * _PAGE))
        # memory that is not pinned is read before `to` returns
        numbers = torch.from_numpy(np.stack((first_pages, begins, sizes))).to(device, non_blocking=True)
        self.first_rows, self.sizes = numbers[1], numbers[2]
        self.tiles = torch.from_numpy(prefill_tiles(sizes)).to(device, non_blocking=True)
        self.lanes = torch.arange(len(sizes), dtype=torch.int32, device=device)
        self.starts = torch.zeros_like(self.sizes)
        # entries behind a sequence's own pages are not read
        columns = torch.arange(int(pages.max(initial=0)), device=device)
        self.tables = (numbers[0][:, None] + columns).int()
        self._in_place = len(sources) == rows and bool((sources == np.arange(rows)).all())
        self._sources = None if self._in_place else torch.from_numpy(sources).to(device, non_blocking=True)

    @classmethod
    def cut(cls, offsets: Sequence[int] | NDArray[np.integer], rows: int, device: torch.device) -> Self:
        """Sequences that cut all rows: `offsets` are host integers [S + 1] from 0 to `rows`, where each sequence begins
        and the last one ends. Raises BadInput for others."""
        ends = np.asarray(offsets, dtype=np.int64)
        counts = np.diff(ends)
        if not len(ends) or ends[0] or ends[-1] != rows or (counts < 0).any():
            raise BadInput("offsets", f"do not cut {rows} rows")
        return cls(ends[:-1], counts, rows, device)

    def paged(self, packed: torch.Tensor) -> torch.Tensor:
        """Rows [rows, KH, D] in pages [n, tokens of a page, KH, D]: a copy, or a view of rows that stand in pages."""
        if self._sources is not None:
            packed = packed.index_select(0, self._sources)
        elif not packed.is_contiguous() or packed.data_ptr() % _ALIGNED_NBYTES:
            packed = packed.clone(memory_format=torch.contiguous_format)
        return packed.view(-1, _PAGE, *packed.shape[1:])


@operation
def attend_packed(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor | None,
    layout: PackedLayout,
    *,
    scale: float,
    reach_kind: ReachKind = "full",
    reach_size: int = 0,
    sinks: torch.Tensor | None = None,
    value_dim: int | None = None,
    fixed: bool = True,
    grain: Grain | None = None,
) -> torch.Tensor:
    """Attend every token to the tokens of its sequence up to itself; returns [T, H, Dv] in the type of the query, zeros
    in rows that belong to no sequence.

    `query` [T, H, Dk], `keys` [T, KH, Dk] and `values` [T, KH, Dv] of one dtype, strided but in the query's last
    dimension, of the T rows of the layout. `values` None: latents, whose value is the first `value_dim` elements of the
    key. Reach, sinks, `scale` and errors are as in `attend_prefill`. `fixed`: in the order of `fixed.py`; a query has
    then the bits that `attend_decode` gives it, and for latents `attend_latents`. Allocates a copy of keys and values,
    whose sequences begin at pages of 16 tokens, unless they do already; enqueues on the current stream and waits for
    nothing. Also raises BadInput for tensors of other rows.
    """
    tokens = len(query)
    if tokens != layout.rows or len(keys) != tokens:
        raise BadInput("layout", f"has {layout.rows} rows beside {tokens} queries and {len(keys)} keys")
    width = value_dim if values is None else values.shape[2]
    if width is None:
        raise BadInput("value_dim", "must say how much of a latent key is the value", limit=keys.shape[2])
    new = query.new_empty if layout.whole else query.new_zeros
    out = new((tokens, query.shape[1], width))
    if not len(layout.tiles):
        return out
    attend_prefill(
        query, layout.paged(keys), None if values is None else layout.paged(values), layout.tables,
        layout.lanes, layout.starts, layout.first_rows, layout.sizes, layout.tiles,
        scale=scale, reach_kind=reach_kind, reach_size=reach_size, sinks=sinks, out=out, value_dim=width,
        fixed=fixed, grain=grain,
    )  # fmt: skip
    return out
