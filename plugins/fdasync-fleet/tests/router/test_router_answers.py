"""Requests of one sample, whose instance sends all of the result in one message."""

from __future__ import annotations

import asyncio

from tests.support.router_scene import in_scene, settle

PROMPT = (1, 2, 3)


def ask(scene):
    """A request on its way; a task."""
    return asyncio.ensure_future(scene.router.complete(PROMPT))


@in_scene("m0", "m1")
async def test_an_answer_in_one_message_ends_a_request_once(scene):
    task = ask(scene)
    await settle()
    (submit,) = scene.m0.submits
    # of an instance that does not serve it, and of no try
    scene.m0.answer("another", 1)
    scene.m0.answer(submit.request, 7, 8)
    scene.m0.answer(submit.request, 9)
    scene.m0.end(submit.request, (5,))
    result = await task
    assert (result.token_ids, result.prompt_token_ids) == ((7, 8), PROMPT)
    await settle()
    assert scene.router.dispatch.num_held == 0
    assert scene.m0.router.is_up


@in_scene("m0", "m1")
async def test_an_answer_in_one_message_follows_the_pieces_of_a_stream(scene):
    async with scene.router.generate(PROMPT) as stream:
        await settle()
        (submit,) = scene.m0.submits
        scene.m0.tokens(submit.request, 7)
        await settle()
        scene.m0.tokens(submit.request, 8, finish="length")
        scene.m0.answer(submit.request, 7, 8)
        deltas = [delta.token_ids async for delta in stream]
    assert deltas == [(7,), (8,)]
    assert stream.result.token_ids == (7, 8)


@in_scene("m0", "m1")
async def test_an_answer_that_does_not_fit_together_is_a_retry(scene):
    task = ask(scene)
    await settle()
    scene.m0.answer(scene.m0.submits[0].request, 7, count=2)
    await settle(1.0)
    (again,) = scene.m1.submits
    scene.m1.answer(again.request, 8)
    assert (await task).token_ids == (8,)


@in_scene("m0")
async def test_the_prompt_of_a_call_with_tokens_is_its_own_whatever_comes(scene):
    task = ask(scene)
    await settle()
    scene.m0.prompt(scene.m0.submits[0].request, 5, 6)
    scene.m0.answer(scene.m0.submits[0].request, 7)
    assert (await task).prompt_token_ids == PROMPT
