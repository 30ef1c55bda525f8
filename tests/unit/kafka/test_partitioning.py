"""The partition of a key is the one that every client of Kafka's finds."""

from aiokafka.partitioner import murmur2
from hypothesis import given
from hypothesis import strategies as st

from service.kafka.producer import partition_of


@given(st.binary(max_size=300), st.integers(1, 1000))
def test_it_is_aiokafkas(key: bytes, partitions: int) -> None:
    assert partition_of(key, partitions) == (murmur2(key) & 0x7FFFFFFF) % partitions
