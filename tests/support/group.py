"""A consumer group without its broker: the cluster that members see, and what they say through Kafka's own bytes."""

from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

from aiokafka.cluster import ClusterMetadata
from aiokafka.coordinator.assignors.abstract import AbstractPartitionAssignor
from aiokafka.coordinator.protocol import ConsumerProtocolMemberMetadata
from aiokafka.protocol.metadata import MetadataResponse_v1

T = TypeVar("T")


def cluster(topics: Mapping[str, int]) -> ClusterMetadata:
    """One broker with these topics, each with so many partitions."""
    found = ClusterMetadata()
    partitions = {name: [(0, number, 0, [0], [0]) for number in range(count)] for name, count in topics.items()}
    rows = [(0, name, False, each) for name, each in partitions.items()]
    found.update_metadata(MetadataResponse_v1([(0, "localhost", 9092, None)], 0, rows))
    return found


def said(assignor: AbstractPartitionAssignor, topics: Iterable[str]) -> ConsumerProtocolMemberMetadata:
    """What a member with this assignor says when it joins, as it comes out of Kafka."""
    return ConsumerProtocolMemberMetadata.decode(assignor.metadata(list(topics)).encode())


def fitting(wanted: Iterable[T], size: Callable[[T], float], room: float) -> set[T]:
    """Each of ``wanted`` for which there is room beside those before it."""
    found: set[T] = set()
    for each in dict.fromkeys(wanted):
        if size(each) <= room:
            found.add(each)
            room -= size(each)
    return found
