"""HTTPS: a certificate from files, which may be renewed while the server runs."""

import asyncio
import shutil
import ssl
from pathlib import Path

import pytest

from service.errors import ConfigError
from service.http.tls import Certificate, certificate_of
from service.settings import load
from tests.support.secure_broker import Authority, seal


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
