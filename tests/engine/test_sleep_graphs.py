"""Graphs hold addresses of weights and blocks: they come back behind them, whatever a wake names."""

from __future__ import annotations

from itertools import permutations

import pytest

from fdasync import Engine
from fdasync.testing import check_idle, synthetic_config
from tests.engine.updates import ask, play

COSTS = {"step_s": 0.01, "sleep_s": 0.5}


@pytest.mark.parametrize(
    "released",
    [("weights", "kv_cache", "cuda_graph"), ("weights", "cuda_graph"), ("kv_cache", "cuda_graph"), ("cuda_graph",)],
)
def test_graphs_come_back_with_the_last_of_the_memory_that_they_need(released):
    """In any order of the others, named or not: xtuner, AReaL and ROLL name weights and blocks alone."""

    async def work():
        async with Engine(synthetic_config(COSTS)) as engine:
            for order in permutations(released):
                for tags in (order, [tag for tag in order if tag != "cuda_graph"] or ["kv_cache"]):
                    await engine.sleep(tags=released)
                    missing = set(released) - {"cuda_graph"}
                    for tag in tags:
                        await engine.wake([tag])
                        missing.discard(tag)
                        # before the others they would hold addresses of nothing
                        assert set(engine.stats().released) == (missing | {"cuda_graph"} if missing else set())
                    assert engine.load().doing == "running"
                    await ask(engine, 1)
            check_idle(engine)

    play(work)
