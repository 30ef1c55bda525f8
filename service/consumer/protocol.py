"""Requests that aiokafka lacks.

OffsetFetch version 7: committed offsets without those of a transaction that is still ending. Its offsets can be seen
only once the coordinator has written its marker, a moment after the commit was answered, and after the next
owner's InitProducerId has ended a transaction that its predecessor left open. Up to version 6 a read in that moment
gives the ledger before it, as if that were the latest. With ``require_stable`` the broker says that the offset is
unstable instead (KIP-447; brokers since 2.5).

Metadata version 12: a topic's id, which is another one each time the topic is made (KIP-516; brokers since 3.1).

DescribeTransactions, DescribeProducers and WriteTxnMarkers: what became of a transaction, where it is still open, and
how to end it there (KIP-664; brokers since 3.0).
"""

import random
import uuid
from collections import defaultdict
from collections.abc import Iterable
from io import BytesIO
from typing import Any

from aiokafka import TopicPartition
from aiokafka.client import AIOKafkaClient
from aiokafka.errors import IncompatibleBrokerVersion, KafkaError, NodeNotReadyError, for_code
from aiokafka.protocol.api import Request, RequestStruct, Response
from aiokafka.protocol.commit import OffsetFetchRequest_v3
from aiokafka.protocol.types import (
    AbstractType,
    Boolean,
    CompactArray,
    CompactString,
    Int16,
    Int32,
    Int64,
    Schema,
    TaggedFields,
)

UNSTABLE_OFFSET_COMMIT = 88
"""An error code: a transaction that writes this partition's offset is still ending; to be asked again."""


class OffsetFetchResponse_v7(Response):  # type: ignore[misc]  # noqa: N801 - aiokafka's naming
    """Offsets, metadata and an error code for each partition, and one for the group."""

    API_KEY = 9
    API_VERSION = 7
    SCHEMA = Schema(
        ("throttle_time_ms", Int32),
        (
            "topics",
            CompactArray(
                ("topic", CompactString("utf-8")),
                (
                    "partitions",
                    CompactArray(
                        ("partition", Int32),
                        ("offset", Int64),
                        ("leader_epoch", Int32),
                        ("metadata", CompactString("utf-8")),
                        ("error_code", Int16),
                        ("tags", TaggedFields),
                    ),
                ),
                ("tags", TaggedFields),
            ),
        ),
        ("error_code", Int16),
        ("tags", TaggedFields),
    )


class OffsetFetchRequest_v7(RequestStruct):  # type: ignore[misc]  # noqa: N801 - aiokafka's naming
    """The partitions of a group, and whether an offset that is about to change is an error."""

    FLEXIBLE_VERSION = True
    API_KEY = 9
    API_VERSION = 7
    RESPONSE_TYPE = OffsetFetchResponse_v7
    SCHEMA = Schema(
        ("group_id", CompactString("utf-8")),
        (
            "topics",
            CompactArray(
                ("topic", CompactString("utf-8")),
                ("partitions", CompactArray(Int32)),
                ("tags", TaggedFields),
            ),
        ),
        ("require_stable", Boolean),
        ("tags", TaggedFields),
    )


class StableOffsetFetch(Request[OffsetFetchRequest_v3 | OffsetFetchRequest_v7]):  # type: ignore[misc]
    """Version 7 with ``require_stable``; version 3, without it, for a broker older than 2.5."""

    API_KEY = 9

    def __init__(self, group: str, partitions: Iterable[TopicPartition]) -> None:
        self._group = group
        self._topics: dict[str, list[int]] = defaultdict(list)
        for topic, number in partitions:
            self._topics[topic].append(number)

    def build(self, version: type[RequestStruct]) -> RequestStruct:
        """The request as this version has it."""
        if version is OffsetFetchRequest_v3:
            return version(self._group, list(self._topics.items()))
        return version(self._group, [(topic, numbers, {}) for topic, numbers in self._topics.items()], True, {})


class _Uuid(AbstractType[uuid.UUID]):  # type: ignore[misc]
    """16 bytes."""

    @classmethod
    def encode(cls, value: uuid.UUID) -> bytes:
        return value.bytes

    @classmethod
    def decode(cls, data: BytesIO) -> uuid.UUID:
        return uuid.UUID(bytes=data.read(16))


class MetadataResponse_v12(Response):  # type: ignore[misc]  # noqa: N801
    """Topics with their ids."""

    API_KEY = 3
    API_VERSION = 12
    SCHEMA = Schema(
        ("throttle_time_ms", Int32),
        (
            "brokers",
            CompactArray(
                ("node_id", Int32),
                ("host", CompactString("utf-8")),
                ("port", Int32),
                ("rack", CompactString("utf-8")),
                ("tags", TaggedFields),
            ),
        ),
        ("cluster_id", CompactString("utf-8")),
        ("controller_id", Int32),
        (
            "topics",
            CompactArray(
                ("error_code", Int16),
                ("topic", CompactString("utf-8")),
                ("topic_id", _Uuid),
                ("is_internal", Boolean),
                (
                    "partitions",
                    CompactArray(
                        ("error_code", Int16),
                        ("partition", Int32),
                        ("leader", Int32),
                        ("leader_epoch", Int32),
                        ("replicas", CompactArray(Int32)),
                        ("isr", CompactArray(Int32)),
                        ("offline_replicas", CompactArray(Int32)),
                        ("tags", TaggedFields),
                    ),
                ),
                ("topic_authorized_operations", Int32),
                ("tags", TaggedFields),
            ),
        ),
        ("tags", TaggedFields),
    )


class MetadataRequest_v12(RequestStruct):  # type: ignore[misc]  # noqa: N801
    """Topics by name, none of which is to be made."""

    FLEXIBLE_VERSION = True
    API_KEY = 3
    API_VERSION = 12
    RESPONSE_TYPE = MetadataResponse_v12
    SCHEMA = Schema(
        ("topics", CompactArray(("topic_id", _Uuid), ("topic", CompactString("utf-8")), ("tags", TaggedFields))),
        ("allow_auto_topic_creation", Boolean),
        ("include_topic_authorized_operations", Boolean),
        ("tags", TaggedFields),
    )


class DescribeTopic(Request[MetadataRequest_v12]):  # type: ignore[misc]
    """What there is to be said of one topic."""

    API_KEY = 3

    def __init__(self, topic: str) -> None:
        self._topic = topic

    def build(self, version: type[RequestStruct]) -> RequestStruct:
        """The request as this version has it."""
        return version([(uuid.UUID(int=0), self._topic, {})], False, False, {})


async def topic_id(client: AIOKafkaClient, topic: str) -> str | None:
    """The id of a topic as it is now; None of a broker older than 3.1, which has none. Raises KafkaError.

    A broker that is known may have gone: they are asked in a random order until one answers.
    """
    nodes = [broker.nodeId for broker in client.cluster.brokers()]
    trouble: KafkaError = NodeNotReadyError("no broker is known")
    for node in random.sample(nodes, len(nodes)):
        try:
            ((code, _, found, *_),) = (await client.send(node, DescribeTopic(topic))).topics
        except IncompatibleBrokerVersion:
            return None
        except KafkaError as error:
            trouble = error
        else:
            if code:
                raise for_code(code)(topic)
            return str(found)
    raise trouble


_PARTITIONS = CompactArray(
    ("topic", CompactString("utf-8")),
    ("partitions", CompactArray(Int32)),
    ("tags", TaggedFields),
)


class DescribeTransactionsResponse_v0(Response):  # type: ignore[misc]  # noqa: N801
    """The state of each transactional id."""

    API_KEY = 65
    API_VERSION = 0
    SCHEMA = Schema(
        ("throttle_time_ms", Int32),
        (
            "transaction_states",
            CompactArray(
                ("error_code", Int16),
                ("transactional_id", CompactString("utf-8")),
                ("transaction_state", CompactString("utf-8")),
                ("transaction_timeout_ms", Int32),
                ("transaction_start_time_ms", Int64),
                ("producer_id", Int64),
                ("producer_epoch", Int16),
                ("topics", _PARTITIONS),
                ("tags", TaggedFields),
            ),
        ),
        ("tags", TaggedFields),
    )


class DescribeTransactionsRequest_v0(RequestStruct):  # type: ignore[misc]  # noqa: N801
    """Transactional ids, at their coordinator."""

    FLEXIBLE_VERSION = True
    API_KEY = 65
    API_VERSION = 0
    RESPONSE_TYPE = DescribeTransactionsResponse_v0
    SCHEMA = Schema(("transactional_ids", CompactArray(CompactString("utf-8"))), ("tags", TaggedFields))


class DescribeTransactions(Request[DescribeTransactionsRequest_v0]):  # type: ignore[misc]
    """What a coordinator knows of one transactional id."""

    API_KEY = 65

    def __init__(self, transactional_id: str) -> None:
        self._id = transactional_id

    def build(self, version: type[RequestStruct]) -> RequestStruct:
        """The request as this version has it."""
        return version([self._id], {})


class DescribeProducersResponse_v0(Response):  # type: ignore[misc]  # noqa: N801
    """The producers of each partition; ``current_txn_start_offset`` is -1 where one has no transaction open."""

    API_KEY = 61
    API_VERSION = 0
    SCHEMA = Schema(
        ("throttle_time_ms", Int32),
        (
            "topics",
            CompactArray(
                ("topic", CompactString("utf-8")),
                (
                    "partitions",
                    CompactArray(
                        ("partition", Int32),
                        ("error_code", Int16),
                        ("error_message", CompactString("utf-8")),
                        (
                            "active_producers",
                            CompactArray(
                                ("producer_id", Int64),
                                ("producer_epoch", Int32),
                                ("last_sequence", Int32),
                                ("last_timestamp", Int64),
                                ("coordinator_epoch", Int32),
                                ("current_txn_start_offset", Int64),
                                ("tags", TaggedFields),
                            ),
                        ),
                        ("tags", TaggedFields),
                    ),
                ),
                ("tags", TaggedFields),
            ),
        ),
        ("tags", TaggedFields),
    )


class DescribeProducersRequest_v0(RequestStruct):  # type: ignore[misc]  # noqa: N801
    """Partitions, at their leader."""

    FLEXIBLE_VERSION = True
    API_KEY = 61
    API_VERSION = 0
    RESPONSE_TYPE = DescribeProducersResponse_v0
    SCHEMA = Schema(("topics", _PARTITIONS), ("tags", TaggedFields))


class DescribeProducers(Request[DescribeProducersRequest_v0]):  # type: ignore[misc]
    """Who writes to partitions that one broker leads."""

    API_KEY = 61

    def __init__(self, partitions: Iterable[TopicPartition]) -> None:
        self._topics = _by_topic(partitions)

    def build(self, version: type[RequestStruct]) -> RequestStruct:
        """The request as this version has it."""
        return version(self._topics, {})


class WriteTxnMarkersResponse_v1(Response):  # type: ignore[misc]  # noqa: N801
    """An error code for each partition of each marker."""

    API_KEY = 27
    API_VERSION = 1
    SCHEMA = Schema(
        (
            "markers",
            CompactArray(
                ("producer_id", Int64),
                (
                    "topics",
                    CompactArray(
                        ("topic", CompactString("utf-8")),
                        (
                            "partitions",
                            CompactArray(("partition", Int32), ("error_code", Int16), ("tags", TaggedFields)),
                        ),
                        ("tags", TaggedFields),
                    ),
                ),
                ("tags", TaggedFields),
            ),
        ),
        ("tags", TaggedFields),
    )


class WriteTxnMarkersRequest_v1(RequestStruct):  # type: ignore[misc]  # noqa: N801
    """How transactions ended, for the partitions that one broker leads."""

    FLEXIBLE_VERSION = True
    API_KEY = 27
    API_VERSION = 1
    RESPONSE_TYPE = WriteTxnMarkersResponse_v1
    SCHEMA = Schema(
        (
            "markers",
            CompactArray(
                ("producer_id", Int64),
                ("producer_epoch", Int16),
                ("transaction_result", Boolean),
                ("topics", _PARTITIONS),
                ("coordinator_epoch", Int32),
                ("tags", TaggedFields),
            ),
        ),
        ("tags", TaggedFields),
    )


class WriteTxnMarkers(Request[WriteTxnMarkersRequest_v1]):  # type: ignore[misc]
    """How one producer's transaction ended in one partition. Needs ClusterAction where there are ACLs."""

    API_KEY = 27

    def __init__(
        self,
        partition: TopicPartition,
        *,
        producer_id: int,
        producer_epoch: int,
        coordinator_epoch: int,
        committed: bool,
    ) -> None:
        told = _by_topic([partition])
        self._marker: tuple[Any, ...] = (producer_id, producer_epoch, committed, told, max(0, coordinator_epoch), {})

    def build(self, version: type[RequestStruct]) -> RequestStruct:
        """The request as this version has it."""
        return version([self._marker], {})


def _by_topic(partitions: Iterable[TopicPartition]) -> list[tuple[str, list[int], dict[int, bytes]]]:
    topics: dict[str, list[int]] = defaultdict(list)
    for topic, number in partitions:
        topics[topic].append(number)
    return [(topic, numbers, {}) for topic, numbers in topics.items()]
