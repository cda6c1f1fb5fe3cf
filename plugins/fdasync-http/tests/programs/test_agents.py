"""Agents and their clients at processes of `fdasync http`: one engine, and a prefill and a decode instance."""

from __future__ import annotations

import json

import pytest
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI

pytest.importorskip("agents", reason="not installed: pip install './plugins/fdasync-http[agents]'")
from agents import Agent, ModelSettings, OpenAIResponsesModel, RunConfig, Runner

pytestmark = pytest.mark.nightly
USER = {"role": "user", "content": "hi"}
SENT = {"seed": 7, "ignore_eos": True}


@pytest.mark.parametrize("options", [(), ("--prefill", "1", "--decode", "1")], ids=["engine", "router"])
async def test_every_client_gets_the_same_answer(front_of, options):
    async with (
        front_of(*options) as front,
        AsyncOpenAI(base_url=f"{front.url}/v1", api_key="none", max_retries=0, timeout=60.0) as openai,
        AsyncAnthropic(base_url=front.url, api_key="none", max_retries=0, timeout=60.0) as claude,
    ):
        chat = await openai.chat.completions.create(model="any", messages=[USER], max_tokens=9, extra_body=SENT)
        text = chat.choices[0].message.content
        assert text
        response = await openai.responses.create(model="any", input="hi", max_output_tokens=9, extra_body=SENT)
        assert (response.output_text, response.usage.output_tokens) == (text, 9)
        async with openai.responses.stream(model="any", input="hi", max_output_tokens=9, extra_body=SENT) as stream:
            deltas = [event.delta async for event in stream if event.type == "response.output_text.delta"]
        assert "".join(deltas) == text
        message = await claude.messages.create(model="any", messages=[USER], max_tokens=9, extra_body=SENT)
        assert (message.content[0].text, message.stop_reason) == (text, "max_tokens")
        async with claude.messages.stream(model="any", messages=[USER], max_tokens=9, extra_body=SENT) as stream:
            assert "".join([delta async for delta in stream.text_stream]) == text
        counted = await claude.messages.count_tokens(model="any", messages=[USER])
        assert counted.input_tokens == chat.usage.prompt_tokens == response.usage.input_tokens
        agent = Agent(
            name="a", model=OpenAIResponsesModel(model="any", openai_client=openai),
            # an answer that is cut is an error to these agents: the stop ends it
            model_settings=ModelSettings(extra_body={"seed": 7, "stop_token_ids": list(range(272))}),
        )  # fmt: skip
        result = await Runner.run(agent, "hi", run_config=RunConfig(tracing_disabled=True))
        assert result.context_wrapper.usage.output_tokens == 1
        rendered = await openai.post(
            "/chat/completions/render", body={"messages": [USER], "max_tokens": 9, **SENT}, cast_to=object
        )
        assert len(rendered["token_ids"]) == counted.input_tokens
        assert json.dumps(rendered)
