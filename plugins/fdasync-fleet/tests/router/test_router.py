"""One request of a router: retries, exactly one end, aborts, deadlines, readers (docs/design.md, rules 17, 21)."""

from __future__ import annotations

import asyncio

import pytest
from fdasync_fleet.messages import Failed, PromptTokens
from fdasync_fleet.router.dispatch import grace_s

from fdasync.errors import BadInput, DuplicateRequestId, InstanceLost, PeerUnreachable, RemoteError
from fdasync.request import SamplingParams
from fdasync.result import Usage
from tests.support.router_scene import done, in_scene, settle, status_of

PROMPT = (1, 2, 3)


def ask(scene, **fields):
    """A request on its way; a task."""
    return asyncio.ensure_future(scene.router.complete(PROMPT, **fields))


# -- the way of a request


@in_scene("m0")
async def test_a_request_is_served_whole_by_a_mixed_instance(scene):
    scene.m0.answers = lambda submit: scene.m0.end(submit.request, (7, 8))
    result = await scene.router.complete(PROMPT, SamplingParams(max_tokens=2), request_id="mine")
    assert (result.request_id, result.token_ids, result.finish_reason) == ("mine", (7, 8), "length")
    (submit,) = scene.m0.submits
    assert (submit.request_id, submit.decoders, submit.streams) == ("mine", (), False)
    assert submit.request != "mine"
    assert submit.params.seed is not None


@in_scene("p0", "d0", "d1")
async def test_one_that_is_handed_over_is_answered_by_whoever_took_it(scene):
    async with scene.router.generate(PROMPT) as stream:
        await settle()
        (submit,) = scene.p0.submits
        assert submit.decoders == (scene.d0.address, scene.d1.address)
        scene.d1.tokens(submit.request, 7)
        scene.p0.moved(submit.request, scene.d1)
        await settle()
        scene.d1.tokens(submit.request, 8, finish="length")
        scene.d1.end(submit.request, (7, 8))
        deltas = [delta.token_ids async for delta in stream]
    # the first one was not taken before the second came
    assert deltas == [(7,), (8,)]
    assert stream.result.token_ids == (7, 8)
    assert stream.result.ttft_s == pytest.approx(0.2, abs=0.05)


@in_scene("p0", "d0")
async def test_words_of_whoever_does_not_serve_it_count_for_nothing(scene):
    task = ask(scene)
    await settle()
    name = scene.p0.submits[0].request
    scene.d0.tokens(name, 7)
    await settle()
    # an abort or a deadline of the prefill side comes late
    scene.p0.end(name, (7,), reason="deadline")
    scene.p0.failed(name)
    await settle()
    assert not task.done()
    scene.d0.end(name, (7, 8))
    assert (await task).token_ids == (7, 8)


@in_scene("p0", "d0", "d1")
async def test_load_counts_before_instances_tell_of_it(scene):
    tasks = [ask(scene) for _ in range(4)]
    await settle()
    firsts = [submit.decoders[0] for submit in scene.p0.submits]
    assert sorted(firsts) == [scene.d0.address] * 2 + [scene.d1.address] * 2
    for submit in scene.p0.submits:
        scene.d0.end(submit.request, (7,))
    await asyncio.gather(*tasks)


# -- once more


@in_scene("m0", "m1")
async def test_while_nothing_was_delivered_it_is_sent_again_with_its_seed(scene):
    scene.m0.answers = lambda submit: scene.m0.failed(submit.request)
    scene.m1.answers = lambda submit: scene.m1.end(submit.request, (7,))
    assert (await scene.router.complete(PROMPT)).token_ids == (7,)
    (first,), (second,) = scene.m0.submits, scene.m1.submits
    assert first.params.seed == second.params.seed
    assert first.request != second.request


@in_scene("m0", "m1")
async def test_the_death_of_an_instance_is_a_retry_too(scene):
    task = ask(scene)
    await settle()
    assert len(scene.m0.submits) == 1
    scene.m0.die()
    await settle(4.0)
    (again,) = scene.m1.submits
    # what it waited goes with it
    assert scene.m0.submits[0].waited_s == 0.0
    assert 1.0 < again.waited_s < 4.1
    scene.m1.end(again.request, (7,))
    assert (await task).token_ids == (7,)


@in_scene("p0", "d0", "d1")
async def test_a_decoder_that_dies_after_it_took_it_is_a_retry(scene):
    task = ask(scene)
    await settle()
    scene.p0.moved(scene.p0.submits[0].request, scene.d0)
    await settle()
    scene.d0.die()
    await settle(4.0)
    assert len(scene.p0.submits) == 2
    scene.d1.end(scene.p0.submits[1].request, (7,))
    assert (await task).token_ids == (7,)


@in_scene("p0", "d0")
async def test_moved_to_an_instance_that_is_gone_is_a_retry(scene):
    task = ask(scene)
    await settle()
    scene.d0.die()
    await settle(4.0)
    scene.p0.moved(scene.p0.submits[0].request, scene.d0)
    await settle(1.0)
    assert len(scene.p0.submits) == 2
    assert scene.p0.submits[1].decoders == ()
    scene.p0.end(scene.p0.submits[1].request, (7,))
    assert (await task).token_ids == (7,)


@in_scene("m0", "m1")
async def test_what_was_delivered_is_not_computed_again(scene):
    async with scene.router.generate(PROMPT) as stream:
        await settle()
        scene.m0.tokens(scene.m0.submits[0].request, 7, 8)
        assert (await anext(stream)).token_ids == (7, 8)
        scene.m0.die()
        with pytest.raises(InstanceLost) as caught:
            await anext(stream)
    assert caught.value.partial.token_ids == (7, 8)
    assert caught.value.partial.finish_reason == "failed"
    assert scene.m1.submits == []


@in_scene("p0", "d0")
async def test_what_is_left_of_a_text_has_the_tokens_of_its_prompt(scene):
    async with scene.router.generate("some text") as stream:
        await settle()
        name = scene.p0.submits[0].request
        # whoever decodes it may be heard before whoever tokenised it
        scene.d0.tokens(name, 7, 8)
        await settle()
        scene.p0.prompt(name, 5, 6)
        scene.p0.moved(name, scene.d0)
        await settle()
        scene.d0.die()
        with pytest.raises(InstanceLost) as caught:
            async for _ in stream:
                pass
    partial = caught.value.partial
    assert (partial.prompt_token_ids, partial.token_ids) == ((5, 6), (7, 8))
    assert partial.usage == Usage(prompt_tokens=2, cached_tokens=0, completion_tokens=2)


@in_scene("m0", "m1")
async def test_tokens_of_a_prompt_that_was_not_text_are_the_callers(scene):
    task = ask(scene, request_id="mine")
    await settle()
    scene.m0.prompt(scene.m0.submits[0].request, 5, 6)
    await settle()
    scene.router.abort("mine")
    assert (await task).prompt_token_ids == PROMPT


@in_scene("m0", "m1")
async def test_a_prompt_that_is_no_tokens_is_a_retry(scene):
    task = asyncio.ensure_future(scene.router.complete("text"))
    await settle()
    scene.m0.router.send(PromptTokens(scene.m0.submits[0].request, b"odd"))
    await settle(1.0)
    scene.m1.end(scene.m1.submits[0].request, (7,))
    assert (await task).token_ids == (7,)


@in_scene("m0", retries=2)
async def test_retries_are_bounded(scene):
    scene.m0.answers = lambda submit: scene.m0.failed(submit.request)
    with pytest.raises(InstanceLost):
        await scene.router.complete(PROMPT)
    assert len(scene.m0.submits) == 3


@in_scene("m0", retries=2)
async def test_learning_how_long_a_text_is_counts_as_no_try(scene):
    def answers(submit):
        if len(scene.m0.submits) == 1:
            scene.m0.router.send(Failed(submit.request, "TooLong", "no", retriable=True, prompt_tokens=200))
        else:
            scene.m0.failed(submit.request)

    scene.m0.answers = answers
    with pytest.raises(InstanceLost):
        await scene.router.complete("a" * 40, SamplingParams(max_tokens=4))
    assert len(scene.m0.submits) == 4


@in_scene("p0", "d0", retries=1)
async def test_a_loss_says_why_no_decode_instance_took_it(scene):
    words = "no instance had room for it within 60 s, d0 last said: it has other weights"
    scene.p0.answers = lambda submit: scene.p0.router.send(
        Failed(submit.request, "InstanceLost", words, retriable=True)
    )
    with pytest.raises(InstanceLost, match=words):
        await ask(scene)


@in_scene("m0", "m1")
async def test_what_is_wrong_with_a_request_is_told_and_not_tried_again(scene):
    scene.m0.answers = lambda submit: scene.m0.failed(
        submit.request, "BadInput", retriable=False, field="max_tokens", limit="9", hint="fewer"
    )
    with pytest.raises(BadInput) as caught:
        await scene.router.complete(PROMPT)
    assert (caught.value.field, caught.value.problem, caught.value.limit) == ("max_tokens", "no", "9")
    scene.m0.answers = lambda submit: scene.m0.failed(submit.request, "DecodeFailed", retriable=False)
    with pytest.raises(RemoteError):
        await scene.router.complete(PROMPT)
    assert scene.m1.submits == []


@in_scene("m0", "m1")
async def test_nonsense_of_an_instance_is_a_retry(scene):
    # one sample was asked for
    scene.m0.answers = lambda submit: scene.m0.end(submit.request, (7,), (8,))
    scene.m1.answers = lambda submit: scene.m1.end(submit.request, (7,))
    assert (await scene.router.complete(PROMPT)).token_ids == (7,)
    assert len(scene.m0.submits) == 1


@in_scene("m0")
async def test_answers_of_a_try_that_is_over_count_for_nothing(scene):
    task = ask(scene)
    await settle()
    old = scene.m0.submits[0].request
    scene.m0.failed(old)
    await settle()
    scene.m0.end(old, (9,))
    await settle()
    assert not task.done()
    scene.m0.end(scene.m0.submits[1].request, (7,))
    assert (await task).token_ids == (7,)


# -- ends


@in_scene("p0", "d0")
async def test_an_abort_goes_to_all_instances_that_may_have_the_request(scene):
    task = ask(scene, request_id="mine")
    await settle()
    scene.router.abort("mine")
    scene.router.abort("mine")
    scene.router.abort("unheard of")
    await settle()
    name = scene.p0.submits[0].request
    assert scene.p0.aborts == scene.d0.aborts == [name]
    scene.p0.end(name, (), reason="abort")
    assert (await task).finish_reason == "abort"


@in_scene("m0")
async def test_an_abort_without_an_answer_ends_the_request_all_the_same(scene):
    task = ask(scene, request_id="mine")
    await settle()
    scene.router.abort("mine")
    result = await asyncio.wait_for(task, 6.0)
    assert (result.finish_reason, result.token_ids) == ("abort", ())


@in_scene("m0")
async def test_an_abort_between_two_tries_ends_it(scene):
    task = ask(scene, request_id="mine")
    await settle()
    scene.m0.failed(scene.m0.submits[0].request)
    await settle(0.01)
    scene.router.abort("mine")
    assert (await task).finish_reason == "abort"
    await settle()
    assert len(scene.m0.submits) == 1


@in_scene("m0")
async def test_a_deadline_without_a_word_of_the_instance_is_an_error_that_has_the_output_so_far(scene):
    """Rows and weights of its tokens are the instance's to tell."""
    async with scene.router.generate(PROMPT, deadline_s=2.0) as stream:
        await settle()
        assert scene.m0.submits[0].deadline_s == pytest.approx(2.0, abs=0.1)
        scene.m0.tokens(scene.m0.submits[0].request, 7)
        assert (await anext(stream)).token_ids == (7,)
        with pytest.raises(InstanceLost, match="m0 did not end it in time") as caught:
            await anext(stream)
    assert caught.value.partial.token_ids == (7,)
    await settle()
    assert len(scene.m0.aborts) == 1


@in_scene("m0")
async def test_what_fails_for_want_of_time_waits_for_no_grace(scene):
    """Something of it was delivered, so it could not be tried again."""
    async with scene.router.generate(PROMPT, deadline_s=2.0) as stream:
        await settle()
        name = scene.m0.submits[0].request
        scene.m0.tokens(name, 7)
        # the router's own end comes a grace later
        await settle(1.9)
        scene.m0.failed(name, "InstanceLost")
        began = asyncio.get_running_loop().time()
        assert (await anext(stream)).token_ids == (7,)
        with pytest.raises(InstanceLost) as caught:
            await anext(stream)
    assert caught.value.partial.token_ids == (7,)
    assert asyncio.get_running_loop().time() - began < grace_s(2.0)


@in_scene("m0")
async def test_a_request_without_an_instance_within_its_deadline_ends_as_by_every_deadline(scene):
    scene.m0.die()
    await settle(4.0)
    loop = asyncio.get_running_loop()
    for deadline_s in (0.01, 2.0):
        begin = loop.time()
        result = await scene.router.complete(PROMPT, deadline_s=deadline_s)
        assert loop.time() - begin == pytest.approx(deadline_s, abs=0.01)
        assert (result.finish_reason, result.token_ids, result.prompt_token_ids) == ("deadline", (), PROMPT)
    async with scene.router.generate(PROMPT, deadline_s=2.0) as stream:
        assert [delta async for delta in stream] == []
    assert stream.result.finish_reason == "deadline"


@in_scene("m0")
async def test_a_deadline_between_two_tries_or_while_intake_is_held_is_one_too(scene):
    # it refuses whatever comes, as busy
    scene.m0.answers = lambda submit: scene.m0.failed(submit.request)
    assert (await scene.router.complete(PROMPT, deadline_s=0.2)).finish_reason == "deadline"
    scene.m0.obeys = None
    update = asyncio.ensure_future(scene.router.update_weights(1, "folder"))
    await settle()
    assert (await scene.router.complete(PROMPT, deadline_s=0.5)).finish_reason == "deadline"
    scene.m0.router.send(done(scene.m0.commands[0].number, "", "", b"w" * 16, 1))
    await update


@in_scene("m0")
async def test_what_is_short_does_not_wait_long_for_one_that_is_silent(scene):
    begin = asyncio.get_running_loop().time()
    assert (await scene.router.complete(PROMPT, deadline_s=0.05)).finish_reason == "deadline"
    assert asyncio.get_running_loop().time() - begin < 0.4
    assert (grace_s(0.05), grace_s(10.0), grace_s(3600.0)) == (0.25, 1.0, 5.0)


@in_scene("m0", absent_s=10.0)
async def test_where_no_instance_is_left_a_request_ends_long_before_its_deadline(scene):
    scene.m0.die()
    await settle(4.0)
    begin = asyncio.get_running_loop().time()
    with pytest.raises(PeerUnreachable, match="no instance was there for 10 s"):
        await scene.router.complete(PROMPT, deadline_s=600.0)
    assert 10.0 <= asyncio.get_running_loop().time() - begin < 12.0


@in_scene("p0", "d0", "d1", absent_s=10.0)
async def test_no_request_waits_to_its_deadline_for_instances_that_drain(scene):
    """Heartbeats say so, and that they are there."""
    loop = asyncio.get_running_loop()

    async def refused(**fields):
        begin = loop.time()
        with pytest.raises(PeerUnreachable, match="no instance was there for 10 s"):
            await scene.router.complete(PROMPT, deadline_s=600.0, **fields)
        assert 10.0 <= loop.time() - begin < 12.0

    scene.d0.status = status_of("draining")
    await settle(1.0)
    await refused(decoders=[scene.d0.address])
    scene.router.table.find(scene.p0.address).leaving = True
    await refused(prefill=scene.p0.address)
    scene.router.table.find(scene.d1.address).leaving = True
    await refused()
    assert not any(script.submits for script in scene.scripts.values())


@in_scene("m0", absent_s=10.0)
async def test_one_that_is_being_brought_up_to_date_is_waited_for(scene):
    scene.router.table.find(scene.m0.address).stands("behind")
    task = ask(scene)
    await settle(60.0)
    assert not task.done()
    scene.router.table.find(scene.m0.address).stands("alike")
    await settle(2.0)
    scene.m0.end(scene.m0.submits[0].request, (7,))
    await task


@in_scene("p0", "d0")
async def test_a_prefill_instance_decodes_no_request(scene):
    for decoders in ([scene.p0.address], [scene.d0.address, scene.p0.address]):
        with pytest.raises(BadInput, match="is a prefill instance") as caught:
            await scene.router.complete(PROMPT, decoders=decoders)
        assert caught.value.field == "decoders"


@in_scene("m0")
async def test_cancelling_and_leaving_a_stream_early_abort_it(scene):
    task = ask(scene)
    await settle()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    async with scene.router.generate(PROMPT) as stream:
        await settle()
        scene.m0.tokens(scene.m0.submits[1].request, 7)
        assert (await anext(stream)).token_ids == (7,)
        scene.m0.answers = None
        asyncio.get_running_loop().call_later(
            0.1, lambda: scene.m0.end(scene.m0.submits[1].request, (7, 8), reason="abort")
        )
    assert scene.m0.aborts == [submit.request for submit in scene.m0.submits]
    assert (stream.result.finish_reason, stream.result.token_ids) == ("abort", (7, 8))


@in_scene("m0")
async def test_a_slow_reader_gets_fewer_longer_deltas(scene):
    async with scene.router.generate(PROMPT, SamplingParams(n=2)) as stream:
        await settle()
        name = scene.m0.submits[0].request
        for token in range(5):
            scene.m0.tokens(name, token, finish="length" if token == 4 else None)
            scene.m0.tokens(name, 10 + token, index=1)
        scene.m0.end(name, tuple(range(5)), tuple(range(10, 15)))
        await settle()
        deltas = [(delta.index, delta.token_ids, delta.finish_reason) async for delta in stream]
    assert deltas == [(0, (0, 1, 2, 3, 4), "length"), (1, (10, 11, 12, 13, 14), None)]


@in_scene("m0")
async def test_a_name_that_is_in_use_is_refused(scene):
    task = ask(scene, request_id="mine")
    await settle()
    with pytest.raises(DuplicateRequestId):
        await scene.router.complete(PROMPT, request_id="mine")
    scene.m0.end(scene.m0.submits[0].request, (7,))
    await task


@in_scene("m0")
async def test_closing_ends_what_is_live(scene):
    task = ask(scene)
    await settle()
    await scene.router.aclose()
    assert (await task).finish_reason == "abort"
    # a goodbye may be lost; this is not
    assert scene.m0.aborts == [scene.m0.submits[0].request]


@in_scene("p0", "d0")
async def test_what_no_decode_instance_ever_takes_is_served_whole(scene):
    task = ask(scene)
    await settle()
    first = scene.p0.submits[0]
    assert first.decoders == (scene.d0.address,)
    scene.p0.failed(first.request, "InstanceLost", whole=True)
    await settle()
    (again,) = scene.d0.submits
    assert again.decoders == ()
    scene.d0.end(again.request, (7,))
    assert (await task).token_ids == (7,)


@in_scene("m0", "m1")
async def test_a_text_counts_as_what_it_turned_out_to_have(scene):
    """Its characters told less, and whoever got it could not serve it."""
    task = asyncio.ensure_future(scene.router.complete("a" * 40, SamplingParams(max_tokens=4)))
    await settle()
    (first,) = [script for script in (scene.m0, scene.m1) if script.submits]
    (other,) = [script for script in (scene.m0, scene.m1) if script is not first]
    first.router.send(Failed(first.submits[0].request, "TooLong", "no", retriable=True, prompt_tokens=200))
    await settle()
    tokens = {member.peer.name: member.tokens for member in scene.router.table.instances.values()}
    assert tokens == {first.name: 0, other.name: 200}
    other.end(other.submits[0].request, (7,))
    await task
