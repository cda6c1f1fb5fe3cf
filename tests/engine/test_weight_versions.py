"""Labels of weights on a whole engine: text, counted up, given again, given without new weights."""

from __future__ import annotations

import asyncio
import json

import pytest

from fdasync import Engine, SamplingParams
from fdasync.errors import BadInput, ConfigError, UpdateUnderWay, WeightsBroken, WeightsRejected
from fdasync.events.catalog import WeightsChanged, WeightsRelabelled
from fdasync.runner.synthetic import SyntheticRunner
from fdasync.testing import check_idle, oracle_of, synthetic_config, until
from tests.engine.updates import PARAMS, PROMPT, ask, play, spans, weights

COSTS = {"step_s": 0.01, "token_s": 0.001}


@pytest.fixture
def folder(tmp_path):
    """Checkpoint folders of the synthetic model; number 1 is what an engine starts with."""
    for number in (1, 70, 71):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "weights.json").write_text(json.dumps({"weights_id": number}))
    return lambda number: tmp_path / str(number)


def test_a_configuration_takes_text_or_an_integer():
    assert [synthetic_config(weight_version=given).weight_version for given in (7, "7", "step-7")] == [
        "7",
        "7",
        "step-7",
    ]
    for given in ("", "v" * 257, "\ud800", -1, 1 << 63):
        with pytest.raises(ConfigError, match=r"config\.weight_version"):
            synthetic_config(weight_version=given).validate()


async def test_versions_are_text_and_none_counts_up():
    async with Engine(synthetic_config(weight_version="step-9")) as engine:
        assert spans(await ask(engine, 1)) == [(0, 16, "step-9")]
        await engine.update_weights("step-11", weights(5))
        await engine.update_weights("step-9", weights(6))
        # a label may have been used before
        await engine.update_weights(None, weights(7))
        assert spans(await ask(engine, 7)) == [(0, 16, "step-10")]
        await engine.update_weights("named", weights(8))
        await engine.update_weights(None, weights(9))
        assert spans(await ask(engine, 9)) == [(0, 16, "named-1")]


@pytest.mark.ci(after=1)
@pytest.mark.parametrize("process", ["inline", "worker"])
async def test_the_version_in_use_may_be_given_again_and_the_same_folder_changes_nothing(process, folder):
    async with Engine(synthetic_config({"step_s": 0.002}, process=process)) as engine:
        await engine.update_weights("0", folder(1))
        await engine.update_weights("a", folder(70))
        await ask(engine, 70)
        running = asyncio.create_task(ask(engine, 70, [5, *PROMPT]))
        await until(lambda: engine.stats().scheduler.running > 0)
        async with engine.bus.subscribe(WeightsChanged) as changes:
            await engine.update_weights("a", folder(70), "abort")
            with pytest.raises(WeightsRejected):
                await engine.update_weights("a", folder(72))
            assert not changes.pending
        assert (await running).finish_reason == "length", "nobody is aborted where nothing changes"
        again = await ask(engine, 70)
        assert again.cached.device == 16
        assert spans(again) == [(0, 16, "a")]
        # other weights under the label in use, and under one that was used before
        await engine.update_weights("a", folder(71))
        changed = await ask(engine, 71)
        assert changed.cached.total == 0
        await engine.update_weights("b", folder(70))
        await ask(engine, 70)
        await engine.update_weights("a", folder(70))
        back = await ask(engine, 70)
        assert [span.version for result in (again, changed, back) for span in result.weight_version] == ["a"] * 3
        assert ids(again, changed, back) == [f"{number:032x}" for number in (70, 71, 70)]
    check_idle(engine)


def ids(*results):
    return [span.weights_id for result in results for span in result.weight_version]


@pytest.mark.parametrize("mode", ["abort", "keep"])
async def test_tensors_are_carried_out_under_any_label(folder, mode):
    async with Engine(synthetic_config()) as engine:
        results = []
        for number in (70, 71, 71):
            await engine.update_weights("a", weights(number), mode)
            results.append(await ask(engine, number))
            assert results[-1].cached.total == 0, "nobody knows that they are the same"
        await engine.update_weights("a", folder(71), mode)
        results.append(await ask(engine, 71))
        await engine.update_weights("a", weights(71), mode, expected=f"{71:032x}")
        results.append(await ask(engine, 71))
        told = ids(*results)
        assert len(set(told)) == 4
        assert told[3:] == [f"{71:032x}"] * 2
        assert {span.version for result in results for span in result.weight_version} == {"a"}
    check_idle(engine)


def test_a_request_that_is_kept_tells_of_both_weights_of_one_label():
    async def work():
        async with Engine(synthetic_config(COSTS)) as engine:
            running = asyncio.create_task(engine.complete(PROMPT, PARAMS))
            await asyncio.sleep(0.1)
            await engine.update_weights("0", weights(5), "keep")
            first, second = (await running).weight_version
            assert (first.version, second.version) == ("0", "0")
            assert first.weights_id != second.weights_id
            assert (first.start, first.stop, second.stop) == (0, second.start, 16)
            check_idle(engine)

    play(work)


async def test_a_pause_outlives_a_comparison(folder):
    async with Engine(synthetic_config()) as engine:
        await engine.pause()
        await engine.update_weights(0, folder(1))
        call = asyncio.create_task(ask(engine, 1))
        await asyncio.sleep(0.02)
        assert not call.done()
        await engine.resume()
        await call


class Breaks(SyntheticRunner):
    """Its first update from memory fails half-way."""

    async def end_tensors(self):
        self.weights_id = 0xBAD
        raise OSError("the disk went away")


async def test_broken_weights_are_loaded_again_under_their_version(folder):
    config = synthetic_config()
    async with Engine(config, runner=Breaks(oracle_of(config).config, config.runner_limits())) as engine:
        with pytest.raises(WeightsBroken):
            await engine.update_weights("a", weights(5))
        with pytest.raises(WeightsBroken):
            await engine.set_weight_version("b")
        with pytest.raises(WeightsBroken):
            await engine.complete(PROMPT, PARAMS)
        await engine.update_weights("0", folder(1))
        assert spans(await ask(engine, 1)) == [(0, 16, "0")]


def test_a_new_label_counts_from_the_next_token_on_and_keeps_the_cache():
    async def work():
        async with Engine(synthetic_config(COSTS)) as engine, engine.bus.subscribe(WeightsRelabelled) as told:
            running = asyncio.create_task(engine.complete(PROMPT, PARAMS))
            await asyncio.sleep(0.1)
            await engine.set_weight_version("best")
            await engine.set_weight_version("best")
            (first, second) = spans(await running)
            assert (first[0], first[2], second) == (0, "0", (first[1], 16, "best"))
            assert 0 < first[1] < 16
            after = await ask(engine, 1)
            assert after.cached.device == 16
            assert spans(after) == [(0, 16, "best")]
            assert engine.stats().scheduler.weight_version == "best"
            assert told.pending == 1

    play(work)


async def test_a_label_may_have_named_other_weights(folder):
    async with Engine(synthetic_config()) as engine:
        await engine.set_weight_version("first")
        await engine.set_weight_version(0)
        await engine.update_weights("second", folder(70))
        for label in (0, "first", "second"):
            await engine.set_weight_version(label)
        for label in (None, "", True):
            with pytest.raises(BadInput, match="version"):
                await engine.set_weight_version(label)
        assert spans(await ask(engine, 70)) == [(0, 16, "second")]


async def test_no_label_changes_during_an_update():
    async with Engine(synthetic_config({"load_s": 0.05})) as engine:
        update = asyncio.create_task(engine.update_weights(1, weights(5)))
        await asyncio.sleep(0.01)
        with pytest.raises(UpdateUnderWay):
            await engine.set_weight_version("other")
        await update
        result = await engine.complete(PROMPT, SamplingParams(max_tokens=1))
        assert spans(result) == [(0, 1, "1")]
