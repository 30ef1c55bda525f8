"""The command as a person and a script use it, against a worker around the fake engine on the real broker."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from click.testing import Result
from typer.testing import CliRunner

from service.cli.main import app
from service.settings import Settings
from tests.support.pool import delete_topics, serving, settings_for

Gearshift = Callable[..., Awaitable[Result]]


@pytest.fixture
async def pool(bootstrap) -> AsyncIterator[Settings]:
    settings = settings_for(bootstrap)
    async with serving(settings, step_s=0.001):
        yield settings
    await delete_topics(settings)


@pytest.fixture
def gearshift(pool) -> Gearshift:
    """``await gearshift("send", "llama", "hello")``: one command, in a thread beside the worker's loop."""
    where = ["--bootstrap-servers", pool.kafka.bootstrap_servers, "--topic-prefix", pool.topics.topic_prefix]

    async def run(*words: str) -> Result:
        return await asyncio.to_thread(CliRunner().invoke, app, [*words, *where])

    return run


def lines(result: Result) -> list[dict]:
    return [json.loads(line) for line in result.stdout.splitlines()]


async def test_a_prompt_is_answered_by_its_model(gearshift):
    result = await gearshift("send", "qwen", "hello", "--max-tokens", "3")
    assert result.exit_code == 0, result.output
    assert "qwen0 qwen1 qwen2" in result.output
    assert "3 tokens" in result.output


async def test_a_script_gets_one_json_object(gearshift):
    result = await gearshift(
        "send", "--body", '{"model": "llama", "prompt": "x", "max_tokens": 2}', "--json", "--id", "r1"
    )
    (found,) = lines(result)
    assert (found["id"], found["outcome"]) == ("r1", "completed")
    assert found["body"]["choices"][0]["text"] == "llama0 llama1 "


async def test_a_stream_is_printed_as_it_comes(gearshift):
    result = await gearshift("send", "llama", "hello", "--stream", "--max-tokens", "4")
    assert result.exit_code == 0
    assert "llama0 llama1 llama2 llama3" in result.output


async def test_a_failed_request_is_said_and_the_exit_code_tells(gearshift):
    result = await gearshift("send", "lama", "hello")
    assert result.exit_code == 1
    assert "404" in result.output
    assert "'llama'" in result.output


async def test_a_switch_is_told_step_by_step_with_its_milliseconds(gearshift):
    result = await gearshift("switch", "qwen")
    assert result.exit_code == 0, result.output
    for step in ("accepted", "switching", "completed", " ms"):
        assert step in result.output
    again = await gearshift("switch", "qwen", "--json")
    assert [status["state"] for status in lines(again)] == ["no_op"]


async def test_a_switch_to_an_unknown_model_is_rejected_with_the_nearest_one(gearshift):
    result = await gearshift("switch", "qwem")
    assert result.exit_code == 1
    assert "rejected" in result.output
    assert "'qwen'" in result.output


async def test_any_control_event_can_be_sent(gearshift):
    for words in (("pin", "model=qwen"), ("pause",), ("resume",), ("reset_cache",), ("lora.list",)):
        result = await gearshift("control", *words)
        assert result.exit_code == 0, (words, result.output)
        assert "completed" in result.output


async def test_a_misspelt_control_event_is_a_usage_error(gearshift):
    result = await gearshift("control", "puase")
    assert "'pause'" in str(result.exception)


async def test_results_and_the_pool_are_listed(gearshift, pool):
    await gearshift("send", "llama", "hello", "--id", "r7", "--max-tokens", "2")
    past = await gearshift("results", "--past", "--no-follow")
    assert "r7" in past.output
    status = await gearshift("status", "--json")
    (presence,) = lines(status)
    assert presence["pool"] == pool.worker.group_id
    table = await gearshift("status")
    assert "serving" in table.output


async def test_a_sent_request_can_be_asked_about_and_cancelled(gearshift):
    sent = await gearshift("send", "llama", "hello", "--max-tokens", "100000", "--no-wait", "--id", "long")
    assert sent.stdout.strip() == "long"
    found: list[dict] = []
    async with asyncio.timeout(30):
        while not found:  # on the bus, but perhaps not read yet
            answer = await gearshift("query", "long", "--json")
            found = [place for worker in lines(answer)[0].values() for place in worker["found"]]
    assert [place["model"] for place in found] == ["llama"]
    await gearshift("cancel", "long")
    result = await gearshift("send", "llama", "hello", "--max-tokens", "2")
    assert result.exit_code == 0
    past = await gearshift("results", "--past", "--no-follow", "--json")
    assert {found["id"]: found["outcome"] for found in lines(past)}["long"] == "cancelled"


async def test_topics_are_made_once(gearshift):
    await gearshift("send", "llama", "hello", "--max-tokens", "1")  # the worker has made them by now
    result = await gearshift("topics", "create")
    assert result.exit_code == 0, result.output
    assert "all there" in result.output
