"""Rows of other specs than routing, on their way to the caller: what is asked for comes, with or without routing."""

from __future__ import annotations

import asyncio
import contextlib
from random import Random

import numpy as np
import pytest
from fdasync_fleet.router.router import Router
from fdasync_fleet.testing.sim.network import SimNetwork
from fdasync_fleet.testing.sim.transport import SimFabric, SimFaults, SimTransport

from fdasync import Engine, Instance, SamplingParams
from fdasync.cache.store.memory import MemoryConfig, MemoryStore
from fdasync.errors import BadInput, EngineFailed
from fdasync.runner.synthetic import SyntheticRunner
from fdasync.testing import check_idle, check_sample, no_leaks, oracle_of, run_sim, synthetic_config, synthetic_engine
from fdasync.testing.harness.engines import until
from fdasync.testing.stores.faults import FaultyStore, StoreFaults

PROMPT = list(range(1, 11))
BRIEF = SamplingParams(max_tokens=5, seed=3)
DENSE = {"num_moe_layers": 0, "pass_stamp": False}
#: what `aux` is, and what comes of it
WAYS = [
    (None, ("values", "stamp")),
    (True, ("values", "stamp")),
    (False, ()),
    ((), ()),
    (["stamp"], ("stamp",)),
    (("values", "stamp", "values"), ("values", "stamp")),
]


@pytest.mark.ci(after=8)
@pytest.mark.parametrize(("aux", "names"), WAYS)
@pytest.mark.parametrize("routing", [None, True, False])
async def test_rows_are_those_asked_for_whatever_was_asked_of_routing(aux, names, routing):
    wanted = names if routing is False else ("routing", *names)
    async with synthetic_engine() as engine:
        oracle = oracle_of(engine.config)
        for start in (0, 3):
            result = await engine.complete(PROMPT, BRIEF, routing=routing, aux=aux, start=start)
            check_sample(result.samples[0], PROMPT, BRIEF, oracle, start=start, names=wanted)
            async with engine.generate(PROMPT, BRIEF, routing=routing, aux=aux, start=start) as stream:
                _ = [delta async for delta in stream]
            check_sample(stream.result.samples[0], PROMPT, BRIEF, oracle, start=start, names=wanted)


async def test_rows_that_are_not_there_are_refused_by_name():
    async with synthetic_engine() as engine:
        with pytest.raises(BadInput, match=r"'logits' \(limit: values, stamp\)"):
            await engine.complete(PROMPT, BRIEF, aux=("values", "logits"))
    async with synthetic_engine(synthetic_config({"values_spec": False, "pass_stamp": False})) as engine:
        with pytest.raises(BadInput, match="aux"):
            await engine.complete(PROMPT, BRIEF, aux=True)
        assert (await engine.complete(PROMPT, BRIEF)).aux == {}


@pytest.mark.parametrize("config", [synthetic_config(DENSE), synthetic_config({"pass_stamp": False}, routing=False)])
async def test_without_routing_there_are_the_rows_of_the_other_specs(config):
    async with synthetic_engine(config) as engine:
        (spec,) = engine.capacity.aux_specs
        assert spec.name == "values"
        oracle = oracle_of(config)
        first = await engine.complete(PROMPT, BRIEF)
        check_sample(first.samples[0], PROMPT, BRIEF, oracle, names=("values",))
        assert first.start == 0
        # a hit's rows are those of the block
        again = await engine.complete(PROMPT, BRIEF, start=2)
        check_sample(again.samples[0], PROMPT, BRIEF, oracle, start=2, names=("values",))
        assert (again.cached_tokens, again.start) == (8, 2)
        none = await engine.complete(PROMPT, BRIEF, aux=False)
        check_sample(none.samples[0], PROMPT, BRIEF, oracle, names=())
        with pytest.raises(BadInput, match="routing"):
            await engine.complete(PROMPT, BRIEF, routing=True)


async def test_a_model_without_any_spec_has_no_slots():
    config = synthetic_config({**DENSE, "values_spec": False})
    async with synthetic_engine(config) as engine:
        assert engine.capacity.aux_specs == ()
        for _ in range(2):
            result = await engine.complete(PROMPT, BRIEF)
            check_sample(result.samples[0], PROMPT, BRIEF, oracle_of(config), names=())
        assert result.cached_tokens == 8


class Kept(FaultyStore):
    """A memory store that outlives the engine that opens it."""

    async def aclose(self):
        self.end()


def prompt(number, length):
    return [number, *[(number * 31 + at * 7) % 100 for at in range(1, length)]]


def test_rows_of_a_dense_model_live_through_preemption_host_and_store():
    own = {**DENSE, "num_blocks": 16, "max_context_tokens": 64, "step_s": 0.01, "token_s": 0.002, "copy_s": 0.001}
    values = {"host_blocks": 24, "store": "memory", "max_running": 4, "decode_reserve_blocks": 0, "trace_turns": 0}
    config = synthetic_config(own, **values)
    params = SamplingParams(max_tokens=24, temperature=0.0)
    prompts = [prompt(number, 16) for number in range(6)]
    store = Kept(MemoryStore(MemoryConfig()), StoreFaults())

    async def life(*, stored):
        async with Engine(config, store=store) as engine:
            results = await asyncio.gather(*[engine.complete(tokens, params) for tokens in prompts])
            for tokens, result in zip(prompts, results, strict=True):
                check_sample(result.samples[0], tokens, params, oracle_of(config), names=("values",))
            counters = engine.stats().scheduler
            if stored:
                assert sum(result.cached.store for result in results) > 0
            else:
                assert counters.preemptions > 0
                assert counters.swapped_in_blocks > 0
                await until(lambda: not engine.stats().scheduler.writing, 60, 0.1)
                assert engine.stats().scheduler.written_blocks > 0
            engine.check()
        check_idle(engine)

    with no_leaks():
        run_sim(life(stored=False))
        run_sim(life(stored=True))


@pytest.mark.parametrize("runner", [DENSE, {"pass_stamp": False}])
def test_rows_are_handed_from_prefill_to_decode(runner):
    async def main():
        network, fabric = SimNetwork(Random(1)), SimFabric(Random(2), SimFaults())

        def instance(number, role):
            config = synthetic_config({"step_s": 0.05, **runner}, role=role, host_blocks=16)
            return Instance(
                config, listen=f"ipc://m{number}", wire=network.wire(f"m{number}"), transports=[SimTransport(fabric)]
            )

        p, d = instance(0, "prefill"), instance(1, "decode")
        async with d, p, Router([p.address, d.address], wire=network.wire("router"), seed=1) as router:
            oracle = oracle_of(d.engine.config)
            whole = ["values"] if runner is DENSE else ["routing", "values"]
            for number, (names, wants) in enumerate(
                [
                    (whole, {}),
                    (whole, {"start": 5}),
                    (["values"], {"routing": False, "aux": ("values",)}),
                    ([name for name in whole if name != "values"], {"aux": False}),
                    ([], {"routing": False, "aux": ()}),
                ]
            ):
                # full blocks, and an open one
                tokens = prompt(number, 18)
                params = SamplingParams(max_tokens=9, seed=number, n=2)
                result = await router.complete(tokens, params, **wants)
                for sample in result.samples:
                    check_sample(sample, tokens, params, oracle, start=wants.get("start", 0), names=names)
                assert d.engine.stats().scheduler.received_blocks == 6 * (number + 1)
            with pytest.raises(BadInput, match="no rows of 'more'"):
                await router.complete(PROMPT, BRIEF, aux=("more",))

    run_sim(main())


def test_rows_of_no_tokens_are_empty_arrays_of_each_kind_that_was_asked_for():
    async def main():
        config = synthetic_config({"step_s": 2.0})
        async with Engine(config) as engine:
            result = await engine.complete(PROMPT, BRIEF, deadline_s=1.0, routing=False, aux=("values",), start=4)
            (sample,) = result.samples
            assert (sample.finish_reason, sample.routing, sorted(sample.aux), sample.start) == (
                "deadline", None, ["values"], 4,
            )  # fmt: skip
            assert (sample.aux["values"].shape, sample.aux["values"].dtype) == ((0, 4), np.float16)

    run_sim(main())


class WritesNoRows(SyntheticRunner):
    """Declares specs, and leaves their slots as they were."""

    def _write_rows(self, flight):
        return None


class SkipsTheFirst(SyntheticRunner):
    """Writes all rows but those of the first block of a prompt."""

    def _write_rows(self, flight):
        batch, size = flight.batch, self._arena.block_tokens
        first = int(batch.aux_index[0]) // size
        kept = batch.aux_index // size != first if len(batch.aux_index) > size else np.ones(len(batch.aux_index), bool)
        rows = {name: values[kept] for name, values in flight.rows.items()}
        self._arena.scatter(batch.aux_index[kept], batch.generations[kept], rows)


def test_rows_that_were_never_written_reach_no_store():
    config = synthetic_config({"pass_stamp": False}, host_blocks=8, store="memory", write_through="all")
    store = MemoryStore(MemoryConfig())
    asked = []
    put, store.put = store.put, lambda items: asked.append(items) or put(items)

    async def main():
        runner = WritesNoRows(oracle_of(config).config, config.runner_limits())
        engine = Engine(config, runner=runner, store=store)
        await engine.start()
        # nobody asks for rows, so nobody copies any
        with contextlib.suppress(EngineFailed):
            await engine.complete(PROMPT, BRIEF, routing=False, aux=False)
        await until(lambda: engine.state == "failed", 10, 0.01)
        with pytest.raises(EngineFailed, match="InvariantBroken: aux rows 0 to 3 of slot"):
            await engine.complete(PROMPT, BRIEF)
        await engine.aclose()

    with no_leaks():
        run_sim(main())
    assert asked == []


@pytest.mark.parametrize("kind", [WritesNoRows, SkipsTheFirst])
def test_rows_that_were_never_written_reach_no_other_instance(kind):
    network, fabric = SimNetwork(Random(1)), SimFabric(Random(2), SimFaults())

    def instance(number, role, kind):
        config = synthetic_config({"pass_stamp": False}, role=role, host_blocks=16)
        return Instance(
            config,
            listen=f"ipc://m{number}",
            wire=network.wire(f"m{number}"),
            transports=[SimTransport(fabric)],
            runner=kind(oracle_of(config).config, config.runner_limits()),
        )

    async def main():
        p, d = instance(0, "prefill", kind), instance(1, "decode", SyntheticRunner)
        await p.start()
        async with d:
            router = Router([p.address, d.address], wire=network.wire("router"), seed=1)
            async with router:
                result = await router.complete(PROMPT, BRIEF, routing=False, aux=False, deadline_s=30.0)
                # by the other one alone
                check_sample(result.samples[0], PROMPT, BRIEF, oracle_of(d.engine.config), names=())
            assert p.engine.state == "failed"
            assert "aux rows" in str(p.engine._failure)
            assert d.engine.stats().scheduler.received_blocks == 0
            with contextlib.suppress(EngineFailed):
                await p.aclose()

    with no_leaks():
        run_sim(main())
