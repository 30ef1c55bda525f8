"""A tool called and answered by a model that was trained to: through OpenAI's client and over the bus."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.support.doors import Doors, open_doors
from tests.support.models import CITIES, question

pytestmark = [pytest.mark.engine, pytest.mark.broker]

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL: Any = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}
COMMON: Any = {"model": "caller", "max_tokens": 120, "temperature": 0}


@pytest.fixture(scope="module")
async def doors(vllm_engine: Any, broker: Any) -> AsyncIterator[Doors]:
    async with open_doors(vllm_engine, broker.bootstrap) as opened:
        yield opened


@pytest.fixture(params=["bus", "http"])
def create(request: pytest.FixtureRequest, doors: Doors) -> Any:
    """How to ask for a chat completion: the same keywords at both doors."""
    return {"bus": doors.bus.chat, "http": doors.openai.chat.completions.create}[request.param]


def asked(city: str) -> list[Any]:
    return [{"role": "user", "content": question(city)}]


@pytest.mark.parametrize("city", CITIES[:2])
async def test_a_tool_is_called_and_its_answer_is_told(create: Any, city: str) -> None:
    first = (await create(messages=asked(city), tools=[TOOL], tool_choice="auto", **COMMON)).choices[0]
    assert first.finish_reason == "tool_calls"
    (call,) = first.message.tool_calls
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments) == {"city": city}
    messages = [
        *asked(city),
        {"role": "assistant", "tool_calls": [call.model_dump()]},
        {"role": "tool", "tool_call_id": call.id, "content": "rain"},
    ]
    last = (await create(messages=messages, tools=[TOOL], tool_choice="auto", **COMMON)).choices[0]
    assert last.finish_reason == "stop"
    assert last.message.content.strip() == f"There is rain in {city}."


async def test_what_the_model_thinks_is_told_apart_from_what_it_says(create: Any) -> None:
    message = (await create(messages=asked("Lima"), **COMMON)).choices[0].message
    assert message.content.strip() == "I can not know."
    assert message.reasoning.strip() == "I have no tool."
    assert not message.tool_calls


async def test_a_tool_call_comes_in_pieces_that_make_the_whole(doors: Doors) -> None:
    body = {"messages": asked("Kyoto"), "tools": [TOOL], "tool_choice": "auto", **COMMON}
    over_http = [piece async for piece in await doors.openai.chat.completions.create(**body, stream=True)]
    over_bus = [piece async for piece in doors.bus.stream(**body)]
    for pieces in (over_http, over_bus):
        deltas = [choice.delta for piece in pieces for choice in piece.choices]
        calls = [call for delta in deltas for call in delta.tool_calls or ()]
        assert [call.function.name for call in calls if call.function.name] == ["weather"]
        assert json.loads("".join(call.function.arguments or "" for call in calls)) == {"city": "Kyoto"}
        assert pieces[-1].choices[0].finish_reason == "tool_calls"


async def test_a_response_calls_a_tool_too(doors: Doors) -> None:
    tool: Any = {"type": "function", "name": "weather", "parameters": PARAMETERS}
    answer = await doors.openai.responses.create(
        model="caller", input=question("Cairo"), tools=[tool], max_output_tokens=120, temperature=0
    )
    (call,) = [item for item in answer.output if item.type == "function_call"]
    assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "Cairo"})
