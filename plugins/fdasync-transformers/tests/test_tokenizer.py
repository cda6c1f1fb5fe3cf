"""Tokenizers from checkpoint folders: exact round trips, light imports, named errors."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from fdasync_transformers.checkpoints import EOS_ID, VOCAB_SIZE, _write_tokenizer
from fdasync_transformers.tokenizer import _load_slow, _SlowTokenizer, load_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from fdasync.engine.tokenizer import IncrementalDecoder
from fdasync.errors import BadInput, CheckpointError

if TYPE_CHECKING:
    from fdasync.engine.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    _write_tokenizer(path)
    return path


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return load_tokenizer(str(folder))


@settings(max_examples=200, deadline=None)
@given(text=st.text(alphabet=st.characters(exclude_categories=["Cs"])))
def test_one_token_per_byte_and_back(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text


def test_special_tokens_are_one_id_and_are_left_out_of_text(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("a<|endoftext|>b") == [97, EOS_ID, 98]
    assert tokenizer.decode([97, EOS_ID, 98, VOCAB_SIZE - 1]) == "ab"
    assert tokenizer.decode([97, VOCAB_SIZE + 5]) == "a"  # no such id
    assert tokenizer.decode([]) == ""


def test_incomplete_characters_become_the_replacement_character(tokenizer: Tokenizer) -> None:
    euro = list("€".encode())
    assert tokenizer.decode(euro[:2]) == "\ufffd"
    decoder = IncrementalDecoder(tokenizer)
    assert [decoder.feed([token]) for token in euro] == ["", "", "€"]


def test_lone_surrogates_are_bad_input(tokenizer: Tokenizer, folder: Path) -> None:
    for loaded in (tokenizer, _SlowTokenizer(_load_slow(folder))):
        with pytest.raises(BadInput, match="surrogate at character 2"):
            loaded.encode("ab\ud800")


def test_the_fallback_agrees(tokenizer: Tokenizer, folder: Path) -> None:
    slow = _SlowTokenizer(_load_slow(folder))
    for text in ("hello wörld 😀", "a<|im_end|>b", " . ,  x", ""):
        assert slow.encode(text) == tokenizer.encode(text)
        assert slow.decode(slow.encode(text)) == tokenizer.decode(tokenizer.encode(text))


def test_a_fingerprint_is_of_every_name(folder: Path, tmp_path: Path) -> None:
    text = (folder / "tokenizer.json").read_text()
    (tmp_path / "tokenizer.json").write_text(text.replace("<|endoftext|>", "<|end|>"))
    (tmp_path / "tokenizer_config.json").write_text((folder / "tokenizer_config.json").read_text())
    for load in (load_tokenizer, lambda path: _SlowTokenizer(_load_slow(Path(path)))):
        same, again, other = (load(str(path)).fingerprint() for path in (folder, folder, tmp_path))
        assert same == again != other


def test_truncation_and_padding_of_the_file_are_off(tmp_path: Path) -> None:
    from tokenizers import Tokenizer as Fast

    _write_tokenizer(tmp_path)
    path = str(tmp_path / "tokenizer.json")
    inner = Fast.from_file(path)
    inner.enable_truncation(max_length=4)
    inner.enable_padding(length=8)
    inner.save(path)
    assert load_tokenizer(str(tmp_path)).encode("abcdef") == list(b"abcdef")
    assert load_tokenizer(str(tmp_path)).encode("a") == [97]


def test_missing_and_corrupt_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="not a folder"):
        load_tokenizer(str(tmp_path / "absent"))
    with pytest.raises(CheckpointError, match="no tokenizer files"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="AutoTokenizer"):
        load_tokenizer(str(tmp_path))
    for content in ("", "{", '{"version": "1.0"}', "\x00\xff"):
        (tmp_path / "tokenizer.json").write_text(content)
        with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
            load_tokenizer(str(tmp_path))


def test_loading_needs_neither_torch_nor_transformers(folder: Path) -> None:
    code = (
        "import sys; from fdasync_transformers.tokenizer import load_tokenizer\n"
        f"assert load_tokenizer({str(folder)!r}).encode('hi') == [104, 105]\n"
        "heavy = {'torch', 'transformers'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
