"""``gearshift send`` and ``results``: what is asked of a client, and what is shown of whatever comes."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest
from typer.testing import CliRunner

from schemas.base import Origin
from schemas.requests import Endpoint
from schemas.results import Chunk, Outcome, Result, Timing
from service.cli.ask import answered, text_of
from service.cli.main import app
from service.client import Client, Options, Stream
from service.client.asking import GRACE_S
from service.client.feed import Box
from service.errors import ConfigError

OPTIONS = {"request_id": "r", "priority": None, "timeout_s": 7.0}


def result(body: dict[str, Any] | None, *, endpoint: str = Endpoint.CHAT) -> Result:
    return Result(
        id="r",
        origin=Origin(topic="requests", partition=0, offset=0),
        outcome=Outcome.COMPLETED,
        status=200,
        endpoint=endpoint,
        body=body,
        timing=Timing(received=0, finished=1),
    )


class Asked:
    """A client that keeps what it is asked, and streams ``pieces``."""

    def __init__(self, *pieces: dict[str, Any]) -> None:
        self.pieces = pieces
        self.asked: list[tuple[Any, ...]] = []
        self.waits_s = 0.0

    async def submit(self, body: dict[str, Any], *, endpoint: Endpoint | None, **options: Any) -> str:
        self.asked.append((endpoint, body, options))
        return "r"

    async def result(self, request_id: str, *, timeout_s: float) -> Result:
        self.waits_s = timeout_s
        return result({})

    def stream_of(self, endpoint: Endpoint | None, body: dict[str, Any], options: Options) -> Stream:
        said = {name: getattr(options, name) for name in OPTIONS}
        self.asked.append((endpoint, body, said))

        @asynccontextmanager
        async def opened() -> AsyncIterator[Box[Chunk | Result]]:
            box: Box[Chunk | Result] = Box("r", "result")
            for seq, data in enumerate(self.pieces):
                box.put(Chunk(id="r", seq=seq, data=data))
            box.put(Chunk(id="r", seq=len(self.pieces), final=True))
            box.put(result({}))
            yield box

        return Stream(request_id="r", endpoint=endpoint, opened=opened, within_s=5)


async def asked(client: Asked, body: dict[str, Any], endpoint: Endpoint | None, *, as_it_comes: bool) -> Result | None:
    return await answered(cast("Client", client), body, endpoint, OPTIONS, as_it_comes=as_it_comes)


@pytest.mark.parametrize("endpoint", [None, Endpoint.MESSAGES])
@pytest.mark.parametrize("body", [{"model": "llama", "messages": [], "priority": 7}, {"messages": [], "key": "x"}])
async def test_a_stream_asks_for_what_is_asked_for_without_one(body: dict[str, Any], endpoint: Endpoint | None) -> None:
    client = Asked()
    for as_it_comes in (True, False):
        assert await asked(client, body, endpoint, as_it_comes=as_it_comes)
    assert client.asked == [(endpoint, body, OPTIONS)] * 2


async def test_a_result_that_says_that_its_deadline_has_passed_is_waited_for() -> None:
    client = Asked()
    await asked(client, {"messages": []}, None, as_it_comes=False)
    assert client.waits_s == OPTIONS["timeout_s"] + GRACE_S


@pytest.mark.parametrize(
    ("endpoint", "pieces"),
    [
        (Endpoint.CHAT, [{"choices": [{"delta": {"content": "a"}}]}, {"choices": []}]),
        (Endpoint.COMPLETIONS, [{"choices": [{"text": "a"}]}]),
        (None, [{"choices": [{"delta": {"content": "a"}}]}, {"choices": [{"delta": {"content": None}}]}]),
        (Endpoint.MESSAGES, [{"type": "content_block_delta", "delta": {"text": "a"}}, {"type": "message_stop"}]),
        (Endpoint.RESPONSES, [{"type": "response.output_text.delta", "delta": "a"}, {"type": "x", "delta": "b"}]),
    ],
)
async def test_the_text_of_a_stream_is_shown_whatever_its_endpoint(
    endpoint: Endpoint | None, pieces: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    await asked(Asked(*pieces), {"messages": []}, endpoint, as_it_comes=True)
    assert capsys.readouterr().out == "a\n"


@pytest.mark.parametrize("choices", ["x", {"a": 1}, [None], 5, [{"message": "text"}], [5], []])
def test_a_body_of_another_shape_is_shown_as_it_is(choices: Any) -> None:
    body = {"choices": choices}
    assert json.loads(text_of(result(body))) == body


@pytest.mark.parametrize("content", ["text", 5, [None], {"a": 1}, [{"text": 5}]])
def test_so_is_a_message_of_another_shape(content: Any) -> None:
    body = {"content": content}
    assert json.loads(text_of(result(body, endpoint=Endpoint.MESSAGES))) == body


def test_what_a_model_said_is_its_text() -> None:
    assert text_of(result({"choices": [{"message": {"content": "a"}}]})) == "a"
    assert text_of(result({"choices": [{"text": "a"}]})) == "a"
    blocks = {"content": [{"text": "a"}, {"type": "tool_use"}]}
    assert text_of(result(blocks, endpoint=Endpoint.MESSAGES)) == 'a\n{"type": "tool_use"}'


@pytest.mark.parametrize(
    ("words", "given", "reason"),
    [
        (["send", "llama", "-"], b"\xff", "standard input: it is no text in UTF-8"),
        (["send", "--body", "-"], b"{\xff}", "standard input: it is no text in UTF-8"),
        (["send", "llama", "a", "--endpoint", "/v1/mesages"], b"", "did you mean '/v1/messages'?"),
    ],
)
def test_what_can_not_be_sent_is_wrong_usage(words: list[str], given: bytes, reason: str) -> None:
    found = CliRunner().invoke(app, words, input=given)
    assert isinstance(found.exception, ConfigError)
    assert reason in str(found.exception)
