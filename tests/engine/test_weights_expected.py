"""Updates that tell which weights they expect: compared once in place, and no step uses others."""

from __future__ import annotations

import json

import pytest

from fdasync import Engine, WeightsFingerprint
from fdasync.errors import Asleep, BadInput, ConfigError, WeightsBroken, WeightsDiffer, WeightsRejected
from fdasync.runner.base import Runner
from fdasync.runner.synthetic import SyntheticRunner
from fdasync.testing import check_idle, run_sim, synthetic_config
from tests.engine.updates import ask, weights
from tests.support.broadcast_runner import runner_of


def hexes(number):
    return f"{number:032x}"


@pytest.fixture
def folder(tmp_path):
    """A checkpoint folder of weights 99, made before any loop runs."""
    (tmp_path / "weights.json").write_text(json.dumps({"weights_id": 99}))
    return tmp_path


@pytest.mark.parametrize("process", ["inline", pytest.param("worker", marks=pytest.mark.ci)])
@pytest.mark.parametrize("way", ["folder", "tensors"])
async def test_weights_that_are_expected_are_used_under_their_fingerprint(process, way, folder):
    async with Engine(synthetic_config(process=process)) as engine:
        source = folder if way == "folder" else weights(99)
        await engine.update_weights(1, source, expected=WeightsFingerprint(hexes(99), {"weights": hexes(99)}))
        # of tensors, too: no longer random, since it is known
        assert engine.capacity.weights_id == hexes(99)
        await ask(engine, 99)
    check_idle(engine)


@pytest.mark.parametrize("process", ["inline", pytest.param("worker", marks=pytest.mark.ci)])
@pytest.mark.parametrize("way", ["folder", "tensors"])
async def test_other_weights_stop_the_engine_until_an_update_brings_the_expected_ones(process, way, folder):
    async with Engine(synthetic_config(process=process)) as engine:
        source = folder if way == "folder" else weights(99)
        with pytest.raises(WeightsDiffer) as caught:
            await engine.update_weights(1, source, expected=WeightsFingerprint(hexes(98), {"weights": hexes(98)}))
        error = caught.value
        assert (error.expected, error.held, error.tensor, error.where) == (hexes(98), hexes(99), "weights", "")
        assert all(part in str(error) for part in (hexes(98), hexes(99), "weights"))
        with pytest.raises(WeightsDiffer):
            await engine.resume()
        assert engine.load().paused
        assert engine.facts().weight_version == "0"
        await engine.update_weights(1, weights(98), expected=hexes(98))
        await ask(engine, 98)
    check_idle(engine)


async def test_without_digests_of_tensors_a_difference_has_no_name():
    async with Engine(synthetic_config()) as engine:
        with pytest.raises(WeightsDiffer) as caught:
            await engine.update_weights(1, weights(99), expected=hexes(98))
        assert caught.value.tensor == ""
        await engine.update_weights(1, weights(99))
        await ask(engine, 99)


async def test_a_version_in_use_is_compared_with_what_is_expected_and_stays_in_use(folder):
    async with Engine(synthetic_config()) as engine:
        await engine.update_weights(1, folder)
        await engine.update_weights(1, folder, expected=hexes(99))
        for _ in range(2):
            with pytest.raises(BadInput, match=hexes(98)) as caught:
                await engine.update_weights(1, folder, expected=hexes(98))
            assert caught.value.field == "expected"
            # nothing has changed
            assert engine.load().doing == "running"
            await ask(engine, 99)
    check_idle(engine)


def test_dropped_weights_are_not_used_where_others_are_expected(tmp_path_factory):
    first, other = tmp_path_factory.mktemp("first"), tmp_path_factory.mktemp("other")
    for folder in (first, other):
        (folder / "weights.json").write_text(json.dumps({"weights_id": 99}))

    async def play():
        config = synthetic_config()
        runner = runner_of(config)
        async with Engine(config, runner=runner) as engine:
            await engine.update_weights(1, first)
            await engine.sleep(2)
            runner.gone = {first.name}
            with pytest.raises(WeightsRejected):
                await engine.wake()
            with pytest.raises(WeightsDiffer):
                await engine.update_weights(1, other, expected=hexes(98))
            assert engine.load().doing == "broken"
            await engine.update_weights(1, other, expected=hexes(99))
            await ask(engine, 99)
        check_idle(engine)

    run_sim(play())


async def test_broken_weights_stay_mendable_where_the_version_in_use_is_expected_to_be_others(folder):
    async with Engine(synthetic_config()) as engine:
        await engine.update_weights(1, folder)
        with pytest.raises(WeightsDiffer):
            await engine.update_weights(2, weights(97), expected=hexes(98))
        with pytest.raises(WeightsDiffer):
            await engine.update_weights(1, folder, expected=hexes(98))
        assert engine.load().doing == "broken"
        await engine.update_weights(1, folder, expected=hexes(99))
        await ask(engine, 99)
    check_idle(engine)


@pytest.mark.parametrize("expected", ["", "12", "X" * 32, hexes(1).upper() + "0", 7, WeightsFingerprint("1")])
async def test_what_is_no_fingerprint_is_refused_and_changes_nothing(expected):
    async with Engine(synthetic_config()) as engine:
        with pytest.raises(BadInput, match="expected"):
            await engine.update_weights(1, weights(99), expected=expected)
        await ask(engine, 1)


async def test_a_runner_that_cannot_tell_is_no_proof(monkeypatch):
    monkeypatch.setattr(SyntheticRunner, "fingerprint_weights", Runner.fingerprint_weights)
    async with Engine(synthetic_config()) as engine:
        with pytest.raises(WeightsBroken, match="cannot tell"):
            await engine.update_weights(1, weights(99), expected=hexes(99))
        await engine.update_weights(1, weights(99))
        await ask(engine, 99)


async def test_the_fingerprint_is_told_between_steps_and_an_engine_goes_on_without_one(monkeypatch, folder):
    async with Engine(synthetic_config()) as engine:
        await engine.update_weights(1, folder)
        assert await engine.weights_fingerprint() == hexes(99)
        await ask(engine, 99)
        # tensors have none that an engine would know by itself
        await engine.update_weights(2, weights(98))
        assert await engine.weights_fingerprint() == hexes(98)
        with pytest.raises(WeightsDiffer) as caught:
            await engine.update_weights(3, weights(97), expected=hexes(99))
        with pytest.raises(WeightsDiffer) as again:
            await engine.weights_fingerprint()
        assert again.value is caught.value
        await engine.update_weights(3, weights(97))
        monkeypatch.setattr(SyntheticRunner, "fingerprint_weights", Runner.fingerprint_weights)
        with pytest.raises(ConfigError, match="cannot tell"):
            await engine.weights_fingerprint()
        await ask(engine, 97)
        check_idle(engine)


async def test_weights_that_a_sleep_dropped_have_no_fingerprint():
    async with Engine(synthetic_config()) as engine:
        await engine.update_weights(1, weights(99))
        await engine.sleep(2)
        for _ in range(2):
            with pytest.raises(Asleep):
                await engine.weights_fingerprint()
            assert await engine.wake() == "waits_for_weights"
        await engine.update_weights(2, weights(98))
        assert await engine.weights_fingerprint() == hexes(98)
