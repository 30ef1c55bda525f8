"""A stream that vLLM's handlers make: its events are read as they are, and one that can't be read is one failure."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from schemas.requests import Endpoint
from service.engine.answering.answers import Answers
from service.engine.answering.runs import Run
from service.errors import HandedBack
from service.ports import Answer, Call

pytest.importorskip("vllm")

CALL = Call(id="c", alias="llama", endpoint=Endpoint.COMPLETIONS, body={"model": "llama", "stream": True})
ENDS_OF_LINES = ["\u0085", "\u2028", "\u2029"]
"""What Python's ``splitlines`` takes for the end of one, and JSON may have as it is."""


def event(**said: Any) -> str:
    return f"data: {json.dumps(said, ensure_ascii=False)}\n\n"


async def answered(*pieces: str | bytes, chunk_fails: Exception | None = None) -> tuple[Answer, list[dict[str, Any]]]:
    """What a server comes to whose route streams these pieces, and says the whole where no stream is asked for."""
    from fastapi import FastAPI
    from pydantic import BaseModel
    from starlette.requests import Request
    from starlette.responses import JSONResponse, Response, StreamingResponse

    class Body(BaseModel):
        stream: bool = False

    app, chunks = FastAPI(), []

    async def complete(body: Body, raw_request: Request) -> Response:
        async def stream() -> AsyncIterator[str | bytes]:
            for piece in pieces:
                yield piece

        return StreamingResponse(stream(), media_type="text/event-stream") if body.stream else JSONResponse({"a": 1})

    complete.__annotations__ |= {"body": Body, "raw_request": Request}
    app.post(Endpoint.COMPLETIONS, response_model=None)(complete)

    @app.exception_handler(Exception)
    @app.exception_handler(ValueError)
    async def explain(_request: Request, error: Exception) -> Response:
        return JSONResponse({"error": {"message": str(error)}}, 400 if isinstance(error, ValueError) else 500)

    async def sink(chunk: dict[str, Any]) -> None:
        chunks.append(chunk)
        if chunk_fails is not None:
            raise chunk_fails

    nobody: Any = None  # no request is made of an engine
    return await Answers(app, nobody, nobody).answer(CALL, Run("c"), sink), chunks


@pytest.mark.parametrize("encode", [str, str.encode])
@pytest.mark.parametrize("end", ENDS_OF_LINES, ids=ascii)
async def test_an_event_ends_with_its_line_and_not_with_what_its_text_has(end: str, encode: Any) -> None:
    text = f"one{end}two"
    pieces = [event(text=text), "event: named\n" + event(text=text) + event(n=2), "data: [DONE]\n\n"]
    answer, chunks = await answered(*map(encode, pieces))
    assert (answer.status, answer.body) == (200, {"a": 1})
    assert chunks == [{"text": text}, {"text": text}, {"n": 2}]


async def test_a_stream_that_cannot_be_read_is_a_failure_of_its_own_call() -> None:
    answer, chunks = await answered(event(n=1), 'data: {"text": "cut o\n\n', event(n=2))
    assert (answer.status, answer.retriable, chunks) == (500, True, [{"n": 1}])
    assert "JSONDecodeError" in answer.body["error"]["message"]


@pytest.mark.parametrize("error", [HandedBack("no memory"), ConnectionError("the broker is gone")])
async def test_what_its_reader_fails_by_is_no_answer(error: Exception) -> None:
    with pytest.raises(type(error), match=str(error)):
        await answered(event(n=1), chunk_fails=error)
