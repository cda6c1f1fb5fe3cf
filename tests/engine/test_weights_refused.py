"""Weight updates that are refused, break, are cancelled, or are under way when an engine ends."""

from __future__ import annotations

import array
import asyncio
from pathlib import Path

import numpy as np
import pytest

from fdasync import Engine
from fdasync.cache.store.memory import MemoryConfig, MemoryStore
from fdasync.errors import BadInput, ConfigError, EngineClosed, UpdateUnderWay, WeightsBroken, WeightsRejected
from fdasync.runner.synthetic import SyntheticRunner
from fdasync.testing import held_engine, oracle_of, synthetic_config, until
from tests.engine.updates import PARAMS, PROMPT, ask, play, spans, weights

COSTS = {"step_s": 0.01, "token_s": 0.001}


# -- what is refused, and what breaks


@pytest.mark.ci(after=1)
@pytest.mark.parametrize("process", ["inline", "worker"])
async def test_weights_that_do_not_fit_change_nothing(process, tmp_path):
    async with Engine(synthetic_config({"step_s": 0.002}, process=process)) as engine:
        assert (await ask(engine, 1)).cached.total == 0
        running = asyncio.create_task(ask(engine, 1, [5, *PROMPT]))
        await until(lambda: engine.stats().scheduler.running > 0)
        for source in ([("bias", "uint64", (1,), bytes(8))], tmp_path / "nothing"):
            with pytest.raises(WeightsRejected):
                await engine.update_weights(5, source)
        assert (await running).finish_reason == "length", "nobody was aborted for weights that were refused"
        again = await ask(engine, 1)
        assert again.cached.device == 16
        assert spans(again) == [(0, 16, "0")]
        # the version was not used
        await engine.update_weights(5, weights(6))
        await ask(engine, 6)


def test_a_sleep_that_an_update_refuses_ends_no_request():
    async def work():
        async with Engine(synthetic_config(COSTS, max_running=1, max_requests=1)) as engine:
            await engine.begin_weight_update()
            # the second one waits for a place
            calls = [asyncio.create_task(ask(engine, 1)) for _ in range(2)]
            await asyncio.sleep(0.05)
            with pytest.raises(UpdateUnderWay):
                await engine.sleep(1, "abort")
            await engine.end_weight_update()
            assert [(await one).finish_reason for one in calls] == ["length", "length"]

    play(work)


class Breaks(SyntheticRunner):
    """Its first update fails half-way."""

    broken = True

    async def end_tensors(self):
        if self.broken:
            self.broken = False
            self.weights_id = 0xBAD
            raise OSError("the disk went away")
        await super().end_tensors()


def breaking_engine(**values):
    config = synthetic_config({"step_s": 0.002}, **values)
    return Engine(config, runner=Breaks(oracle_of(config).config, config.runner_limits()))


async def test_a_load_that_fails_half_way_leaves_the_engine_paused_until_weights_are_whole():
    async with breaking_engine() as engine:
        running = asyncio.create_task(engine.complete(PROMPT, PARAMS))
        await until(lambda: engine.stats().scheduler.running > 0)
        with pytest.raises(WeightsBroken, match="the disk went away"):
            await engine.update_weights(1, weights(50), "keep")
        for call in (engine.complete(PROMPT, PARAMS), engine.resume()):
            with pytest.raises(WeightsBroken):
                await call
        steps = engine.stats().scheduler.steps
        await asyncio.sleep(0.05)
        assert engine.stats().scheduler.steps == steps
        assert not running.done()
        await engine.update_weights(2, weights(51), "keep")
        assert (await running).finish_reason == "length"
        assert (await ask(engine, 51)).cached.total == 0


async def test_an_engine_whose_weights_are_broken_can_be_closed():
    async with breaking_engine() as engine:
        running = asyncio.create_task(engine.complete(PROMPT, PARAMS))
        await until(lambda: engine.stats().scheduler.running > 0)
        with pytest.raises(WeightsBroken):
            await engine.update_weights(1, weights(50), "keep")
    assert (await running).finish_reason == "abort"


@pytest.mark.ci(after=18)
@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ((-1, weights(1)), "version"),
        ((True, weights(1)), "version"),
        ((1 << 63, weights(1)), "version"),
        ((1.0, weights(1)), "version"),
        (("", weights(1)), "version"),
        (("v" * 257, weights(1)), "version"),
        (("\ud800", weights(1)), "version"),
        ((1, weights(1), "drop"), "mode"),
        ((1, ""), "source"),
        ((1, b"folder"), "source"),
        ((1, 5), "source"),
        ((1, []), "source"),
        ((1, [("weights", "uint64", (1,))]), "source[0]"),
        ((1, [("", "uint64", (1,), bytes(8))]), "source[0]"),
        ((1, [("weights", "uint65", (1,), bytes(8))]), "source[0] 'weights'"),
        ((1, [("weights", "uint64", (2,), bytes(8))]), "source[0] 'weights'"),
        ((1, [("weights", "uint64", (-1,), bytes(8))]), "source[0] 'weights'"),
        ((1, [("weights", "uint64", (1,), [0] * 8)]), "source[0] 'weights'"),
        ((1, [("weights", "uint64", (1,), memoryview(bytes(16))[::2])]), "source[0] 'weights'"),
        ((1, "a\0b"), "source"),
        ((1, Path("a\0b")), "source"),
        ((1, "a\ud800"), "source"),
        ((1, [("\ud800", "uint64", (1,), bytes(8))]), "source[0]"),
        *[
            ((1, [*weights(1), ("more", *rest)]), "source[1] 'more'")
            for rest in [
                ("uint64", 3, bytes(8)),
                ("uint64", None, bytes(8)),
                ("uint8", "", bytes(1)),
                ("uint8", b"\1", bytes(1)),
                ("uint64", {1}, bytes(8)),
                ("uint64", (0, 1 << 63), b""),
                (["x"], (1,), bytes(8)),
                (None, (1,), bytes(8)),
                ("int64", (1,), np.zeros(1, "M8[s]")),
                ("float64", (1,), np.zeros(1, ">f8")),
                ("int64", (1,), np.zeros(1, ">i8")),
                ("uint64", (1,), np.zeros(1, np.float64)),
                ("float64", (1,), np.zeros(1, np.uint64)),
                ("int64", (1,), np.zeros(1, np.uint64)),
                ("float32", (2,), np.zeros(1, np.float64)),
                ("float64", (1,), np.zeros(1, np.complex64)),
                ("float64", (1,), np.zeros(1, [("a", "f4"), ("b", "f4")])),
                ("bfloat16", (1,), np.zeros(1, np.float16)),
                ("bfloat16", (2,), np.zeros(1, np.uint32)),
                ("bool", (1,), np.zeros(1, np.float64)),
            ]
        ],
    ],
)
async def test_bad_arguments_are_named_before_anything_happens(arguments, field):
    async with Engine(synthetic_config()) as engine:
        with pytest.raises(BadInput) as caught:
            await engine.update_weights(*arguments)
        assert caught.value.field == field
        assert not engine.stats().scheduler.paused
        await ask(engine, 1)


class TakesAll(SyntheticRunner):
    """Tensors of any name and dtype; it keeps what came."""

    async def begin_tensors(self, tensors):
        self.came = [(meta, bytearray()) for meta in tensors]

    async def write_tensor(self, number, offset_nbytes, data):
        assert len(self.came[number][1]) == offset_nbytes
        self.came[number][1].extend(data)

    async def end_tensors(self):
        pass


async def test_buffers_of_a_dtypes_own_format_and_raw_bytes_are_taken():
    floats = np.arange(6, dtype=np.float64).reshape(2, 3)
    taken = [
        ("float64", floats),
        ("float64", floats.view(np.uint8)),
        ("float64", floats.tobytes()),
        ("float64", memoryview(floats.tobytes()).cast("c")),
        ("float64", memoryview(floats.tobytes()).cast("@d")),
        ("int64", np.arange(6, dtype=np.int64)),
        ("int64", np.arange(6, dtype=np.longlong)),
        ("uint64", array.array("L", range(6))),
        ("bfloat16", np.arange(6, dtype=np.uint16)),
        ("bfloat16", np.arange(6, dtype=np.int16)),
        ("float16", np.arange(6, dtype=np.float16)),
        ("float8_e4m3fn", np.arange(6, dtype=np.uint8)),
        ("float8_e5m2", np.arange(6, dtype=np.int8)),
        ("bool", np.ones(6, dtype=bool)),
        ("int8", bytes(6)),
    ]
    config = synthetic_config()
    runner = TakesAll(oracle_of(config).config, config.runner_limits())
    async with Engine(config, runner=runner) as engine:
        source = [(f"t{number}", dtype, [2, 3], data) for number, (dtype, data) in enumerate(taken)]
        source += [("scalar", "float32", (), np.array(2.5, np.float32)), ("empty", "int32", (0, 3), b"")]
        await engine.update_weights(1, source)
    assert [(meta.name, meta.dtype, meta.shape) for meta, _ in runner.came] == [
        (name, dtype, tuple(shape)) for name, dtype, shape, _ in source
    ]
    for (meta, came), (*_, data) in zip(runner.came, source, strict=True):
        assert came == memoryview(data).tobytes(), meta


@pytest.mark.ci
async def test_one_update_at_a_time():
    async with Engine(synthetic_config(process="worker")) as engine:
        first = asyncio.create_task(engine.update_weights(1, weights(5)))
        await asyncio.sleep(0)
        with pytest.raises(BadInput, match="under way"):
            await engine.update_weights(2, weights(6))
        await first
        await ask(engine, 5)


def test_an_update_that_meets_the_last_turn_of_another_is_refused_and_the_next_one_is_ended_by_the_close(monkeypatch):
    async def work():
        engine, _ = held_engine()
        await engine.start()
        runner, second, loading = engine._runtime.runner, [], asyncio.Event()

        async def hang(tensors):
            loading.set()
            await asyncio.get_running_loop().create_future()

        async def refuse(path):
            # its first step is due before anybody is told that this update has ended
            second.append(asyncio.ensure_future(engine.update_weights(2, weights(7))))
            raise WeightsRejected("not these")

        monkeypatch.setattr(runner, "delta_base", refuse)
        monkeypatch.setattr(runner, "begin_tensors", hang)
        with pytest.raises(WeightsRejected):
            await engine.update_weights(1, "/some/folder")
        with pytest.raises(UpdateUnderWay):
            await second[0]
        third = asyncio.ensure_future(engine.update_weights(3, weights(8)))
        await loading.wait()
        await engine.aclose()
        assert [task.get_name() for task in asyncio.all_tasks() if task.get_name() == "fdasync-update_weights"] == []
        with pytest.raises(EngineClosed):
            await third

    play(work)


@pytest.mark.ci
async def test_a_cancelled_call_leaves_the_update_to_go_on():
    async with Engine(synthetic_config(process="worker")) as engine:
        first = asyncio.create_task(engine.update_weights(1, weights(5)))
        await asyncio.sleep(0)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        await until(lambda: engine.stats().scheduler.weight_version == "1")
        await ask(engine, 5)


@pytest.mark.parametrize("process", ["inline", "worker"])
async def test_closing_during_an_update_ends_it(process):
    engine = Engine(synthetic_config(process=process))
    await engine.start()
    update = asyncio.create_task(engine.update_weights(1, weights(5)))
    await asyncio.sleep(0)
    await engine.aclose()
    done, _ = await asyncio.wait([update], timeout=300)
    assert done
    # who waits for it is told, never cancelled
    assert not update.cancelled()
    assert update.exception() is None or isinstance(update.exception(), EngineClosed)


def test_closing_while_weights_load_is_quick_and_copies_nothing_into_the_runner():
    async def work():
        config = synthetic_config({**COSTS, "load_s": 100.0, "num_blocks": 12, "max_context_tokens": 48},
                                  host_blocks=32, close_deadline_s=5.0)  # fmt: skip
        engine = Engine(config)
        await engine.start()
        for number in range(4):
            await ask(engine, 1, [number, *PROMPT])
        waiting = asyncio.create_task(engine.complete([9, *PROMPT], PARAMS))
        await asyncio.sleep(0.02)
        update = asyncio.create_task(engine.update_weights(1, weights(5), "keep"))
        await asyncio.sleep(1.0)
        assert engine.stats().updating
        begun = asyncio.get_running_loop().time()
        await engine.aclose()
        assert asyncio.get_running_loop().time() - begun < 1.0
        assert (await waiting).finish_reason == "abort"
        with pytest.raises(EngineClosed):
            await update

    play(work)


def test_nothing_runs_while_weights_load_whoever_resumes():
    async def work():
        config = synthetic_config({**COSTS, "load_s": 1.0, "num_blocks": 12, "max_context_tokens": 48}, host_blocks=32)
        async with Engine(config) as engine:
            calls = [asyncio.create_task(engine.complete([number, *PROMPT], PARAMS)) for number in range(3)]
            await asyncio.sleep(0.05)
            update = asyncio.create_task(engine.update_weights(1, weights(5), "keep"))
            await asyncio.sleep(0.5)
            assert engine.stats().updating
            steps = engine.stats().scheduler.steps
            # the runner refuses steps and copies now, and would fail the engine
            await engine.resume()
            await engine.pause()
            await engine.resume()
            await asyncio.sleep(0.3)
            assert engine.stats().scheduler.steps == steps
            await update
            assert not engine.stats().updating
            assert all(result.finish_reason == "length" for result in await asyncio.gather(*calls))

    play(work)


async def test_a_caller_that_gives_up_waiting_for_a_pause_takes_it_back():
    engine, faults = held_engine()
    async with engine:
        faults.hold()
        running = asyncio.create_task(engine.complete(PROMPT, PARAMS))
        await faults.reached(0)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(engine.pause(), 0.05)
        faults.release()
        assert (await asyncio.wait_for(running, 300)).finish_reason == "length"


def test_a_store_object_must_not_block_and_needs_a_name():
    class Blocks(MemoryStore):
        blocking = True

    with pytest.raises(ConfigError, match="in a process of its own"):
        Engine(synthetic_config(store="memory"), store=Blocks(MemoryConfig()))
    for what in (5, MemoryStore, "memory"):
        with pytest.raises(ConfigError, match="is no Store"):
            Engine(synthetic_config(store="memory"), store=what)
    with pytest.raises(ConfigError, match="names no store"):
        Engine(synthetic_config(), store=MemoryStore(MemoryConfig()))


async def test_no_update_before_the_start_and_after_the_end():
    engine = Engine(synthetic_config())
    for call in (engine.pause, engine.resume, lambda: engine.update_weights(1, weights(5))):
        with pytest.raises(EngineClosed):
            await call()
    async with engine:
        pass
    for call in (engine.pause, engine.resume, lambda: engine.update_weights(1, weights(5))):
        with pytest.raises(EngineClosed):
            await call()
