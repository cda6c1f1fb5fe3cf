"""`echo` and `prompt_logprobs`: a prompt repeated and scored, by OpenAI's client and as evaluation harnesses ask."""

from __future__ import annotations

import string

import numpy as np
import pytest
from openai import BadRequestError

from fdasync import SamplingParams
from fdasync.testing import until

PROMPT = [5, 6, 7, 8, 9, 10, 11]
SEEDED = {"model": "any", "max_tokens": 4, "seed": 7, "temperature": 0}
LISTS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


async def scored(scene, prompt=PROMPT, **params):
    params = {"max_tokens": 4, "seed": 7, "temperature": 0.0, "logprobs": "raw", "prompt_logprobs_start": 0, **params}
    return await scene.generator.complete(prompt, SamplingParams(**params))


def text_of(token_ids):
    """As the tokenizer of these scenes has it."""
    return "".join(
        string.printable[token] if token < len(string.printable) else string.ascii_lowercase[token % 26]
        for token in token_ids
    )


async def streamed(openai, **body):
    """Choices of a stream, joined by their number, and the usage."""
    stream = await openai.completions.create(**body, stream=True, stream_options={"include_usage": True})
    choices, usage = {}, None
    async for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            made = choices.setdefault(choice.index, {"text": "", "logprobs": None, "events": 0})
            made["text"] += choice.text
            made["events"] += 1
            if choice.logprobs is not None:
                made["logprobs"] = made["logprobs"] or {name: [] for name in LISTS}
                for name in LISTS:
                    made["logprobs"][name] += getattr(choice.logprobs, name)
            if choice.finish_reason is not None:
                made["finish_reason"], made["extra"] = choice.finish_reason, choice.model_extra
    return choices, usage


@pytest.mark.ci(after=1)
async def test_an_answer_repeats_its_prompt_with_log_probs(chat):
    scene, openai = chat
    right = await scored(scene, prompt_top_logprobs=2, top_logprobs=2)
    body = {"prompt": PROMPT, **SEEDED, "logprobs": 2, "echo": True}
    (choice,) = (await openai.completions.create(**body)).choices
    told = choice.logprobs
    everything = [*PROMPT, *right.token_ids]
    assert told.tokens == [text_of([token]) for token in everything]
    assert choice.text == text_of(everything)
    assert told.text_offset == list(range(len(everything)))
    assert (told.token_logprobs[0], told.top_logprobs[0]) == (None, None)
    values = [*right.prompt_logprobs[1:].tolist(), *right.raw_logprobs.tolist()]
    assert told.token_logprobs[1:] == pytest.approx(values)
    for value, top, best in zip(
        values, told.top_logprobs[1:], [*right.prompt_top_logprobs[1:], *right.top_logprobs], strict=True
    ):
        # an evaluation asks whether the token is the likeliest
        assert max(top.values()) == pytest.approx(max(value, best.logprobs[0]))
    choices, usage = await streamed(openai, **body)
    assert (choices[0]["text"], choices[0]["finish_reason"]) == (choice.text, "length")
    for name in ("tokens", "text_offset"):
        assert choices[0]["logprobs"][name] == getattr(told, name)
    assert choices[0]["logprobs"]["token_logprobs"][1:] == pytest.approx(values)
    assert (usage.prompt_tokens, usage.completion_tokens) == (7, 4)


@pytest.mark.parametrize("prompt", [PROMPT, "letters"])
async def test_a_prompt_is_scored_without_new_tokens(chat_of, prompt):
    """What an evaluation of multiple choices sends, with 0 or 1 for `max_tokens`."""
    async with chat_of() as (scene, openai):
        right = await scored(scene, prompt)
        count = len(right.prompt_token_ids)
        body = {"prompt": prompt, **SEEDED, "max_tokens": 0, "logprobs": 1, "echo": True}
        made = await openai.completions.create(**body)
        (choice,) = made.choices
        assert (choice.text, choice.finish_reason) == (text_of(right.prompt_token_ids), "length")
        assert [len(getattr(choice.logprobs, name)) for name in LISTS] == [count] * 4
        assert choice.logprobs.token_logprobs[1:] == pytest.approx(right.prompt_logprobs[1:].tolist())
        assert (made.usage.prompt_tokens, made.usage.completion_tokens) == (count, 0)
        one = (await openai.completions.create(**{**body, "max_tokens": 1})).choices[0]
        assert one.logprobs.token_logprobs[:-1] == choice.logprobs.token_logprobs
        choices, usage = await streamed(openai, **body)
        assert (choices[0]["text"], choices[0]["logprobs"]["tokens"]) == (choice.text, choice.logprobs.tokens)
        assert usage.completion_tokens == 0
        # without log-probs there is the text alone
        bare = await openai.completions.create(**{**body, "logprobs": None})
        assert (bare.choices[0].text, bare.choices[0].logprobs) == (choice.text, None)
        choices, _ = await streamed(openai, **{**body, "logprobs": None})
        assert choices[0]["text"] == choice.text
        rows = await scene.client.post("/v1/completions", json={**body, "return_routed_experts": True, "n": 2})
        assert [one["finish_reason"] for one in rows.json()["choices"]] == ["length"] * 2
        for body in ({"prompt": prompt, "max_tokens": 0}, {"prompt": prompt, "max_tokens": -1, "echo": True}):
            with pytest.raises(BadRequestError, match="max_tokens"):
                await openai.completions.create(model="any", **body)


async def test_a_stream_repeats_its_prompt_first(chat_of):
    async with chat_of() as (_, openai):
        body = {"prompt": "letters", **SEEDED, "n": 2, "echo": True, "temperature": 1}
        whole = await openai.completions.create(**body)
        choices, _ = await streamed(openai, **body)
        for choice in whole.choices:
            assert choice.text.startswith("letters")
            assert choices[choice.index]["text"] == choice.text
            assert choices[choice.index]["events"] > 2


def check_scores(told, result, top):
    """vLLM's form of them."""
    assert told[0] is None
    assert len(told) == len(result.prompt_token_ids)
    tops = result.prompt_top_logprobs or [None] * len(told)
    values = result.prompt_logprobs.tolist()
    for token, value, best, entry in list(zip(result.prompt_token_ids, values, tops, told, strict=True))[1:]:
        assert entry[str(token)]["logprob"] == pytest.approx(value)
        assert entry[str(token)]["decoded_token"]
        ranks = {one["rank"]: int(other) for other, one in entry.items() if one["rank"] is not None}
        assert set(range(1, top + 1)) <= ranks.keys()
        assert top == 0 or [ranks[rank] for rank in range(1, top + 1)] == list(best.token_ids[:top])


@pytest.mark.ci(after=1)
@pytest.mark.parametrize("top", [0, 2])
async def test_prompts_have_log_probs_in_vllms_form(chat, top):
    scene, openai = chat
    right = await scored(scene, prompt_top_logprobs=top)
    body = {"prompt": [PROMPT, PROMPT[:3]], **SEEDED, "extra_body": {"prompt_logprobs": top}}
    made = await openai.completions.create(**body)
    check_scores(made.choices[0].prompt_logprobs, right, top)
    assert [one is None for one in made.choices[1].prompt_logprobs] == [True, False, False]
    assert made.choices[0].text == text_of(right.token_ids)
    choices, _ = await streamed(openai, **body)
    for choice in made.choices:
        assert choices[choice.index]["text"] == choice.text
        assert choices[choice.index]["extra"]["prompt_logprobs"] == choice.prompt_logprobs
    # more alternatives for the repeated prompt than for this field
    body |= {"echo": True, "logprobs": 3}
    made = await openai.completions.create(**body)
    check_scores(made.choices[0].prompt_logprobs, right, top)
    assert len(made.choices[0].logprobs.tokens) == 11


@pytest.mark.ci(after=1)
async def test_chats_have_log_probs_of_their_prompt(chat):
    scene, openai = chat
    messages = [{"role": "user", "content": "hi"}]
    body = {"messages": messages, **SEEDED, "extra_body": {"prompt_logprobs": 1, "return_token_ids": True}}
    made = await openai.chat.completions.create(**body)
    right = await scored(scene, made.prompt_token_ids, prompt_top_logprobs=1)
    check_scores(made.prompt_logprobs, right, 1)
    told = []
    async for chunk in await openai.chat.completions.create(**body, stream=True):
        told += [chunk.prompt_logprobs] if "prompt_logprobs" in (chunk.model_extra or {}) else []
    assert told == [made.prompt_logprobs]
    for bad in ({"prompt_logprobs": -1}, {"prompt_logprobs": 1000}, {"echo": True}):
        with pytest.raises(BadRequestError, match=next(iter(bad)).partition("_")[0]):
            await openai.chat.completions.create(messages=messages, **SEEDED, extra_body=bad)


@pytest.mark.ci
async def test_streams_of_several_prompts_are_mixed(chat):
    scene, openai = chat
    prompts = [PROMPT, [3, 2, 1], [4, 4]]
    body = {"prompt": prompts, "model": "any", "max_tokens": 30, "seed": 7, "n": 2, "logprobs": 0}
    whole = await openai.completions.create(**body)
    choices, usage = await streamed(openai, **body)
    assert sorted(choices) == list(range(6))
    for choice in whole.choices:
        made = choices[choice.index]
        assert (made["text"], made["finish_reason"]) == (choice.text, choice.finish_reason)
        assert made["logprobs"]["tokens"] == choice.logprobs.tokens
        assert made["logprobs"]["text_offset"] == choice.logprobs.text_offset
        np.testing.assert_allclose(made["logprobs"]["token_logprobs"], choice.logprobs.token_logprobs, rtol=1e-6)
    assert (usage.prompt_tokens, usage.completion_tokens) == (12, 180)
    order, ids = [], set()
    extra = {"rid": "mine", "return_meta_info": True, "return_routed_experts": True}
    async for chunk in await openai.completions.create(**body, stream=True, extra_body=extra):
        order.append(chunk.choices[0].index // 2)
        ids.add(chunk.id)
        if chunk.choices[0].finish_reason is not None:
            meta = chunk.choices[0].meta_info
            assert meta["id"] == f"mine-{chunk.choices[0].index // 2}"
            assert meta["routed_experts"]
            assert meta["prompt_tokens"] == len(prompts[chunk.choices[0].index // 2])
    assert order != sorted(order), "one prompt after the other"
    assert ids == {"mine"}
    assert scene.generator.load().live == 0


async def test_one_prompt_that_is_refused_refuses_the_stream(chat_of):
    async with chat_of() as (scene, openai):
        for prompts in ([PROMPT, [1] * 1000], [[1] * 1000, PROMPT]):
            with pytest.raises(BadRequestError):
                async for _ in await openai.completions.create(
                    prompt=prompts, model="any", max_tokens=100, stream=True
                ):
                    pass
        assert scene.generator.load().live == 0


async def test_a_client_that_leaves_a_mixed_stream_aborts_all_of_it(chat_of):
    async with chat_of() as (scene, openai):
        stream = await openai.completions.create(prompt=[PROMPT, [3, 2]], model="any", max_tokens=200, stream=True)
        seen = set()
        async for chunk in stream:
            seen.add(chunk.choices[0].index)
            if len(seen) == 2:
                break
        assert scene.generator.load().live == 2
        await stream.close()
        await until(lambda: not scene.generator.load().live)
