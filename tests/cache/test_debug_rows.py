"""The self-check mode: rows that name positions, through every tier and end; and that a wrong one is found."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from fdasync import Engine, SamplingParams
from fdasync.cache.aux import AuxSpec
from fdasync.cache.aux_arena import AuxArena
from fdasync.cache.debug_rows import check_debug_rows, debug_rows
from fdasync.engine.prepare import namespace_of
from fdasync.errors import ConfigError, EngineFailed, InvariantBroken
from fdasync.testing import run_sim, synthetic_config

PARAMS = SamplingParams(max_tokens=12, temperature=0.0)


def prompt(number, length):
    return [number, *[(number * 31 + at * 7) % 100 for at in range(1, length)]]


def config(**values):
    own = {"num_blocks": 14, "max_context_tokens": 48, "step_s": 0.01, "copy_s": 0.001}
    return synthetic_config(own, **{"routing_debug": True, "host_blocks": 32, **values})


def assert_named(result):
    for sample in result.samples:
        routing = sample.routing
        count = len(result.prompt_token_ids) + len(sample.token_ids) - 1 - routing.start
        assert len(routing.array) == count
        spec = AuxSpec("routing", routing.array.shape[1:], routing.array.dtype.name)
        assert np.array_equal(routing.array, debug_rows(np.arange(routing.start, routing.start + count), spec))


@pytest.mark.parametrize("depth", [1, 2])
def test_rows_name_their_positions_through_hits_swaps_and_preemption(depth):
    async def work():
        async with Engine(config(pipeline_depth=depth)) as engine:
            for _ in range(2):
                asked = [engine.complete(prompt(number, 21 + number), PARAMS) for number in range(5)]
                for result in await asyncio.gather(*asked):
                    assert_named(result)
            assert (await engine.complete(prompt(0, 21), PARAMS)).cached.total > 0
            late = await engine.complete(prompt(1, 22), SamplingParams(max_tokens=3, temperature=0.0), start=5)
            assert_named(late)

    run_sim(work())


def test_a_row_of_another_position_fails_the_engine_by_name(monkeypatch):
    honest = AuxArena.scatter

    def moved(self, index, generations, values):
        # the runner's own check has passed: what follows is what swaps, stores and transports could do
        rolled = {name: np.roll(rows, 1, axis=0) for name, rows in values.items()}
        honest(self, index, generations, rolled if len(index) > 4 else values)

    monkeypatch.setattr(AuxArena, "scatter", moved)

    async def work():
        async with Engine(config()) as engine:
            with pytest.raises(EngineFailed) as failed:
                await engine.complete(prompt(0, 21), PARAMS)
            assert "the row of position 0" in str(failed.value.__cause__ or failed.value)

    run_sim(work())


def test_without_it_the_same_engine_gives_experts():
    async def work():
        async with Engine(config(routing_debug=False)) as engine:
            routing = (await engine.complete(prompt(0, 21), PARAMS)).samples[0].routing
            assert (routing.array < routing.num_experts).all()

    run_sim(work())


def test_identities_of_the_two_do_not_meet():
    namespaces = []

    async def work(debug):
        async with Engine(config(routing_debug=debug)) as engine:
            namespaces.append(namespace_of(engine.capacity))

    run_sim(work(True))
    run_sim(work(False))
    assert namespaces[0] != namespaces[1]


def test_a_dense_model_cannot_have_it():
    dense = synthetic_config({"num_moe_layers": 0}, routing_debug=True)

    async def work():
        with pytest.raises(ConfigError, match="routing_debug"):
            async with Engine(dense):
                pass

    run_sim(work())


@pytest.mark.parametrize(("dtype", "shape"), [("uint8", (3, 2)), ("uint16", (5, 4)), ("uint8", (48, 8))])
def test_every_wrong_row_is_found(dtype, shape):
    spec = AuxSpec("routing", shape, dtype)
    positions = np.array([0, 1, 2, 255, 256, 65534, 65535, 65536, 1_000_000])
    rows = debug_rows(positions, spec)
    check_debug_rows(rows, positions, spec, "here")
    # no two positions look alike, where a row has cells for all digits
    if np.prod(shape) >= 4:
        assert len({row.tobytes() for row in rows}) == len(positions)
    for place in range(len(positions) - 1):
        swapped = rows.copy()
        swapped[[place, place + 1]] = swapped[[place + 1, place]]
        with pytest.raises(InvariantBroken, match=f"here the row of position {positions[place]} "):
            check_debug_rows(swapped, positions, spec, "here")
    with pytest.raises(InvariantBroken, match="were expected"):
        check_debug_rows(rows[:-1], positions, spec, "here")
    with pytest.raises(InvariantBroken, match="position 0"):
        check_debug_rows(np.zeros_like(rows), positions, spec, "here")
