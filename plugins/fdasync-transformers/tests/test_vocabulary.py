"""What one token puts into a text, and tokens that tokenizer_config.json alone names."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from fdasync_transformers.tokenizer import _load_auto, _SlowTokenizer, load_tokenizer
from fdasync_transformers.weights.random_checkpoints import write_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from fdasync.engine.tokenizer import WithPieces, WithSpecials, chat_of
from fdasync.errors import CheckpointError

if TYPE_CHECKING:
    from pathlib import Path

WORDS = ("true", "cat", "no")


def byte_level(folder: Path) -> None:
    write_tokenizer(folder)


def metaspace(folder: Path) -> None:
    """Llama 2's kind: pieces that begin with U+2581, bytes for the rest; the decoder drops a space at the start."""
    pieces = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)] + ["\u2581"]
    pieces += sorted(set("".join(WORDS)))
    merges = []
    for word in WORDS:
        for start in ("\u2581", ""):
            have, rest = (start, word) if start else (word[0], word[1:])
            for letter in rest:
                if have + letter not in pieces:
                    merges.append((have, letter))
                    pieces.append(have + letter)
                have += letter
    vocab = {piece: number for number, piece in enumerate(pieces)}
    made = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    made.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in ("<unk>", "<s>", "</s>")])
    save(made, folder, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def word_pieces(folder: Path) -> None:
    vocab = {piece: number for number, piece in enumerate(["[UNK]", "a", "true", "##cat", "no"])}
    made = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.decoder = decoders.WordPiece(cleanup=False)
    made.add_special_tokens([AddedToken("[UNK]", special=True)])
    save(made, folder, unk_token="[UNK]")


def save(made: Tokenizer, folder: Path, **config: Any) -> None:
    made.save(str(folder / "tokenizer.json"))
    told = {"tokenizer_class": "PreTrainedTokenizerFast", **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(told))


def both(folder: Path) -> list[Any]:
    """The tokenizer of the folder, and the one of AutoTokenizer."""
    return [load_tokenizer(str(folder)), _SlowTokenizer(_load_auto(folder), folder)]


def vocab_of(folder: Path) -> dict[str, int]:
    return Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab()


def test_a_piece_has_the_space_that_it_begins_with(tmp_path: Path) -> None:
    metaspace(tmp_path)
    vocab = vocab_of(tmp_path)
    for tokenizer in both(tmp_path):
        assert isinstance(tokenizer, WithPieces)
        named = {piece: tokenizer.piece(vocab[piece]) for piece in ("\u2581true", "true", "\u2581", "<s>", "<unk>")}
        assert named == {
            "\u2581true": b" true", "true": b"true", "\u2581": b" ", "<s>": b"<s>", "<unk>": b"<unk>",
        }  # fmt: skip
        # `decode` of one token is not that
        assert tokenizer.decode([vocab["\u2581true"]]) == "true"
        assert tokenizer.piece(len(vocab) + 5) == b""


def test_parts_of_a_character_have_their_bytes(tmp_path: Path) -> None:
    for make in (metaspace, byte_level):
        folder = tmp_path / make.__name__
        folder.mkdir()
        make(folder)
        for tokenizer in both(folder):
            tokens = tokenizer.encode("\U0001f600")
            parts = [tokenizer.piece(token) for token in tokens]
            assert b"".join(parts).strip() == "\U0001f600".encode()
            assert [part for part in parts if part != b" "] == [bytes([byte]) for byte in "\U0001f600".encode()]


def test_what_stands_behind_a_word_or_apart_from_it_differs(tmp_path: Path) -> None:
    word_pieces(tmp_path)
    tokenizer = load_tokenizer(str(tmp_path))
    assert isinstance(tokenizer, WithPieces)
    assert [tokenizer.piece(token) for token in (2, 3, 4)] == [b" true", b"cat", b" no"]
    assert [tokenizer.spelling(token) for token in (2, 3, 4, 9999)] == ["true", "##cat", "no", ""]


@pytest.mark.parametrize(("make", "space"), [(metaspace, "\u2581"), (byte_level, "\u0120")])
def test_a_spelling_is_the_vocabulary_s(tmp_path: Path, make: Any, space: str) -> None:
    make(tmp_path)
    for tokenizer in both(tmp_path):
        spelled = "".join([tokenizer.spelling(token) for token in tokenizer.encode("true cat no")])
        assert spelled.lstrip(space) == f"true{space}cat{space}no"


def test_special_tokens_have_their_text_whoever_is_asked(tmp_path: Path) -> None:
    byte_level(tmp_path)
    for tokenizer in both(tmp_path):
        token = tokenizer.encode("<|im_end|>")[0]
        assert tokenizer.piece(token) == tokenizer.with_specials().piece(token) == b"<|im_end|>"


@settings(max_examples=60, deadline=None)
@given(text=st.text("truecatno \u00e9\u4e2d\U0001f600\n", max_size=12))
@pytest.mark.parametrize("make", [metaspace, byte_level])
def test_pieces_joined_are_the_text(make: Any, text: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("pieces")
    make(folder)
    tokenizer = load_tokenizer(str(folder))
    assert isinstance(tokenizer, WithPieces)
    tokens = tokenizer.encode(text)
    joined = b"".join([tokenizer.piece(token) for token in tokens]).decode()
    # at the start of a text the decoder drops one space, which the tokenizer put there
    assert tokenizer.decode(tokens) == joined.removeprefix(" " if make is metaspace else "")


CONFIGS: list[dict[str, Any]] = [
    {"additional_special_tokens": ["<|turn|>", "<|im_end|>"]},
    {"extra_special_tokens": ["<|turn|>"]},
    {"extra_special_tokens": {"turn_token": "<|turn|>"}},
    {"pad_token": "<|turn|>"},
    {"pad_token": {"__type": "AddedToken", "content": "<|turn|>", "lstrip": True}},
    {"added_tokens_decoder": {
        "273": {"content": "<|turn|>", "special": True}, "272": {"content": "<|first|>", "special": False},
    }},
    # a token of the file, with other fields
    {"added_tokens_decoder": {"257": {"content": "<|im_start|>", "special": True, "lstrip": True}}},
]  # fmt: skip


@pytest.mark.parametrize("config", CONFIGS)
def test_tokens_that_only_the_configuration_names_are_those_of_the_library(config: Any, tmp_path: Path) -> None:
    byte_level(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    template = "{% for m in messages %}<|turn|>{{ m.content }} <|im_start|>{% endfor %}"
    path.write_text(json.dumps({**json.loads(path.read_text()), **config, "chat_template": template}))
    tokenizer, library = both(tmp_path)
    text = "<|turn|>a <|im_start|>"
    tokens = tokenizer.encode(text)
    assert tokens == library.encode(text)
    messages = [{"role": "user", "content": "a"}]
    assert chat_of(tokenizer).apply_chat_template(messages, add_generation_prompt=False) == tokens
    assert chat_of(library).apply_chat_template(messages, add_generation_prompt=False) == tokens
    assert tokenizer.decode(tokens) == library.decode(tokens)
    assert isinstance(tokenizer, WithSpecials)
    assert tokenizer.with_specials().decode(tokens) == library.with_specials().decode(tokens)
    assert tokenizer.piece(tokens[0]) == library.piece(tokens[0])  # type: ignore[attr-defined]


def test_a_configuration_that_is_none_is_named(tmp_path: Path) -> None:
    byte_level(tmp_path)
    for text in ("{", "[]", '{"added_tokens_decoder": {"x": 1}}', '{"additional_special_tokens": [1]}'):
        (tmp_path / "tokenizer_config.json").write_text(text)
        with pytest.raises(CheckpointError, match=r"tokenizer_config\.json"):
            load_tokenizer(str(tmp_path))
