"""OpenAI's endpoints: a request's body goes through the worker as it is, and the answer is what vLLM's server says.

What the body means is for the engine to say, so that every parameter of every endpoint works here as it does there.
"""

import asyncio
import base64
import uuid
from collections.abc import Coroutine, Mapping
from contextlib import suppress
from typing import Any

from pydantic import TypeAdapter, ValidationError
from pydantic_core import to_json
from starlette.datastructures import FormData, UploadFile
from starlette.formparsers import MultiPartException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from schemas import headers as h
from schemas.errors import ErrorObject
from schemas.requests import Endpoint
from schemas.results import Chunk, Outcome, Result
from service.errors import Overloaded, Unavailable
from service.http import errors
from service.http.memory_bus import Exchange, InMemoryBus

OTHER_PATHS = {
    "/v1/score": Endpoint.SCORE,
    "/v1/rerank": Endpoint.RERANK,
    "/v2/rerank": Endpoint.RERANK,
}
"""Further paths under which vLLM's server has an endpoint."""
_TAKEN = (h.DEADLINE, h.TTL, h.PRIORITY, h.TENANT, h.TRACEPARENT, h.TRACESTATE)
_PREFIX = "x-gearshift-"
_SSE = "text/event-stream; charset=utf-8"
_FLAG = TypeAdapter(bool)
_BINARY = {"content_type", "metadata", "data_base64"}


class OpenAIEndpoint:
    """One endpoint as an ASGI application. A client that disconnects ends what it asked for."""

    def __init__(self, bus: InMemoryBus, endpoint: Endpoint, *, max_bytes: int) -> None:
        self._bus = bus
        self._endpoint = endpoint
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        id_ = uuid.uuid4().hex
        headers = _record_headers(request.headers, self._endpoint)
        named = {"x-request-id": request.headers.get("x-request-id", id_)}
        try:
            body = await read_body(request, self._max_bytes)
            value = await _as_json(scope, body, request.headers.get("content-type", ""))
            with self._bus.ask(value, headers, id_=id_) as exchange:
                await _while_connected(self._reply(exchange, named, scope, receive, send), receive)
        except Refused as refused:
            await refused.response(scope, receive, send)
        except Overloaded as crowded:
            await errors.error(429, f"Too many requests: {crowded}")(scope, receive, send)
        except Unavailable as closed:
            await errors.error(503, str(closed), kind="ServiceUnavailableError")(scope, receive, send)

    async def _reply(
        self, exchange: Exchange, headers: Mapping[str, str], scope: Scope, receive: Receive, send: Send
    ) -> None:
        """The first thing that comes decides: a stream begins with a piece, everything else is the result."""
        first = await exchange.next()
        while isinstance(first, Chunk) and first.data is None:
            first = await exchange.next()  # a run that ended before it said anything is no stream
        if isinstance(first, Result):
            response = whole(first)
            response.headers.update(headers)
            await response(scope, receive, send)
        else:
            await self._stream(first, exchange, headers, send)

    async def _stream(self, first: Chunk, exchange: Exchange, headers: Mapping[str, str], send: Send) -> None:
        pairs = [(b"content-type", _SSE.encode()), (b"cache-control", b"no-cache")]
        pairs += [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": 200, "headers": pairs})
        item: Chunk | Result = first
        while isinstance(item, Chunk) and item.attempt == first.attempt:
            if item.data is not None:
                await send(_body(self._event(item.data)))
                if "error" in item.data:
                    break
            item = await exchange.next()
        else:
            problem = _broken(item)
            if problem is not None:
                await send(_body(self._event({"error": problem.model_dump()})))
        end = b"" if self._endpoint is Endpoint.RESPONSES else b"data: [DONE]\n\n"
        await send({"type": "http.response.body", "body": end})

    def _event(self, data: Mapping[str, Any]) -> bytes:
        """A piece in the framing of vLLM's server."""
        line = b"data: " + to_json(data) + b"\n\n"
        if self._endpoint is Endpoint.RESPONSES and "type" in data:
            return b"event: " + str(data["type"]).encode() + b"\n" + line
        return line


def routes(bus: InMemoryBus, *, max_bytes: int) -> list[Route]:
    """Every endpoint under every path that it has."""
    paths = {endpoint.value: endpoint for endpoint in Endpoint} | OTHER_PATHS
    return [
        Route(path, OpenAIEndpoint(bus, endpoint, max_bytes=max_bytes), methods=["POST"])
        for path, endpoint in paths.items()
    ]


def whole(result: Result) -> Response:
    """A result as the server's response."""
    if result.outcome is not Outcome.COMPLETED or result.body is None:
        found = result.error or ErrorObject(message=f"The request is {result.outcome}", code=result.status)
        return errors.of(result.status, found)
    if result.body.keys() == _BINARY:
        content = base64.b64decode(result.body["data_base64"])
        answer = Response(content, result.status, media_type=result.body["content_type"])
        if result.body["metadata"] is not None:
            answer.headers["metadata"] = to_json(result.body["metadata"]).decode()
        return answer
    return Json(result.body, result.status)


class Json(JSONResponse):
    """JSON by pydantic's writer, which is vLLM's too."""

    def render(self, content: Any) -> bytes:
        return to_json(content, inf_nan_mode="null")


class Refused(Exception):
    """The request is answered without being asked."""

    def __init__(self, response: Response) -> None:
        super().__init__(response.status_code)
        self.response = response


async def read_body(request: Request, limit: int) -> bytes:
    """The body, as long as it is within the limit. Raises Refused with 413."""
    pieces, size = [], int(request.headers.get("content-length") or 0)
    if size <= limit:
        size = 0
        async for piece in request.stream():
            pieces.append(piece)
            size += len(piece)
            if size > limit:
                break
    if size > limit:
        raise Refused(errors.error(413, f"The request is too large; at most {limit} bytes are taken"))
    return b"".join(pieces)


def _record_headers(given: Mapping[str, str], endpoint: Endpoint) -> list[tuple[str, bytes]]:
    """What the record says of the request. ``Priority: u=1, i`` is the browser's and means something else."""
    headers = [(h.ENDPOINT, endpoint.value.encode())]
    for name in _TAKEN:
        value = given.get(_PREFIX + name) or given.get(name)
        if value and not (name == h.PRIORITY and _PREFIX + name not in given and "=" in value):
            headers.append((name, value.encode()))
    if "x-request-id" in given:
        headers.append((h.CORRELATION_ID, given["x-request-id"].encode()))
    return headers


async def _as_json(scope: Scope, body: bytes, content_type: str) -> bytes:
    """The body as it is; a form with a file as the JSON that the engine takes for it.

    Raises Refused for what is neither, in the words of vLLM's server: a form of another site could send that.
    """
    kind = content_type.partition(";")[0].strip().lower()
    if kind == "application/json":
        return body
    if kind != "multipart/form-data":
        message = "1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed"
        raise Refused(errors.error(400, message))

    async def replay() -> Message:
        return {"type": "http.request", "body": body}

    try:
        async with Request(scope, replay).form() as form:
            return to_json(await _fields(form))
    except MultiPartException as wrong:
        raise Refused(errors.error(400, wrong.message)) from None


async def _fields(form: FormData) -> dict[str, Any]:
    """``name[]`` is a list; a file is base64; of the words only ``stream`` means something here, too."""
    fields: dict[str, Any] = {}
    for name, value in form.multi_items():
        plain = base64.b64encode(await value.read()).decode() if isinstance(value, UploadFile) else value
        if name.endswith("[]"):
            fields.setdefault(name.removesuffix("[]"), []).append(plain)
        else:
            fields[name] = plain
    if "stream" in fields:
        with suppress(ValidationError):  # the engine says what is wrong with it
            fields["stream"] = _FLAG.validate_python(fields["stream"])
    return fields


def _broken(end: Chunk | Result) -> ErrorObject | None:
    """What to say at the end of a stream that is not the whole answer."""
    if isinstance(end, Chunk):
        return ErrorObject(message="The run was interrupted; ask again", type="InternalServerError", code=500)
    if end.outcome is Outcome.COMPLETED:
        return None
    return end.error or ErrorObject(message=f"The request is {end.outcome}", code=end.status)


def _body(data: bytes) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": True}


async def _while_connected(reply: Coroutine[Any, Any, None], receive: Receive) -> None:
    """Reply, unless the client goes away first."""
    replying = asyncio.create_task(reply, name="reply")
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
