"""Samples of a router's request that end before the request does: whole from their last delta on, and kept."""

from __future__ import annotations

import asyncio

import pytest

from fdasync.errors import InstanceLost
from fdasync.request import SamplingParams
from tests.support.router_scene import in_scene, settle

PROMPT = (1, 2, 3)
PAIR = SamplingParams(n=2)


def name_of(script):
    return script.submits[-1].request


async def last_of(stream, index):
    """Reads up to the last delta of a sample; returns its tokens."""
    tokens = []
    async for delta in stream:
        if delta.index == index:
            tokens += delta.token_ids
            if delta.finish_reason is not None:
                return tokens
    raise AssertionError(f"no end of sample {index}")


@in_scene("m0")
async def test_the_last_delta_waits_for_all_of_its_sample(scene):
    async with scene.router.generate(PROMPT, PAIR) as stream:
        await settle()
        name = name_of(scene.m0)
        scene.m0.tokens(name, 7)
        scene.m0.tokens(name, 8, finish="length")
        reading = asyncio.ensure_future(last_of(stream, 0))
        await settle()
        assert not reading.done()
        with pytest.raises(RuntimeError, match="still running"):
            stream.sample(0)
        scene.m0.sample(name, 7, 8)
        assert await reading == [7, 8]
        assert (stream.sample(0).token_ids, stream.sample(0).finish_reason) == ((7, 8), "length")
        with pytest.raises(RuntimeError, match="sample 1 is still running"):
            stream.sample(1)
        with pytest.raises(IndexError):
            stream.sample(2)
        scene.m0.sample(name, 9, index=1)
        # all of it is here, and its last delta was not read yet
        await settle()
        with pytest.raises(RuntimeError, match="was not read yet"):
            stream.sample(1)
        scene.m0.tokens(name, 9, index=1, finish="length")
        assert await last_of(stream, 1) == [9]
        ended = [stream.sample(index) for index in (0, 1)]
        scene.m0.end(name)
        assert list((await stream.finished()).samples) == ended


@in_scene("m0", "m1")
async def test_a_sample_stays_when_its_instance_dies(scene):
    async with scene.router.generate(PROMPT, PAIR) as stream:
        await settle()
        name = name_of(scene.m0)
        scene.m0.sample(name, 7)
        scene.m0.tokens(name, 7, finish="length")
        scene.m0.tokens(name, 8, index=1)
        await last_of(stream, 0)
        scene.m0.die()
        with pytest.raises(InstanceLost) as caught:
            await last_of(stream, 1)
    assert stream.sample(0).finish_reason == "length"
    assert stream.sample(0) is caught.value.partial.samples[0]
    assert caught.value.partial.samples[1].finish_reason == "failed"
    with pytest.raises(InstanceLost):
        stream.sample(1)


@in_scene("m0")
async def test_samples_outlast_an_early_leave_of_the_others(scene):
    async with scene.router.generate(PROMPT, PAIR) as stream:
        await settle()
        name = name_of(scene.m0)
        scene.m0.sample(name, 7)
        scene.m0.tokens(name, 7, finish="length")
        await last_of(stream, 0)
        # it is silent from here on: the router ends the request
    assert [sample.finish_reason for sample in stream.result.samples] == ["length", "abort"]
    assert stream.sample(0) is stream.result.samples[0]
    assert scene.m0.aborts == [name]


@in_scene("m0", "m1")
async def test_samples_of_a_try_that_failed_are_not_those_of_the_next(scene):
    task = asyncio.ensure_future(scene.router.complete(PROMPT, PAIR))
    await settle()
    scene.m0.sample(name_of(scene.m0), 7)
    await settle()
    scene.m0.failed(name_of(scene.m0))
    await settle()
    again = name_of(scene.m1)
    scene.m1.sample(again, 8, index=1)
    scene.m1.sample(again, 9)
    scene.m1.end(again)
    assert [sample.token_ids for sample in (await task).samples] == [(9,), (8,)]


@in_scene("m0")
async def test_the_tokens_of_a_text_are_known_with_the_first_delta(scene):
    async with scene.router.generate("a b", PAIR) as stream:
        await settle()
        assert stream.prompt_token_ids == ()
        name = name_of(scene.m0)
        # the instance that decodes may be heard before the one that tokenised
        scene.m0.tokens(name, 6, index=1)
        first = asyncio.ensure_future(anext(stream))
        await settle()
        assert not first.done()
        scene.m0.prompt(name, 4, 5)
        assert (await first).token_ids == (6,)
        assert stream.prompt_token_ids == (4, 5)
        scene.m0.sample(name, 7)
        scene.m0.tokens(name, 7, finish="length")
        await last_of(stream, 0)
        assert stream.prompt_token_ids == (4, 5)
        scene.m0.sample(name, 8, index=1)
        # an instance that ended it before it was tokenised knows no tokens
        scene.m0.prompt(name)
        scene.m0.end(name)
        assert (await stream.finished()).prompt_token_ids == (4, 5)


@in_scene("m0")
async def test_many_prompts_are_served_and_read_as_by_an_engine(scene):
    scene.m0.answers = lambda submit: scene.m0.end(submit.request, (int(submit.request_id[-1]),))
    results = await scene.router.complete_all([(1, 2), (3,), (4, 5)], request_id="batch")
    assert [result.token_ids for result in results] == [(0,), (1,), (2,)]
    assert [submit.request_id for submit in scene.m0.submits] == ["batch/0", "batch/1", "batch/2"]
    scene.m0.answers = lambda submit: (
        scene.m0.tokens(submit.request, 8, finish="length"),
        scene.m0.end(submit.request, (8,)),
    )
    assert [delta.token_ids async for delta in scene.router.generate((6, 7))] == [(8,)]
