"""HTTPS: a certificate from files, which may be renewed while the server runs."""

import asyncio
import contextlib
import shutil
import socket
import ssl
from asyncio import constants
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from service.errors import ConfigError
from service.http.connection import RESERVED
from service.http.tls import Certificate, certificate_of
from service.settings import load
from tests.support.secure_broker import Authority, seal
from tests.support.waiting import PATIENCE_S


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def copied(files: tuple[Path, Path], folder: Path) -> tuple[Path, Path]:
    """As an operator renews them: in place."""
    places = folder / "tls.crt", folder / "tls.key"
    for source, place in zip(files, places, strict=True):
        shutil.copyfile(source, place)
    return places


async def shown(address: str) -> bytes:
    """The certificate that a server shows."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    host, port = address.removeprefix("https://").split(":")
    _, writer = await asyncio.open_connection(host, int(port), ssl=context)
    found: bytes = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    return found


@contextlib.contextmanager
def silent(address: str) -> Iterator[socket.socket]:
    """A connection without TLS on which nothing was said yet."""
    where = urlsplit(address)
    with socket.create_connection((where.hostname, where.port)) as plain:
        plain.setblocking(False)
        yield plain


async def rest(plain: socket.socket) -> bytes:
    """Everything until the server ends this connection."""
    found = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := await asyncio.get_running_loop().sock_recv(plain, 1 << 16):
            found += piece
    return found


async def answer_to(address: str, path: str) -> bytes:
    """What a connection of its own is answered over TLS."""
    where, context = urlsplit(address), ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    reader, writer = await asyncio.open_connection(where.hostname, where.port, ssl=context)
    writer.write(f"GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n".encode())
    found = await reader.read()
    writer.close()
    return found


def der(file: Path) -> bytes:
    return ssl.PEM_cert_to_DER_cert(file.read_text())


async def test_answers_and_streams_come_over_tls(served, authority, tmp_path):
    chain, key = authority.issue("door")
    async with served(http_ssl_certfile=chain, http_ssl_keyfile=key) as s:
        assert s.server.address.startswith("https://127.0.0.1:")
        answer = await s.openai.completions.create(model="llama", prompt="hello", max_tokens=2)
        assert answer.choices[0].text == "llama0 llama1 "
        pieces = [
            piece.choices[0].text
            async for piece in await s.openai.completions.create(
                model="llama", prompt="hello", max_tokens=2, stream=True
            )
        ]
        assert "".join(pieces) == "llama0 llama1 "
        assert await shown(s.server.address) == der(chain)


async def test_a_renewed_certificate_is_shown_to_whoever_comes_next(served, authority, tmp_path):
    old, new = authority.issue("old"), authority.issue("new")
    chain, key = copied(old, tmp_path)
    async with served(http_ssl_certfile=chain, http_ssl_keyfile=key) as s:
        certificate = s.server._certificate
        shutil.copyfile(new[0], chain)
        certificate.look()  # half of a pair
        assert await shown(s.server.address) == der(old[0])
        shutil.copyfile(new[1], key)
        certificate.look()
        assert await shown(s.server.address) == der(new[0])
        key.unlink()
        certificate.look()
        assert await shown(s.server.address) == der(new[0])


def test_a_pair_that_does_not_fit_is_named(authority, tmp_path):
    chain, key = authority.issue("one")[0], authority.issue("two")[1]
    with pytest.raises(ConfigError, match=f"http_ssl_certfile, http_ssl_keyfile: {chain}, {key}: .*MISMATCH"):
        Certificate(chain, key)
    with pytest.raises(ConfigError, match="No such file"):
        Certificate(chain, tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="go together"):
        certificate_of(load(http_ssl_certfile=chain).http)
    assert certificate_of(load().http) is None


def test_an_encrypted_key_asks_nobody_at_a_terminal(authority, tmp_path):
    chain, key = authority.issue("one")
    seal(key, b"password")
    with pytest.raises(ConfigError, match="the key is encrypted"):
        Certificate(chain, key)


async def test_a_handshake_that_does_not_come_to_its_end_is_not_waited_for(served, authority):
    chain, key = authority.issue("door")
    async with served(http_ssl_certfile=chain, http_ssl_keyfile=key, http_headers_timeout_s=0.2) as s:
        with silent(s.server.address) as nothing, silent(s.server.address) as a_bit:
            a_bit.send(b"\x16\x03\x01\x02\x00")  # how a hello begins
            async with asyncio.timeout(constants.SSL_HANDSHAKE_TIMEOUT / 2):  # what asyncio gives if nobody says
                assert await rest(nothing) == b""
                assert await rest(a_bit) == b""
        assert (await s.http.get("/health")).status_code == 200


async def test_connections_without_a_handshake_are_counted(served, authority):
    chain, key = authority.issue("door")
    given = {"http_max_connections": 2, "http_headers_timeout_s": 3600, "wait": False}
    async with (
        served(http_ssl_certfile=chain, http_ssl_keyfile=key, **given) as s,
        contextlib.AsyncExitStack() as stack,
    ):
        many = [stack.enter_context(silent(s.server.address)) for _ in range(2 + RESERVED + 8)]
        async with asyncio.timeout(PATIENCE_S):
            assert await rest(many[-1]) == b""
        with pytest.raises(BlockingIOError):  # the first ones have the time that they may take
            many[0].recv(1)


async def test_probes_are_answered_beyond_the_cap_over_tls_too(served, authority):
    chain, key = authority.issue("door")
    given = {"http_max_connections": 1, "http_headers_timeout_s": 3600, "wait": False}
    async with (
        served(http_ssl_certfile=chain, http_ssl_keyfile=key, **given) as s,
        contextlib.AsyncExitStack() as stack,
    ):
        for _ in range(RESERVED // 2):
            stack.enter_context(silent(s.server.address))
        assert (await s.http.get("/version")).status_code == 200  # and this connection is held
        assert b"Too many connections: at most 1" in await answer_to(s.server.address, "/v1/models")
        for path in ("/health", "/ready", "/metrics"):
            found = await answer_to(s.server.address, path)
            assert found.startswith(b"HTTP/1.1 ")
            assert b"Too many" not in found


async def test_what_is_no_tls_leaves_no_trace_and_holds_up_no_end(served, authority, caplog):
    chain, key = authority.issue("door")
    given = {"http_headers_timeout_s": 3600, "wait": False}
    async with served(http_ssl_certfile=chain, http_ssl_keyfile=key, **given) as s:
        with silent(s.server.address) as plain, silent(s.server.address) as waiting:
            plain.send(b"GET /version HTTP/1.1\r\nhost: localhost\r\n\r\n")
            async with asyncio.timeout(PATIENCE_S):
                await rest(plain)
                s.stop.set()
                await s.done
                assert await rest(waiting) == b""
    assert not [one for one in caplog.records if one.levelname == "ERROR"]
