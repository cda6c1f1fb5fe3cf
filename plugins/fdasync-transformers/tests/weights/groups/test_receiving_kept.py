"""Broadcast tensors for places that are kept as stored: plain ones are quantised, quantised ones stay as they are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from fdasync_transformers import named_tensors
from fdasync_transformers.model.kept.forms import FP8, MXFP4
from fdasync_transformers.model.kept.kept import logical_state
from fdasync_transformers.weights import identity
from fdasync_transformers.weights.groups.framing import buckets
from fdasync_transformers.weights.groups.receiving import ReceivePlan, TensorReceiver
from fdasync_transformers.weights.shards import SINGLE_FILE
from live_weights import CPU, Live
from quantised import make_fp8, make_mxfp4
from safetensors.torch import load_file

from fdasync.errors import WeightsBroken
from fdasync.runner.base import TensorMeta

if TYPE_CHECKING:
    from pathlib import Path

SIZES: dict[str, Any] = {"num_hidden_layers": 2, "mlp_only_layers": [0], "moe_intermediate_size": 128, "num_experts": 4}


class Group:
    """Broadcasts of a sender that is always there: the bytes of its tensors, bucket by bucket."""

    device = CPU
    is_full = False

    def __init__(self, sent: list[torch.Tensor], bucket_nbytes: int) -> None:
        flat = [tensor.reshape(-1).view(torch.uint8) for tensor in sent]
        self._sent = []
        for bucket in buckets((len(each) for each in flat), bucket_nbytes):
            data = torch.zeros(bucket.nbytes, dtype=torch.uint8)
            for number, at in bucket.parts:
                piece = (
                    flat[number][bucket.first : bucket.first + bucket.nbytes]
                    if len(bucket.parts) == 1
                    else flat[number]
                )
                data[at : at + len(piece)] = piece
            self._sent.append(data)
        self._under_way: list[torch.Tensor] = []

    def begin(self, data: torch.Tensor, limit_s: float) -> None:
        assert limit_s > 0
        data.copy_(self._sent.pop(0))
        self._under_way.append(data)

    async def next(self, until: float, what: str) -> torch.Tensor:
        del until
        return self._under_way.pop(0)


async def receive(live: Live, tensors: dict[str, torch.Tensor], bucket_nbytes: int) -> None:
    given = named_tensors(tensors)
    live.weights.begin_tensors([TensorMeta(name, dtype, shape) for name, dtype, shape, _ in given])
    live.weights.touch()
    plan = ReceivePlan(live.weights.incoming, bucket_nbytes, CPU)
    group: Any = Group([torch.from_numpy(buffer) for *_, buffer in given], bucket_nbytes)
    await TensorReceiver(group, plan, checksum=False).run(1e9)
    live.weights.received("", last=True)


async def test_weights_that_a_form_cannot_have_break_the_update(tmp_path: Path) -> None:
    make_mxfp4(tmp_path / "quantised", tmp_path / "plain")
    live = Live(tmp_path / "quantised", form=MXFP4)
    tensors = load_file(tmp_path / "quantised" / SINGLE_FILE)
    name = next(name for name in tensors if name.endswith("_scales"))
    with pytest.raises(WeightsBroken, match=f"{name}: .*too large"):
        await receive(live, {**tensors, name: tensors[name] + 20}, 3000)
    assert live.weights.broken


@pytest.mark.ci(after=2)
@pytest.mark.parametrize("bucket_nbytes", [0, 3000, 1 << 30])
@pytest.mark.parametrize("kind", ["fp8", "mxfp4", "dequantised", "fp8_linears"])
async def test_broadcast_tensors_reach_kept_places(tmp_path: Path, kind: str, bucket_nbytes: int) -> None:
    folders = []
    for seed in range(2):
        folder = tmp_path / f"quantised {seed}"
        if kind == "mxfp4":
            make_mxfp4(folder, tmp_path / f"plain {seed}", seed)
        else:
            make_fp8(folder, tmp_path / f"plain {seed}", "qwen3_moe", seed, (128, 128), **SIZES)
        folders.append(folder)
    form = {"mxfp4": MXFP4, "dequantised": None}.get(kind, FP8)
    live = Live(folders[0], form=form, linears=kind == "fp8_linears")
    await receive(live, load_file(folders[1] / SINGLE_FILE), bucket_nbytes)
    assert identity.weights_id(live.model) == identity.weights_id(Live(folders[1]).model)
    assert live.now() == live.addresses
    # plain ones, under the names of the state dict
    plain = {name: held[:].clone() for name, held in logical_state(Live(folders[0], form=form).model).items()}
    await receive(live, plain, bucket_nbytes)
    expected = Live(folders[0], form=form, linears=kind == "fp8_linears")
    expected.send(named_tensors(plain))
    assert identity.weights_id(live.model) == identity.weights_id(expected.model)
    assert live.now() == live.addresses
