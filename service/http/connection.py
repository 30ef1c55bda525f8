"""One HTTP connection, bounded in time and size: uvicorn's protocol waits for ever and takes headers without end.

What a connection is refused for is answered in OpenAI's form, as everything else is.
"""

import asyncio
import resource
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import structlog
from starlette.responses import Response
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from service.http import errors
from service.settings import Settings

log = structlog.get_logger(__name__)
RESERVED = 32
"""Connections beyond the cap that may still ask for a probe: who is crowded is neither dead nor without metrics."""
RESERVED_FOR = frozenset({b"/health", b"/ready", b"/metrics"})
FILES = b"/v1/files"
"""Where bodies are files."""
_RESERVED_HEADERS_S = 1.0
_RAW_PER_BODY_BYTE = 8
"""A body in chunks of one byte has six bytes for each."""
_RAW_BYTES = 1 << 20
_OTHER_FILES = 1024
_HEADER_OVERHEAD = 4
_CLOSE = {"connection": "close"}
_PARTS = 10


@dataclass(frozen=True)
class Limits:
    """Of each connection, and how many there may be. Times are seconds."""

    connections: int
    header_bytes: int
    body_bytes: int
    file_bytes: int
    """Of a body that is a file."""
    headers_s: float
    """From the first byte of a request, or the beginning of its connection, to the end of its headers; and for a
    handshake."""
    body_s: float
    """From the end of the headers to the end of the body."""
    file_s: float
    """The same, where that is a file."""
    write_s: float
    """For how long a client may take nothing of its answer."""

    @classmethod
    def of(cls, settings: Settings) -> "Limits":
        """What the settings say."""
        http = settings.http
        return cls(
            connections=_affordable(http.http_max_connections),
            header_bytes=http.http_max_header_bytes,
            body_bytes=settings.worker.max_request_bytes,
            file_bytes=http.http_max_file_bytes,
            headers_s=http.http_headers_timeout_s,
            body_s=http.http_body_timeout_s,
            file_s=http.http_file_timeout_s,
            write_s=http.http_write_timeout_s,
        )

    def headers_within_s(self, others: int) -> float:
        """What a new connection has for its headers, or its handshake, where there are so many others."""
        return self.headers_s if others < self.connections else min(_RESERVED_HEADERS_S, self.headers_s)


def _affordable(connections: int) -> int:
    """As many as this process may have files open, beside those that the worker needs; the limit is raised for them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY:
        hard = max(soft, connections + RESERVED + _OTHER_FILES)
    wanted = min(hard, connections + RESERVED + _OTHER_FILES)
    if 0 <= soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    afforded = max(1, min(connections, hard - RESERVED - _OTHER_FILES))
    if afforded < connections:
        log.warning("http.fewer_connections", http_max_connections=connections, served=afforded, open_files=hard)
    return afforded


class _Counted:
    """A transport that knows how many bytes its client took."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._given = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: Any) -> None:
        self._given += len(data)
        self._transport.write(data)

    @property
    def taken(self) -> int:
        """Bytes that lie here no more."""
        return self._given - self._transport.get_write_buffer_size()


class Connection(HttpToolsProtocol):
    """Ends a connection that sends too slowly or too much, one too many, and one that does not take its answer."""

    def __init__(self, limits: Limits, **given: Any) -> None:
        super().__init__(**given)
        self._limits = limits
        self._reading: asyncio.TimerHandle | None = None
        self._writing: asyncio.TimerHandle | None = None
        self._taken = 0
        self._head = 0
        self._raw = 0
        self._in_body = False
        self._of_file = False
        self._deaf = False

    # --- beginning and end ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(cast("asyncio.Transport", _Counted(cast("asyncio.Transport", transport))))
        others = len(self.connections) - 1
        if others >= self._limits.connections + RESERVED:
            self._refuse(errors.error(503, self._crowded(), kind="ServiceUnavailableError"))
            return
        if others >= self._limits.connections:
            self.app = self._probes_only(self.app)
        self._expect(self._limits.headers_within_s(others), "headers")

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._received()
        if self._writing is not None:
            self._writing.cancel()

    def _crowded(self) -> str:
        return f"Too many connections: at most {self._limits.connections} are served at once"

    def _probes_only(self, app: Any) -> Any:
        """Of a connection beyond the cap, the server's other routes are not reached."""
        refusal = errors.error(503, self._crowded(), kind="ServiceUnavailableError", headers=_CLOSE)

        async def chosen(scope: Any, receive: Any, send: Any) -> None:
            asked = scope["raw_path"] in RESERVED_FOR and scope["method"] == "GET"
            await (app if asked else refusal)(scope, receive, send)

        return chosen

    # --- reading ---

    def data_received(self, data: bytes) -> None:
        if self._deaf or self.transport.is_closing():
            return
        if self._reading is None and not self._under_way():  # another request on this connection
            self._expect(self._limits.headers_s, "headers")
        self._raw += len(data)
        super().data_received(data)
        if not self._in_body and self._raw > self._limits.header_bytes and not self._under_way():
            self._refuse(self._too_large())
        most = self._limits.file_bytes if self._of_file else self._limits.body_bytes
        if self._raw > most * _RAW_PER_BODY_BYTE + _RAW_BYTES:
            self._refuse(errors.error(413, f"The request is too large; at most {most} bytes"))

    def on_message_begin(self) -> None:
        if self._under_way():
            self._deaf = True
            self.cycle.keep_alive = False
            raise _Unwanted("a request before the last one was answered")
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._count(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        """Also called for what follows a body in chunks."""
        super().on_header(name, value)
        self._count(len(name) + len(value) + _HEADER_OVERHEAD)

    def on_headers_complete(self) -> None:
        self._in_body = True
        self._of_file = self.url.partition(b"?")[0] == FILES
        self._expect(self._limits.file_s if self._of_file else self._limits.body_s, "body")
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._received()
        self._head = self._raw = 0
        self._in_body = self._of_file = False
        super().on_message_complete()

    def _unsupported_upgrade_warning(self) -> None:
        """Answered as if it had not been asked for, as HTTP allows; nobody at the server can do anything about it."""

    def _under_way(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _count(self, size: int) -> None:
        self._head += size
        if self._head > self._limits.header_bytes:
            raise _Unwanted("too many headers")

    def _expect(self, within_s: float, what: str) -> None:
        self._received()
        self._wait(within_s, what, _PARTS)

    def _wait(self, within_s: float, what: str, parts: int) -> None:
        """In parts of that time: one in which this process stood still is none in which its client could be heard."""
        part_s = within_s / _PARTS
        due = self.loop.time() + part_s
        self._reading = self.loop.call_at(due, self._waited, within_s, what, parts, due + part_s)

    def _waited(self, within_s: float, what: str, parts: int, latest: float) -> None:
        left = parts if self.loop.time() > latest else parts - 1
        if left:
            self._wait(within_s, what, left)
        else:
            self._late(what, within_s)

    def _received(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None

    def _late(self, what: str, within_s: float) -> None:
        silent = what == "headers" and not self._raw
        message = f"The {what} of the request did not arrive within {within_s:g} s"
        self._refuse(None if silent else errors.error(408, message))

    # --- writing ---

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch_writing()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_writing()

    @property
    def _counted(self) -> _Counted:
        return cast("_Counted", self.transport)

    def _watch_writing(self) -> None:
        """Look now and then whether the client takes what lies here for it."""
        if self._writing is None and self.transport.get_write_buffer_size():
            self._taken = self._counted.taken
            self._writing = self.loop.call_later(self._limits.write_s, self._look)

    def _look(self) -> None:
        self._writing = None
        if self._counted.taken == self._taken and self.transport.get_write_buffer_size():
            self.transport.abort()
        else:
            self._watch_writing()

    # --- refusing ---

    def send_400_response(self, msg: str) -> None:
        if not self._deaf:
            self._refuse(self._too_large() if self._head > self._limits.header_bytes else errors.error(400, msg))

    def _too_large(self) -> errors.ErrorResponse:
        return errors.error(431, f"The headers are too large; at most {self._limits.header_bytes} bytes are taken")

    def _path(self) -> str:
        """Of the request that is being read; it may not be there yet."""
        return getattr(self, "url", b"").partition(b"?")[0].decode("latin-1")

    def _refuse(self, response: errors.ErrorResponse | None) -> None:
        """End the connection; with an answer, if one may still begin."""
        if self.transport.is_closing():
            return
        self._received()
        if response is not None and not (self._under_way() and self.cycle.response_started):
            self.transport.write(_encoded(response.at(self._path())))
        if self._under_way():
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.close()
        self._watch_writing()


class _Unwanted(Exception):
    """Ends the parsing of what came."""


def _encoded(response: Response) -> bytes:
    fields = [*response.raw_headers, (b"connection", b"close")]
    lines = b"".join(name + b": " + value + b"\r\n" for name, value in fields)
    return bytes(STATUS_LINE[response.status_code] + lines + b"\r\n" + bytes(response.body))


def protocol(limits: Limits) -> type[asyncio.Protocol]:
    """What uvicorn makes for each connection."""
    return cast("type[asyncio.Protocol]", partial(Connection, limits))
