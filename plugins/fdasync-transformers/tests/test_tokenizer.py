"""Tokenizers from checkpoint folders: exact round trips, light imports, named errors."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from fdasync_transformers.tokenizer import _load_slow, _SlowTokenizer, load_tokenizer
from fdasync_transformers.weights.random_checkpoints import EOS_ID, VOCAB_SIZE, write_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from fdasync import Engine, EngineConfig
from fdasync.engine.tokenizer import ChatTokenizer, IncrementalDecoder, chat_of
from fdasync.errors import BadInput, ChatUnsupported, CheckpointError, TokenizerFailed
from fdasync.testing import LetterTokenizer

if TYPE_CHECKING:
    from fdasync.engine.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(path)
    return path


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return load_tokenizer(str(folder))


@settings(max_examples=200, deadline=None)
# names of special tokens, which hypothesis finds in the sources, are no plain text
@given(text=st.text(alphabet=st.characters(exclude_categories=["Cs"])).filter(lambda text: "<|" not in text))
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
    for loaded in (tokenizer, _SlowTokenizer(_load_slow(folder), folder)):
        with pytest.raises(BadInput, match="surrogate at character 2"):
            loaded.encode("ab\ud800")


def test_the_fallback_agrees(tokenizer: Tokenizer, folder: Path) -> None:
    slow = _SlowTokenizer(_load_slow(folder), folder)
    for text in ("hello wörld 😀", "a<|im_end|>b", " . ,  x", ""):
        assert slow.encode(text) == tokenizer.encode(text)
        assert slow.decode(slow.encode(text)) == tokenizer.decode(tokenizer.encode(text))


def test_a_fingerprint_is_of_every_name(folder: Path, tmp_path: Path) -> None:
    text = (folder / "tokenizer.json").read_text()
    (tmp_path / "tokenizer.json").write_text(text.replace("<|endoftext|>", "<|end|>"))
    (tmp_path / "tokenizer_config.json").write_text((folder / "tokenizer_config.json").read_text())
    for load in (load_tokenizer, lambda path: _SlowTokenizer(_load_slow(Path(path)), Path(path))):
        same, again, other = (load(str(path)).fingerprint() for path in (folder, folder, tmp_path))
        assert same == again != other


def test_truncation_and_padding_of_the_file_are_off(tmp_path: Path) -> None:
    from tokenizers import Tokenizer as Fast

    write_tokenizer(tmp_path)
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
    subprocess.run([sys.executable, "-c", code], check=True, timeout=600)


# -- chats ----------------------------------------------------------------------------------------------

CHAT = """
{%- if tools %}[tools: {% for tool in tools %}{{ tool.function.name }} {% endfor %}]{% endif %}
{%- for message in messages %}
{%- if message.role not in ["user", "assistant"] %}{{ raise_exception("no role " + message.role) }}{% endif %}
{{- message.role }}: {{ message.content }}<|im_end|>
{%- endfor %}
{%- if add_generation_prompt %}assistant:{% if mood is defined %} ({{ mood }}){% endif %}{% endif %}"""
USER, ANSWER = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}
END = "<|im_end|>"
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture
def chat_folder(folder: Path, tmp_path: Path) -> Path:
    """A copy of the folder with a chat template in the configuration."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    configure(tmp_path, chat_template=CHAT)
    return tmp_path


def configure(folder: Path, **values: object) -> None:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def chats(folder: Path) -> list[ChatTokenizer]:
    """Both kinds of tokenizers of a folder."""
    return [chat_of(load_tokenizer(str(folder))), chat_of(_SlowTokenizer(_load_slow(folder), folder))]


def test_a_conversation_becomes_tokens_by_the_template_of_its_checkpoint(
    chat_folder: Path, tokenizer: Tokenizer
) -> None:
    for chat in chats(chat_folder):
        assert chat.chat_template() == CHAT
        asked = [USER, ANSWER, USER]
        text = f"user: hi{END}assistant: ho{END}user: hi{END}assistant:"
        ids = chat.apply_chat_template(asked)
        assert ids == tokenizer.encode(text)
        assert all(type(token) is int for token in ids)
        assert asked == [USER, ANSWER, USER]
        assert chat.apply_chat_template([USER], add_generation_prompt=False) == tokenizer.encode(f"user: hi{END}")
        begun = chat.apply_chat_template([USER, ANSWER], add_generation_prompt=False, continue_final_message=True)
        assert begun == tokenizer.encode(f"user: hi{END}assistant: ho")
        asked_with = chat.apply_chat_template([USER], tools=[TOOL], template_kwargs={"mood": "glad"})
        assert asked_with == tokenizer.encode(f"[tools: look ]user: hi{END}assistant: (glad)")


def test_a_template_refuses_in_its_own_words(chat_folder: Path) -> None:
    for chat in chats(chat_folder):
        with pytest.raises(BadInput, match="no role king") as caught:
            chat.apply_chat_template([{"role": "king", "content": "hi"}])
        assert caught.value.field == "messages"
        for messages in ([], ["hi"], "hi", USER, [{"content": "hi"}]):
            with pytest.raises(BadInput, match="messages"):
                chat.apply_chat_template(messages)  # type: ignore[arg-type]
        with pytest.raises(BadInput, match="tools"):
            chat.apply_chat_template([USER], tools=["look"])  # type: ignore[list-item]
        with pytest.raises(BadInput, match="continue_final_message"):
            chat.apply_chat_template([USER], continue_final_message=True)
        for name in ("chat_template", "tokenize", "return_tensors", "tokenizer_kwargs"):
            with pytest.raises(BadInput, match=f"'{name}' is no variable of a template"):
                chat.apply_chat_template([USER], template_kwargs={name: "{{ 1 }}"})


@pytest.mark.parametrize(
    "code",
    ["{{ messages.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ cycler.__init__.__globals__.os }}", "{{ ("],
)
def test_a_template_is_rendered_in_a_sandbox(chat_folder: Path, code: str) -> None:
    configure(chat_folder, chat_template=code)
    for chat in chats(chat_folder):
        with pytest.raises(BadInput, match="the chat template refuses them: "):
            chat.apply_chat_template([USER])


def test_a_template_may_be_a_file_or_one_of_several(chat_folder: Path, tokenizer: Tokenizer) -> None:
    several = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "with tools"}]
    configure(chat_folder, chat_template=several)
    for chat in chats(chat_folder):
        assert (chat.chat_template(), chat.chat_template(with_tools=True)) == ("plain", "with tools")
        assert chat.apply_chat_template([USER], tools=[TOOL]) == tokenizer.encode("with tools")
        assert chat.apply_chat_template([USER], tools=[]) == tokenizer.encode("plain")
    (chat_folder / "tokenizer_config.json").unlink()
    (chat_folder / "chat_template.jinja").write_text("a file")
    (chat,) = [chat_of(load_tokenizer(str(chat_folder)))]
    assert chat.apply_chat_template([USER]) == tokenizer.encode("a file")


def test_without_a_template_a_chat_is_refused_by_type(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    for chat in [*chats(folder), chat_of(load_tokenizer(str(tmp_path)))]:
        assert chat.chat_template() == chat.chat_template(with_tools=True) == ""
        with pytest.raises(ChatUnsupported, match="has no chat template") as caught:
            chat.apply_chat_template([USER])
        assert caught.value.tokenizer == type(chat).__name__
        assert chat.parse_response([1], [2]) is None
    with pytest.raises(ChatUnsupported, match="LetterTokenizer knows no chat templates"):
        chat_of(LetterTokenizer())


def test_an_answer_is_read_as_the_checkpoint_declares(chat_folder: Path) -> None:
    thought = {"open": "<think>", "close": "</think>"}
    template = {"start_anchor": "assistant:", "fields": {"thinking": thought, "content": {"close": END}}}
    configure(chat_folder, response_template={**template, "defaults": {"role": "assistant"}})
    for chat in chats(chat_folder):
        asked = chat.apply_chat_template([USER])
        answer = list(f"<think>well</think>ho{END}".encode().replace(END.encode(), b"")) + asked[8:9]
        read = {"role": "assistant", "thinking": "well", "content": "ho"}
        assert chat.parse_response(answer, asked) == read
        # the prompt may have begun the answer
        assert chat.parse_response(answer[7:], asked + answer[:7]) == read
        assert chat.parse_response([], asked) == {"role": "assistant"}
    configure(chat_folder, response_template={"fields": {}})
    for chat in chats(chat_folder):
        with pytest.raises(TokenizerFailed, match=r"the answer cannot be read: .*fields"):
            chat.parse_response([97], [98])


async def test_an_engine_names_the_folder_without_a_tokenizer() -> None:
    config = EngineConfig(runner="synthetic", process="inline", tokenizer="transformers", model="no/such/folder")
    with pytest.raises(CheckpointError, match="no/such/folder"):
        await Engine(config).start()
