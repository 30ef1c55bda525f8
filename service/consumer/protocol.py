"""OffsetFetch version 7, which aiokafka lacks: committed offsets without those of a transaction that is still ending.

A transaction's offsets can be seen only once the coordinator has written its marker, a moment after the commit was
answered, and after the next owner's InitProducerId has ended a transaction that its predecessor left open. Up to
version 6 a read in that moment gives the ledger before it, as if that were the latest. With ``require_stable`` the
broker says that the offset is unstable instead (KIP-447; brokers since 2.5).
"""

from collections import defaultdict
from collections.abc import Iterable

from aiokafka import TopicPartition
from aiokafka.protocol.api import Request, RequestStruct, Response
from aiokafka.protocol.commit import OffsetFetchRequest_v3
from aiokafka.protocol.types import Boolean, CompactArray, CompactString, Int16, Int32, Int64, Schema, TaggedFields

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
