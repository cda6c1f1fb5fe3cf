"""Which stop ended a sample and where its text ends, in every dialect; rows of samples that ended in their prompt."""

from __future__ import annotations

import asyncio
import base64
import json
import string

import numpy as np
import pytest
import safetensors

from fdasync.testing import until

END = 90
TAG = "<|end|>"
PROMPT = [5, 6, 7]


class Tagged:
    """A letter for each token, and a special token."""

    def __init__(self, *, shows=False):
        self._shows = shows

    def encode(self, text):
        return [string.ascii_lowercase.index(letter) for letter in text]

    def decode(self, token_ids):
        tag = TAG if self._shows else ""
        return "".join([tag if token == END else string.ascii_lowercase[token % 26] for token in token_ids])

    def with_specials(self):
        return Tagged(shows=True)


@pytest.fixture
async def tagged(kind, scene_of):
    async with scene_of(kind, tokenizer=Tagged()) as scene:
        yield scene


async def post(scene, path, **body):
    response = await scene.client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response


def events_of(response):
    return [json.loads(line[6:]) for line in response.text.split("\n\n") if line and "[DONE]" not in line]


class Asks:
    """How each dialect is asked for an answer with a stop, and what it says: text, number of tokens, the stop."""

    def __init__(self, scene, **sampling):
        self.scene = scene
        self.sampling = sampling

    async def generate(self):
        names = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens", "seed": "sampling_seed"}
        body = {
            "input_ids": PROMPT,
            "sampling_params": {names.get(name, name): value for name, value in self.sampling.items()},
        }
        whole = (await post(self.scene, "/generate", **body)).json()
        *_, last = events_of(await post(self.scene, "/generate", stream=True, **body))
        assert (last["text"], last["output_ids"]) == (whole["text"], whole["output_ids"])
        assert last["meta_info"]["finish_reason"] == whole["meta_info"]["finish_reason"]
        return whole["text"], len(whole["output_ids"]), whole["meta_info"]["finish_reason"].get("matched")

    async def completions(self):
        body = {"model": "m", "prompt": PROMPT, "return_token_ids": True, **self.sampling}
        return await self._choices("/v1/completions", body, lambda choice: choice["text"])

    async def chat(self):
        body = {"model": "m", "messages": [], "input_ids": PROMPT, "return_token_ids": True, **self.sampling}
        told = await self._choices(
            "/v1/chat/completions",
            body,
            lambda choice: choice.get("message", choice.get("delta", {})).get("content", ""),
        )
        metas = (await post(self.scene, "/v1/chat/completions", **body, return_meta_info=True)).json()["choices"]
        assert metas[0]["meta_info"]["finish_reason"].get("matched") == told[2]
        return told

    async def _choices(self, path, body, text_of):
        (whole,) = (await post(self.scene, path, **body)).json()["choices"]
        events = [event["choices"][0] for event in events_of(await post(self.scene, path, stream=True, **body))]
        assert "".join(map(text_of, events)) == text_of(whole)
        assert [event.get("stop_reason") for event in events[:-1]] == [None] * (len(events) - 1)
        assert whole["stop_reason"] == whole["matched_stop"] == events[-1]["stop_reason"] == events[-1]["matched_stop"]
        return text_of(whole), len(whole["token_ids"]), whole["stop_reason"]

    async def inference(self):
        body = {"token_ids": PROMPT, "sampling_params": self.sampling, "output_mode": "text"}
        (whole,) = (await post(self.scene, "/inference/v1/generate", **body)).json()["choices"]
        events = events_of(await post(self.scene, "/inference/v1/generate", stream=True, **body))
        assert "".join(event["choices"][0]["text"] for event in events) == whole["text"]
        assert events[-1]["choices"][0]["stop_reason"] == whole["stop_reason"]
        return whole["text"], len(whole["token_ids"]), whole["stop_reason"]

    async def rollout(self):
        data = (await post(self.scene, "/v1/rollout", token_ids=PROMPT, sampling=self.sampling)).content
        meta = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]
        count = len(safetensors.deserialize(data)[0][1]["data"]) and self._count(data)
        reason = meta["stop_reason"]
        return meta["text"], count, None if not reason else int(reason) if meta["stop_token_id"] else reason

    @staticmethod
    def _count(data):
        (ids,) = [array for name, array in safetensors.deserialize(data) if name == "token_ids"]
        return ids["shape"][0]


DIALECTS = ("generate", "completions", "chat", "inference", "rollout")


@pytest.mark.ci
@pytest.mark.parametrize("dialect", DIALECTS)
async def test_a_dialect_tells_which_stop_ended_a_sample(tagged, dialect):
    sampling = {"max_tokens": 6, "temperature": 0.0, "seed": 3}
    text, count, stop = await getattr(Asks(tagged, **sampling), dialect)()
    assert (count, len(text), stop) == (6, 6, None)
    # the third letter, unless it stands before
    for letter in text:
        at = text.index(letter)
        told = await getattr(Asks(tagged, **sampling, stop=["!!", letter]), dialect)()
        assert told == (text[:at], at + 1, letter)
        # the first tokens bar it
        found = text.find(letter, at + 1)
        told = await getattr(Asks(tagged, **sampling, min_tokens=at + 1, stop=[letter]), dialect)()
        assert told == ((text, 6, None) if found < 0 else (text[:found], found + 1, letter))
    ids = (await post(tagged, "/generate", input_ids=PROMPT, sampling_params={
        "max_new_tokens": 6, "temperature": 0.0,
    })).json()["output_ids"]  # fmt: skip
    _, count, stop = await getattr(Asks(tagged, **sampling, stop_token_ids=[ids[2]]), dialect)()
    assert (count, stop) == (ids.index(ids[2]) + 1, ids[2])


@pytest.mark.ci(after=3)
@pytest.mark.parametrize("dialect", [one for one in DIALECTS if one != "inference"])
async def test_a_special_token_stops_by_its_text(tagged, dialect):
    sampling = {"max_tokens": 6, "temperature": 0.0, "logit_bias": {str(END): 100}, "stop": ["zz", TAG]}
    forms = [{}] if dialect == "rollout" else [{}, {"skip_special_tokens": False}]
    for form in forms:
        assert await getattr(Asks(tagged, **sampling, **form), dialect)() == ("", 1, TAG)
        told = await getattr(Asks(tagged, **sampling, **form, min_tokens=2), dialect)()
        assert told == (2 * TAG if form else "", 3, TAG)
    if dialect == "completions":
        told = await Asks(tagged, **sampling, skip_special_tokens=False, no_stop_trim=True).completions()
        assert told == (TAG, 1, TAG)


# -- rows of samples that were ended in their prompt

LONG = [(7 * at) % 97 for at in range(200)]


def other(number):
    """A prompt of which nothing is cached."""
    return [(token + number) % 97 for token in LONG]


@pytest.fixture
async def in_prompt(scene_of):
    """Asks while no step ends, lets two of many steps over the prompts end, and aborts."""
    async with scene_of(held=True, runner={"chosen_top_k": 5}) as scene:

        async def ask(path, **body):
            scene.steps.hold()
            call = asyncio.ensure_future(post(scene, path, **body))
            await until(lambda: scene.generator.load().live == 1)
            await scene.steps.let(2)
            await scene.client.post("/abort_request", json={"abort_all": True})
            scene.steps.release()
            return await call

        yield scene, ask


def rows_fit(meta):
    """As AReaL reads them, before it looks at how the call ended."""
    if "routed_experts" in meta:
        flat = np.frombuffer(base64.b64decode(meta["routed_experts"]), np.int32)
        flat.reshape(meta["prompt_tokens"] + meta["completion_tokens"] - 1, -1)


@pytest.mark.parametrize("form", ["whole", "stream", "n", "stream n", "no new tokens"])
async def test_rows_of_a_part_of_a_prompt_are_left_out(in_prompt, form):
    _, ask = in_prompt
    sampling = {"max_new_tokens": 0 if form == "no new tokens" else 20, "n": 2 if "n" in form.split() else 1}
    body = {
        "input_ids": LONG, "sampling_params": sampling, "return_logprob": True, "return_routed_experts": True,
        "return_indexer_topk": True, "stream": "stream" in form,
    }  # fmt: skip
    response = await ask("/generate", **body)
    answers = events_of(response) if "stream" in form else response.json()
    ends = answers if isinstance(answers, list) else [answers]
    assert len(ends) == sampling["n"]
    for end in ends:
        meta = end["meta_info"]
        assert (meta["finish_reason"]["type"], meta["completion_tokens"]) == ("abort", 0)
        assert not {"routed_experts", "indexer_topk"} & set(meta)
        rows_fit(meta)


async def test_a_chat_and_other_dialects_leave_them_out_too(in_prompt):
    scene, ask = in_prompt
    body = {"model": "m", "messages": [], "max_tokens": 9}
    wishes = {"return_meta_info": True, "return_routed_experts": True}
    told = await ask("/v1/chat/completions", **body, input_ids=other(1), **wishes)
    (choice,) = told.json()["choices"]
    assert choice["finish_reason"] == "abort"
    assert "routed_experts" not in choice["meta_info"]
    told = await ask("/v1/chat/completions", **body, input_ids=other(2), routed_experts_prompt_start=0)
    (choice,) = told.json()["choices"]
    assert (choice["finish_reason"], "routed_experts" in choice) == ("abort", False)
    told = await ask("/inference/v1/generate", token_ids=other(3), sampling_params={"max_tokens": 9})
    (choice,) = told.json()["choices"]
    assert (choice["finish_reason"], choice["routed_experts"]) == ("abort", None)
    # a client that names a start reads no rows as an empty text
    meta = (
        await ask(
            "/generate", input_ids=other(4), sampling_params={"max_new_tokens": 9}, return_routed_experts=True,
            routed_experts_start_len=2,
        )
    ).json()["meta_info"]  # fmt: skip
    assert meta["routed_experts"] == ""
    # and a prompt that is scored whole keeps its rows
    told = await post(
        scene, "/generate", input_ids=other(5), sampling_params={"max_new_tokens": 0}, return_routed_experts=True
    )
    rows_fit(told.json()["meta_info"])
    assert told.json()["meta_info"]["routed_experts"]


@pytest.mark.parametrize("form", ["whole", "stream n"])
@pytest.mark.parametrize("start", [0, 3])
async def test_scores_of_a_part_of_a_prompt_stand_beside_its_own_tokens(in_prompt, form, start):
    scene, ask = in_prompt
    body = {
        "input_ids": LONG, "sampling_params": {"max_new_tokens": 9, "n": 2 if "n" in form.split() else 1},
        "return_logprob": True, "logprob_start_len": start, "stream": "stream" in form,
    }  # fmt: skip
    response = await ask("/generate", **body)
    ends = events_of(response) if "stream" in form else [response.json()]
    body |= {"sampling_params": {"max_new_tokens": 0}, "stream": False}
    whole = (await post(scene, "/generate", **body)).json()["meta_info"]["input_token_logprobs"]
    assert [token for _, token, _ in whole] == LONG[start:]
    for end in ends:
        assert end["meta_info"]["finish_reason"]["type"] == "abort"
        scored = end["meta_info"]["input_token_logprobs"]
        assert 1 < len(scored) < len(whole)
        assert scored == whole[: len(scored)]
