"""A loaded model whose weights are replaced, as the tests of new weights use it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from fdasync_transformers.model.kept.keep import keep_experts
from fdasync_transformers.model.kept.linears import keep_linears, linears_of
from fdasync_transformers.weights import identity, loading
from fdasync_transformers.weights.shards import SINGLE_FILE
from fdasync_transformers.weights.update import LiveWeights
from safetensors.torch import load_file

from fdasync.runner.base import TensorMeta

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from fdasync_transformers.model.kept.forms import Form

CPU = torch.device("cpu")


class Live:
    """A model loaded from `folder`, with what must not change."""

    def __init__(self, folder: Path, dtype: str = "auto", form: Form | None = None, *, linears: bool = False) -> None:
        """`form`: in which experts stay. `linears`: linear layers stay in FP8."""
        checkpoint = loading.read_checkpoint(str(folder))
        facts = identity.config_facts(checkpoint.config)
        self.model = loading.build(checkpoint, dtype)
        self.names = loading.names_of(checkpoint, self.model)
        if form is not None:
            keep_experts(self.model, form)
        if linears:
            keep_linears(self.model, [path for path, _ in linears_of(self.model)])
        self.notes = loading.fill(self.model, checkpoint, self.names, CPU)
        self.weights = LiveWeights(self.names, facts)
        self.addresses = self.now()

    def now(self) -> dict[str, int]:
        everything = {**self.model.state_dict(), **dict(self.model.named_buffers())}
        return {name: tensor.data_ptr() for name, tensor in everything.items()}

    def state(self) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in self.model.state_dict().items()}

    def send(self, tensors: Iterable[tuple[str, str, tuple[int, ...], Any]], piece: int = 640) -> None:
        given = list(tensors)
        self.weights.begin_tensors([TensorMeta(name, dtype, shape) for name, dtype, shape, _ in given])
        for number, (_, _, _, buffer) in enumerate(given):
            data = memoryview(buffer)
            for first in range(0, len(data), piece):
                self.weights.write_tensor(number, first, data[first : first + piece])
        self.weights.end_tensors()


def assert_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert tensor.dtype == other[name].dtype, name
        assert torch.equal(tensor, other[name]), name


def stored(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / SINGLE_FILE)
