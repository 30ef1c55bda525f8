"""Writing batches as they are, past everything that a client library checks."""

import asyncio
from types import TracebackType
from typing import Self

from aiokafka import TopicPartition
from aiokafka.client import AIOKafkaClient
from aiokafka.errors import LeaderNotAvailableError, NotEnoughReplicasError, NotLeaderForPartitionError, for_code
from aiokafka.protocol.produce import ProduceRequest

from service.consumer.protocol import topic_id

_PASSING = LeaderNotAvailableError, NotLeaderForPartitionError, NotEnoughReplicasError
"""Refusals that pass by themselves, and after which nothing was written."""
_TRIES = 50
_ACKNOWLEDGED_BY_ALL = -1


class RawProducer:
    """Sends whole batches. Opened with ``async with``. Not for times in which brokers die: nothing tells whether a
    batch without an answer was written.
    """

    def __init__(self, bootstrap: str) -> None:
        self._client = AIOKafkaClient(bootstrap_servers=bootstrap, metadata_max_age_ms=2000)

    async def __aenter__(self) -> Self:
        await self._client.bootstrap()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._client.close()

    async def send(self, topic: str, partition: int, batch: bytes) -> int:
        """The offset of the batch's first record. Raises KafkaError where the broker refuses it."""
        await self._client.add_topic(topic)
        for _ in range(_TRIES):
            leader = self._client.cluster.leader_for_partition(TopicPartition(topic, partition))
            if leader not in {None, -1}:
                request = ProduceRequest(None, _ACKNOWLEDGED_BY_ALL, 30_000, [(topic, [(partition, batch)])])
                response = await self._client.send(leader, request)
                ((_, ((_, code, offset, *_),)),) = response.topics
                error = for_code(code)
                if not code:
                    return int(offset)
                if not issubclass(error, _PASSING):
                    raise error(f"{topic}/{partition}")
            await self._client.force_metadata_update()
            await asyncio.sleep(0.2)
        raise NotLeaderForPartitionError(f"{topic}/{partition}")

    async def topic_id(self, topic: str) -> str | None:
        """The id of a topic that is there."""
        return await topic_id(self._client, topic)

    async def partitions(self, topic: str) -> list[int]:
        """The partitions of a topic that is there; a broker that has just started may not know of it yet."""
        await self._client.add_topic(topic)
        for _ in range(_TRIES):
            if found := self._client.cluster.partitions_for_topic(topic):
                return sorted(found)
            await self._client.force_metadata_update()
            await asyncio.sleep(0.2)
        raise LeaderNotAvailableError(topic)
