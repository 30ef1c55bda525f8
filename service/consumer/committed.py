"""Reading ledgers: what a group has committed for a partition, and where a partition begins and ends."""

import asyncio
from collections.abc import Sequence

import structlog
from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import KafkaError, for_code
from aiokafka.structs import OffsetAndMetadata

from service.consumer.hanging import HangingTransactions
from service.consumer.ledger import Ledger
from service.consumer.ledgers_topic import LedgersTopic
from service.consumer.protocol import UNSTABLE_OFFSET_COMMIT, OffsetFetchRequest_v7, StableOffsetFetch, topic_id
from service.errors import BrokerUnavailable
from service.kafka.connection import client_options, close_client, close_consumer, start
from service.settings import Forgotten, Settings

log = structlog.get_logger(__name__)

_NO_COMMIT = -1
_WITHIN_S = 10.0
_AGAIN_S = 0.02


async def commits_of(
    admin: AIOKafkaAdminClient, group: str, partitions: Sequence[TopicPartition], *, within_s: float = _WITHIN_S
) -> dict[TopicPartition, OffsetAndMetadata | None]:
    """What a group has committed for each partition; None where it has committed nothing. Raises BrokerUnavailable.

    Waits for transactions that are ending. An error that concerns the whole group, as of a coordinator that is still
    loading it, comes without partitions: what the answer lacks is not known, and is not nothing.
    """
    ending = False
    try:
        async with asyncio.timeout(within_s):
            while (commits := await _stable_commits(admin, group, partitions)) is None:
                ending = True
                await asyncio.sleep(_AGAIN_S)
    except TimeoutError as error:
        what = f"a transaction has been ending for {within_s:.0f} s (one that never ends: deploy/OPERATING.md)"
        raise BrokerUnavailable(f"can't read the ledgers of {group}: {what if ending else repr(error)}") from error
    except (KafkaError, OSError, AttributeError, TypeError) as error:  # it stumbles over other errors
        raise BrokerUnavailable(f"can't read the ledgers of {group}: {error!r}") from error
    if unknown := [partition for partition in partitions if partition not in commits]:
        raise BrokerUnavailable(f"the coordinator of {group} does not say where it stands in {unknown[0]}")
    return {tp: None if commits[tp].offset == _NO_COMMIT else commits[tp] for tp in partitions}


async def _stable_commits(
    admin: AIOKafkaAdminClient, group: str, partitions: Sequence[TopicPartition]
) -> dict[TopicPartition, OffsetAndMetadata] | None:
    """None: a transaction of one of the partitions is still ending."""
    coordinator = await admin.find_coordinator(group)
    response = await admin._send_request(StableOffsetFetch(group, partitions), coordinator)
    commits: dict[TopicPartition, OffsetAndMetadata] = {}
    for topic, found, *_ in response.topics:
        for number, offset, *rest in found:
            metadata, code = rest[1:3] if response.API_VERSION == OffsetFetchRequest_v7.API_VERSION else rest
            if code == UNSTABLE_OFFSET_COMMIT:
                return None
            if code:
                raise for_code(code)(f"{topic}/{number}")
            commits[TopicPartition(topic, number)] = OffsetAndMetadata(offset, metadata)
    return commits


class CommittedLedgers:
    """Committed ledgers of one group. ``open`` it, and ``close`` it in any case.

    A consumer's ``committed()`` drops the metadata, so the admin client is asked; and it is asked only behind a
    fence, because an answer given before may miss a transaction that is being committed.
    """

    def __init__(self, *, settings: Settings, ledgers_topic: LedgersTopic) -> None:
        self._group_id = settings.worker.group_id
        self._policy = settings.worker.forgotten_offsets
        self._ledgers_topic = ledgers_topic
        self._admin = AIOKafkaAdminClient(**client_options(settings.kafka))
        self._prober = AIOKafkaConsumer(**client_options(settings.kafka), enable_auto_commit=False)
        self.hanging = HangingTransactions(admin=self._admin, topics=settings.topics)
        self.forgotten = 0
        """Partitions that this group has had before and whose committed offsets have gone."""

    async def open(self) -> None:
        """Connect. Raises KafkaError and OSError."""
        await start(self._admin)
        await start(self._prober)

    async def close(self) -> None:
        """Close both connections, whether they opened or not."""
        await close_client(self._admin.close())
        await close_consumer(self._prober)

    async def topics(self) -> frozenset[str]:
        """The topics that there are and that this group has committed to. Raises BrokerUnavailable."""
        try:
            async with asyncio.timeout(_WITHIN_S):
                commits = await self._admin.list_consumer_group_offsets(self._group_id)
                there = await self._admin.list_topics()
        except (KafkaError, OSError, TimeoutError) as error:
            raise BrokerUnavailable(f"can't see what {self._group_id} has committed to: {error!r}") from error
        return frozenset(partition.topic for partition in commits).intersection(there)

    async def ledger(self, partition: TopicPartition) -> Ledger:
        """The committed ledger; without a commit, what the settings say, and for a new group an empty one.

        Raises BrokerUnavailable, UnknownLedger.
        """
        commit = (await commits_of(self._admin, self._group_id, [partition]))[partition]
        return await self._uncommitted(partition) if commit is None else Ledger.decode(commit.offset, commit.metadata)

    async def _uncommitted(self, partition: TopicPartition) -> Ledger:
        first, end = await self.bounds(partition)
        try:
            found = await topic_id(self._prober._client, partition.topic)
        except (KafkaError, OSError, TimeoutError) as error:
            raise BrokerUnavailable(f"can't see which topic {partition.topic} is: {error!r}") from error
        remembered = await self._ledgers_topic.ledger(partition, topic_id=found)
        if remembered is None:
            return Ledger(first)
        self.forgotten += 1
        ledger = Ledger(end if self._policy is Forgotten.END else first)
        if self._policy is Forgotten.RESUME and remembered.watermark <= end:  # or the topic has lost records
            ledger = remembered
        log.error(
            "bus.offsets_forgotten",
            partition=str(partition),
            remembered=remembered.watermark,
            first=first,
            end=end,
            policy=self._policy.value,
            goes_on_at=ledger.watermark,
        )
        return ledger

    async def bounds(self, partition: TopicPartition) -> tuple[int, int]:
        """The first offset that is kept, and the next that will be written. Raises BrokerUnavailable."""
        try:
            async with asyncio.timeout(_WITHIN_S):
                first = await self._prober.beginning_offsets([partition])
                last = await self._prober.end_offsets([partition])
        except (KafkaError, OSError, TimeoutError) as error:
            raise BrokerUnavailable(f"can't see the bounds of {partition}: {error!r}") from error
        return first[partition], last[partition]
