"""What a rank holds while it loads: its share of the weights, and one stored tensor beside it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from fdasync_transformers.parallel.shard import Sharded
from fdasync_transformers.tiny.checkpoints import make_tiny_checkpoint
from fdasync_transformers.weights import loading
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

if TYPE_CHECKING:
    from pathlib import Path

CPU = torch.device("cpu")
# experts stored one by one; latents; experts stored in one tensor
FAMILIES = [
    "qwen3_moe",
    *[pytest.param(name, marks=pytest.mark.nightly) for name in ("deepseek_v2", "llama4_text", "mixtral")],
]


class HeldBytes(TorchDispatchMode):
    """Counts the bytes of all host tensors that operations meet, as long as they live.

    Attributes:
        peak_nbytes: most at a time, each memory once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak_nbytes = 0
        self._held: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for tensor in tree_leaves((args, kwargs or {}, found)):
            if isinstance(tensor, torch.Tensor) and tensor.device == CPU:
                storage = tensor.untyped_storage()
                self._held[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._held = {key: one for key, one in self._held.items() if not one[0].expired()}
        self.peak_nbytes = max(self.peak_nbytes, sum(nbytes for _, nbytes in self._held.values()))
        return found


def nbytes_of(tensors: Any) -> int:
    """Each memory once."""
    return sum({one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}.values())


def loaded(folder: Path, rank: int, ranks: int) -> tuple[int, int]:
    """Most bytes at a time while a rank loads, and those of its share."""
    checkpoint = loading.read_checkpoint(str(folder))
    model = loading.build(checkpoint, "float32")
    names = loading.names_of(checkpoint, model)
    if ranks > 1:
        names.cuts = Sharded(model, rank, ranks, latent=True).cuts
    with HeldBytes() as held:
        loading.fill(model, checkpoint, names, CPU)
    return held.peak_nbytes, nbytes_of([*model.parameters(), *model.buffers()])


@pytest.mark.ci
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_holds_its_share_and_one_stored_tensor(tmp_path: Path, family: str, ranks: int) -> None:
    make_tiny_checkpoint(tmp_path, family)
    table = loading.read_checkpoint(str(tmp_path)).tensors.values()
    most_stored = max(torch.empty(stored.shape, device="meta").numel() for stored in table) * 4
    _, whole = loaded(tmp_path, 0, 1)
    for rank in range(ranks):
        peak, share = loaded(tmp_path, rank, ranks)
        # stored tensors were seen on their way
        assert share < peak <= share + most_stored
        assert share + most_stored < whole, "a rank that loads all of it would be noticed"
