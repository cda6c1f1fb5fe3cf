"""Text of growing token lists, for every kind of decoder there is (`tokenizer.py`), and what it costs."""

from __future__ import annotations

from itertools import chain, pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fdasync.engine.request_state import SampleOutput
from fdasync.engine.tokenizer import IncrementalDecoder, TokenKind, TokenKinds
from fdasync.request import SamplingParams
from fdasync.testing import synthetic_engine
from tests.engine.output_stage import ByteTokenizer
from tests.support.helpers import case_settings

PIECES = (" ", " a", "b", "中", "\ufffd", "", "ab ")
FIRST_PIECE = 258
NUM_TOKENS = FIRST_PIECE + len(PIECES)


class Counted:
    """Counts the tokens that are decoded. 0 to 255 are bytes, 256 and 257 special, then come pieces of text."""

    def __init__(self) -> None:
        self.decoded = 0

    def encode(self, text):
        return [256, *text.encode(), 257]

    def decode(self, token_ids):
        self.decoded += len(token_ids)
        return self.text([token for token in token_ids if token < 256 or token >= FIRST_PIECE])

    def text(self, tokens):
        raise NotImplementedError


class Replacing(Counted):
    """Byte-level: all bytes in a row."""

    errors = "replace"

    def text(self, tokens):
        parts = [bytes([token]) if token < 256 else PIECES[token - FIRST_PIECE].encode() for token in tokens]
        return b"".join(parts).decode(errors=self.errors)


class Ignoring(Replacing):
    """Byte-level; what is no character is nothing."""

    errors = "ignore"


class ByteForByte(Counted):
    """Bytes between pieces are decoded apart, with a replacement character for each that is of no character."""

    def text(self, tokens):
        parts = []
        at = 0
        while at < len(tokens):
            if tokens[at] >= FIRST_PIECE:
                parts.append(PIECES[tokens[at] - FIRST_PIECE])
                at += 1
                continue
            for size in (1, 2, 3, 4):
                some = tokens[at : at + size]
                if len(some) == size and max(some) < 256 and (character := whole(some)) is not None:
                    parts.append(character)
                    at += size
                    break
            else:
                parts.append("\ufffd")
                at += 1
        return "".join(parts)


class Fallback(Counted):
    """A run of bytes is clean as a whole, or not at all; the first space of a text is left out."""

    def text(self, tokens):
        parts, run = [], []
        for token in [*tokens, NUM_TOKENS]:
            if token < 256:
                run.append(token)
                continue
            clean = whole(run)
            parts.append("\ufffd" * len(run) if clean is None else clean)
            run = []
            if token < NUM_TOKENS:
                parts.append(PIECES[token - FIRST_PIECE])
        return "".join(parts).removeprefix(" ")


class Silent(Counted):
    def text(self, tokens):
        return ""


class Murmuring(Counted):
    """Nothing that it decodes is clean, and nothing can be found out about it."""

    def text(self, tokens):
        return "\ufffd" * len(tokens)


class Wordless(Replacing):
    def encode(self, text):
        raise NotImplementedError


def whole(some):
    try:
        return bytes(some).decode()
    except UnicodeDecodeError:
        return None


def fed(decoder, tokens, cuts):
    edges = [0, *sorted(min(cut, len(tokens)) for cut in cuts), len(tokens)]
    return [decoder.feed(tokens[first:last]) for first, last in pairwise(edges)]


utf8 = st.text("a €中😀\ufffd", min_size=1, max_size=4).map(lambda text: list(text.encode()))
cut_short = utf8.map(lambda tokens: tokens[:-1])
one = st.integers(0, NUM_TOKENS - 1).map(lambda token: [token])
special = st.integers(1, 40).map(lambda count: [256] * count)
textless = st.integers(1, 40).map(lambda count: [FIRST_PIECE + 5] * count)
piece = st.integers(FIRST_PIECE, NUM_TOKENS - 1).map(lambda token: [token])


def joined(*parts):
    return st.lists(st.one_of(*parts), max_size=12).map(lambda some: list(chain(*some)))


DECODERS = (Replacing, Fallback, Silent, Ignoring, ByteForByte, Murmuring, Wordless)


@pytest.mark.ci(after=3)
@pytest.mark.parametrize("make", DECODERS)
@case_settings(100)
@given(joined(utf8, cut_short, one, special, textless, piece), st.lists(st.integers(0, 80), max_size=30), st.booleans())
@example(list("中中".encode()), [1, 2, 3, 4, 5], False)
@example([*b"a\n", 0xE4, FIRST_PIECE], [1, 2, 3], False)
@example([0xE4, *[256] * 30, 0xB8, *[256] * 30, 0xAD], range(64), True)
@example([FIRST_PIECE, *[256] * 30, FIRST_PIECE, FIRST_PIECE + 1], range(40), True)
@example([*b"aaaaaaa", 0xF0, *[256] * 7, 0x9F, 0x98, 0x80], range(64), True)
@example([FIRST_PIECE + 2, *[FIRST_PIECE + 5] * 30, FIRST_PIECE + 1], [], True)
def test_what_was_given_out_in_parts_is_the_whole_text(make, tokens, cuts, one_by_one):
    tokenizer = make()
    decoder = IncrementalDecoder(tokenizer)
    parts = fed(decoder, tokens, range(len(tokens)) if one_by_one else cuts)
    assert "".join(parts) + decoder.flush() == tokenizer.decode(tokens)


@case_settings(150)
@given(joined(utf8, cut_short, one, special, piece))
@example([FIRST_PIECE + 5, 32, 32, 97])
def test_no_more_is_held_back_than_may_change(tokens):
    tokenizer, runs = Replacing(), Fallback()
    decoder, of_runs = IncrementalDecoder(tokenizer), IncrementalDecoder(runs)
    given_out = of_runs_given_out = ""
    closed = 0
    for number, token in enumerate(tokens):
        given_out += decoder.feed([token])
        held = tokenizer.decode(tokens[: number + 1])[len(given_out) :]
        assert held in ("", "\ufffd", "\ufffd" * 2, "\ufffd" * 3)
        of_runs_given_out += of_runs.feed([token])
        if token >= FIRST_PIECE:
            closed = number + 1
        assert of_runs_given_out == runs.decode(tokens[:closed])
        run = bytes(token for token in tokens[closed : number + 1] if token < 256)
        if (clean := whole(run)) is not None:
            assert (of_runs_given_out + of_runs.open_text()).endswith(clean.removeprefix(" "))
            assert of_runs_given_out + of_runs.open_text() == runs.decode(tokens[: number + 1])


@pytest.mark.parametrize("make", DECODERS)
def test_kinds_of_tokens_are_found_out(make):
    kinds = TokenKinds(make())
    of_byte = TokenKind.BYTE if make is Fallback else TokenKind.PIECE
    assert {kinds.of(byte) for byte in range(256)} == {of_byte}
    assert kinds.known == (make not in (Silent, Murmuring, Wordless))
    assert kinds.of(256) == (TokenKind.UNSEEN if kinds.known else TokenKind.PIECE)
    assert {kinds.of(FIRST_PIECE + number) for number in (0, 1, 2, 3, 4, 6)} == {TokenKind.PIECE}


LONG = {
    "bytes that are of no character": [0x80],
    "characters that are never complete": [0xF0, 0x9F],
    "clean bytes": list("a😀中".encode()),
    "special tokens": [256],
    "special tokens in a character": [0xE4, 256, 256, 256, 0xB8, 256],
    "empty pieces": [FIRST_PIECE + 5],
    "spaces": [FIRST_PIECE],
    "pieces": [FIRST_PIECE + 3],
    "replacement characters": [FIRST_PIECE + 4],
}


@pytest.mark.ci(after=2)
@pytest.mark.parametrize("make", DECODERS)
def test_the_cost_of_a_token_does_not_grow_with_a_text_that_never_settles(make):
    for name, pattern in LONG.items():
        costs = []
        for count in (500, 2000):
            tokenizer = make()
            # stop strings are looked for in open runs, too
            kinds = TokenKinds(tokenizer)
            tokens = (pattern * count)[:count]
            # once for an engine
            kinds.of(tokens[0])
            tokenizer.decoded = 0
            sample = SampleOutput(0, 0, SamplingParams(stop=("never",)), 0, kinds)
            most = 0
            for token in tokens:
                before = tokenizer.decoded
                assert not sample.find_stop(token)
                most = max(most, tokenizer.decoded - before)
            sample.end_text()
            costs.append(tokenizer.decoded / count)
            assert sample.spoiled is None
            assert sample.text == tokenizer.decode(tokens)
            if make in (Replacing, ByteForByte, Fallback) and name != "empty pieces":
                assert most < 100, name
        assert max(costs) < 60, name
        assert costs[1] <= 1.5 * costs[0], name


def test_a_tokenizer_that_cannot_encode_is_asked_once():
    class Asked(Wordless):
        asked = 0

        def encode(self, text):
            self.asked += 1
            raise KeyError(text)

    kinds = TokenKinds(tokenizer := Asked())
    for _ in range(3):
        decoder = IncrementalDecoder(tokenizer, kinds)
        assert decoder.feed("a€".encode()) == "a€"
    assert tokenizer.asked == 1


def test_half_a_character_waits_over_special_tokens():
    decoder = IncrementalDecoder(ByteTokenizer())
    parts = [decoder.feed([token]) for token in (0xE2, *[256] * 100, 0x82, *[256] * 100, 0xAC)]
    assert (set(parts[:-1]), parts[-1]) == ({""}, "€")


def test_where_nothing_is_known_text_that_was_late_is_followed_by_text_in_time():
    decoder = IncrementalDecoder(Wordless())
    parts = [decoder.feed([token]) for token in [0x80] * 500 + [97] * 1000]
    assert "".join(parts) == "\ufffd" * 500 + "a" * 1000
    assert parts[-200:] == ["a"] * 200


async def test_an_engine_finds_a_stop_string_in_text_that_is_final_only_at_the_end():
    async with synthetic_engine(tokenizer=Murmuring()) as engine:
        stopping = SamplingParams(max_tokens=3, stop=("\ufffd",))
        result = await engine.complete([1, 2, 3], stopping)
        assert (result.finish_reason, result.text, len(result.token_ids)) == ("stop", "", 3)
        async with engine.generate([1, 2, 3], stopping) as stream:
            deltas = [delta async for delta in stream]
        assert "".join(delta.text for delta in deltas) == ""
        assert deltas[-1].finish_reason == "stop"
        whole = await engine.complete([1, 2, 3], SamplingParams(max_tokens=3, stop=("x",)))
        assert (whole.finish_reason, whole.text) == ("length", "\ufffd" * 3)
