"""An answer as HTTP has it: whole, or as a stream in the framing of vLLM's server, while its client is there."""

import asyncio
import base64
import json
from collections.abc import Coroutine, Mapping
from typing import Any, Protocol

from pydantic_core import to_json
from starlette.responses import JSONResponse, Response
from starlette.types import Message, Receive, Scope, Send

from schemas.errors import ErrorObject
from schemas.requests import Endpoint
from schemas.results import Chunk, Outcome, Result
from service.http import errors

_SSE = "text/event-stream; charset=utf-8"
_OBJECTIVE = "x-gearshift-objective"
_BINARY = {"content_type", "metadata", "data_base64"}
_NAMED = frozenset({Endpoint.RESPONSES, Endpoint.MESSAGES})
"""Their events have names, and their streams no end mark."""


class Pieces(Protocol):
    """What comes of one request: pieces of a stream, if one was asked for, then the result."""

    async def next(self) -> Chunk | Result: ...


async def reply(
    pieces: Pieces, endpoint: Endpoint, headers: Mapping[str, str], scope: Scope, receive: Receive, send: Send
) -> None:
    """The first thing that comes decides: a stream begins with a piece, everything else is the result."""
    first = await pieces.next()
    while isinstance(first, Chunk) and first.data is None:
        first = await pieces.next()  # a run that ended before it said anything is no stream
    if isinstance(first, Result):
        response = whole(first)
        response.headers.update(headers)
        await response(scope, receive, send)
    else:
        await _stream(first, pieces, endpoint, headers, send)


async def _stream(first: Chunk, pieces: Pieces, endpoint: Endpoint, headers: Mapping[str, str], send: Send) -> None:
    pairs = [(b"content-type", _SSE.encode()), (b"cache-control", b"no-cache")]
    pairs += [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": 200, "headers": pairs})
    item: Chunk | Result = first
    following = first.seq
    while isinstance(item, Chunk) and item.seq == following:  # a run that was begun anew counts from 0 again
        following += 1
        if item.data is not None:
            await send(_body(_event(endpoint, item.data)))
            if "error" in item.data:
                break
        item = await pieces.next()
    else:
        problem = _broken(item)
        if problem is not None:
            theirs = errors.anthropic(problem) if endpoint in errors.ANTHROPIC else {"error": problem.model_dump()}
            await send(_body(_event(endpoint, theirs)))
    end = b"" if endpoint in _NAMED else b"data: [DONE]\n\n"
    await send({"type": "http.response.body", "body": end})


def _event(endpoint: Endpoint, data: Mapping[str, Any]) -> bytes:
    """A piece in the framing of vLLM's server."""
    line = b"data: " + to_json(data) + b"\n\n"
    if endpoint in _NAMED and "type" in data:
        return b"event: " + str(data["type"]).encode() + b"\n" + line
    return line


def whole(result: Result) -> Response:
    """A result as the server's response, which says whether the request got what it was to get."""
    response = _whole(result)
    if (reached := result.objective) is not None:
        response.headers[_OBJECTIVE] = "met" if reached.met else f"missed; by={reached.missed_by}"
    return response


def _whole(result: Result) -> Response:
    if result.outcome is not Outcome.COMPLETED or result.body is None:
        found = result.error or ErrorObject(message=f"The request is {result.outcome}", code=result.status)
        return errors.of(result.status, found)
    if result.body.keys() == _BINARY:
        content = base64.b64decode(result.body["data_base64"])
        answer = Response(content, result.status, media_type=result.body["content_type"])
        if result.body["metadata"] is not None:
            answer.headers["metadata"] = json.dumps(result.body["metadata"], separators=(",", ":"))
        return answer
    return Json(result.body, result.status)


class Json(JSONResponse):
    """JSON by pydantic's writer, which is vLLM's too."""

    def render(self, content: Any) -> bytes:
        return to_json(content, inf_nan_mode="null")


def _broken(end: Chunk | Result) -> ErrorObject | None:
    """What to say at the end of a stream that is not the whole answer."""
    if isinstance(end, Chunk):
        return ErrorObject(message="The run was interrupted; ask again", type="InternalServerError", code=500)
    if end.outcome is Outcome.COMPLETED:
        return None
    return end.error or ErrorObject(message=f"The request is {end.outcome}", code=end.status)


def _body(data: bytes) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": True}


async def while_connected(replying_to: Coroutine[Any, Any, None], receive: Receive) -> None:
    """Reply, unless the client goes away first."""
    replying = asyncio.create_task(replying_to, name="reply")
    gone = asyncio.create_task(_gone(receive), name="connection")
    try:
        await asyncio.wait({replying, gone}, return_when=asyncio.FIRST_COMPLETED)
        if replying.done():
            replying.result()
    finally:
        replying.cancel()
        gone.cancel()
        await asyncio.gather(replying, gone, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
