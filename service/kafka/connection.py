"""How every Kafka client here reaches the broker: one place for addresses, TLS and credentials."""

import asyncio
import ssl
import time
from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import Any

import structlog
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.abc import AbstractTokenProvider
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.client import AIOKafkaClient
from aiokafka.conn import collect_hosts, create_conn
from aiokafka.errors import (
    AuthenticationFailedError,
    BrokerResponseError,
    IllegalSaslStateError,
    InvalidTimestampError,
    InvalidTopicError,
    KafkaConnectionError,
    KafkaError,
    MessageSizeTooLargeError,
    PolicyViolationError,
    RecordListTooLargeError,
    RecordTooLargeError,
    SaslAuthenticationFailed,
    TopicAuthorizationFailedError,
    UnknownTopicOrPartitionError,
    UnsupportedSaslMechanismError,
    kafka_errors,
)
from pydantic import SecretStr
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception, stop_after_delay, wait_exponential, wait_random

from service.errors import BrokerUnavailable, ConfigError
from service.settings import KafkaSettings

log = structlog.get_logger(__name__)

_STOP_S = 5.0
_TELLINGS, _TOLD_S = 50, 0.1
_TROUBLE = (OSError, KafkaError, TimeoutError)
_UNWELCOME = (
    AuthenticationFailedError,
    IllegalSaslStateError,
    SaslAuthenticationFailed,
    UnsupportedSaslMechanismError,
    ssl.SSLCertVerificationError,
)
"""Answers that trying again won't change."""


class InvalidRecordError(BrokerResponseError):  # type: ignore[misc]  # aiokafka is untyped
    """What a topic's own rules refuse: one without a key where it is compacted, one that breaks the topic's schema."""

    errno = 87
    message = "INVALID_RECORD"
    description = "the topic's rules refuse this record"


kafka_errors.setdefault(InvalidRecordError.errno, InvalidRecordError)  # aiokafka tells it as any unknown one
RECORD_REFUSALS = (
    InvalidRecordError,
    InvalidTimestampError,
    InvalidTopicError,
    MessageSizeTooLargeError,
    PolicyViolationError,
    RecordListTooLargeError,
    RecordTooLargeError,
    TopicAuthorizationFailedError,
    UnknownTopicOrPartitionError,
)
"""Answers about a record, or about those that travelled with it: others may still be written."""
_PROBE_S = 5.0
_LAST_PORT = 65535


class TokenFile(AbstractTokenProvider):  # type: ignore[misc]  # aiokafka is untyped
    """An OAUTHBEARER token kept fresh in a file by someone else; it is read again for every connection."""

    def __init__(self, path: Path, extensions: Mapping[str, str]) -> None:
        self._path = path
        self._extensions = dict(extensions)

    async def token(self) -> str:
        return (await asyncio.to_thread(self._path.read_text)).strip()

    def extensions(self) -> dict[str, str]:
        return self._extensions


def client_options(kafka: KafkaSettings) -> dict[str, Any]:
    """The keyword arguments that every aiokafka consumer, producer and admin client is made with.

    Contains secrets in the clear: don't log it. Raises ConfigError for a file that can't be read, and for addresses
    that are none.
    """
    _hosts(kafka.bootstrap_servers)
    options: dict[str, Any] = {
        "bootstrap_servers": kafka.bootstrap_servers,
        "security_protocol": kafka.security_protocol,
        "request_timeout_ms": round(kafka.request_timeout_s * 1000),
        "retry_backoff_ms": 100,
    }
    if kafka.security_protocol.endswith("SSL"):
        options["ssl_context"] = _ssl_context(kafka)
    if kafka.security_protocol.startswith("SASL"):
        options |= _sasl(kafka)
    return options


def _hosts(bootstrap_servers: str) -> list[tuple[str, int]]:
    """In a random order."""
    wrong = ConfigError(f"bootstrap_servers: {bootstrap_servers!r}: write HOST:PORT, several with commas between them")
    try:
        hosts = [(host, port) for host, port, _ in collect_hosts(bootstrap_servers)]
    except ValueError:
        raise wrong from None
    if any(port > _LAST_PORT for _, port in hosts):
        raise wrong
    return hosts


def _ssl_context(kafka: KafkaSettings) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=kafka.ssl_cafile)
        if kafka.ssl_certfile:
            password = _said(kafka.ssl_password, kafka.ssl_password_file, "ssl_password_file")
            context.load_cert_chain(kafka.ssl_certfile, kafka.ssl_keyfile, password or "")
    except OSError as error:
        files = ", ".join(str(file) for file in (kafka.ssl_cafile, kafka.ssl_certfile, kafka.ssl_keyfile) if file)
        raise ConfigError(f"TLS: can't use {files}: {error}") from None
    context.check_hostname = kafka.ssl_check_hostname
    return context


def _sasl(kafka: KafkaSettings) -> dict[str, Any]:
    if kafka.sasl_mechanism == "OAUTHBEARER":
        if kafka.oauth_token_file is None:
            raise ConfigError("sasl_mechanism OAUTHBEARER needs oauth_token_file")
        return {
            "sasl_mechanism": "OAUTHBEARER",
            "sasl_oauth_token_provider": TokenFile(kafka.oauth_token_file, kafka.oauth_extensions),
        }
    password = _said(kafka.sasl_password, kafka.sasl_password_file, "sasl_password_file")
    if kafka.sasl_username is None or password is None:
        raise ConfigError(
            f"sasl_mechanism {kafka.sasl_mechanism} needs sasl_username, and sasl_password or sasl_password_file"
        )
    return {
        "sasl_mechanism": kafka.sasl_mechanism,
        "sasl_plain_username": kafka.sasl_username,
        "sasl_plain_password": password,
    }


def _said(password: SecretStr | None, file: Path | None, setting: str) -> str | None:
    """A password, or what is in its file; None where there is neither. ``setting`` names the file."""
    if password is not None:
        return password.get_secret_value()
    if file is None:
        return None
    try:
        return file.read_text().rstrip("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{setting}: {error}") from None


async def start(client: AIOKafkaConsumer | AIOKafkaProducer | AIOKafkaAdminClient) -> None:
    """Start a client, once there is a broker for it.

    A cluster whose only broker was fenced, as behind a pause of its machine, tells of none for a moment. aiokafka takes
    that for an answer, and fails in what it does next. Raises as the client's own ``start``, and KafkaConnectionError.
    """
    connection: AIOKafkaClient = client.client if isinstance(client, AIOKafkaProducer) else client._client
    bootstrap = connection.bootstrap

    async def to_a_broker() -> None:
        await bootstrap()
        until = time.monotonic() + connection._request_timeout_ms / 1000
        while not connection.cluster.brokers():
            if time.monotonic() > until:
                raise KafkaConnectionError("the cluster has no broker in service")
            await asyncio.sleep(connection._retry_backoff)
            await connection.force_metadata_update()

    connection.bootstrap = to_a_broker
    await client.start()


async def reachable(kafka: KafkaSettings, *, within_s: float = 60.0) -> None:
    """Return once a broker of the list answers, and accepts our credentials.

    Raises BrokerUnavailable with the reason: after ``within_s`` seconds where no broker answers, at once where
    one refuses us.
    """
    options = client_options(kafka)
    attempts = AsyncRetrying(
        retry=retry_if_exception(lambda error: isinstance(error, _TROUBLE) and not isinstance(error, _UNWELCOME)),
        stop=stop_after_delay(within_s),
        wait=wait_exponential(multiplier=0.2, max=5.0) + wait_random(0, 0.5),
        before_sleep=_tell(kafka),
        reraise=True,
    )
    try:
        await attempts(_probe, options)
    except _UNWELCOME as error:
        raise BrokerUnavailable(f"the broker at {kafka.bootstrap_servers} refuses us: {_reason(error)}") from None
    except _TROUBLE as error:
        raise BrokerUnavailable(
            f"no broker answers at {kafka.bootstrap_servers} ({kafka.security_protocol}) "
            f"within {within_s:g} s: {_reason(error)}"
        ) from None


async def answers(kafka: KafkaSettings) -> bool:
    """Whether a broker of the list takes a connection now, be it to refuse our credentials."""
    try:
        await _probe(client_options(kafka))
    except _UNWELCOME:
        return True
    except _TROUBLE:
        return False
    return True


async def _probe(options: dict[str, Any]) -> None:
    """Open a connection, which asks for API versions and authenticates, to the first broker that takes one."""
    options = dict(options)
    hosts = _hosts(options.pop("bootstrap_servers"))
    options.pop("retry_backoff_ms")
    options["request_timeout_ms"] = min(options["request_timeout_ms"], round(_PROBE_S * 1000))
    trouble: BaseException | None = None
    for host, port in hosts:
        try:
            connection = await create_conn(host, port, **options)
        except _TROUBLE as error:
            trouble = error
            continue
        await connection.close()
        return
    assert trouble is not None
    raise trouble


def _tell(kafka: KafkaSettings) -> Any:
    def waiting(state: RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome else None
        log.warning("broker.awaited", broker=kafka.bootstrap_servers, tries=state.attempt_number, reason=_reason(error))

    return waiting


def _reason(error: BaseException | None) -> str:
    return str(error) or type(error).__name__


async def close_client(closing: Coroutine[Any, Any, None], *, within_s: float = _STOP_S) -> None:
    """Carry out what closes an aiokafka client, but not longer than brokers that are away deserve.

    It has a task of its own, which a cancellation of the caller does not reach: whichever comes while aiokafka waits
    for one of its own tasks it takes for that one's, and the caller would never hear of it.
    """
    task = asyncio.create_task(closing, name="kafka.close")
    try:
        await asyncio.wait({task}, timeout=within_s)
    finally:
        await _ended({task})
        if not task.done() or task.cancelled():
            log.debug("bus.client_not_closed", reason="cancelled" if task.done() else "it goes on")
        elif (error := task.exception()) is not None:
            log.debug("bus.client_not_closed", reason=repr(error))


async def close_consumer(consumer: AIOKafkaConsumer) -> None:
    """Stop a consumer, and close its connections."""
    try:
        await close_client(consumer.stop())
    finally:
        await close_client(consumer._client.close())


async def close_producer(producer: AIOKafkaProducer, *, within_s: float) -> None:
    """Stop a producer; what it has not sent after ``within_s`` seconds is given up.

    aiokafka's sender takes a cancellation for the end of one of its requests, and waits for the next of them, for ever
    with a broker that does not answer: it is told again.
    """
    try:
        await close_client(producer.stop(), within_s=within_s)
    finally:
        await _ended({task for task in (producer._sender.sender_task,) if task is not None})
        await close_client(producer.client.close())


async def _ended(tasks: "set[asyncio.Task[Any]]") -> None:
    """End what is not done; who does not listen is told again."""
    left = {task for task in tasks if not task.done()}
    for _ in range(_TELLINGS):
        if not left:
            return
        for task in left:
            task.cancel()
        _, left = await asyncio.wait(left, timeout=_TOLD_S)
    log.debug("bus.tasks_left", left=len(left))
