"""Random tokens through real tokenizers: text in parts is the whole text, stop strings are found where they stand."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import pytest
from fdasync_transformers.tokenizer import _FastTokenizer
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Fast

from fdasync import SamplingParams
from fdasync.engine.request_state import SampleOutput
from fdasync.engine.tokenizer import IncrementalDecoder, TokenKinds
from fdasync.testing import synthetic_config, synthetic_engine

if TYPE_CHECKING:
    from collections.abc import Iterator

WORDS = ["a", "b", "ab", " ", "  ", " a", " b", ".", " .", "\n", "中", "国", "中国", " 中", "é", "😀", "\ufffd", "'s"]
TEXTS = ["a b", "中国人", "😀😀", "é", " .", "\n\n", "漢字", "👩\u200d👧", "ab  b", "\ufffd", "ñ", "x"]
SPECIAL = ("<s>", "</s>", "<pad>")


class Kind(NamedTuple):
    """A tokenizer, which of its ids are special and which stand for which byte of a run."""

    tokenizer: _FastTokenizer
    size: int
    special: frozenset[int]
    bytes: dict[int, int]


def finished(inner: Fast, runs: bool = False) -> Kind:
    inner.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL])
    inner.add_tokens([AddedToken("<think>", special=False), AddedToken(" b<", special=False)])
    size = inner.get_vocab_size()
    tokens = {byte: inner.token_to_id(f"<0x{byte:02X}>") for byte in range(256)} if runs else {}
    values = {token: byte for byte, token in tokens.items() if token is not None}
    special = frozenset(inner.token_to_id(name) for name in SPECIAL)
    return Kind(_FastTokenizer(inner, Path()), size, special, values)


def numbered(names: list[str]) -> dict[str, int]:
    return {name: number for number, name in enumerate(dict.fromkeys(names))}


def byte_level() -> Kind:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    mapper = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    names, merges = list(letters), []
    # with tokens that begin or end in a character
    for text in ["中国", "😀😀", " ab", "é.", "\ufffd"]:
        mapped = mapper.pre_tokenize_str(text)[0][0]
        for size in range(2, len(mapped)):
            merges.append((mapped[: size - 1], mapped[size - 1]))
            names.append(mapped[:size])
        names.append(mapped[1:4])
    inner = Fast(models.BPE(vocab=numbered(names), merges=merges))
    inner.pre_tokenizer = mapper
    inner.decoder = decoders.ByteLevel()
    return finished(inner)


def spelled(word: str) -> str:
    return word.replace(" ", "▁")


def byte_fallback(strip: bool) -> Kind:
    names = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *map(spelled, WORDS)]
    inner = Fast(models.BPE(vocab=numbered(names), merges=[], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if strip:
        inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        inner.normalizer = normalizers.Replace(" ", "▁")
    inner.decoder = decoders.Sequence(steps)
    return finished(inner, runs=True)


def unspoken_bytes(values: range) -> Kind:
    """Bytes that a model may give and nothing is spelled in: the vocabulary may have some of them only."""
    names = ["<unk>", *(f"<0x{value:02X}>" for value in values), "▁", *map(spelled, WORDS)]
    inner = Fast(models.BPE(vocab=numbered(names), merges=[], unk_token="<unk>", byte_fallback=False))
    inner.normalizer = normalizers.Replace(" ", "▁")
    inner.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return finished(inner, runs=True)


def unigram_fallback() -> Kind:
    names = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *map(spelled, WORDS)]
    inner = Fast(models.Unigram([(name, -1.0) for name in numbered(names)], unk_id=0, byte_fallback=True))
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    inner.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first")])
    return finished(inner, runs=True)


def metaspace(scheme: str) -> Kind:
    names = ["<unk>", "▁", *map(spelled, WORDS)]
    inner = Fast(models.BPE(vocab=numbered(names), merges=[], unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    inner.decoder = decoders.Metaspace(prepend_scheme=scheme)
    return finished(inner)


def word_pieces() -> Kind:
    names = ["[UNK]", "a", "##b", "##'s", "s", ".", "中", "##国", "\ufffd", "'", "##", "do", "n't"]
    inner = Fast(models.WordPiece(vocab=numbered(names), unk_token="[UNK]"))
    inner.decoder = decoders.WordPiece(cleanup=True)
    return finished(inner)


def word_ends() -> Kind:
    names = ["<unk>", "a", "b", "a</w>", "</w>", "中", "中</w>", ".</w>"]
    inner = Fast(models.BPE(vocab=numbered(names), merges=[], unk_token="<unk>", end_of_word_suffix="</w>"))
    inner.decoder = decoders.BPEDecoder()
    return finished(inner)


KINDS = {
    "byte-level": byte_level,
    "byte-fallback": lambda: byte_fallback(False),
    "metaspace": lambda: metaspace("always"),
    "word pieces": word_pieces,
    "ends of words": word_ends,
    "byte-fallback, a space dropped": lambda: byte_fallback(True),
    "byte-fallback, never spelled": lambda: unspoken_bytes(range(256)),
    "some bytes, never spelled": lambda: unspoken_bytes(range(0x80, 0xF0)),
    "byte-fallback, unigram": unigram_fallback,
    "metaspace, first": lambda: metaspace("first"),
    "metaspace, never": lambda: metaspace("never"),
}


def random_tokens(kind: Kind, rng: Random) -> list[int]:
    tokens: list[int] = []
    tokens_of = {byte: token for token, byte in kind.bytes.items()}
    for _ in range(rng.randint(1, 7)):
        draw = rng.random()
        if draw < 0.35:
            tokens += [rng.randrange(kind.size) for _ in range(rng.randint(1, 6))]
        elif draw < 0.7:
            some = kind.tokenizer.encode(rng.choice(TEXTS) + rng.choice(TEXTS))
            first = rng.choice((0, 0, 1, 2))
            tokens += some[first : len(some) - rng.choice((0, 0, 0, 1, 2))]
        elif draw < 0.8:
            tokens += [rng.choice(sorted(kind.special))] * rng.choice((1, 1, 2, 20))
        elif draw < 0.9 and tokens_of:
            text = rng.choice(["😀", "é", "A", "\n", "中中", "\ufffd"]).encode()
            tokens += [tokens_of[byte] for byte in text[: rng.choice((len(text), len(text), 1))] if byte in tokens_of]
        else:
            tokens += [rng.randrange(kind.size)] * rng.choice((2, 3, 20))
    return tokens


def chunks(tokens: list[int], rng: Random) -> Iterator[list[int]]:
    longest = rng.choice((1, 1, 3, 9, 40))
    at = 0
    while at < len(tokens):
        size = rng.randint(0 if longest > 1 else 1, longest)
        yield tokens[at : at + size]
        at += size


def check_parts(kind: Kind, kinds: TokenKinds, tokens: list[int], rng: Random) -> None:
    decoder = IncrementalDecoder(kind.tokenizer, kinds)
    text = "".join([decoder.feed(chunk) for chunk in chunks(tokens, rng)])
    whole = kind.tokenizer.decode(tokens)
    seen = [token for token in tokens if token not in kind.special]
    closed = len(seen)
    while closed and seen[closed - 1] in kind.bytes:
        closed -= 1
    # no more is held back than could change
    settled = kind.tokenizer.decode(seen[:closed])
    assert text == settled or (not kind.bytes and settled.rstrip("\ufffd") == text.rstrip("\ufffd")), tokens
    assert len(settled) - len(text) <= 3, tokens
    assert text + decoder.flush() == whole, tokens


def visible(kind: Kind, tokens: list[int]) -> str | None:
    """Text that counts after these tokens if no more come; None where it ends in the middle of something."""
    text = kind.tokenizer.decode(tokens)
    run = []
    for token in reversed([token for token in tokens if token not in kind.special]):
        if token not in kind.bytes:
            break
        run.append(kind.bytes[token])
    try:
        bytes(reversed(run)).decode()
    except UnicodeDecodeError:
        return None
    if kind.bytes:
        return text
    return text[: len(text) - min(3, len(text) - len(text.rstrip("\ufffd")))]


def check_stop(kind: Kind, kinds: TokenKinds, tokens: list[int], rng: Random) -> str:
    """Without special tokens, which stand between what is before and behind them."""
    tokens = [token for token in tokens if token not in kind.special]
    whole = kind.tokenizer.decode(tokens)
    stops = ["never"]
    for _ in range(rng.choice((0, 1, 2))):
        at = rng.randrange(max(len(whole), 1))
        stops.append(whole[at : at + rng.randint(1, 4)] or "a")
    if rng.random() < 0.3:
        stops.append(rng.choice(["中", "😀", "\ufffd", " ", "\n"]))
    sample = SampleOutput(0, 0, SamplingParams(stop=tuple(stops)), 0, kinds)
    end = "no"
    given_out = ""
    for number, token in enumerate(tokens, 1):
        found = sample.find_stop(token)
        released = sample.text[: sample.released]
        assert released.startswith(given_out), (tokens, stops)
        given_out = released
        text = visible(kind, tokens[:number])
        places = [at for stop in stops if text is not None and (at := text.find(stop)) >= 0]
        assert found == bool(places), (tokens, stops, number)
        if found:
            assert sample.text == text[: min(places)], (tokens, stops, number)
            end = "found"
            break
    if end == "no":
        places = [at for stop in stops if (at := whole.find(stop)) >= 0]
        end = "at the end" if sample.end_text() else "no"
        assert (end != "no") == bool(places), (tokens, stops)
        assert sample.text == whole[: min(places)] if places else sample.text == whole, (tokens, stops)
    assert sample.released == len(sample.text)
    assert sample.text.startswith(given_out)
    return end


def check_special_stop(kind: Kind, kinds: TokenKinds, tokens: list[int], rng: Random) -> bool:
    """A special token is found where it comes, and nowhere else."""
    stop = rng.choice(SPECIAL)
    ends = kind.tokenizer.with_specials().encode(stop)[-1]
    sample = SampleOutput(0, 0, SamplingParams(stop=("never", stop)), 0, kinds)
    found = [number for number, token in enumerate(tokens) if sample.find_stop(token)][:1]
    assert found == [number for number, token in enumerate(tokens) if token == ends][:1], (tokens, stop)
    if found and (text := visible(kind, tokens[: found[0]])) is not None:
        assert sample.text == text, (tokens, stop)
    return bool(found)


def stands_apart(kind: Kind, tokens: list[int], at: int, stop: str) -> bool:
    """Whether a special token is inside of a text that begins at a place."""
    places = [len(kind.tokenizer.decode(tokens[:number])) for number, one in enumerate(tokens) if one in kind.special]
    return any(at < place < at + len(stop) for place in places)


def fuzz(name: str, count: int, seed: int) -> set[str]:
    kind = KINDS[name]()
    rng = Random(seed)
    ends = set()
    kinds = TokenKinds(kind.tokenizer)
    for number in range(count):
        if number % 500 == 499:
            kinds = TokenKinds(kind.tokenizer)
        tokens = random_tokens(kind, rng)
        check_parts(kind, kinds, tokens, rng)
        if number % 4 == 0:
            ends.add(check_stop(kind, kinds, tokens, rng))
            if check_special_stop(kind, kinds, tokens, rng):
                ends.add("special")
    return ends


@pytest.mark.ci(after=4)
@pytest.mark.parametrize("name", KINDS)
def test_text_in_parts_is_the_whole_text(name: str) -> None:
    ends = fuzz(name, 400, 1)
    assert {"no", "found", "special"} <= ends


@pytest.mark.nightly
@pytest.mark.parametrize("name", KINDS)
def test_text_in_parts_is_the_whole_text_of_very_many_sequences(name: str) -> None:
    # 132,000 in all
    ends = fuzz(name, 12_000, 2)
    assert {"no", "found", "special"} <= ends
    assert "at the end" in ends or name.startswith(("metaspace", "word", "ends")), ends


@pytest.mark.ci
@pytest.mark.parametrize("name", ["byte-level", "byte-fallback, a space dropped", "metaspace"])
async def test_an_engine_streams_the_whole_text_and_stops_in_the_middle_of_a_run(name: str) -> None:
    kind = KINDS[name]()
    tokenizer = kind.tokenizer
    rng = Random(5)
    stopped = in_run = 0
    config = synthetic_config({"vocab_size": kind.size})
    async with synthetic_engine(config, tokenizer=tokenizer) as engine:
        for seed in range(30):
            prompt = [rng.randrange(kind.size) for _ in range(rng.randint(1, 9))]
            params = SamplingParams(max_tokens=40, seed=seed, temperature=1.0, ignore_eos=True)
            async with engine.generate(prompt, params) as stream:
                deltas = [delta async for delta in stream]
            result = await engine.complete(prompt, params)
            tokens, text = result.token_ids, tokenizer.decode(result.token_ids)
            assert "".join([delta.text for delta in deltas]) == result.text == text
            assert sum([delta.token_ids for delta in deltas], ()) == tokens

            # what runs hold is there to be stopped at while they are open, and no later
            shown = [(number, visible(kind, list(tokens[:number]))) for number in range(1, len(tokens) + 1)]
            known = [(number, some) for number, some in shown if some and some[-1] not in "\ufffd "]
            if not known:
                continue
            _, some = rng.choice(known)
            stop = some[-2:].lstrip(" ")
            keep, cut = next((count, seen[: seen.find(stop)]) for count, seen in shown if seen and stop in seen)
            if stands_apart(kind, list(tokens), len(cut), stop):
                continue
            stopping = msgspec.structs.replace(params, stop=(stop,))
            async with engine.generate(prompt, stopping) as stream:
                deltas = [delta async for delta in stream]
            result = await engine.complete(prompt, stopping)
            assert (result.finish_reason, result.text, result.token_ids) == ("stop", cut, tokens[:keep])
            assert "".join([delta.text for delta in deltas]) == cut
            assert sum([delta.token_ids for delta in deltas], ()) == tokens[:keep]
            assert deltas[-1].finish_reason == "stop"
            stopped += 1
            in_run += tokens[keep - 1] in kind.bytes
    assert stopped > 10
    assert in_run > 3 or not kind.bytes


async def test_two_emoji_of_a_byte_fallback_tokenizer_come_whole() -> None:
    kind = KINDS["byte-fallback, a space dropped"]()
    tokenizer = kind.tokenizer
    for text in ("漢漢", "😀😀", "a 👩\u200d👩\u200d👧 b"):
        tokens = tokenizer.encode(text)
        for stops, ends in (((), None), (("\ufffd",), None), ((text[-1],), text.find(text[-1]))):
            sample = SampleOutput(0, 0, SamplingParams(stop=stops), 0, TokenKinds(tokenizer))
            if stops:
                assert any(sample.find_stop(token) for token in tokens) == (ends is not None)
            else:
                sample.feed(tokens)
            sample.end_text()
            assert sample.text == text[:ends]
