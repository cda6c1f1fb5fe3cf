"""Objects that two engines are given: what an engine has no other one gets, and nothing of the first one is harmed."""

from __future__ import annotations

import asyncio
from random import Random

import pytest

from fdasync import Engine, SamplingParams
from fdasync.cache.store.guard import GuardedStore, GuardLimits
from fdasync.cache.store.memory import MemoryConfig, MemoryStore
from fdasync.drafting import DrafterLimits, Speculation
from fdasync.errors import ConfigError, StoreUnavailable
from fdasync.ipc.deadlines import Closing
from fdasync.runner.synthetic.oracle import SyntheticConfig
from fdasync.runner.synthetic.runner import SyntheticRunner
from fdasync.testing import check_idle, check_sample, oracle_of, run_sim, synthetic_config, synthetic_engine
from fdasync.testing.stores.wrapper import Wrapper
from tests.support.drafters import Foretold, answers_of

PARAMS = SamplingParams(max_tokens=2, temperature=0.0)
PROMPT = list(range(60))


class Outlives(MemoryStore):
    """For one engine after the other."""

    async def aclose(self) -> None:
        pass


def config(**values):
    costs = {"num_blocks": 20, "step_s": 0.01, "token_s": 0.01, "copy_s": 0.002}
    return synthetic_config(
        costs, max_step_tokens=64, max_running=2, host_blocks=24, store_retry_s=0.5, request_deadline_s=600.0, **values
    )


async def ask(engine: Engine, prompt=PROMPT):
    result = await engine.complete(prompt, PARAMS)
    check_sample(result.samples[0], prompt, PARAMS, oracle_of(engine.config))
    return result


@pytest.mark.ci
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_store_serves_one_engine_at_a_time(wrapped):
    random = Random(1)
    prompts = [[random.randrange(100) for _ in range(60)] for _ in range(12)]

    async def work():
        store = Outlives(MemoryConfig())
        one, two = (synthetic_engine(config(), store=Wrapper(store) if wrapped else store) for _ in range(2))
        async with two:
            async with one:
                assert two.stats().store_problem == ""
                assert "another engine has this object open" in one.stats().store_problem
                for _ in range(4):
                    random.shuffle(prompts)
                    await asyncio.gather(*[ask(engine, prompt) for prompt in prompts for engine in (one, two)])
                assert two.stats().scheduler.fetched_blocks > 0
                assert one.stats().scheduler.fetched_blocks == 0
            # the one that went without it has closed nothing of the other's
            fetched = two.stats().scheduler.fetched_blocks
            for prompt in prompts:
                await ask(two, prompt)
            assert two.stats().scheduler.fetched_blocks > fetched
        # the next one finds what the last one wrote
        async with synthetic_engine(config(), store=store) as three:
            for prompt in prompts:
                await ask(three, prompt)
            assert three.stats().scheduler.fetched_blocks > 0

    run_sim(work())


def test_the_second_engine_opens_it_when_the_first_has_let_go():
    async def work():
        store = Outlives(MemoryConfig())
        one, two = (synthetic_engine(config(), store=store) for _ in range(2))
        await one.start()
        async with two:
            assert two.stats().store_problem
            await one.aclose()
            await asyncio.sleep(2)
            assert two.stats().store_problem == ""

    run_sim(work())


async def test_an_engine_that_requires_it_does_not_start():
    store = MemoryStore(MemoryConfig())
    async with synthetic_engine(config(), store=store) as one:
        with pytest.raises(StoreUnavailable, match="another engine has this object open"):
            await synthetic_engine(config(store_required=True), store=store).start()
        await ask(one)


async def test_a_store_is_let_go_of_where_its_closing_fails():
    class Fails(MemoryStore):
        async def aclose(self) -> None:
            raise OSError("no")

    store = Fails(MemoryConfig())
    limits = GuardLimits(call_s=1.0)
    one, two = (GuardedStore(store, limits, name="own", publish=lambda _: None, closing=Closing(1.0)) for _ in range(2))
    await one.open(())
    with pytest.raises(StoreUnavailable):
        await two.open(())
    # nothing of the other's
    assert not await two.kill("it has not got it")
    await two.aclose()
    with pytest.raises(OSError, match="no"):
        await one.aclose()
    three = GuardedStore(store, limits, name="own", publish=lambda _: None, closing=Closing(1.0))
    await three.open(())
    assert store.in_use
    with pytest.raises(OSError, match="no"):
        await three.aclose()


async def test_a_runner_serves_one_engine_at_a_time():
    plain = synthetic_config({})
    runner = SyntheticRunner(SyntheticConfig(**plain.runner_config), plain.runner_limits())
    async with Engine(plain, runner=runner) as one:
        two = Engine(plain, runner=runner)
        with pytest.raises(ConfigError, match="SyntheticRunner is used by another engine") as caught:
            await two.start()
        assert caught.value.field == "runner"
        await two.aclose()
        await ask(one)
        check_idle(one)
    assert not runner.in_use


async def test_a_drafter_serves_one_engine_at_a_time():
    drafts = synthetic_config(
        {}, speculation=Speculation(drafter="foretold", max_tokens=3, budget=False), max_step_tokens=64
    )
    drafter = Foretold("right", answers_of([(PROMPT, PARAMS)], oracle_of(drafts)), DrafterLimits.of(3, 2, 8))
    async with synthetic_engine(drafts, drafter=drafter) as one:
        with pytest.raises(ConfigError, match="used by another engine") as caught:
            await synthetic_engine(drafts, drafter=drafter).start()
        assert caught.value.field == "drafter"
        await ask(one)
    async with synthetic_engine(drafts, drafter=drafter) as later:
        await ask(later)
