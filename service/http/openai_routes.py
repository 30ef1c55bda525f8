"""OpenAI's endpoints: a request's body goes through the worker as it is, and the answer is what vLLM's server says.

What the body means is for the engine to say, so that every parameter of every endpoint works here as it does there.
"""

import base64
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from pydantic import TypeAdapter, ValidationError
from pydantic_core import to_json
from starlette.datastructures import FormData, UploadFile
from starlette.formparsers import MultiPartException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from schemas import headers as h
from schemas.requests import PATHS, Endpoint
from service.http import errors
from service.http.doorkeeper import Doorkeeper
from service.http.durable import Durable, Sent
from service.http.errors import Refused
from service.http.memory_bus import InMemoryBus
from service.http.replies import reply, while_connected

REALTIME = "/v1/realtime"
_TAKEN = (h.DEADLINE, h.TTL, h.PRIORITY, h.REQUEST_CLASS, h.TTFT, h.TPOT, h.TENANT, h.TRACEPARENT, h.TRACESTATE)
_REQUEST_ID = "x-request-id"
_PREFIX = "x-gearshift-"
_MAX_HEADER = 256
JSON = "application/json"
_FORM = "multipart/form-data"
_OF_RECORDINGS = frozenset({Endpoint.TRANSCRIPTIONS, Endpoint.TRANSLATIONS})
_COPIES_OF_FORM = 2
"""A form is taken apart and its files are encoded: so many more bytes are held for each of its own."""
_FLAG = TypeAdapter(bool)


class OpenAIEndpoint:
    """One endpoint as an ASGI application. A client that disconnects ends what it asked for, if it is not durable."""

    def __init__(
        self, bus: InMemoryBus, endpoint: Endpoint, *, durable: Durable, door: Doorkeeper, max_bytes: int
    ) -> None:
        self._bus = bus
        self._durable = durable
        self._door = door
        self._endpoint = endpoint
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises Refused, Unavailable, Overloaded, ClientDisconnect before anything is answered."""
        request = Request(scope, receive)
        id_ = uuid.uuid4().hex
        headers = record_headers(request.headers, self._endpoint, tenant=tenant_of(scope))
        named = {_REQUEST_ID: dict(headers).get(h.CORRELATION_ID, id_.encode()).decode("latin-1")}
        with self._bus.receiving() as take:
            value = await self._read(request, take)
            sent = Sent(endpoint=self._endpoint, value=value, max_bytes=self._max_bytes, take=take)
            durable = await self._durable.ask(request, sent, headers, named, door=self._door)
            value = b"" if durable is not None else await self._durable.continued(request.scope, sent)
        if durable is not None:  # the log has it
            await durable(scope, receive, send)
            return
        with (
            self._door.asking(headers, len(value)) as entry,
            self._bus.ask(value, headers, id_=id_) as exchange,
        ):
            pieces = entry.until_result(exchange)
            await while_connected(reply(pieces, self._endpoint, named, scope, receive, send), receive)

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
        refusal = _recording_too_large(_recording_bytes(self._max_bytes), self._max_bytes)
        body = await read_body(request, self._max_bytes, take, refusal)
        take(_COPIES_OF_FORM * len(body))
        return await _form_as_json(request.scope, body, self._max_bytes)


def routes(bus: InMemoryBus, *, durable: Durable, door: Doorkeeper, max_bytes: int) -> list[Route]:
    """Every endpoint under every path that it has."""
    found = [
        Route(path, OpenAIEndpoint(bus, endpoint, durable=durable, door=door, max_bytes=max_bytes), methods=["POST"])
        for path, endpoint in PATHS.items()
    ]
    return [*found, Route(REALTIME, _no_realtime, methods=["GET"])]


async def _no_realtime(_request: Request) -> Response:
    message = f"This server has no WebSocket, so that {REALTIME} is not served; {Endpoint.TRANSCRIPTIONS} is"
    return errors.error(501, message, kind="NotImplementedError")


async def read_body(
    request: Request,
    limit: int,
    take: Callable[[int], None] = lambda _size: None,
    refusal: Refused | None = None,
) -> bytes:
    """The body, as long as it is within the limit; ``take`` is told of each piece. Raises Refused with 413.

    ``refusal``: what is raised then, where bytes of the body would say nothing to who asks.
    """
    pieces, size = [], 0
    refusal = refusal or Refused(errors.error(413, f"The request is too large; at most {limit} bytes are taken"))
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


def record_headers(given: Mapping[str, str], endpoint: Endpoint, *, tenant: str | None) -> list[tuple[str, bytes]]:
    """What the record says of the request. ``Priority: u=1, i`` is the browser's and means something else.

    ``tenant`` is the key's, "" where it has none; the header counts only where it is None: there are no keys.

    Raises Refused for what no record may carry; traces that can't be continued are begun anew, as W3C asks.
    """
    headers = [(h.ENDPOINT, endpoint.value.encode())]
    for name in (*_TAKEN, _REQUEST_ID):
        of_key = name == h.TENANT and tenant is not None
        value = tenant if of_key else given.get(_PREFIX + name) or given.get(name)
        if not value or (name == h.PRIORITY and _PREFIX + name not in given and _is_browsers(value)):
            continue
        raw = value.encode("utf-8" if of_key else "latin-1")  # what is a header's is as it came
        if _fits(raw, 2 * _MAX_HEADER if name == h.TRACESTATE else _MAX_HEADER):
            headers.append((h.CORRELATION_ID if name == _REQUEST_ID else name, raw))
        elif name not in {h.TRACEPARENT, h.TRACESTATE}:
            message = f"The header {name} must be at most {_MAX_HEADER} bytes of printable text"
            raise Refused(errors.error(400, message, param=name))
    return headers


def _is_browsers(priority: str) -> bool:
    """Whether it has nothing but the words of RFC 9218."""
    return {each.partition("=")[0].strip() for each in priority.split(",")} <= {"u", "i"}


def tenant_of(scope: Scope) -> str | None:
    """The tenant of the key that asks, "" where it has none; None where there are no keys."""
    tenant: str | None = scope.get("state", {}).get("tenant")
    return tenant


def _fits(raw: bytes, limit: int) -> bool:
    try:
        return len(raw) <= limit and raw.decode().isprintable()
    except UnicodeDecodeError:
        return False


async def _form_as_json(scope: Scope, body: bytes, max_bytes: int) -> bytes:
    """Raises Refused for what is no form, and for what is too large as JSON."""

    async def replay() -> Message:
        return {"type": "http.request", "body": body}

    try:
        async with Request(scope, replay).form() as form:
            value = to_json(await _fields(form))
            recording = sum(file.size or 0 for file in form.values() if isinstance(file, UploadFile))
    except MultiPartException as wrong:
        raise Refused(errors.error(400, wrong.message)) from None
    except ValueError as wrong:  # its charset decodes nothing, or to what is no text
        said = Request(scope).headers["content-type"]
        raise Refused(errors.error(400, f"The form can't be read as {said!r}: {wrong}")) from None
    if len(value) > max_bytes:
        beside = len(value) - _base64_bytes(recording)
        raise _recording_too_large(_recording_bytes(max_bytes - beside), max_bytes)
    return value


def _base64_bytes(size: int) -> int:
    return (size + 2) // 3 * 4


def _recording_bytes(room: int) -> int:
    """How many have room as base64."""
    return max(0, room) // 4 * 3


def _recording_too_large(most: int, max_bytes: int) -> Refused:
    message = (
        f"Too large: a recording may have at most {most} bytes here: as base64 and with the rest of its form it must "
        f"fit into max_request_bytes ({max_bytes})"
    )
    return Refused(errors.error(413, message, param="file"))


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
