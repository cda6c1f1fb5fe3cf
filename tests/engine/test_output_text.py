"""Incremental text and stop strings (`tokenizer.py`, `output.py`)."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fdasync.engine.tokenizer import IncrementalDecoder
from fdasync.events.catalog import StopChecked, StopMatched
from tests.engine.output_stage import ByteTokenizer, OutputStage, WordTokenizer, letters
from tests.support.helpers import case_settings

# -- incremental decoding


def split(tokens, cuts):
    edges = [0, *sorted(min(cut, len(tokens)) for cut in cuts), len(tokens)]
    return [tokens[first:last] for first, last in pairwise(edges)]


@case_settings(150)
@given(st.lists(st.integers(0, 256), max_size=40), st.lists(st.integers(0, 40), max_size=8))
def test_incremental_text_is_the_whole_text_for_any_bytes(tokens, cuts):
    decoder = IncrementalDecoder(ByteTokenizer())
    text = "".join(decoder.feed(part) for part in split(tokens, cuts)) + decoder.flush()
    assert text == ByteTokenizer().decode(tokens)


@case_settings(100)
@given(st.text(max_size=30), st.lists(st.binary(max_size=4), max_size=6), st.data())
def test_what_was_given_out_never_changes(text, pieces, data):
    pieces = [*pieces, *(text[at : at + 2].encode() for at in range(0, len(text), 2))]
    tokens = data.draw(st.lists(st.integers(0, len(pieces) - 1), max_size=20)) if pieces else []
    decoder = IncrementalDecoder(WordTokenizer(pieces))
    given_out = ""
    for token in tokens:
        given_out += decoder.feed([token])
        # never a character whose bytes are not all there
        assert b"".join(pieces[token] for token in tokens).decode(errors="replace").startswith(given_out)
    assert given_out + decoder.flush() == WordTokenizer(pieces).decode(tokens)


def test_half_a_character_waits_for_the_other_half():
    decoder = IncrementalDecoder(ByteTokenizer())
    parts = [decoder.feed([byte]) for byte in "aé€x".encode()]
    assert parts == ["a", "", "é", "", "", "€", "x"]
    assert decoder.flush() == ""
    assert decoder.feed("é".encode()[:1]) == ""
    assert decoder.flush() == "\ufffd"


def test_special_tokens_without_text_hold_nothing_up():
    decoder = IncrementalDecoder(ByteTokenizer())
    assert [decoder.feed([token]) for token in (97, 256, 98, 256, 256, 99)] == ["a", "", "b", "", "", "c"]


# -- stop strings


def play(stops, tokens, tokenizer, look=True):
    """Feed tokens until a stop matches; (tokens kept, whether it matched, text, deltas)."""
    stage = OutputStage(tokenizer, stop=tuple(stops))
    deltas = []
    for number, token in enumerate(tokens):
        stage.emit(token)
        (answer,) = stage.answers()
        if isinstance(answer, StopMatched):
            assert (answer.key, answer.keep_tokens) == (0, number + 1)
            # what is in flight still arrives, and is overrun
            stage.emit(token)
            assert stage.answers() == []
            deltas += stage.deltas()
            stage.finish(tokens[: number + 1], "stop")
            deltas += stage.deltas()
            return number + 1, True, stage.sample.text, deltas
        assert (answer.key, answer.num_tokens) == (0, number + 1)
        assert isinstance(answer, StopChecked)
        if look:
            deltas += stage.deltas()
    stage.finish(tokens)
    deltas += stage.deltas()
    return len(tokens), False, stage.sample.text, deltas


@pytest.mark.parametrize(
    ("pieces", "stops", "kept", "text"),
    [
        (["hello", " wor", "ld", "!"], ["world"], 3, "hello "),
        (["a", "b", "c", "d"], ["bc"], 3, "a"),
        (["abcd"], ["bc"], 1, "a"),
        (["a", "a", "b"], ["aab"], 3, ""),
        (["aa", "ab"], ["aab"], 2, "a"),
        (["x", "ST", "OP"], ["STOP", "TO"], 3, "x"),
        (["x", "S", "TO", "x"], ["STOP", "no"], None, "xSTOx"),
        (["x", "STO"], ["STOP"], None, "xSTO"),
        (["é", "€"], ["€"], 2, "é"),
        (["\n", "\n"], ["\n\n"], 2, ""),
        (["one", "two"], ["one", "two"], 1, ""),
    ],
)
async def test_stop_strings_across_token_borders(pieces, stops, kept, text):
    tokenizer = WordTokenizer([piece.encode() for piece in pieces])
    count, matched, got, deltas = play(stops, list(range(len(pieces))), tokenizer)
    assert (matched, got) == (kept is not None, text)
    assert count == (kept or len(pieces))
    assert "".join(delta.text for delta in deltas) == text
    assert sum((delta.token_ids for delta in deltas), ()) == tuple(range(count))


@pytest.mark.ci
@case_settings(200)
@given(
    st.lists(st.sampled_from([b"a", b"b", b"ab", b"ba", b"\xc3", b"\xa9", b"c"]), min_size=1, max_size=14),
    st.lists(st.text("abc\u00e9", min_size=1, max_size=4), min_size=1, max_size=3),
    st.booleans(),
)
def test_stop_strings_agree_with_a_search_of_the_whole_text(pieces, stops, look):
    async def check():
        tokenizer = WordTokenizer(pieces)
        count, matched, text, deltas = play(stops, list(range(len(pieces))), tokenizer, look)
        streamed = "".join(delta.text for delta in deltas)
        assert streamed == text
        whole = tokenizer.decode(range(count))
        earlier = IncrementalDecoder(tokenizer)
        before = "".join(earlier.feed([number]) for number in range(count - 1))
        assert not any(stop in before for stop in stops)
        if matched:
            assert text == whole[: min(whole.find(stop) for stop in stops if stop in whole)]
        else:
            assert text == whole
            settled = before + earlier.feed([count - 1])
            assert not any(stop in settled for stop in stops)

    asyncio.run(check())


async def test_what_could_begin_a_stop_string_is_held_back_and_no_more():
    stage = OutputStage(ByteTokenizer(), stop=("STOP", "TX"))
    texts = []
    for token in letters("aSTxSTTO"):
        stage.emit(token)
        texts += [delta.text for delta in stage.deltas()]
    assert texts == ["a", "", "", "STx", "", "", "ST", "TO"]
    stage.finish(letters("aSTxSTTO"), "length")
    assert stage.deltas()[0].text == ""


async def test_what_was_held_back_comes_with_the_end():
    stage = OutputStage(ByteTokenizer(), stop=("STOP",))
    stage.emit_all(letters("aSTO"))
    assert [delta.text for delta in stage.deltas()] == ["a"]
    stage.finish(letters("aSTO"))
    assert [(delta.text, delta.token_ids) for delta in stage.deltas()] == [("STO", ())]


# -- stop strings in text that becomes final at the end


@pytest.mark.parametrize(
    ("reason", "told"), [("length", "stop"), ("stop", "stop"), ("abort", "abort"), ("deadline", "deadline")]
)
@pytest.mark.parametrize("look", [True, False])
async def test_a_stop_string_in_what_comes_with_the_end_is_found(reason, told, look):
    stage = OutputStage(ByteTokenizer(), stop=("b\ufffd", "x"))
    tokens = [97, 98, 0xE4, 0xB8]
    deltas = []
    for number, token in enumerate(tokens):
        stage.emit(token)
        assert stage.answers() == [StopChecked(key=0, num_tokens=number + 1, at=5.0, seq=number)]
        if look:
            deltas += stage.deltas()
    stage.finish(tokens, reason)
    deltas += stage.deltas()
    (ended,) = stage.answers()
    sample = stage.sample
    assert (sample.text, sample.finish_reason, sample.token_ids) == ("a", told, tuple(tokens))
    assert "".join(delta.text for delta in deltas) == "a"
    assert sum((delta.token_ids for delta in deltas), ()) == tuple(tokens)
    assert [delta.finish_reason for delta in deltas] == [None] * (len(deltas) - 1) + [told]
    assert ended.reasons == (told,)


async def test_an_end_without_a_stop_string_in_it_stays_what_it_was():
    stage = OutputStage(ByteTokenizer(), stop=("c\ufffd",))
    stage.emit_all([97, 98, 0xE4])
    stage.finish([97, 98, 0xE4])
    assert (stage.sample.text, stage.sample.finish_reason) == ("ab\ufffd", "length")


async def test_a_stop_of_a_replacement_character_spares_characters_that_are_whole_in_the_end():
    kept, matched, text, _ = play(["\ufffd"], letters("中😀é"), ByteTokenizer())
    assert (kept, matched, text) == (9, False, "中😀é")
    kept, matched, text, _ = play(["\ufffd"], [0xE4, 97, 98], ByteTokenizer())
    assert (kept, matched, text) == (2, True, "")


async def test_what_the_tokenizer_raises_at_the_end_is_its_samples_alone():
    class Fussy(ByteTokenizer):
        last = False

        def decode(self, token_ids):
            if self.last:
                raise ValueError("no more")
            return super().decode(token_ids)

    stage = OutputStage(tokenizer := Fussy(), stop=("x",), n=2)
    stage.emit(97, 98)
    stage.finish([98], key=1)
    tokenizer.last = True
    stage.finish([97])
    first, second = stage.request.samples
    assert (str(first.spoiled), second.spoiled) == ("no more", None)
    assert (first.text, second.text, stage.sample.finish_reason) == ("a", "b", "length")
    assert stage.request.done.done()
