"""What tokens are called in log-probs: where a decoder drops a space at the start, and of parts of characters."""

from __future__ import annotations

import json
import string

import pytest
from fdasync_http.config import HttpConfig
from fdasync_http.front import Front
from fdasync_http.openai.logprobs import TextOffsets, TokenNames, spaced
from hypothesis import given
from hypothesis import strategies as st

# of a vocabulary of 100: letters with a space before them, without, bytes of a character, special tokens
FACE = "\U0001f600".encode()
BYTES, TAG, NONE = 52, 60, 70
SEEDED = {"model": "any", "max_tokens": 4, "temperature": 0}


class Spaced:
    """Metaspace's kind."""

    def __init__(self, *, shows=False):
        self._shows = shows

    def encode(self, text):
        return [string.ascii_lowercase.index(letter) + 26 for letter in text]

    def piece(self, token):
        if token < 52:
            return (" " * (token < 26) + string.ascii_lowercase[token % 26]).encode()
        if token < TAG:
            return FACE[token % 4 : token % 4 + 1]
        return b"<tag>" if token < NONE else b""

    def spelling(self, token):
        return ("\u2581" * (token < 26) + string.ascii_lowercase[token % 26]) if token < 52 else ""

    def decode(self, token_ids):
        seen = [token for token in token_ids if self._shows or not TAG <= token < NONE]
        return b"".join(map(self.piece, seen)).decode(errors="replace").removeprefix(" ")

    def with_specials(self):
        return Spaced(shows=True)


class Shown:
    """Of a tokenizer that tells its pieces: it, with special tokens shown, tells none."""

    def encode(self, text):
        return Spaced().encode(text)

    def decode(self, token_ids):
        return Spaced(shows=True).decode(token_ids)


class ShownByAnother(Spaced):
    def with_specials(self):
        return Shown()


def names_of(as_ids=False, tokenizer=None):
    return TokenNames(Front(None, HttpConfig(), tokenizer or Spaced()), as_ids=as_ids)


@pytest.fixture
async def spaces(kind, chat_of):
    async with chat_of(kind, tokenizer=Spaced(), runner={"vocab_size": 100}) as made:
        yield made


@pytest.mark.parametrize("tokenizer", [Spaced(), ShownByAnother()])
def test_names_tell_tokens_apart(tokenizer):
    names = names_of(tokenizer=tokenizer)
    assert [names.of(token) for token in (0, 26, TAG)] == [" a", "a", "<tag>"]
    assert [names.of(token) for token in range(BYTES, BYTES + 4)] == [
        r"bytes:\xf0", r"bytes:\x9f", r"bytes:\x98", r"bytes:\x80",
    ]  # fmt: skip
    assert b"".join(map(names.bytes_of, range(BYTES, BYTES + 4))) == FACE
    assert (names.of(71), names.of(72), names.bytes_of(71)) == ("token_id:71", "token_id:72", b"")
    assert [names.text(token) for token in (0, BYTES, TAG, 71)] == [" a", "\ufffd", "<tag>", ""]
    ids = names_of(as_ids=True)
    assert (ids.of(0), ids.text(0), ids.bytes_of(0)) == ("token_id:0", "token_id:0", b"token_id:0")


@given(
    st.lists(st.sampled_from([0, 1, 2, 26, 27, TAG, 71, [*range(BYTES, BYTES + 4)]]), max_size=12),
    st.booleans(),
    st.booleans(),
)
def test_an_offset_is_where_the_text_of_a_token_begins(parts, specials, echoes):
    tokens = [token for part in parts for token in (part if isinstance(part, list) else [part])]
    names, tokenizer = names_of(), Spaced(shows=specials)
    text = tokenizer.decode(tokens)
    if echoes:
        text = spaced(text, tokens, names, specials=specials)
    offsets = TextOffsets(names, specials=specials, spaced=echoes and text.startswith(" "))
    for number, token in enumerate(tokens):
        at = offsets.add(token)
        behind = text[at:]
        name = names.piece(token).decode(errors="replace")
        if token == TAG and not specials:
            continue
        if len(names.piece(token)) == 1 and BYTES <= token < TAG:
            assert behind.startswith(FACE.decode()) or at == text.rindex(FACE.decode(), 0, at) + 1
        elif number == 0 or not any(names.piece(one) and (specials or one != TAG) for one in tokens[:number]):
            # the first of all may have lost its space
            assert behind.startswith((name, name.removeprefix(" ")))
        else:
            assert behind.startswith(name)


async def test_an_echo_is_the_text_of_its_tokens(spaces):
    _, openai = spaces
    body = {**SEEDED, "prompt": [3, 29, 3, TAG, 30], "echo": True, "logprobs": 3}
    body["extra_body"] = {"logit_bias": {"3": 100, "29": 90}}
    (choice,) = (await openai.completions.create(**body)).choices
    told = choice.logprobs
    assert told.tokens == [" d", "d", " d", "<tag>", "e", *[" d"] * 4]
    assert choice.text == " dd de d d d d"
    assert told.text_offset == [0, 2, 3, 5, 5, 6, 8, 10, 12]
    # no two of them have one name
    assert all(3 <= len(top) <= 4 for top in told.top_logprobs[1:])
    streamed = [chunk.choices[0] async for chunk in await openai.completions.create(**body, stream=True)]
    assert "".join(one.text for one in streamed) == choice.text
    # without log-probs it comes as it grows
    body["logprobs"] = None
    streamed = [chunk.choices[0] async for chunk in await openai.completions.create(**body, stream=True)]
    assert "".join(one.text for one in streamed) == choice.text


async def test_a_prompt_that_came_as_text_is_repeated_as_it_came(spaces):
    _, openai = spaces
    (choice,) = (await openai.completions.create(**{**SEEDED, "prompt": "de", "echo": True, "logprobs": 0})).choices
    assert choice.text.startswith("de")
    assert choice.logprobs.text_offset[:3] == [0, 1, 2]


async def test_a_text_alone_begins_without_the_space(spaces):
    _, openai = spaces
    body = {**SEEDED, "prompt": "de", "logprobs": 0, "extra_body": {"logit_bias": {"3": 100}}}
    (choice,) = (await openai.completions.create(**body)).choices
    assert (choice.text, choice.logprobs.tokens) == ("d d d d", [" d"] * 4)
    assert choice.logprobs.text_offset == [0, 1, 3, 5]
    streamed = [chunk.choices[0] async for chunk in await openai.completions.create(**body, stream=True)]
    offsets = [at for one in streamed if one.logprobs is not None for at in one.logprobs.text_offset]
    assert offsets == [0, 1, 3, 5]


async def test_a_chat_has_bytes_of_parts_of_a_character(spaces):
    scene, _ = spaces
    body = {"messages": [], "input_ids": [3], "max_tokens": 1, "temperature": 0, "logprobs": True, "top_logprobs": 3}
    told = []
    for token in range(BYTES, BYTES + 4):
        answer = await scene.client.post("/v1/chat/completions", json={**body, "logit_bias": {str(token): 100}})
        (entry,) = answer.json()["choices"][0]["logprobs"]["content"]
        assert len({top["token"] for top in entry["top_logprobs"]}) == 3
        told += entry["bytes"]
    assert bytes(told) == FACE


async def test_the_prompt_s_own_token_is_first_at_its_position(spaces):
    scene, _ = spaces
    prompt = [3, 29, TAG, 30, 71, BYTES]
    one = {"prompt_logprobs": 2, "max_tokens": 1}
    asks = [
        ("/v1/completions", {"prompt": prompt, **one}, lambda told: told["choices"][0]),
        ("/v1/chat/completions", {"messages": [], "input_ids": prompt, **one}, dict),
        ("/inference/v1/generate", {"token_ids": prompt, "sampling_params": one}, dict),
    ]
    for path, body, place in asks:
        told = place((await scene.client.post(path, json=body)).json())["prompt_logprobs"]
        assert told[0] is None
        # as prime-rl scores by a teacher
        assert [int(next(iter(one))) for one in told[1:]] == prompt[1:]
        assert all(2 <= len(one) <= 3 for one in told[1:])
        for token, one in zip(prompt[1:], told[1:], strict=True):
            ranks = [entry["rank"] for entry in one.values() if entry["rank"] is not None]
            assert sorted(ranks)[:2] == [1, 2]
            if path != "/inference/v1/generate":
                assert one[str(token)]["decoded_token"] == names_of().text(token)


async def test_sglang_s_log_probs_have_the_text_of_their_tokens(spaces):
    scene, _ = spaces
    body = {
        "input_ids": [3, 29, TAG], "return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2,
        "return_text_in_logprobs": True, "sampling_params": {"max_new_tokens": 3, "temperature": 0},
    }  # fmt: skip
    lists = ("output_token_logprobs", "input_token_logprobs")
    tops = ("output_top_logprobs", "input_top_logprobs")
    names = names_of()
    whole = (await scene.client.post("/generate", json=body)).json()["meta_info"]
    text = (await scene.client.post("/generate", json={**body, "stream": True})).text
    for event in [msg for msg in text.split("\n\n") if msg and "[DONE]" not in msg]:
        meta = json.loads(event[6:])["meta_info"]
        for entry in [*meta["output_token_logprobs"], *[one for top in meta["output_top_logprobs"] for one in top]]:
            assert entry[2] == names.text(entry[1])
    assert [entry[2] for entry in whole["input_token_logprobs"]] == [" d", "d", "<tag>"]
    for entry in [one for name in lists for one in whole[name]]:
        assert entry[2] == names.text(entry[1])
    for entry in [one for name in tops for top in whole[name] for one in top or []]:
        assert entry[2] == names.text(entry[1])
    plain = (await scene.client.post("/generate", json={**body, "return_text_in_logprobs": False})).json()["meta_info"]
    assert {entry[2] for name in lists for entry in plain[name]} == {None}


async def test_tokenize_spells_tokens_as_the_vocabulary_does(spaces, monkeypatch):
    """As vLLM does, which has the library's `convert_ids_to_tokens` there."""
    scene, _ = spaces
    monkeypatch.setattr(Spaced, "encode", lambda _, text: [string.ascii_lowercase.index(letter) for letter in text])
    answer = await scene.client.post("/tokenize", json={"prompt": "ab", "return_token_strs": True})
    assert answer.json()["token_strs"] == ["\u2581a", "\u2581b"]
