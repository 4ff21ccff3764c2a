"""openai-agents with its default model class, which uses the Responses API: tools, typed output, sessions, streams."""

from __future__ import annotations

from typing import Any

import openai
from agents import (
    Agent,
    ModelSettings,
    OpenAIResponsesModel,
    Runner,
    SQLiteSession,
    function_tool,
    set_default_openai_client,
    set_tracing_disabled,
)
from checks import BASE, MODEL, PERSON, SUM, WEATHER, check, refused, run
from pydantic import BaseModel

set_tracing_disabled(True)
GREEDY = ModelSettings(temperature=0, max_tokens=150)
ASKED: list[str] = []


class Person(BaseModel):
    name: str
    age: int


@function_tool
def get_weather(city: str) -> str:
    """Get the current weather of a city"""
    ASKED.append(city)
    return '{"temperature": 21, "sky": "sunny"}'


def agent(**options: Any) -> Agent[Any]:
    # A client belongs to the event loop of its check.
    set_default_openai_client(openai.AsyncOpenAI(base_url=BASE, api_key="none", max_retries=0))
    return Agent(**{"name": "Assistant", "model": MODEL, "model_settings": GREEDY} | options)


@check
def default_model_class() -> None:
    from agents.models.openai_provider import OpenAIProvider

    assert isinstance(OpenAIProvider().get_model(MODEL), OpenAIResponsesModel)


@check
async def plain() -> None:
    result = await Runner.run(agent(instructions="You are a helpful assistant."), SUM)
    assert "42" in result.final_output
    used = result.context_wrapper.usage
    assert used.output_tokens > 0 and used.total_tokens == used.input_tokens + used.output_tokens


@check
async def tool_is_called_and_answered() -> None:
    ASKED.clear()
    result = await Runner.run(agent(tools=[get_weather]), WEATHER)
    assert ASKED == ["Paris"] and "sunny" in result.final_output


@check
async def streamed_with_a_tool() -> None:
    ASKED.clear()
    result = Runner.run_streamed(agent(tools=[get_weather]), WEATHER)
    kinds = [e.data.type async for e in result.stream_events() if e.type == "raw_response_event"]
    assert ASKED == ["Paris"] and "sunny" in result.final_output
    assert {"response.function_call_arguments.done", "response.output_text.delta", "response.completed"} <= {*kinds}


@check
async def typed_output() -> None:
    result = await Runner.run(agent(output_type=Person), PERSON)
    assert result.final_output == Person(name="Tom", age=9)


@check
async def previous_response_id() -> None:
    first = await Runner.run(agent(), "My name is Anna.")
    again = await Runner.run(agent(), "What is my name?", previous_response_id=first.last_response_id)
    assert "Anna" in again.final_output


@check
async def session() -> None:
    """The client keeps the conversation and sends its items back."""
    session = SQLiteSession("one")
    await Runner.run(agent(), "My name is Anna.", session=session)
    assert "Anna" in (await Runner.run(agent(), "What is my name?", session=session)).final_output


@check
async def handoff() -> None:
    other = agent(name="Weather", tools=[get_weather])
    forced = ModelSettings(temperature=0, max_tokens=150, tool_choice="required")
    result = await Runner.run(agent(handoffs=[other], model_settings=forced), WEATHER)
    assert result.last_agent.name == "Weather", result.final_output


@check
def errors_have_their_types() -> None:
    e = refused(openai.NotFoundError, lambda: Runner.run_sync(agent(model="other"), "x"))
    assert e.code == "model_not_found"


run("openai-agents")
