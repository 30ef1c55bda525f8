"""How clients are told to reach the broker, and what they are told when that can't work."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

import pytest
from pydantic import SecretStr

from service.errors import ConfigError
from service.kafka.connection import TokenFile, client_options, close_client, close_consumer, close_producer
from service.settings import KafkaSettings
from tests.support.secure_broker import Authority, seal


class Stopping:
    """A consumer whose stop does as it is told."""

    def __init__(self, stop: Callable[[], Awaitable[None]]) -> None:
        self.stop, self.closed, self._client = stop, False, self

    async def close(self) -> None:
        self.closed = True


async def test_a_consumer_that_cancels_itself_while_it_stops_does_not_cancel_who_closes_it():
    async def stop() -> None:
        task = asyncio.create_task(asyncio.sleep(3600))
        task.cancel()
        await task

    consumer = Stopping(stop)
    await close_consumer(consumer)
    assert consumer.closed


class Stubborn:
    """A producer whose sender waits for one request after another, as aiokafka's does when it is cancelled."""

    def __init__(self, requests: int) -> None:
        self.closed, self.client, self._sender = False, self, self
        self.sender_task = asyncio.create_task(self._send(requests))

    async def _send(self, requests: int) -> None:
        for _ in range(requests):
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(3600)

    async def stop(self) -> None:
        await self.sender_task

    async def close(self) -> None:
        self.closed = True


async def test_a_producer_whose_sender_swallows_cancellations_is_stopped_all_the_same():
    producer = Stubborn(3)
    async with asyncio.timeout(5):
        await close_producer(producer, within_s=0.01)
    assert (producer.sender_task.done(), producer.closed) == (True, True)


async def test_a_client_that_does_not_let_itself_be_closed_is_given_up():
    producer = Stubborn(1000)
    await close_client(producer.stop(), within_s=0.01)
    assert not producer.sender_task.done()
    while not producer.sender_task.done():
        producer.sender_task.cancel()
        await asyncio.wait({producer.sender_task}, timeout=0)


async def test_who_closes_a_consumer_can_be_cancelled_meanwhile():
    stopping = asyncio.Event()

    async def stop() -> None:
        stopping.set()
        await asyncio.sleep(3600)

    consumer = Stopping(stop)
    closing = asyncio.create_task(close_consumer(consumer))
    await stopping.wait()
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert consumer.closed


async def test_a_cancellation_that_aiokafka_takes_for_its_own_task_s_reaches_who_closes():
    stopping = asyncio.Event()

    async def stop() -> None:
        stopping.set()
        with contextlib.suppress(asyncio.CancelledError):  # as it ends its fetcher, and the synchronizer of metadata
            await asyncio.sleep(3600)

    consumer = Stopping(stop)
    closing = asyncio.create_task(close_consumer(consumer))
    await stopping.wait()
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert consumer.closed


def test_a_plain_broker_needs_no_credentials():
    options = client_options(KafkaSettings(bootstrap_servers="a:1,b:2", request_timeout_s=7.5))
    assert options["bootstrap_servers"] == "a:1,b:2"
    assert options["request_timeout_ms"] == 7500
    assert not [name for name in options if name.startswith(("sasl", "ssl"))]


def test_a_password_may_come_from_a_file_whose_line_end_does_not_count(tmp_path):
    file = tmp_path / "password"
    file.write_text("s3cret\n")
    options = client_options(
        KafkaSettings(security_protocol="SASL_PLAINTEXT", sasl_username="me", sasl_password_file=file)
    )
    assert options["sasl_plain_password"] == "s3cret"
    assert options["sasl_mechanism"] == "PLAIN"


async def test_a_token_is_read_again_for_every_connection(tmp_path):
    file = tmp_path / "token"
    file.write_text("old\n")
    options = client_options(
        KafkaSettings(security_protocol="SASL_PLAINTEXT", sasl_mechanism="OAUTHBEARER", oauth_token_file=file)
    )
    provider = options["sasl_oauth_token_provider"]
    assert isinstance(provider, TokenFile)
    assert await provider.token() == "old"
    file.write_text("new\n")
    assert await provider.token() == "new"


def test_a_broker_is_told_beside_the_token_what_it_wants_to_know(tmp_path, monkeypatch):
    (file := tmp_path / "token").write_text("token")
    monkeypatch.setenv("GEARSHIFT_OAUTH_EXTENSIONS", "logicalCluster=lkc-1, identityPoolId=pool=1")
    kafka = KafkaSettings(security_protocol="SASL_SSL", sasl_mechanism="OAUTHBEARER", oauth_token_file=file)
    provider = client_options(kafka)["sasl_oauth_token_provider"]
    assert provider.extensions() == {"logicalCluster": "lkc-1", "identityPoolId": "pool=1"}


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"sasl_mechanism": "OAUTHBEARER"}, "oauth_token_file"),
        ({"sasl_mechanism": "SCRAM-SHA-512", "sasl_username": "me"}, "sasl_password"),
        ({"sasl_password": SecretStr("x")}, "sasl_username"),
        ({"sasl_username": "me", "sasl_password_file": "/nowhere/at/all"}, "/nowhere/at/all"),
    ],
)
def test_incomplete_credentials_are_named_before_anything_is_connected(given, named):
    with pytest.raises(ConfigError, match=named):
        client_options(KafkaSettings(security_protocol="SASL_PLAINTEXT", **given))


def test_a_certificate_that_cannot_be_read_is_named():
    with pytest.raises(ConfigError, match=r"/no/such/ca\.pem"):
        client_options(KafkaSettings(security_protocol="SSL", ssl_cafile="/no/such/ca.pem"))


def test_the_password_of_a_key_may_come_from_a_file(tmp_path):
    chain, key = Authority(tmp_path).issue("worker")
    seal(key, b"s3cret")
    (password := tmp_path / "password").write_text("s3cret\n")
    given = {"security_protocol": "SSL", "ssl_certfile": chain, "ssl_keyfile": key}
    assert client_options(KafkaSettings(**given, ssl_password_file=password))["ssl_context"]
    password.write_text("another")
    with pytest.raises(ConfigError, match=key.name):
        client_options(KafkaSettings(**given, ssl_password_file=password))
    with pytest.raises(ConfigError, match="ssl_password_file"):
        client_options(KafkaSettings(**given, ssl_password_file=tmp_path / "nowhere"))


def test_an_error_about_credentials_does_not_show_them():
    with pytest.raises(ConfigError) as caught:
        client_options(KafkaSettings(security_protocol="SASL_PLAINTEXT", sasl_password=SecretStr("s3cret")))
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize("servers", ["host:abc", "127.0.0.1:99999", "[::1", "a:9092,b:", "[::1]9092x"])
def test_an_address_that_is_none_is_told_before_anything_is_asked(servers: str):
    with pytest.raises(ConfigError, match="bootstrap_servers"):
        client_options(KafkaSettings(bootstrap_servers=servers))


@pytest.mark.parametrize("servers", ["host", "host:9092,other:9093", "::1", "[::1]:9092", "127.0.0.1:65535"])
def test_addresses_go_to_the_client_as_they_are(servers: str):
    assert client_options(KafkaSettings(bootstrap_servers=servers))["bootstrap_servers"] == servers
