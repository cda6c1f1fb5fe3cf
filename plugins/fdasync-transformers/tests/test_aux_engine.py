"""Router weights and layer norms through whole engines: a hit, swapping, a store, a hand-over.

Each row is compared with the library's own, and each that came back with the one that was computed first.
"""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from aux_reference import assert_weights, plain
from fdasync_fleet.testing.patience import LEASES, LINKS
from fdasync_transformers.tiny.checkpoints import make_tiny_checkpoint

import fdasync
from fdasync import Engine, EngineConfig, Instance, SamplingParams

if TYPE_CHECKING:
    from pathlib import Path

    from fdasync import Result

pytestmark = pytest.mark.usefixtures("forked_children")

PARAMS = SamplingParams(max_tokens=5, temperature=0.0)
KINDS = [
    ("qwen3_moe", ["routing_weights"]),
    ("glm4_moe", ["layer_norms", "routing_weights"]),
    ("qwen3_dense", ["layer_norms"]),
]


def prompt(number: int) -> list[int]:
    """Prompts of 22 tokens, five blocks and a part, that share nothing: their first tokens differ."""
    return [number + 3, *[(number * 31 + at * 7) % 100 + 3 for at in range(1, 22)]]


def config(folder: Path, aux: list[str], **values: Any) -> EngineConfig:
    own = {"dtype": "float32", "device": "cpu", "num_threads": 1, "self_check": False, "aux": aux}
    sizes = {"block_tokens": 4, "num_blocks": 64, "max_context_tokens": 64, "max_running": 4, "max_step_tokens": 64}
    return EngineConfig(model=str(folder), runner_config=own, process="inline", tokenizer="none", **{**sizes, **values})


def check(result: Result, model: Any, tokens: list[int], aux: list[str]) -> dict[str, np.ndarray]:
    """The sample's rows by name, each right by a plain pass over the whole sequence."""
    sample = result.samples[0]
    assert sorted(sample.aux) == sorted(aux)
    forwarded = [*tokens, *sample.token_ids][:-1]
    top_k = [] if sample.routing is None else [sample.routing.array.shape[2]] * sample.routing.array.shape[1]
    ids, weights, norms = plain(model, forwarded, top_k)
    found = dict(sample.aux)
    assert all(len(rows) == len(forwarded) for rows in found.values())
    if "routing_weights" in aux:
        assert sample.routing is not None
        assert_weights(found["routing_weights"], sample.routing.array, ids, weights)
    if "layer_norms" in aux:
        np.testing.assert_allclose(found["layer_norms"], norms, rtol=1e-4)
    return found


def assert_kept(again: dict[str, np.ndarray], first: dict[str, np.ndarray], tokens: int) -> None:
    """What came with the KV of the first so many tokens is what was computed with it."""
    for name, rows in first.items():
        assert np.array_equal(again[name][:tokens], rows[:tokens])


@pytest.mark.ci(after=1)
@pytest.mark.parametrize(("family", "aux"), KINDS)
async def test_a_hit_on_the_device_and_on_the_host(tmp_path: Path, family: str, aux: list[str]) -> None:
    model = make_tiny_checkpoint(tmp_path, family)
    async with Engine(config(tmp_path, aux, num_blocks=14, host_blocks=64, max_running=1)) as engine:
        first = check(await engine.complete(prompt(0), PARAMS), model, prompt(0), aux)
        again = await engine.complete(prompt(0), PARAMS)
        assert (again.cached.device, again.cached.host) == (20, 0)
        assert_kept(check(again, model, prompt(0), aux), first, 20)
        for number in (1, 2, 3):
            check(await engine.complete(prompt(number), PARAMS), model, prompt(number), aux)
        back = await engine.complete(prompt(0), PARAMS)
        assert (back.cached.device, back.cached.host) == (0, 20)
        assert_kept(check(back, model, prompt(0), aux), first, 20)
        engine.check()


@pytest.mark.ci
@pytest.mark.parametrize(("family", "aux"), KINDS)
async def test_from_a_store_into_another_engine(
    tmp_path: Path, family: str, aux: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_tiny_checkpoint(tmp_path / "model", family)
    # a model this small computes faster than any store reads, so the engines get another speed
    monkeypatch.setattr("fdasync_transformers.start.capacity.prefill_tokens_per_s", lambda *_: 1.0)
    store = {
        "store": "file",
        "store_config": {"path": str(tmp_path / "store")},
        "host_blocks": 64,
        "fetch_min_tokens": 4,
    }
    async with Engine(config(tmp_path / "model", aux, **store)) as engine:
        first = check(await engine.complete(prompt(0), PARAMS), model, prompt(0), aux)
        await engine.drain()
    async with Engine(config(tmp_path / "model", aux, **store)) as engine:
        back = await engine.complete(prompt(0), PARAMS)
        assert back.cached.store == 20
        assert_kept(check(back, model, prompt(0), aux), first, 20)
    # objects with other rows are another namespace: nothing is found, and nothing is mistaken for it
    other = ["layer_norms"] if aux != ["layer_norms"] else []
    async with Engine(config(tmp_path / "model", other, **store)) as engine:
        fresh = await engine.complete(prompt(0), PARAMS)
        assert fresh.cached.total == 0
        check(fresh, model, prompt(0), other)


@pytest.mark.ci(after=1)
@pytest.mark.parametrize(("family", "aux"), KINDS)
async def test_handed_over_from_prefill_to_decode(tmp_path: Path, family: str, aux: list[str]) -> None:
    model = make_tiny_checkpoint(tmp_path / "model", family)
    async with AsyncExitStack() as stack:
        addresses = []
        for role in ("prefill", "decode"):
            own = config(tmp_path / "model", aux, role=role, host_blocks=64, leases=LEASES)
            instance = Instance(own, listen=f"ipc://{tmp_path}/{role}", name=role, links=LINKS, transfer_process=False)
            addresses.append((await stack.enter_async_context(instance)).address)
        router = await stack.enter_async_context(fdasync.connect(addresses, links=LINKS))
        first = check(await router.complete(prompt(0), PARAMS, deadline_s=300.0), model, prompt(0), aux)
        # what the decode side has already is neither computed nor sent again
        again = await router.complete(prompt(0), PARAMS, deadline_s=300.0)
        assert again.cached.total == 20
        assert_kept(check(again, model, prompt(0), aux), first, 20)
