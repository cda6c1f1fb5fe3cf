"""The face that engines and routers share: one program, played on either (`fdasync/generator/face.py`)."""

from __future__ import annotations

import asyncio
import inspect
import json
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pytest
from fdasync_fleet.testing.patience import LEASES, LINKS

import fdasync
from fdasync import Engine, GenerateOptions, Generator, Instance, Router, SamplingParams
from fdasync.errors import Asleep, BadInput, EngineClosed, SourceUnsupported, UpdateUnderWay, WeightsRejected
from fdasync.runner.synthetic import WEIGHTS_FILE
from fdasync.testing import LetterTokenizer, check_sample, oracle_of, synthetic_config, synthetic_engine, until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from fdasync import PauseMode

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5]
PARAMS = SamplingParams(max_tokens=12, seed=7, n=2)
LONG = SamplingParams(max_tokens=200, seed=7)
# its samples end after 55, 12, 200 and 112 tokens
GROUP = SamplingParams(max_tokens=200, seed=7, n=4, stop_token_ids=(41,))
STEP = {"step_s": 0.002}
RELOADED = 77
METHODS = [name for name, value in vars(Generator).items() if getattr(value, "__isabstractmethod__", False)]


@pytest.fixture(params=["engine", "router of a mixed instance", "router of prefill and decode"])
async def face(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Generator]:
    """Not started."""
    roles = {"engine": [], "router of a mixed instance": ["mixed"]}.get(request.param, ["prefill", "decode"])
    async with AsyncExitStack() as stack:
        addresses = [f"ipc://{tmp_path}/{role}" for role in roles]
        for role, address in zip(roles, addresses, strict=True):
            config = synthetic_config(STEP, role=role, host_blocks=64, leases=LEASES)
            instance = Instance(
                config,
                listen=address,
                links=LINKS,
                tokenizer=LetterTokenizer(),
                transport="shm",
                transfer_process=False,
            )
            await stack.enter_async_context(instance)
        made: Generator = fdasync.connect(addresses, links=LINKS) if roles else synthetic_engine(
            synthetic_config(STEP), tokenizer=LetterTokenizer()
        )  # fmt: skip
        yield made
        await made.aclose()


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    (tmp_path / WEIGHTS_FILE).write_text(json.dumps({"weights_id": RELOADED}))
    return tmp_path


@pytest.fixture
def other(tmp_path: Path) -> Path:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / WEIGHTS_FILE).write_text(json.dumps({"weights_id": 5}))
    return tmp_path / "other"


def check(result: fdasync.Result, params: SamplingParams = PARAMS, prompt: list[int] = PROMPT, **model: int) -> None:
    oracle = oracle_of(synthetic_config({**STEP, **model}))
    assert result.prompt_token_ids == tuple(prompt)
    for sample in result.samples:
        check_sample(sample, prompt, params, oracle)


async def test_a_stream_and_a_completion_are_the_same_tokens_and_rows(face: Generator) -> None:
    async with face:
        parts: dict[int, list[int]] = {0: [], 1: []}
        async with face.generate(PROMPT, PARAMS, request_id="mine", priority=1, deadline_s=300.0) as stream:
            assert stream.request_id == "mine"
            with pytest.raises(RuntimeError):
                _ = stream.result
            async for delta in stream:
                parts[delta.index] += delta.token_ids
        check(stream.result)
        assert [tuple(parts[sample.index]) for sample in stream.result.samples] == [
            sample.token_ids for sample in stream.result.samples
        ]
        whole = await face.complete(PROMPT, PARAMS, cache_salt="of its own", start=2)
        check_start = [sample.start for sample in whole.samples]
        assert check_start == [2, 2]
        assert [sample.token_ids for sample in whole.samples] == [tuple(parts[0]), tuple(parts[1])]
        async with face.generate("letters", PARAMS, routing=False, aux=False) as stream:
            text = await stream.finished()
        assert [(sample.routing, sample.aux, len(sample.text)) for sample in text.samples] == [(None, {}, 12)] * 2


@pytest.mark.ci(after=1)
async def test_a_sample_is_whole_from_its_last_delta_on(face: Generator) -> None:
    params = msgspec.structs.replace(GROUP, logprobs="raw")
    async with face:
        ended: dict[int, fdasync.Sample] = {}
        async with face.generate(PROMPT, params, start=2) as stream:
            with pytest.raises(IndexError):
                stream.sample(4)
            async for delta in stream:
                if delta.finish_reason is None:
                    with pytest.raises(RuntimeError, match="still running"):
                        stream.sample(delta.index)
                    continue
                ended[delta.index] = stream.sample(delta.index)
                assert stream.prompt_token_ids == tuple(PROMPT)
        assert list(ended) == [1, 0, 3, 2]
        for sample in stream.result.samples:
            early = ended[sample.index]
            for one in (early, sample):
                check_sample(one, PROMPT, params, oracle_of(synthetic_config(STEP)), start=2)
            assert early.routing is not None
            assert sample.routing is not None
            assert early.routing.array.tolist() == sample.routing.array.tolist()
            assert (early.start, early.cached, early.weight_version) == (2, sample.cached, sample.weight_version)


async def test_the_first_samples_are_kept_when_the_others_are_left(face: Generator) -> None:
    """The early stop of a trainer that has enough of a group."""
    async with face:
        async with face.generate(PROMPT, GROUP) as stream:
            async for delta in stream:
                if delta.finish_reason is not None:
                    break
        assert (delta.index, stream.sample(1).finish_reason) == (1, "stop")
        samples = stream.result.samples
        assert [sample.finish_reason for sample in samples] == ["abort", "stop", "abort", "abort"]
        for sample in (stream.sample(1), *samples):
            check_sample(sample, PROMPT, GROUP, oracle_of(synthetic_config(STEP)))


async def test_a_block_is_entered_once_and_its_stream_has_one_reader(face: Generator) -> None:
    async with face:
        block = face.generate(PROMPT, PARAMS)
        async with block as stream:
            # no token can be there before the first reader waits
            first, second = await asyncio.gather(anext(stream), anext(stream), return_exceptions=True)
            assert isinstance(first, fdasync.Delta)
            assert isinstance(second, RuntimeError)
            check(await stream.finished())
        with pytest.raises(RuntimeError, match="entered once"):
            async with block:
                pass


async def test_an_abort_tells_whether_there_was_such_a_request(face: Generator) -> None:
    assert face.abort("mine") is False
    async with face:
        assert face.abort("mine") is False
        async with face.generate(PROMPT, LONG, request_id="mine") as stream:
            await anext(aiter(stream))
            assert face.abort("mine") is True
            assert face.abort("mine") is True
            result = await stream.finished()
        assert result.finish_reason == "abort"
        assert 0 < len(result.token_ids) < 200
        assert face.abort("mine") is False
        with pytest.raises(BadInput, match="request_id"):
            face.abort(7)  # type: ignore[arg-type]
        async with face.generate(PROMPT, LONG) as stream:
            await anext(aiter(stream))
            stream.abort()
            assert (await stream.finished()).finish_reason == "abort"


async def test_abort_all_ends_every_request_of_a_name(face: Generator) -> None:
    assert face.abort_all() == 0
    async with face:
        assert face.abort_all() == 0
        names = ("a-1", "a-2", "b-1", None)
        streams = [await face.generate(PROMPT, LONG, request_id=name).__aenter__() for name in names]
        for stream in streams:
            await anext(aiter(stream))
        assert face.abort_all("no such") == 0
        assert face.abort_all("a-") == 2
        for stream in streams[:2]:
            result = await stream.finished()
            assert result.finish_reason == "abort"
            assert 0 < len(result.token_ids) < 200
        assert face.abort_all("a-") == 0
        await anext(aiter(streams[2]))
        assert face.abort_all() == 2
        ends = [(await stream.finished()).finish_reason for stream in streams]
        assert ends == ["abort"] * 4
        check(await face.complete(PROMPT, PARAMS))
        for prefix in (None, 7, b"a"):
            with pytest.raises(BadInput) as caught:
                face.abort_all(prefix)  # type: ignore[arg-type]
            assert caught.value.field == "prefix"


async def test_a_pause_holds_requests_until_it_is_resumed(face: Generator) -> None:
    async with face:
        await face.pause()
        await face.pause()
        waiting = asyncio.ensure_future(face.complete(PROMPT, PARAMS))
        done, _ = await asyncio.wait([waiting], timeout=0.2)
        assert not done
        await face.resume()
        await face.resume()
        check(await waiting)


@pytest.mark.ci(after=3)
@pytest.mark.parametrize("mode", ["in_place", "retract", "abort", "wait"])
async def test_a_pause_of_every_mode_is_undone_by_resume(face: Generator, mode: PauseMode) -> None:
    async with face:
        running = await face.generate(PROMPT, LONG).__aenter__()
        await anext(aiter(running))
        await face.pause(mode)
        await face.pause(mode)
        waiting = asyncio.ensure_future(face.complete(PROMPT, PARAMS))
        if mode in ("abort", "wait"):
            assert (await running.finished()).finish_reason == ("abort" if mode == "abort" else "length")
        done, _ = await asyncio.wait([waiting, asyncio.ensure_future(running.finished())], timeout=0.2)
        assert waiting not in done
        assert len(done) == (mode in ("abort", "wait"))
        await face.resume()
        await face.resume()
        check(await waiting)
        result = await running.finished()
        if mode != "abort":
            check(result, LONG)
        with pytest.raises(BadInput, match="mode"):
            await face.pause("gently")  # type: ignore[arg-type]


@pytest.mark.ci(after=1)
async def test_requests_between_two_instances_outlast_every_pause(face: Generator) -> None:
    """Many arrive while pauses come and go: some are in the middle of a hand-over each time."""
    brief = SamplingParams(max_tokens=6, seed=7)
    async with face:
        prompts = [[number % 90, *PROMPT * 3] for number in range(40)]
        calls = []
        modes: tuple[PauseMode, ...] = ("wait", "retract", "in_place", "retract", "wait")
        for number, mode in enumerate(modes):
            for prompt in prompts[8 * number : 8 * number + 8]:
                calls.append(asyncio.ensure_future(face.complete(prompt, brief)))
                await asyncio.sleep(0.002)
            await face.pause(mode)
            await face.resume()
        for prompt, result in zip(prompts, await asyncio.gather(*calls), strict=True):
            check(result, brief, prompt)


def versions(result: fdasync.Result) -> set[str]:
    return {span.version for sample in result.samples for span in sample.weight_version}


@pytest.mark.ci(after=1)
async def test_a_version_is_counted_up_given_again_and_given_without_new_weights(
    face: Generator, weights: Path, other: Path
) -> None:
    async with face:
        assert versions(await face.complete(PROMPT, PARAMS)) == {"0"}
        await face.update_weights(None, weights)
        assert versions(await face.complete(PROMPT, PARAMS)) == {"1"}
        await face.set_weight_version("step-9")
        result = await face.complete(PROMPT, PARAMS)
        check(result, weights_id=RELOADED)
        assert versions(result) == {"step-9"}
        assert result.usage.cached_tokens == 8, "the cache is kept"
        # the same weights under the same label: nothing changes, and nothing is computed again
        await face.update_weights("step-9", weights)
        assert (await face.complete(PROMPT, PARAMS)).usage.cached_tokens == 8
        check(await face.complete(PROMPT, PARAMS), weights_id=RELOADED)
        # others under it, and under the next one
        for label, named in (("step-9", "step-9"), (None, "step-10")):
            await face.update_weights(label, other)
            result = await face.complete(PROMPT, PARAMS)
            check(result, weights_id=5)
            assert [(span.version, span.weights_id) for span in result.weight_version] == [(named, f"{5:032x}")]
        # a trainer begins at version 1 again
        for label, folder, number in ((1, weights, RELOADED), (2, other, 5), (1, other, 5), (1, weights, RELOADED)):
            await face.update_weights(label, folder)
            result = await face.complete(PROMPT, PARAMS)
            check(result, weights_id=number)
            assert [(span.version, span.weights_id) for span in result.weight_version] == [
                (str(label), f"{number:032x}")
            ]
        await face.set_weight_version("step-9")
        for label in ("", "v" * 257, None, -1):
            with pytest.raises(BadInput, match="version"):
                await face.set_weight_version(label)  # type: ignore[arg-type]
        await face.set_weight_version("step-10")


@pytest.mark.ci(after=1)
async def test_the_fingerprint_is_that_of_the_weights_in_place(face: Generator, weights: Path) -> None:
    async with face:
        first = await face.weights_fingerprint()
        running = await face.generate(PROMPT, LONG).__aenter__()
        await anext(aiter(running))
        # a request that runs goes on
        assert await face.weights_fingerprint() == first
        await running.finished()
        await face.update_weights(None, weights)
        assert await face.weights_fingerprint() == f"{RELOADED:032x}" != first
        await face.sleep(1)
        with pytest.raises(Asleep):
            await face.weights_fingerprint()
        await face.wake()
        await face.begin_weight_update()
        with pytest.raises(UpdateUnderWay):
            await face.weights_fingerprint()


@pytest.mark.ci(after=1)
async def test_a_reset_forgets_computed_blocks_and_disturbs_no_request(face: Generator) -> None:
    prompt = PROMPT * 4
    brief = SamplingParams(max_tokens=4, seed=7)

    async def cached() -> int:
        result = await face.complete(prompt, brief)
        check(result, brief, prompt)
        return result.cached.total

    async with face:
        assert [await cached() for _ in range(2)] == [0, 32]
        running = await face.generate(prompt, LONG).__aenter__()
        await anext(aiter(running))
        await face.reset_cache()
        await face.reset_cache()
        # it has all of the prompt's blocks, and shares them with nobody
        assert not running._request.done.done()
        assert [await cached() for _ in range(2)] == [0, 32]
        check(await running.finished(), LONG, prompt)
        await face.pause()
        await face.reset_cache()
        await face.resume()
        assert await cached() == 0
        if isinstance(face, Router):
            await until(lambda: all(one.blocks for one in face.table.instances.values()))
            await face.reset_cache()
            await until(lambda: not any(one.blocks for one in face.table.instances.values()))


async def test_weights_come_from_a_folder_or_are_refused_by_type(face: Generator, weights: Path) -> None:
    async with face:
        check(await face.complete(PROMPT, PARAMS))
        with pytest.raises(WeightsRejected):
            await face.update_weights(1, str(weights / "nowhere"))
        for nonsense in (7, b"folder", "", "a\0b"):
            with pytest.raises(BadInput) as caught:
                await face.update_weights(1, nonsense)  # type: ignore[arg-type]
            assert (caught.value.field, type(caught.value)) == ("source", BadInput)
        # a path or its text, under every mode
        await face.update_weights(1, weights, "keep")
        check(await face.complete(PROMPT, PARAMS), weights_id=RELOADED)
        await face.update_weights(2, str(weights))
        result = await face.complete(PROMPT, PARAMS)
        check(result, weights_id=RELOADED)
        assert [span.version for span in result.samples[0].weight_version] == ["2"]
        tensors = [("weights", "uint64", (1,), np.array([5], np.uint64))]
        if isinstance(face, Engine):
            await face.update_weights(3, tensors)
            check(await face.complete(PROMPT, PARAMS), weights_id=5)
        else:
            with pytest.raises(SourceUnsupported) as refused:
                await face.update_weights(3, tensors)
            assert (refused.value.given, refused.value.field) == ("tensors of this process", "source")
            check(await face.complete(PROMPT, PARAMS), weights_id=RELOADED)


async def test_facts_are_those_of_the_model(face: Generator, weights: Path) -> None:
    for tell in (face.facts, face.load):
        with pytest.raises(EngineClosed):
            tell()
    async with face:
        told = face.facts()
        assert (told.model, told.model_path, told.tokenizer, told.takes_text) == ("synthetic", "", "", True)
        assert (told.vocab_size, told.eos_ids, told.max_context_tokens, told.block_tokens) == (100, (), 256, 4)
        assert (told.dtype, told.kv_dtype, told.num_instances) == ("", "uint64", len(face.load().instances) or 1)
        assert told.numerics == "default"
        # instances may differ in it
        assert told.tensor_parallel == (1 if isinstance(face, Engine) else 0)
        result = await face.complete(PROMPT, PARAMS)
        routing = result.samples[0].routing
        assert routing is not None
        assert told.captures_routing
        assert (told.moe_layer_ids, told.num_experts) == (routing.layer_ids, routing.num_experts)
        assert (told.top_k, told.top_k_by_layer) == (routing.array.shape[2], routing.top_k_by_layer)
        assert set(told.aux) == result.samples[0].aux.keys()
        await face.update_weights("new", weights)
        assert face.facts() == msgspec.structs.replace(told, weight_version="new")


@pytest.mark.ci(after=1)
async def test_load_counts_requests_samples_and_tokens(face: Generator, weights: Path) -> None:
    async with face:
        async with asyncio.timeout(300):
            # an instance tells its load with its heartbeats
            await until(lambda: face.load().capacity_tokens > 0)
            idle = face.load()
            assert (idle.running, idle.waiting, idle.live, idle.used_tokens) == (0, 0, 0, 0)
            assert (idle.paused, idle.updating) == (False, False)
            async with face.generate(PROMPT, LONG) as stream:
                await anext(aiter(stream))
                assert face.load().live == 1
                # so that it does not end between two heartbeats
                await face.pause()
                await until(lambda: face.load().running > 0 and face.load().used_tokens > 0)
                assert face.load().paused
                assert all(one.paused for one in face.load().instances)
                await face.resume()
                assert not face.load().paused
            assert face.load().live == 0
            await until(lambda: not (face.load().running or face.load().used_tokens))
            update = asyncio.ensure_future(face.update_weights(1, weights))
            await until(lambda: face.load().updating)
            await update
        assert not face.load().updating
        assert {one.weight_version for one in face.load().instances} <= {"1"}


async def test_what_is_not_open_refuses_everything(face: Generator, weights: Path) -> None:
    async def refuses_all(state: str) -> None:
        for call in (
            lambda: face.generate(PROMPT, PARAMS).__aenter__(),
            lambda: face.complete(PROMPT, PARAMS),
            lambda: face.pause(),
            lambda: face.resume(),
            lambda: face.reset_cache(),
            lambda: face.update_weights(9, str(weights)),
            lambda: face.set_weight_version("late"),
            lambda: face.weights_fingerprint(),
        ):
            with pytest.raises(EngineClosed) as caught:
                await call()
            assert caught.value.state == state

    await refuses_all("new")
    await face.start()
    stream = await face.generate(PROMPT, LONG, request_id="live").__aenter__()
    await anext(aiter(stream))
    await face.aclose()
    await face.aclose()
    assert (await stream.finished()).finish_reason == "abort"
    assert face.abort("live") is False
    await refuses_all("closed")


async def test_an_option_that_there_is_not_is_refused_with_the_nearest(face: Generator) -> None:
    async with face:
        for make in (face.generate, face.complete):
            with pytest.raises(TypeError, match="did you mean 'priority'"):
                await make(PROMPT, PARAMS, prioritty=1)  # type: ignore[call-arg,misc]
        # fields of what goes on to the scheduler are none of the caller's
        with pytest.raises(TypeError, match="hand_off"):
            await face.complete(PROMPT, PARAMS, hand_off=None)  # type: ignore[call-arg]
        for name, value in (("priority", "x"), ("deadline_s", 0), ("routing", 1), ("aux", "x"), ("start", -1)):
            with pytest.raises(BadInput, match=name):
                await face.complete(PROMPT, PARAMS, **{name: value})  # type: ignore[arg-type]


def test_the_options_stand_once() -> None:
    for owner in (Generator, Engine, Router):
        for verb in ("generate", "complete"):
            parameters = inspect.signature(getattr(owner, verb)).parameters
            assert not GenerateOptions.__annotations__.keys() & parameters.keys()


def test_every_method_of_the_face_is_each_ones_own() -> None:
    assert METHODS == [
        "start", "aclose", "generate", "complete", "abort", "abort_all", "pause", "resume", "sleep", "wake",
        "reset_cache", "update_weights", "join_weights_group", "leave_weights_group", "begin_weight_update",
        "end_weight_update", "abandon_weight_update", "set_weight_version", "weights_fingerprint",
        "profile", "facts", "load", "watch",
    ]  # fmt: skip
    for owner in (Engine, Router):
        assert not inspect.isabstract(owner)
        assert Generator in owner.__mro__
