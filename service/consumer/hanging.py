"""Transactions that ended for their coordinator and not for their partitions, and how they are ended there.

A broker that starts alone, or with all others, decides what it finds prepared, and does not tell partitions whose
leader is not back yet: Kafka (4.3) takes those for deleted. Offsets stay unstable then, and records invisible. Behind
the fence no transaction of the partition's producer can be open, so what is open there hangs; whether it was
committed is what the coordinator said before the fence.
"""

import asyncio
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import structlog
from aiokafka import TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import IncompatibleBrokerVersion, KafkaError, for_code

from service.consumer.protocol import DescribeProducers, DescribeTransactions, WriteTxnMarkers
from service.errors import BrokerUnavailable
from service.settings import TopicSettings

log = structlog.get_logger(__name__)

_OFFSETS = "__consumer_offsets"
_TRANSACTION = 1
"""The kind of coordinator."""
_COMMITTED = frozenset({"PrepareCommit", "CompleteCommit"})
_ABORTED = frozenset({"Ongoing", "PrepareAbort", "CompleteAbort", "PrepareEpochFence"})
"""The fence aborts one that is open yet."""
_WITHIN_S = 5.0
_TOO_OLD = (NotImplementedError, IncompatibleBrokerVersion)


@dataclass(frozen=True, slots=True)
class _Open:
    partition: TopicPartition
    leader: int
    producer_epoch: int
    coordinator_epoch: int


class HangingTransactions:
    """Finds and ends them. A broker that is too old, or refuses, changes nothing but the log."""

    def __init__(self, *, admin: AIOKafkaAdminClient, topics: TopicSettings) -> None:
        self._admin = admin
        self._topics = topics

    async def decision(self, transactional_id: str) -> bool | None:
        """Whether its last transaction was, or will be, committed; None: nobody knows any more, or may tell us.

        Raises BrokerUnavailable.
        """
        try:
            async with asyncio.timeout(_WITHIN_S):
                coordinator = await self._admin.find_coordinator(transactional_id, coordinator_type=_TRANSACTION)
                response = await self._admin._send_request(DescribeTransactions(transactional_id), coordinator)
        except _TOO_OLD:
            return None
        except (KafkaError, OSError, TimeoutError) as error:
            raise BrokerUnavailable(f"can't ask how {transactional_id} ended: {error!r}") from error
        code, _, state, *_ = response.transaction_states[0]
        if code and for_code(code).retriable:
            raise BrokerUnavailable(f"can't ask how {transactional_id} ended: {for_code(code).__name__}")
        return True if state in _COMMITTED else False if state in _ABORTED else None

    async def end(self, producer_id: int, *, committed: bool) -> int:
        """End what a fenced producer has open anywhere; returns in how many partitions that was."""
        try:
            async with asyncio.timeout(_WITHIN_S):
                found = await self._open(producer_id)
                for one in found:
                    await self._mark(producer_id, one, committed=committed)
        except _TOO_OLD:
            return 0
        except (KafkaError, OSError, TimeoutError) as error:
            log.warning("bus.transaction_hangs", producer_id=producer_id, reason=repr(error))
            return 0
        return len(found)

    async def _open(self, producer_id: int) -> list[_Open]:
        cluster = await self._admin._client.fetch_all_metadata()
        by_leader: dict[int, list[TopicPartition]] = defaultdict(list)
        for topic in filter(self._may_be_in, cluster.topics(exclude_internal_topics=False)):
            for number in cluster.partitions_for_topic(topic) or ():
                partition = TopicPartition(topic, number)
                leader = cluster.leader_for_partition(partition)
                if leader not in {None, -1}:
                    by_leader[leader].append(partition)
        found: list[_Open] = []
        for leader, partitions in by_leader.items():
            response = await self._admin._send_request(DescribeProducers(partitions), leader)
            for topic, told, _ in response.topics:
                for number, code, _, producers, _ in told:
                    if code:
                        log.debug("bus.producers_not_described", partition=f"{topic}/{number}", code=code)
                    found += [
                        _Open(TopicPartition(topic, number), leader, epoch, coordinator)
                        for id_, epoch, _, _, coordinator, start, _ in producers or ()
                        if id_ == producer_id and start >= 0
                    ]
        return found

    async def _mark(self, producer_id: int, one: _Open, *, committed: bool) -> None:
        request = WriteTxnMarkers(
            one.partition,
            producer_id=producer_id,
            producer_epoch=one.producer_epoch,
            coordinator_epoch=one.coordinator_epoch,
            committed=committed,
        )
        response = await self._admin._send_request(request, one.leader)
        for code in _codes(response.markers):
            if code:
                raise for_code(code)(str(one.partition))
        log.warning("bus.transaction_ended", partition=str(one.partition), producer_id=producer_id, committed=committed)

    def _may_be_in(self, topic: str) -> bool:
        """Whether a worker's transactions write there."""
        topics = self._topics
        own = (topics.ledgers, topics.progress, topics.dead_letters, topics.usage)
        kept = topic == _OFFSETS or topic in map(topics.named, own)
        return kept or topics.takes_moved(topic) or topics.allows_reply(topic)


def _codes(markers: Iterable[tuple[int, list[tuple[str, list[tuple[int, int, object]], object]], object]]) -> list[int]:
    return [code for _, topics, _ in markers for _, partitions, _ in topics for _, code, _ in partitions]
