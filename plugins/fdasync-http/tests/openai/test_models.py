"""`/v1/models`, `/tokenize` and `/detokenize`; and a checkpoint's own tokenizer behind all of them."""

from __future__ import annotations

import json

import pytest
from fdasync_http.openai.declared import DeclaredReader
from fdasync_http.openai.tools import TagReader

from fdasync.testing import LetterTokenizer

USER = {"role": "user", "content": "hi"}
END = "<|im_end|>"
TEMPLATE = """
{%- if tools %}call <tool_call>{"name": n, "arguments": {}}</tool_call>{{ tools[0].function.name }}{% endif %}
{%- for message in messages %}{{ message.role }}: {{ message.content }}<|im_end|>{% endfor %}
{%- if add_generation_prompt %}assistant:{% endif %}"""
LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


@pytest.mark.parametrize("dialect", ["sglang", "vllm"])
async def test_models_name_the_dialect_and_the_context(chat_of, dialect):
    async with chat_of(dialect=dialect, model="org/name") as (scene, openai):
        (card,) = (await openai.models.list()).data
        assert (card.id, card.object, card.owned_by, card.max_model_len) == ("org/name", "model", dialect, 256)
        assert (await openai.models.retrieve("org/name")) == card
        assert (await scene.client.get("/v1/models")).json()["object"] == "list"
        made = await openai.completions.create(model="org/name", prompt=[1], max_tokens=1)
        assert made.model == "org/name"


async def test_text_to_tokens_and_back(chat_of):
    async with chat_of() as (scene, _):

        async def post(path, **body):
            response = await scene.client.post(path, json=body)
            return response.json() if response.status_code == 200 else response.json()["error"]["param"]

        told = await post("/tokenize", model="any", prompt="abc", add_special_tokens=False, return_token_strs=True)
        assert told == {"tokens": [10, 11, 12], "count": 3, "max_model_len": 256, "token_strs": ["a", "b", "c"]}
        told = await post("/tokenize", prompt=["a", "bc"])
        assert (told["tokens"], told["count"]) == ([[10], [11, 12]], [1, 2])
        chat = await post("/tokenize", messages=[USER], tools=[LOOK])
        assert (await post("/detokenize", tokens=chat["tokens"]))["text"] == "[look]<user>hi<assistant>"
        told = await post("/tokenize", messages=[USER], add_generation_prompt=False)
        assert (await post("/detokenize", tokens=told["tokens"]))["prompt"] == "<user>hi"
        assert (await post("/detokenize", tokens=[[10], []]))["text"] == ["a", ""]
        assert await post("/tokenize") == await post("/tokenize", prompt="a", messages=[USER]) == "prompt"
        assert await post("/tokenize", prompt="a" * 20_000) == "prompt"
        for tokens in ([-1], [1000], [[1], 2], ["a"]):
            assert (await post("/detokenize", tokens=tokens)).startswith("tokens")
        assert await post("/detokenize", tokens=[1], skip_special_tokens=False) == "skip_special_tokens"


async def test_without_a_chat_tokenizer_chats_are_refused(chat_of):
    async with chat_of(tokenizer=LetterTokenizer()) as (scene, openai):
        response = await scene.client.post("/v1/chat/completions", json={"messages": [USER]})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "messages")
        made = await openai.chat.completions.create(
            model="any", messages=[USER], max_tokens=4, extra_body={"input_ids": [1, 2, 3]}
        )
        assert len(made.choices[0].message.content) == 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint's tokenizer: a token for each byte, special ones behind them."""
    checkpoints = pytest.importorskip("fdasync_transformers.weights.random_checkpoints")
    path = tmp_path_factory.mktemp("tokenizer")
    checkpoints.write_tokenizer(path)
    config = path / "tokenizer_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "chat_template": TEMPLATE}))
    return path


def load(folder):
    from fdasync_transformers.tokenizer import load_tokenizer

    return load_tokenizer(str(folder))


async def test_a_checkpoint_with_a_jinja_template(chat_of, folder):
    tokenizer = load(folder)
    async with chat_of(tokenizer=tokenizer) as (scene, openai):
        for tools, text in (([], ""), ([LOOK], 'call <tool_call>{"name": n, "arguments": {}}</tool_call>look')):
            made = await openai.chat.completions.create(
                model="any", messages=[USER, {"role": "system", "content": "é"}], max_tokens=4, tools=tools,
                extra_body={"return_token_ids": True},
            )  # fmt: skip
            text += f"user: hi{END}system: é{END}assistant:"
            assert made.prompt_token_ids == tokenizer.encode(text)
        shown = await scene.client.post(
            "/detokenize", json={"tokens": made.prompt_token_ids, "skip_special_tokens": False}
        )
        assert shown.json()["text"] == text
        hidden = await scene.client.post("/detokenize", json={"tokens": made.prompt_token_ids})
        assert hidden.json()["text"] == text.replace(END, "")


def test_an_answer_is_read_alike_however_it_comes(folder, tmp_path):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    config = tmp_path / "tokenizer_config.json"
    fields = {
        "thinking": {"open": "<think>", "close": "</think>"}, "content": {"close": END},
        "tool_calls": {
            "open": "<tool_call>", "close": "</tool_call>", "content": "json", "repeats": True,
            "transform": {"type": "function", "function": "{content}"},
        },
    }  # fmt: skip
    template = {"start_anchor": "assistant:", "fields": fields, "defaults": {"role": "assistant"}}
    config.write_text(json.dumps({**json.loads(config.read_text()), "response_template": template}))
    tokenizer = load(tmp_path)
    prompt = tokenizer.apply_chat_template([USER])
    call = '<tool_call>{"name": "look", "arguments": {"at": "é"}}</tool_call>'
    thought, said = "It may well be that this takes some thought, or so.", "It is there, as far as I see. " * 4
    text = f"<think>{thought}</think>{said}{call}{call}"
    tokens = tokenizer.encode(text + END)
    whole = DeclaredReader(tokenizer, prompt, [LOOK], ()).end(text, tokens)
    assert (whole.content, whole.reasoning) == (said.strip(), thought)
    assert [(made.name, json.loads(made.arguments)) for made in whole.calls] == [("look", {"at": "é"})] * 2
    reader = DeclaredReader(tokenizer, prompt, [LOOK], ())
    parts = [reader.add("", [token]) for token in tokens]
    parts.append(reader.end(text, ()))
    assert "".join(one.content for one in parts) == whole.content
    assert "".join(one.reasoning for one in parts) == whole.reasoning
    assert [made[:2] for one in parts for made in one.calls] == [made[:2] for made in whole.calls]
    # most of it came before the end
    assert sum(bool(one.content) for one in parts[:-1]) > 3
    assert [made[:2] for made in TagReader().end(call, ()).calls] == [made[:2] for made in whole.calls[:1]]
