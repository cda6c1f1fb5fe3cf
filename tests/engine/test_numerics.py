"""`EngineConfig.numerics`: what a runner must answer, and that blocks of the two settings never meet."""

from __future__ import annotations

import msgspec
import pytest

from fdasync import Engine
from fdasync.engine.prepare import namespace_of
from fdasync.errors import ConfigError
from fdasync.runner.synthetic import SyntheticRunner
from fdasync.runner.synthetic.oracle import SyntheticConfig
from fdasync.testing import check_idle, synthetic_config
from tests.engine.tiers import ask, kept_memory, play, prompt, tiers_config
from tests.support.helpers import make_capacity


class Default(SyntheticRunner):
    """A runner that knows one arithmetic."""

    async def open(self):
        return msgspec.structs.replace(await super().open(), numerics="default")


@pytest.mark.parametrize("numerics", ["default", "fixed"])
def test_the_setting_reaches_the_runner_and_the_facts(numerics):
    config = synthetic_config(numerics=numerics)
    assert config.runner_limits().numerics == numerics

    async def work():
        async with Engine(config) as engine:
            assert engine.capacity.numerics == engine.facts().numerics == numerics
            await ask(engine, prompt(0, 9))
        check_idle(engine)

    play(work)


def test_a_runner_that_does_not_promise_fixed_numerics_is_refused_by_name():
    config = synthetic_config(numerics="fixed")

    async def work():
        with pytest.raises(ConfigError) as caught:
            async with Engine(config, runner=Default(SyntheticConfig(), config.runner_limits())):
                pass
        error = caught.value
        assert error.field == "config.numerics"
        assert "runner 'synthetic' promises 'default' numerics" in error.problem
        assert "set numerics to 'default', or take a runner" in str(error.hint)

    play(work)


class Whole(SyntheticRunner):
    """A runner that does not cut its sums."""

    async def open(self):
        return msgspec.structs.replace(await super().open(), sum_slices=1)


def test_a_runner_that_does_not_sum_in_slices_is_refused_by_name():
    config = synthetic_config(numerics="fixed", sum_slices=4)
    assert config.runner_limits().sum_slices == 4

    async def work():
        with pytest.raises(ConfigError, match="is 4, and runner 'synthetic' answers 1") as caught:
            async with Engine(config, runner=Whole(SyntheticConfig(), config.runner_limits())):
                pass
        assert caught.value.field == "config.sum_slices"
        async with Engine(config) as engine:
            assert engine.capacity.sum_slices == 4
        check_idle(engine)

    play(work)


def test_a_runner_that_knows_one_arithmetic_serves_by_default():
    config = synthetic_config()

    async def work():
        async with Engine(config, runner=Default(SyntheticConfig(), config.runner_limits())) as engine:
            assert engine.facts().numerics == "default"

    play(work)


def test_the_namespace_of_the_default_is_that_of_before_the_setting():
    """Stores that were filled by earlier versions stay warm."""
    assert namespace_of(make_capacity()).hex() == "1c50794f317772cbd50f5bf32b44d9e5"
    assert namespace_of(make_capacity(routing_debug=True)).hex() == "8a422fdcb93d72dc5994712b25cb69c3"
    kinds = [{"routing_debug": debug, "numerics": kind} for debug in (False, True) for kind in ("default", "fixed")]
    assert len({namespace_of(make_capacity(**kind)) for kind in kinds}) == 4


def test_a_store_gives_each_setting_its_own_blocks_after_restarts():
    async def work():
        store = kept_memory()
        found = []
        for numerics in ("default", "fixed", "default", "fixed"):
            # the device has room for one prompt: the second one pushes it out, to the host
            config = tiers_config({"step_s": 0.1}, store="memory", numerics=numerics)
            async with Engine(config, store=store) as engine:
                found.append((await ask(engine, prompt(0))).cached.store)
                await ask(engine, prompt(1))
                cached = (await ask(engine, prompt(0))).cached
                assert cached.host >= 32
                assert cached.total == 36
            check_idle(engine)
        assert found == [0, 0, 36, 36]

    play(work)
