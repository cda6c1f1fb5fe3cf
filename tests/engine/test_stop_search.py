"""Stop strings in text with special tokens shown (`stop_search.py`, `request_state.py`)."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fdasync.engine.stop_search import StopSearch
from fdasync.events.catalog import StopMatched
from tests.engine.output_stage import ByteTokenizer, OutputStage, letters
from tests.support.helpers import case_settings

END = 256
SPECIALS = {END: "<|im_end|>", 257: "<s>", 258: "|"}


class WithTags:
    """One token per UTF-8 byte, and special ones."""

    def __init__(self, *, shows=False):
        self._shows = shows

    def encode(self, text):
        return list(text.encode())

    def decode(self, token_ids):
        texts = [bytes([token]) if token < 256 else SPECIALS[token].encode() * self._shows for token in token_ids]
        return b"".join(texts).decode(errors="replace")

    def with_specials(self):
        return WithTags(shows=True)


def play(stops, tokens, tokenizer=None, **params):
    """Feed tokens until a stop matches, and give the sample."""
    stage = OutputStage(tokenizer or WithTags(), stop=tuple(stops), **params)
    texts = []
    for number, token in enumerate(tokens):
        stage.emit(token)
        (answer,) = stage.answers()
        texts += [delta.text for delta in stage.deltas()]
        if isinstance(answer, StopMatched):
            stage.finish(tokens[: number + 1], "stop")
            break
    else:
        stage.finish(tokens)
    texts += [delta.text for delta in stage.deltas()]
    assert "".join(texts) == stage.sample.text
    return stage.sample


@pytest.mark.parametrize(
    ("stops", "pieces", "kept", "text", "reason"),
    [
        (["<|im_end|>"], ["AB", END, "CD"], 3, "AB", "<|im_end|>"),
        (["zz", "AA"], ["AAA"], 2, "", "AA"),
        (["AA", "A"], ["xA"], 2, "x", "A"),
        # it holds one, and ends or begins within one
        (["B<|im_end|>C"], ["AB", END, "CD"], 4, "A", "B<|im_end|>C"),
        (["B<|"], ["AB", END, "CD"], 3, "A", "B<|"),
        (["end|>C"], ["AB", END, "CD"], 4, "AB", "end|>C"),
        # two that touch, and text between two
        (["|><s"], [END, 257, "x"], 2, "", "|><s"),
        (["|x|"], ["a", 258, "x", 258], 4, "a", "|x|"),
        # a character that is whole in the text, with one in the middle
        (["é"], ["é"[:0], 0xC3, END, 0xA9], 3, "", "é"),
        # none
        (["<|im_end|>"], ["AB", 257, "CD"], None, "ABCD", None),
        (["AC"], ["A", END, "C"], None, "AC", None),
    ],
)
async def test_special_tokens_are_seen_by_the_search_and_are_no_text(stops, pieces, kept, text, reason):
    tokens = [token for piece in pieces for token in (letters(piece) if isinstance(piece, str) else [piece])]
    sample = play(stops, tokens)
    assert (sample.text, sample.stop_reason, sample.stop_string) == (text, reason, reason or "")
    assert sample.finish_reason == ("length" if kept is None else "stop")
    assert len(sample.token_ids) == (len(tokens) if kept is None else kept)


async def test_a_tokenizer_that_cannot_show_special_tokens_is_searched_as_text():
    sample = play(["b"], [97, 256, 98, 99], ByteTokenizer())
    assert (sample.text, sample.stop_reason, len(sample.token_ids)) == ("a", "b", 3)


@pytest.mark.parametrize(("min_tokens", "kept"), [(0, 1), (1, 2), (4, 5), (6, None)])
async def test_no_stop_string_ends_in_the_first_tokens(min_tokens, kept):
    sample = play(["A", "<|im_end|>"], [65, END, 65, 65, END, 65], min_tokens=min_tokens)
    whole = "AAAA"
    assert len(sample.token_ids) == (kept or 6)
    assert (sample.finish_reason, sample.stop_reason is None) == (("stop", False) if kept else ("length", True))
    assert sample.text == {1: "", 2: "A", 5: "AAA", None: whole}[kept]


async def test_a_stop_string_that_begins_in_the_first_tokens_may_end_behind_them():
    sample = play(["ABC"], letters("xABCD"), min_tokens=3)
    assert (sample.text, len(sample.token_ids), sample.stop_reason) == ("x", 4, "ABC")
    sample = play(["ABC"], letters("xABCABC"), min_tokens=4)
    assert (sample.text, len(sample.token_ids)) == ("xABC", 7)


async def test_the_last_text_tells_its_stop_too_unless_it_is_barred():
    for min_tokens, reason, stop in ((0, "stop", "b\ufffd"), (2, "length", None)):
        stage = OutputStage(WithTags(), stop=("b\ufffd",), min_tokens=min_tokens)
        stage.emit_all([98, 0xE4])
        stage.finish([98, 0xE4])
        assert (stage.sample.finish_reason, stage.sample.stop_reason) == (reason, stop)


async def test_a_match_in_a_sample_that_was_aborted_ended_nothing():
    stage = OutputStage(WithTags(), stop=("b",))
    stage.emit_all([97, 98])
    stage.finish([97, 98], "abort")
    assert (stage.sample.finish_reason, stage.sample.stop_reason) == ("abort", None)


async def test_what_showing_special_tokens_raises_ends_its_request_alone():
    class Broken(WithTags):
        def with_specials(self):
            raise ValueError("no text of them")

    stage = OutputStage(Broken(), stop=("b",))
    stage.emit_all([97, END])
    assert str(stage.request.spoiled) == "no text of them"


@case_settings(200)
@given(
    st.lists(st.sampled_from([97, 98, 124, 60, *SPECIALS]), min_size=1, max_size=14),
    st.lists(st.text("ab|<s>", min_size=1, max_size=4), min_size=1, max_size=3),
    st.integers(0, 8),
)
def test_the_search_agrees_with_one_of_the_whole_text(tokens, stops, min_tokens):
    async def check():
        sample = play(stops, tokens, min_tokens=min_tokens)
        shown, plain = WithTags(shows=True), WithTags()
        count = len(tokens)
        begin, found = 0, []
        for number in range(1, len(tokens) + 1):
            whole, before = shown.decode(tokens[:number]), len(shown.decode(tokens[: number - 1]))
            ends = [
                (at, stops.index(stop))
                for stop in stops
                for at in range(len(whole))
                if whole.startswith(stop, at) and at + len(stop) > before
            ]
            if ends and number > min_tokens:
                count, (begin, which) = number, min(ends)
                found = [stops[which]]
                break
        assert (list(sample.token_ids), sample.stop_reason) == (tokens[:count], found[0] if found else None)
        if not found:
            assert sample.text == plain.decode(tokens)
            return
        marked = "".join(chr(token) if token < 256 else "\0" * len(SPECIALS[token]) for token in tokens[:count])
        assert sample.text == marked[:begin].replace("\0", "")

    asyncio.run(check())


def test_a_token_costs_the_same_however_long_the_text_is():
    search = StopSearch(("abc",))
    for _ in range(10_000):
        assert search.add("ab", following="", special="<s>", barred=False) is None
    assert len(search._tail) == len(search._marks) == 2
    assert search.held == 0


def test_what_is_held_is_counted_in_characters_of_the_text():
    search = StopSearch(("ab<|im_end|>c",))
    assert search.add("xa", following="", special="", barred=False) is None
    assert search.held == 1
    # the special token is no text, and nothing of it is held
    assert search.add("b", following="", special="<|im_end|>", barred=False) is None
    assert search.held == 2
    assert search.add("c", following="", special="", barred=False) == ("ab<|im_end|>c", 3)
