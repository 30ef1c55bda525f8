"""What one client may take of the server: time, connections, memory, slots. Raw sockets, as an enemy has them."""

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

import pytest
import uvicorn
from uvicorn.server import ServerState

from schemas.progress import Progress
from service.http.connection import Connection, Limits
from service.ports import Answer, Call, ChunkSink
from service.settings import load
from tests.support.fake_engine import FakeEngine
from tests.support.virtual_time import virtual_time
from tests.support.waiting import PATIENCE_S

BODY = json.dumps({"model": "llama", "prompt": "x", "max_tokens": 1}).encode()
POST = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
MIB = 1 << 20


@asynccontextmanager
async def connected(s: Any, *, window: int | None = None) -> AsyncIterator["Raw"]:
    """A connection of our own; ``window``: bytes that its socket takes before somebody reads."""
    where = urlsplit(s.server.address)
    plain = socket.socket()
    if window is not None:
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, window)
    plain.setblocking(False)
    await asyncio.get_running_loop().sock_connect(plain, (where.hostname, where.port))
    raw = Raw(plain)
    try:
        yield raw
    finally:
        plain.close()


class Loud(FakeEngine):
    """Each piece of a stream fills some of the buffers on its way."""

    async def answer(self, call: Call, on_chunk: ChunkSink | None = None, progress: Progress | None = None) -> Answer:
        async def padded(piece: dict[str, Any]) -> None:
            assert on_chunk is not None
            await on_chunk({**piece, "padding": "x" * 50_000})

        return await super().answer(call, padded if on_chunk is not None else None, progress)


class Raw:
    def __init__(self, plain: socket.socket) -> None:
        self._plain = plain
        self._loop = asyncio.get_running_loop()

    async def send(self, data: bytes) -> None:
        await self._loop.sock_sendall(self._plain, data)

    async def rest(self) -> bytes:
        """Everything until the server ends the connection."""
        found = bytearray()
        async with asyncio.timeout(PATIENCE_S):
            with contextlib.suppress(ConnectionError):
                while piece := await self._loop.sock_recv(self._plain, 1 << 16):
                    found += piece
        return bytes(found)

    async def refused(self) -> tuple[int, str]:
        """The status and the message of an error in OpenAI's form, after which the server hangs up."""
        head, _, body = (await self.rest()).partition(b"\r\n\r\n")
        error = json.loads(body)["error"]
        status = int(head.split()[1])
        assert error["code"] == status
        assert b"connection: close" in head
        return status, error["message"]


async def test_headers_that_do_not_come_to_their_end_are_not_waited_for(served):
    async with served(http_headers_timeout_s=0.3) as s, connected(s) as raw:
        await raw.send(b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\nx-slow: ")
        trickling = asyncio.create_task(_trickle(raw, b"x"))
        assert await raw.refused() == (408, "The headers of the request did not arrive within 0.3 s")
        trickling.cancel()


async def test_a_connection_that_says_nothing_is_ended_without_a_word(served):
    async with served(http_headers_timeout_s=0.2) as s, connected(s) as raw:
        assert await raw.rest() == b""


async def test_a_body_that_does_not_come_to_its_end_is_not_waited_for(served):
    async with served(http_body_timeout_s=0.3) as s, connected(s) as raw:
        await raw.send(POST + b"content-length: 100000\r\n\r\n{")
        trickling = asyncio.create_task(_trickle(raw, b" "))
        assert await raw.refused() == (408, "The body of the request did not arrive within 0.3 s")
        trickling.cancel()
        assert (await s.http.post("/v1/completions", json=json.loads(BODY))).status_code == 200


async def test_a_second_request_on_a_connection_has_its_own_time(served):
    async with served(http_headers_timeout_s=0.3) as s, connected(s) as raw:
        await raw.send(b"GET /version HTTP/1.1\r\nhost: localhost\r\n\r\nGET /ver")
        answer = await raw.rest()
        assert answer.count(b"HTTP/1.1 200") == 1


async def test_a_connection_may_idle_between_requests_and_not_for_ever(served):
    async with served(http_keep_alive_s=1) as s, connected(s) as raw:
        for _ in range(2):
            await raw.send(b"GET /version HTTP/1.1\r\nhost: localhost\r\n\r\n")
            assert (await _head(raw)).startswith(b"HTTP/1.1 200")
        assert await raw.rest() == b""


async def test_a_long_run_is_not_ended_by_the_limits_of_reading(served):
    async with served(
        engine=FakeEngine(step_s=0.001), http_headers_timeout_s=0.1, http_body_timeout_s=0.1, http_write_timeout_s=0.1
    ) as s:
        body = {"model": "llama", "prompt": "x", "max_tokens": 600}
        answer = await s.http.post("/v1/completions", json=body)
        assert answer.json()["usage"]["completion_tokens"] == 600


async def test_connections_beyond_the_cap_are_refused_and_probes_are_not(served):
    async with served(http_max_connections=3, wait=False) as s, contextlib.AsyncExitStack() as stack:
        held = [await stack.enter_async_context(connected(s)) for _ in range(3)]
        await _answered(held[-1])
        one = await stack.enter_async_context(connected(s))
        await one.send(POST + b"content-length: %d\r\n\r\n" % len(BODY) + BODY)
        assert await one.refused() == (503, "Too many connections: at most 3 are served at once")
        for path in (b"/health", b"/ready", b"/metrics"):
            probe = await stack.enter_async_context(connected(s))
            await probe.send(b"GET " + path + b" HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
            assert b"Too many" not in await probe.rest()
        await held[0].send(POST + b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(BODY) + BODY)
        assert b"llama0" in await held[0].rest()


async def test_not_even_probes_make_the_number_of_connections_unbounded(served):
    async with served(http_max_connections=1, wait=False) as s, contextlib.AsyncExitStack() as stack:
        many = [await stack.enter_async_context(connected(s)) for _ in range(40)]
        assert (await many[-1].refused())[0] == 503


async def test_bodies_that_are_still_arriving_are_held_within_the_bound_of_all(served):
    """Thirty half-sent bodies of 1 MiB where 8 MiB are the bound: what comes beyond it is refused, not held."""
    async with (
        served(max_waiting_bytes=8 * MIB, max_request_bytes=2 * MIB, http_body_timeout_s=3600) as s,
        contextlib.AsyncExitStack() as stack,
    ):
        many = [await stack.enter_async_context(connected(s)) for _ in range(30)]
        for raw in many:
            await raw.send(POST + b"content-length: %d\r\n\r\n" % (2 * MIB))
        sending = [asyncio.create_task(raw.send(b" " * MIB)) for raw in many]
        await asyncio.wait(sending, timeout=20)
        async with asyncio.timeout(PATIENCE_S):
            heads = [asyncio.create_task(_head(raw)) for raw in many]
            for refused, done in enumerate(asyncio.as_completed(heads), 1):
                assert (await done).startswith(b"HTTP/1.1 429")
                if refused == 22:  # the others wait for the rest of their bodies
                    break
        assert s.server.bus.held_bytes <= 8 * MIB
        for task in heads:
            task.cancel()
        refused_now = await s.http.post("/v1/completions", json={"model": "llama", "prompt": "x" * MIB})
        assert (refused_now.status_code, refused_now.headers["retry-after"]) == (429, "1")
        assert "arriving" in refused_now.json()["error"]["message"]
        await stack.aclose()
        async with asyncio.timeout(PATIENCE_S):
            while s.server.bus.held_bytes:
                await s.http.get("/health")
        assert (await s.http.post("/v1/completions", json=json.loads(BODY))).status_code == 200


async def test_streams_that_nobody_reads_hold_no_slots(served):
    """As many as may run at once, none of them read; who comes next is answered all the same."""
    endless = json.dumps({"model": "llama", "prompt": "x", "max_tokens": 1 << 20, "stream": True}).encode()
    async with (
        served(engine=Loud(step_s=0.001), max_running=4, http_stream_backlog=100) as s,
        contextlib.AsyncExitStack() as stack,
    ):
        stalled = [await stack.enter_async_context(connected(s, window=4096)) for _ in range(4)]
        for raw in stalled:
            await raw.send(POST + b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(endless) + endless)
        async with asyncio.timeout(PATIENCE_S):
            while sum(info.unfinished for info in s.engine.contexts()) < 4:
                await s.http.get("/health")
        answer = await s.http.post("/v1/completions", json=json.loads(BODY))
        assert answer.status_code == 200
        async with asyncio.timeout(PATIENCE_S):
            while sum(info.unfinished for info in s.engine.contexts()):
                await s.http.get("/health")
        # Who reads after all is told how it ended.
        told = await stalled[0].rest()
        assert b"The stream was not read: 100 pieces of it were waiting, and its run was aborted" in told
        assert told.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


async def test_who_does_not_take_an_answer_is_disconnected(served):
    endless = json.dumps({"model": "llama", "prompt": "x", "max_tokens": 1 << 20, "stream": True}).encode()
    async with (
        served(engine=Loud(step_s=0.001), http_write_timeout_s=0.3) as s,
        connected(s, window=4096) as raw,
    ):
        await raw.send(POST + b"content-length: %d\r\n\r\n" % len(endless) + endless)
        async with asyncio.timeout(PATIENCE_S):
            while not len(s.server.bus):
                await s.http.get("/health")
            while len(s.server.bus):
                await s.http.get("/health")
        assert b"[DONE]" not in await raw.rest()


class Pipe(asyncio.Transport):
    """A connection whose client takes what it is told to take."""

    def __init__(self) -> None:
        super().__init__()
        self.held = 0
        self.aborted = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.held += len(data)

    def get_write_buffer_size(self) -> int:
        return self.held

    def is_closing(self) -> bool:
        return self.aborted

    def abort(self) -> None:
        self.aborted = True

    close = abort


def piped(limits: Limits) -> tuple[Connection, Pipe]:
    """A connection that is called by hand."""
    config = uvicorn.Config(lambda: None, log_config=None)
    config.load()
    connection = Connection(limits, config=config, server_state=ServerState(), app_state={})
    connection.connection_made(pipe := Pipe())
    return connection, pipe


@pytest.mark.parametrize("begun", [b"", b"GET /ver", POST + b"content-length: 100000\r\n\r\n{"])
@pytest.mark.parametrize("lived_s", [1, 9.5])
def test_time_in_which_the_server_stood_still_is_not_its_clients(begun, lived_s):
    """It was paused with its machine, or starved: what clients sent meanwhile, or could not send, is not read yet."""
    limits = replace(Limits.of(load()), headers_s=10, body_s=10)

    async def talk() -> None:
        connection, pipe = piped(limits)
        connection.app = never
        connection.data_received(begun)
        for _ in range(3):
            await asyncio.sleep(lived_s / 3)
            loop.clock.now += 60
        await asyncio.sleep(0.4)
        assert not pipe.aborted
        await asyncio.sleep(10)
        assert pipe.aborted, "it has had its time"

    async def never(_scope: Any, _receive: Any, _send: Any) -> None:
        await asyncio.Event().wait()

    with virtual_time() as loop:
        loop.run_until_complete(talk())


def test_who_takes_an_answer_slower_than_it_comes_is_not():
    """What lies here for the client is more at one moment and less at another, however steadily it reads."""
    limits = replace(Limits.of(load(http_write_timeout_s=10)), headers_s=1e9)

    async def talk() -> None:
        connection, pipe = piped(limits)
        for _ in range(100):
            connection.transport.write(b"x" * 10_000)
            connection.pause_writing()
            await asyncio.sleep(7)
            pipe.held -= 1_000
            connection.resume_writing()
            assert not pipe.aborted
        await asyncio.sleep(21)
        assert pipe.aborted, "it took nothing more"

    with virtual_time() as loop:
        loop.run_until_complete(talk())


async def _trickle(raw: Raw, what: bytes) -> None:
    with contextlib.suppress(OSError):
        while True:
            await raw.send(what)
            await asyncio.sleep(0.02)


async def _head(raw: Raw) -> bytes:
    return await raw._loop.sock_recv(raw._plain, 1 << 16)


async def _answered(raw: Raw) -> None:
    """The server has taken this connection, and so those before it."""
    await raw.send(b"GET /version HTTP/1.1\r\nhost: localhost\r\n\r\n")
    assert (await _head(raw)).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    ("lines", "status"),
    [
        (b"content-length: abc\r\n", 400),
        (b"content-length: -5\r\n", 400),
        (b"content-length: 99999999999999999999999\r\n", 400),
        (b"content-length: 5\r\ncontent-length: 6\r\n", 400),
        (b"content-length: 5\r\ntransfer-encoding: chunked\r\n", 400),
        (b"content-length: 1000000000000\r\n", 413),
        (b"x-nul: a\x00b\r\n", 400),
        (b"x-large: " + b"x" * 40_000 + b"\r\n", 431),
        (b"x: y\r\n" * 20_000, 431),
        (b"no colon\r\n", 400),
    ],
)
async def test_what_is_no_http_is_answered_as_such(served, lines, status):
    async with served() as s, connected(s) as raw:
        await raw.send(POST + b"connection: close\r\n" + lines + b"\r\n")
        assert (await raw.refused())[0] == status
        assert (await s.http.get("/health")).status_code == 200


async def test_a_header_without_end_is_not_collected(served):
    async with served() as s, connected(s) as raw:
        await raw.send(b"GET / HTTP/1.1\r\nx: ")
        with pytest.raises(ConnectionError):  # the server has hung up long before that
            await raw.send(b"x" * (512 << 20))


async def test_lines_after_the_chunks_of_a_body_are_bounded_too(served):
    async with served() as s, connected(s) as raw:
        await raw.send(POST + b"transfer-encoding: chunked\r\n\r\n1\r\n{\r\n0\r\n")
        with contextlib.suppress(ConnectionError):
            for _ in range(100):
                await raw.send(b"x-more: " + b"x" * 1000 + b"\r\n")
        assert b" 431 " in (await raw.rest()).split(b"\r\n")[0]


@pytest.mark.parametrize(
    ("header", "value"),
    [
        ("x-request-id", b"x" * 10_000),
        ("x-request-id", b"a\tb"),
        ("x-request-id", b"\xff\xfe"),
        ("tenant", b"x" * 300),
        ("x-gearshift-tenant", b"\xff"),
        ("ttl", b"1" * 300),
        ("priority", b"NaN"),
        ("priority", b"inf"),
        ("ttl", b"NaN"),
        ("deadline", b"-inf"),
    ],
)
async def test_a_header_that_no_record_may_carry_is_a_clear_error(served, header, value):
    async with served() as s, connected(s) as raw:
        line = header.encode() + b": " + value + b"\r\n"
        await raw.send(POST + b"connection: close\r\n" + line + b"content-length: %d\r\n\r\n" % len(BODY) + BODY)
        head, _, body = (await raw.rest()).partition(b"\r\n\r\n")
        assert int(head.split()[1]) == 400
        error = json.loads(body)["error"]
        assert header.removeprefix("x-gearshift-") in error["message"]


async def test_names_in_any_script_are_carried_as_they_are(served):
    async with served() as s, connected(s) as raw:
        line = "x-request-id: Größe-東京\r\n".encode()
        await raw.send(POST + b"connection: close\r\n" + line + b"content-length: %d\r\n\r\n" % len(BODY) + BODY)
        answer = await raw.rest()
        assert answer.startswith(b"HTTP/1.1 200")
        assert line.strip() in answer


async def test_the_id_that_is_told_is_the_one_that_was_looked_at(served):
    async with served() as s:
        for given in ({"x-request-id": "a"}, {"x-gearshift-x-request-id": "a", "x-request-id": "b" * 400}):
            answer = await s.http.post("/v1/completions", json=json.loads(BODY), headers=given)
            assert (answer.status_code, answer.headers["x-request-id"]) == (200, "a")


async def test_a_trace_that_can_not_be_continued_is_no_reason_to_refuse(served):
    async with served() as s:
        answer = await s.http.post(
            "/v1/completions", json=json.loads(BODY), headers={"traceparent": "x" * 400, "tracestate": "y" * 2000}
        )
        assert answer.status_code == 200


@pytest.mark.parametrize("depth", [300, 100_000])
async def test_deeply_nested_json_is_an_error_of_its_sender(served, depth):
    async with served(dev_mode=True) as s:
        nested = b'{"model": "llama", "prompt": ' + b"[" * depth + b"]" * depth + b"}"
        for path in ("/v1/completions", "/v1/models/switch"):
            answer = await s.http.post(path, content=nested, headers={"content-type": "application/json"})
            assert answer.status_code in {400, 413}
            assert answer.json()["error"]["message"]


async def test_a_request_before_the_last_one_is_answered_ends_the_connection_after_its_answer(served):
    async with served(engine=FakeEngine(step_s=0.001)) as s, connected(s) as raw:
        one = POST + b"content-length: %d\r\n\r\n" % len(BODY) + BODY
        await raw.send(one * 50)
        answer = await raw.rest()
        assert answer.count(b"HTTP/1.1 200") == 1
        assert b"connection: close" in answer


async def test_a_client_that_leaves_in_the_middle_of_its_body_leaves_nothing_behind(served, caplog):
    async with served(http_body_timeout_s=3600) as s:
        async with connected(s) as raw:
            await raw.send(POST + b"content-length: 1000\r\n\r\n" + b" " * 500)
            async with asyncio.timeout(PATIENCE_S):
                while s.server.bus.held_bytes != 500:
                    await s.http.get("/health")
        async with asyncio.timeout(PATIENCE_S):
            while s.server.bus.held_bytes:
                await s.http.get("/health")
        ours = [one for one in caplog.records if one.name.partition(".")[0] in {"service", "uvicorn", "asyncio"}]
        assert not [one for one in ours if one.levelname == "ERROR"]
