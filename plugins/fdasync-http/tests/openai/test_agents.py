"""Agents by `openai-agents` and by Anthropic's tool runner: loops of theirs, which call tools and go on."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager

import pytest
from anthropic import AsyncAnthropic, beta_async_tool

pytest.importorskip("agents", reason="not installed: pip install './plugins/fdasync-http[agents]'")
from agents import Agent, ModelSettings, OpenAIResponsesModel, RunConfig, Runner, function_tool
from agents.exceptions import ModelBehaviorError

CALL = '{"name": "look", "arguments": {"at": "home"}}'
SHOWN = [{"function": {"name": "look"}}]
SYSTEM = {"role": "system", "content": "Look, then say."}
USER = {"role": "user", "content": "hi"}
TURN = [SYSTEM, USER, {"role": "assistant", "content": ""}, {"role": "tool", "content": "a cat at home"}]
PIECES = ["<tool_call>", CALL[:9], CALL[9:], "</tool_call>"]


@pytest.fixture
def model(scripted_turns):
    """Calls `look`, and says what it saw."""
    return scripted_turns([(PIECES, [SYSTEM, USER]), (["A cat", " is", " there."], TURN)], tools=SHOWN)


async def looked(place: str) -> str:
    return f"a cat at {place}"


@pytest.fixture
def agent_of():
    """An agent of `openai-agents` with a tool, and how it is run: without traces, which would leave the machine."""

    def make(openai, model):
        @function_tool
        async def look(at: str) -> str:
            return await looked(at)

        agent = Agent(
            name="seer", instructions="Look, then say.", tools=[look],
            model=OpenAIResponsesModel(model="any", openai_client=openai),
            model_settings=ModelSettings(extra_body=model.more, max_tokens=30),
        )  # fmt: skip
        return agent, RunConfig(tracing_disabled=True)

    return make


@pytest.mark.parametrize("kind", ["engine", "router"])
async def test_an_agent_of_openai_calls_a_tool_and_says_what_it_saw(chat_of, model, agent_of, kind):
    async with chat_of(kind, tokenizer=model.tokenizer) as (_, openai):
        agent, config = agent_of(openai, model)
        result = await Runner.run(agent, "hi", run_config=config)
        assert result.final_output == "A cat is there."
        assert [item.type for item in result.new_items] == ["tool_call_item", "tool_call_output_item",
                                                            "message_output_item"]  # fmt: skip
        assert result.context_wrapper.usage.requests == 2
        assert result.context_wrapper.usage.output_tokens == len(PIECES) + 1 + 3 + 1
        streamed = Runner.run_streamed(agent, "hi", run_config=config)
        deltas = [
            event.data.delta
            async for event in streamed.stream_events()
            if event.type == "raw_response_event" and event.data.type == "response.output_text.delta"
        ]
        assert streamed.final_output == "".join(deltas) == "A cat is there."


async def test_an_agent_of_openai_is_told_that_its_answer_was_cut(chat_of, scripted_turns, agent_of):
    model = scripted_turns([(["A", " cat"], [SYSTEM, USER])], tools=SHOWN)
    async with chat_of(tokenizer=model.tokenizer) as (_, openai):
        agent, config = agent_of(openai, model)
        agent.model_settings.max_tokens = 1
        with pytest.raises(ModelBehaviorError, match="max_output_tokens"):
            await Runner.run(agent, "hi", run_config=config)


@asynccontextmanager
async def claude_at(scene):
    async with AsyncAnthropic(base_url=scene.url, api_key="none", max_retries=0, timeout=300.0) as client:
        yield client


@pytest.mark.parametrize("kind", ["engine", "router"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_tool_runner_of_anthropic_s_goes_on_with_results(chat_of, model, kind, stream):
    @beta_async_tool
    async def look(at: str) -> str:
        """Looks.

        Args:
            at: where.
        """
        return await looked(at)

    async with chat_of(kind, tokenizer=model.tokenizer) as (scene, _), claude_at(scene) as client:
        runner = client.beta.messages.tool_runner(
            model="any", max_tokens=30, tools=[look], system="Look, then say.", messages=[USER], stream=stream,
            extra_body=model.more,
        )  # fmt: skip
        called, said = [await one.get_final_message() if stream else one async for one in runner]
        assert (called.stop_reason, said.stop_reason) == ("tool_use", "end_turn")
        assert called.content[0].input == {"at": "home"}
        assert said.content[0].text == "A cat is there."
        tools = model.tokenizer.asked[-1]["tools"]
        assert tools[0]["function"]["parameters"]["required"] == ["at"]
        assert json.dumps(tools)
