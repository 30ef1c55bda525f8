"""OpenAI's endpoints: a request's body goes through the worker as it is, and the answer is what vLLM's server says.

What the body means is for the engine to say, so that every parameter of every endpoint works here as it does there.
"""

import asyncio
import base64
import uuid
from collections.abc import Callable, Coroutine, Mapping
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
from service.http import errors
from service.http.memory_bus import Exchange, InMemoryBus

OTHER_PATHS = {
    "/v1/score": Endpoint.SCORE,
    "/v1/rerank": Endpoint.RERANK,
    "/v2/rerank": Endpoint.RERANK,
}
"""Further paths under which vLLM's server has an endpoint."""
_TAKEN = (h.DEADLINE, h.TTL, h.PRIORITY, h.TENANT, h.TRACEPARENT, h.TRACESTATE)
_REQUEST_ID = "x-request-id"
_PREFIX = "x-gearshift-"
_MAX_HEADER = 256
JSON = "application/json"
_FORM = "multipart/form-data"
_OF_RECORDINGS = frozenset({Endpoint.TRANSCRIPTIONS, Endpoint.TRANSLATIONS})
_COPIES_OF_FORM = 2
"""A form is taken apart and its files are encoded: so many more bytes are held for each of its own."""
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
        """Raises Refused, Unavailable, Overloaded, ClientDisconnect before anything is answered."""
        request = Request(scope, receive)
        id_ = uuid.uuid4().hex
        headers = _record_headers(request.headers, self._endpoint)
        named = {"x-request-id": request.headers.get("x-request-id", id_)}
        with self._bus.receiving() as take:
            value = await self._read(request, take)
        with self._bus.ask(value, headers, id_=id_) as exchange:
            await _while_connected(self._reply(exchange, named, scope, receive, send), receive)

    async def _read(self, request: Request, take: Callable[[int], None]) -> bytes:
        """The body as it is; a form with a recording as the JSON that the engine takes for it.

        ``take`` is told what is held meanwhile. Raises Refused for what is neither, in the words of vLLM's server: a
        page of another site could send that.
        """
        kind = content_type(request)
        if kind == JSON:
            return await read_body(request, self._max_bytes, take)
        if kind != _FORM or self._endpoint not in _OF_RECORDINGS:
            message = "1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed"
            raise Refused(errors.error(400, message))
        body = await read_body(request, self._max_bytes, take)
        take(_COPIES_OF_FORM * len(body))
        return await _form_as_json(request.scope, body)

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


async def read_body(request: Request, limit: int, take: Callable[[int], None] = lambda _size: None) -> bytes:
    """The body, as long as it is within the limit; ``take`` is told of each piece. Raises Refused with 413."""
    pieces, size = [], 0
    refusal = Refused(errors.error(413, f"The request is too large; at most {limit} bytes are taken"))
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit:
        raise refusal
    async for piece in request.stream():
        size += len(piece)
        if size > limit:
            raise refusal
        take(len(piece))
        pieces.append(piece)
    return b"".join(pieces)


def content_type(request: Request) -> str:
    """What the body is said to be, without parameters."""
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


def _record_headers(given: Mapping[str, str], endpoint: Endpoint) -> list[tuple[str, bytes]]:
    """What the record says of the request. ``Priority: u=1, i`` is the browser's and means something else.

    Raises Refused for what no record may carry; traces that can't be continued are begun anew, as W3C asks.
    """
    headers = [(h.ENDPOINT, endpoint.value.encode())]
    for name in (*_TAKEN, _REQUEST_ID):
        value = given.get(_PREFIX + name) or given.get(name)
        if not value or (name == h.PRIORITY and _PREFIX + name not in given and "=" in value):
            continue
        raw = value.encode("latin-1")  # as it came
        if _fits(raw, 2 * _MAX_HEADER if name == h.TRACESTATE else _MAX_HEADER):
            headers.append((h.CORRELATION_ID if name == _REQUEST_ID else name, raw))
        elif name not in {h.TRACEPARENT, h.TRACESTATE}:
            message = f"The header {name} must be at most {_MAX_HEADER} bytes of printable text"
            raise Refused(errors.error(400, message, param=name))
    return headers


def _fits(raw: bytes, limit: int) -> bool:
    try:
        return len(raw) <= limit and raw.decode().isprintable()
    except UnicodeDecodeError:
        return False


async def _form_as_json(scope: Scope, body: bytes) -> bytes:
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
