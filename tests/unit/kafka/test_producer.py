"""The producer outside transactions: whatever becomes of those that wait for it, each of aiokafka's is closed."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from aiokafka.cluster import ClusterMetadata
from aiokafka.errors import OutOfOrderSequenceNumber, UnknownTopicOrPartitionError
from aiokafka.protocol.metadata import MetadataResponse_v0

from schemas.base import Outgoing
from service.errors import BrokerUnavailable, RecordRefused
from service.kafka import producer as producer_module
from service.kafka.producer import IdempotentProducer
from service.settings import KafkaSettings


class Producer:
    """aiokafka's, the first of which dies of its first record and then has something to send for ever."""

    made: list["Producer"]

    def __init__(self, *, request_timeout_ms: int, **_options: Any) -> None:
        self._request_timeout_ms = request_timeout_ms
        self.client = self._client = self
        self._sender = SimpleNamespace(sender_task=None)
        self.flushing = asyncio.Event()
        self.closed = False
        Producer.made.append(self)

    async def bootstrap(self) -> None:
        """It has nothing to connect to."""

    async def start(self) -> None:
        """As a producer."""

    async def stop(self) -> None:
        self.closed = True

    async def close(self) -> None:
        """As a client."""

    async def flush(self) -> None:
        self.flushing.set()
        if self is Producer.made[0]:
            await asyncio.Event().wait()

    dies_of: type[Exception] = OutOfOrderSequenceNumber
    cluster = ClusterMetadata()

    async def send(self, *_record: object, **_more: object) -> None:
        raise self.dies_of


async def test_a_dead_producer_is_closed_though_who_was_closing_it_is_cancelled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Producer, "made", [], raising=False)
    monkeypatch.setattr(producer_module, "AIOKafkaProducer", Producer)
    async with IdempotentProducer(kafka=KafkaSettings(), max_record_bytes=1000) as outlet:
        with pytest.raises(BrokerUnavailable):
            await outlet.send(Outgoing("t", b"k", b"v"))
        sending = asyncio.create_task(outlet.send(Outgoing("t", b"k", b"v")))
        await Producer.made[0].flushing.wait()
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        monkeypatch.setattr(producer_module, "_STOP_S", 0.01)
    assert all(one.closed for one in Producer.made)


async def test_a_topic_is_unknown_when_a_broker_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """And aiokafka says so, too, where none answers for long."""
    cluster = ClusterMetadata()
    cluster.update_metadata(MetadataResponse_v0([(1, "here", 9092)], []))
    settings = KafkaSettings()
    for name, value in {"made": [], "dies_of": UnknownTopicOrPartitionError, "cluster": cluster}.items():
        monkeypatch.setattr(Producer, name, value, raising=False)
    monkeypatch.setattr(producer_module, "AIOKafkaProducer", Producer)
    monkeypatch.setattr(Producer, "flush", Producer.stop)
    async with IdempotentProducer(kafka=settings, max_record_bytes=1000) as outlet:
        with pytest.raises(RecordRefused):
            await outlet.send(Outgoing("t", b"k", b"v"))
        cluster._last_successful_refresh_ms -= 1000 * settings.request_timeout_s + 1  # which nothing after it changed
        with pytest.raises(BrokerUnavailable):
            await outlet.send(Outgoing("t", b"k", b"v"))
    assert len(Producer.made) == 1, "it goes on"
