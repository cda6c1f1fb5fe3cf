"""Pauses and weight updates of whole engines: what goes on, what ends, and that nothing old is ever matched."""

from __future__ import annotations

import array
import asyncio
import json
from pathlib import Path

import msgspec
import numpy as np
import pytest

from fdasync import Engine, EngineClosed, EngineFailed, SamplingParams
from fdasync.cache.store.memory import MemoryConfig, MemoryStore
from fdasync.cache.store.wrappers import FaultyStore, StoreFaults
from fdasync.errors import BadInput, ConfigError, DeadlineExceeded, UpdateUnderWay, WeightsBroken, WeightsRejected
from fdasync.events.catalog import StepDone
from fdasync.runner.oracle import Oracle
from fdasync.runner.synthetic import SyntheticRunner
from fdasync.testing import check_idle, check_sample, held_engine, no_leaks, oracle_of, run_sim, synthetic_config, until

COSTS = {"step_s": 0.01, "token_s": 0.001}
PROMPT = list(range(20))
PARAMS = SamplingParams(max_tokens=16, temperature=0.0)


def weights(number):
    return [("weights", "uint64", (1,), number.to_bytes(8, "little"))]


@pytest.fixture
def folder(tmp_path):
    """Checkpoint folders of the synthetic model, made before any loop runs."""
    for number in (70, 71, 99):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "weights.json").write_text(json.dumps({"weights_id": number}))
    return lambda number: tmp_path / str(number)


def oracle_with(engine, number):
    return Oracle(msgspec.structs.replace(oracle_of(engine.config).config, weights_id=number))


async def ask(engine, number, prompt=PROMPT, params=PARAMS):
    """A whole request under these weights."""
    result = await engine.complete(prompt, params)
    check_sample(result.samples[0], prompt, params, oracle_with(engine, number))
    return result


def spans(result):
    return [(span.start, span.stop, span.version) for span in result.weight_version]


def play(work):
    with no_leaks():
        return run_sim(work())


# -- updates


@pytest.mark.parametrize("process", ["inline", "worker"])
@pytest.mark.parametrize("way", ["folder", "tensors"])
async def test_new_weights_answer_and_nothing_old_is_matched(process, way, folder):
    async with Engine(synthetic_config(process=process)) as engine:
        first = await ask(engine, 1)
        assert (await ask(engine, 1)).cached.device == 16
        before = engine.capacity.weights_id
        await engine.update_weights(7, folder(99) if way == "folder" else weights(99))
        assert engine.capacity.weights_id != before
        after = await ask(engine, 99)
        assert after.cached.total == 0
        assert after.token_ids != first.token_ids
        assert spans(after) == [(0, 16, 7)]
        assert (await ask(engine, 99)).cached.device == 16
        assert engine.stats().scheduler.weight_version == 7
    check_idle(engine)


def test_keep_continues_on_the_old_kv_and_abort_ends_with_what_there_is():
    async def work():
        async with Engine(synthetic_config(COSTS)) as engine:
            kept = asyncio.create_task(engine.complete(PROMPT, PARAMS))
            await asyncio.sleep(0.1)
            await engine.update_weights(1, weights(50), "keep")
            aborted = asyncio.create_task(engine.complete([9, *PROMPT], PARAMS))
            result = await kept
            (old, new) = spans(result)
            assert old[0] == 0
            assert old[2] == 0
            assert new == (old[1], 16, 1)
            assert len(result.token_ids) == 16
            # until the update it was what the old weights say
            whole = oracle_of(engine.config).generate(PROMPT, 16)
            assert result.token_ids[: old[1]] == tuple(whole[: old[1]])
            assert result.token_ids != tuple(whole)
            assert len(result.routing.array) == 35
            # its blocks are of old KV: nobody gets them
            assert (await ask(engine, 50)).cached.total == 0
            await engine.update_weights(2, weights(51), "abort")
            cut = await aborted
            assert cut.finish_reason in ("abort", "length")
            check_sample(cut.samples[0], [9, *PROMPT], PARAMS, oracle_with(engine, 50))
            assert (await ask(engine, 51)).cached.total == 0
        check_idle(engine)

    play(work)


def test_a_kept_request_that_is_preempted_later_starts_again_and_is_indexed_again():
    async def work():
        config = synthetic_config(
            {**COSTS, "num_blocks": 16, "max_context_tokens": 64}, max_running=4, decode_reserve_blocks=0
        )
        params = SamplingParams(max_tokens=28, temperature=0.0)
        async with Engine(config) as engine:
            calls = [asyncio.create_task(engine.complete([number, *range(15)], params)) for number in range(3)]
            await asyncio.sleep(0.06)
            await engine.update_weights(1, weights(50), "keep")
            results = await asyncio.gather(*calls)
            assert engine.stats().scheduler.preemptions > 0
            assert all(len(result.token_ids) == 28 and len(result.routing.array) == 43 for result in results)
            assert any(len(result.weight_version) == 2 for result in results)
            # somebody's blocks are of the new weights and can be had: those of one who had to start again
            one = SamplingParams(max_tokens=1)
            again = [(await engine.complete([number, *range(15)], one)).cached.total for number in range(3)]
            assert any(again)
            engine.check()

    play(work)


def test_requests_at_the_door_and_waiting_ones_start_under_the_new_weights():
    async def work():
        async with Engine(synthetic_config(COSTS, max_running=1)) as engine:
            running = asyncio.create_task(engine.complete(PROMPT, PARAMS))
            await asyncio.sleep(0.03)
            waiting = asyncio.create_task(ask(engine, 50, [7, *PROMPT]))
            await asyncio.sleep(0.01)
            await engine.update_weights(1, weights(50), "keep")
            assert spans(await waiting) == [(0, 16, 1)]
            await running

    play(work)


def test_no_object_of_old_weights_is_read_and_those_of_weights_that_come_back_are(folder):
    async def work():
        class Kept(FaultyStore):
            async def aclose(self):
                self.end()

        store = Kept(MemoryStore(MemoryConfig()), StoreFaults())
        config = synthetic_config(
            {**COSTS, "token_s": 0.01, "num_blocks": 12, "max_context_tokens": 48}, store="memory", host_blocks=16
        )
        one, two = folder(70), folder(71)
        async with Engine(config, store=store) as engine:
            await engine.update_weights(1, one)
            await ask(engine, 70)
            await until(lambda: not engine.stats().scheduler.writing, 60, 0.1)
            await engine.update_weights(2, two)
            assert (await ask(engine, 71)).cached.total == 0
            await until(lambda: not engine.stats().scheduler.writing, 60, 0.1)
            # the same bytes have the same id, whatever they are called: what was stored under it is right again
            await engine.update_weights(3, one)
            result = await ask(engine, 70)
            assert result.cached.store == 16
            assert spans(result) == [(0, 16, 3)]
            # tensors from memory never share a namespace, not even with themselves
            await engine.update_weights(4, weights(70))
            assert (await ask(engine, 70)).cached.total == 0

    play(work)


# -- what is refused, and what breaks


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
        assert spans(again) == [(0, 16, 0)]
        # the version was not used
        await engine.update_weights(5, weights(6))
        await ask(engine, 6)


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


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ((0, weights(1)), "version"),
        ((-1, weights(1)), "version"),
        ((True, weights(1)), "version"),
        (("1", weights(1)), "version"),
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


async def test_a_version_is_never_used_twice():
    async with Engine(synthetic_config(weight_version=3)) as engine:
        assert spans(await ask(engine, 1)) == [(0, 16, 3)]
        await engine.update_weights(9, weights(5))
        for version in (3, 9):
            with pytest.raises(BadInput, match="used before"):
                await engine.update_weights(version, weights(6))


async def test_one_update_at_a_time():
    async with Engine(synthetic_config(process="worker")) as engine:
        first = asyncio.create_task(engine.update_weights(1, weights(5)))
        await asyncio.sleep(0)
        with pytest.raises(BadInput, match="under way"):
            await engine.update_weights(2, weights(6))
        await first
        await ask(engine, 5)


def test_an_update_that_begins_as_another_ends_is_ended_by_the_close(monkeypatch):
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

        monkeypatch.setattr(runner, "load_folder", refuse)
        monkeypatch.setattr(runner, "begin_tensors", hang)
        with pytest.raises(WeightsRejected):
            await engine.update_weights(1, "/some/folder")
        with pytest.raises(UpdateUnderWay):
            await engine.update_weights(3, weights(8))
        await loading.wait()
        await engine.aclose()
        assert [task.get_name() for task in asyncio.all_tasks() if task.get_name() == "fdasync-weights"] == []
        with pytest.raises(EngineClosed):
            await second[0]

    play(work)


async def test_who_is_cancelled_leaves_the_update_to_go_on():
    async with Engine(synthetic_config(process="worker")) as engine:
        first = asyncio.create_task(engine.update_weights(1, weights(5)))
        await asyncio.sleep(0)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        await until(lambda: engine.stats().scheduler.weight_version == 1)
        await ask(engine, 5)


@pytest.mark.parametrize("process", ["inline", "worker"])
async def test_closing_during_an_update_ends_it(process):
    engine = Engine(synthetic_config(process=process))
    await engine.start()
    update = asyncio.create_task(engine.update_weights(1, weights(5)))
    await asyncio.sleep(0)
    await engine.aclose()
    done, _ = await asyncio.wait([update], timeout=10)
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


async def test_who_gives_up_waiting_for_a_pause_takes_it_back():
    engine, edge = held_engine()
    async with engine:
        edge.hold()
        running = asyncio.create_task(engine.complete(PROMPT, PARAMS))
        await edge.reached(0)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(engine.pause(), 0.05)
        edge.release()
        assert (await asyncio.wait_for(running, 10)).finish_reason == "length"


def test_a_store_object_must_not_block_and_needs_a_name():
    class Blocks(MemoryStore):
        blocking = True

    with pytest.raises(ConfigError, match="hosted"):
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


# -- pauses


async def test_a_paused_engine_plans_nothing_and_goes_on_where_it_was():
    async with Engine(synthetic_config({"step_s": 0.001})) as engine, engine.bus.subscribe(StepDone) as steps:
        running = asyncio.create_task(ask(engine, 1))
        await until(lambda: engine.stats().scheduler.running > 0)
        await engine.pause()
        await engine.pause()
        assert engine.stats().steps_in_flight == 0
        seen = engine.stats().scheduler.steps
        late = asyncio.create_task(ask(engine, 1, [3, *PROMPT]))
        await asyncio.sleep(0.05)
        assert engine.stats().scheduler.steps == seen
        assert not running.done()
        await engine.resume()
        await engine.resume()
        assert spans(await running) == [(0, 16, 0)]
        await late
        assert steps.pending


async def test_deadlines_and_aborts_go_on_during_a_pause():
    async with Engine(synthetic_config({"step_s": 0.001})) as engine:
        await engine.pause()
        timed = asyncio.create_task(engine.complete(PROMPT, PARAMS, deadline_s=0.05))
        aborted = asyncio.create_task(engine.complete(PROMPT, PARAMS, request_id="mine"))
        assert (await timed).finish_reason == "deadline"
        engine.abort("mine")
        assert (await aborted).finish_reason == "abort"


async def test_a_pause_that_is_lifted_while_it_waits_ends_too():
    engine, edge = held_engine()
    async with engine:
        edge.hold()
        running = asyncio.create_task(engine.complete(PROMPT, PARAMS))
        await edge.reached(0)
        pausing = asyncio.create_task(engine.pause())
        await asyncio.sleep(0.01)
        assert not pausing.done()
        await engine.resume()
        await asyncio.wait_for(pausing, 5)
        edge.release()
        await running


async def test_an_update_keeps_a_pause_that_somebody_asked_for():
    async with Engine(synthetic_config()) as engine:
        await engine.pause()
        await engine.update_weights(1, weights(5))
        call = asyncio.create_task(ask(engine, 5))
        await asyncio.sleep(0.02)
        assert not call.done()
        await engine.resume()
        await call


async def test_a_step_that_never_ends_fails_the_engine_that_should_pause():
    engine, edge = held_engine(synthetic_config(step_deadline_s=0.1, pipeline_depth=1))
    async with engine:
        edge.hold()
        running = asyncio.create_task(engine.complete(PROMPT, PARAMS))
        await edge.reached(0)
        with pytest.raises(EngineFailed) as caught:
            await engine.update_weights(1, weights(5))
        assert isinstance(caught.value.cause, DeadlineExceeded)
        with pytest.raises(EngineFailed):
            await running
