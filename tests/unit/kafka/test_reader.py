"""A record as the client library has it becomes one of ours, and so do its errors."""

import time
from collections.abc import Sequence

import pytest
from aiokafka import TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import KafkaTimeoutError

from service.errors import BrokerUnavailable, TopicError
from service.kafka.reader import TopicReader, partitions_of
from service.kafka.records import moment_of
from service.settings import load

CREATE_TIME, LOG_APPEND_TIME = 0, 1


def timestamp_of(moment: float, kind: int) -> float:
    return moment_of(round(1000 * moment), kind)


def test_a_producer_whose_clock_is_an_hour_fast_gains_no_time_to_live():
    now = time.time()
    assert now <= timestamp_of(now + 3600, CREATE_TIME) <= time.time()
    assert timestamp_of(now - 3600, CREATE_TIME) < now - 3599


def test_the_brokers_time_is_taken_as_it_is_though_our_clock_is_behind():
    ahead = round(time.time()) + 5.0
    assert timestamp_of(ahead, LOG_APPEND_TIME) == ahead


class EndsUnknown:
    """aiokafka's consumer of a broker that does not say where its logs end."""

    async def end_offsets(self, _partitions: Sequence[TopicPartition]) -> dict[TopicPartition, int]:
        raise KafkaTimeoutError("no leader")


async def test_a_broker_that_does_not_say_where_a_topic_ends_is_away():
    reader = TopicReader(kafka=load(group_id="g").kafka, topics=["progress"])
    reader._consumer = EndsUnknown()
    with pytest.raises(BrokerUnavailable, match="no leader"):
        _ = [record async for record in reader.backlog()]


async def test_a_broker_that_goes_away_while_a_topic_is_waited_for_is_no_more_than_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []

    class Once(AIOKafkaAdminClient):
        async def start(self) -> None:
            """There is no broker."""

        async def describe_topics(self, _topics: object = None) -> list[dict[str, object]]:
            if asked:
                raise KafkaTimeoutError("no broker")
            asked.append("topics")
            return [{"topic": "there", "error_code": 0, "partitions": [0]}]

    monkeypatch.setattr("service.kafka.reader.AIOKafkaAdminClient", Once)
    with pytest.raises(TopicError, match="no topic missing at"):
        await partitions_of(load(group_id="g").kafka, ["there", "missing"], within_s=0)
