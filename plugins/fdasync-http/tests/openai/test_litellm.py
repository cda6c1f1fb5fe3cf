"""`litellm` on a live server: whole, streamed, tools, log-probs, and errors as classes of its own."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
from pathlib import Path

import httpx2
import pytest

from fdasync.testing import until

pytestmark = pytest.mark.nightly
CLIENT = Path(__file__).with_name("litellm_client.py")
KEY = "sk-0123456789abcdef"
LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
CALL = '{"name": "look", "arguments": {"at": 1}}'


@pytest.fixture
def litellm(tmp_path):
    """Calls it in its own Python; skips where it is not installed."""
    beside = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    found = shutil.which("litellm", path=beside)
    if found is None:
        pytest.skip("litellm is not installed: pip install './plugins/fdasync-http[proof]', or put it on PATH")
    python = str(Path(found).parent / "python")

    async def call(url, case, **given):
        clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        process = await asyncio.create_subprocess_exec(
            python, str(CLIENT), f"{url}/v1", case, json.dumps(given), cwd=tmp_path,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
            # it would fetch prices of models at its import
            env={**clean, "LITELLM_LOCAL_MODEL_COST_MAP": "True", "HOME": str(tmp_path)},
        )  # fmt: skip
        async with asyncio.timeout(300):
            out, err = await process.communicate()
        assert process.returncode == 0, err.decode()
        return json.loads(out.decode().splitlines()[-1])

    return call


async def test_whole_and_streamed_answers(chat_of, litellm):
    async with chat_of() as (scene, openai):
        sent = {"seed": 3, "max_tokens": 7}
        want = await openai.chat.completions.create(model="any", messages=[{"role": "user", "content": "hi"}], **sent)
        content = want.choices[0].message.content
        whole = await litellm(scene.url, "chat", **sent, n=2, logprobs=True, top_logprobs=1)
        assert (whole["content"], whole["finish_reason"], whole["choices"]) == (content, "length", 2)
        assert len(whole["logprobs"]) == 7
        streamed = await litellm(scene.url, "stream", **sent)
        assert (streamed["content"], streamed["finish_reason"], streamed["tokens"]) == (content, "length", 7)
        # slow readers get fewer, longer deltas
        assert streamed["chunks"] > 3
        for prompt in ("abc", [1, 2, 3]):
            made = await openai.completions.create(model="any", prompt=prompt, **sent)
            assert await litellm(scene.url, "text", prompt=prompt, **sent) == {
                "text": made.choices[0].text,
                "tokens": 7,
            }


async def test_tools(chat_of, scripted, litellm):
    model = scripted(["I see. ", "<tool_call>", CALL, "</tool_call>"], tools=[LOOK])
    async with chat_of(tokenizer=model.tokenizer) as (scene, _):
        for case in ("chat", "stream"):
            made = await litellm(scene.url, case, tools=[LOOK], **model.sampling)
            ((name, arguments),) = made["calls"]
            assert (name, json.loads(arguments), made["finish_reason"]) == ("look", {"at": 1}, "tool_calls")
            assert made["content"] == "I see."


async def test_errors_are_its_classes(chat_of, litellm):
    async with chat_of(api_key=KEY, dialect="vllm", max_live=1) as (scene, _):

        async def error(**given):
            made = await litellm(scene.url, "error", **{"api_key": KEY, **given})
            return made["class"], made["status"]

        # agents cut their conversations at this one
        long = [{"role": "user", "content": "a" * 300}]
        assert await error(messages=long) == ("ContextWindowExceededError", 400)
        assert await error(temperature=-1) == ("BadRequestError", 400)
        assert await error(extra_body={"nonsense": 1}) == ("BadRequestError", 400)
        assert await error(api_key="sk-wrong-0123456789") == ("AuthenticationError", 401)
        assert await error(model="openai/other") == ("NotFoundError", 404)
        body = {"prompt": [1, 2, 3], "max_tokens": 200, "ignore_eos": True}
        async with httpx2.AsyncClient(
            base_url=scene.url, timeout=300, headers={"authorization": f"Bearer {KEY}"}
        ) as client:
            await scene.generator.pause()
            held = asyncio.ensure_future(client.post("/v1/completions", json=body))
            await until(lambda: scene.generator.load().live == 1)
            assert await error() == ("RateLimitError", 429)
            await scene.generator.resume()
            assert (await held).status_code == 200
