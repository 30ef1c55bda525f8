"""Whose partitions are whose here, and what a writer's end means."""

import asyncio
from typing import Any

import pytest
from aiokafka import TopicPartition

from service.consumer.in_flight import InFlight, Limits
from service.consumer.ledger import Ledger
from service.consumer.partitions import OwnedPartitions
from service.errors import BrokerUnavailable

ONE, OTHER = TopicPartition("requests", 0), TopicPartition("requests", 1)


class Writer:
    """Lives until it is told to end, by whomever."""

    def __init__(self, partition: TopicPartition) -> None:
        self.partition = partition
        self.ledger = Ledger()
        self.ready = self.fenced = False
        self.written = asyncio.get_running_loop().create_future()
        self.end = asyncio.get_running_loop().create_future()

    async def run(self) -> None:
        await self.end

    def flushed(self) -> asyncio.Future[None]:
        return self.written


def owned() -> OwnedPartitions:
    def open_writer(partition: TopicPartition, acquired: Any) -> Any:
        return Writer(partition)

    limits = Limits(requests=10, bytes=10, tokens=10)
    return OwnedPartitions(
        writers={}, open_writer=open_writer, in_flight=InFlight(limits), acquired=lambda _writer: None
    )


async def test_a_writer_that_its_own_client_has_cancelled_is_a_failure_and_no_silence() -> None:
    """aiokafka lets the cancellation of its own tasks out; a partition without its writer would never be read."""
    partitions = owned()
    partitions.reassign({ONE, OTHER}, missed=False)
    writer: Any = partitions.writers[ONE]
    writer.end.cancel()
    await asyncio.wait(set(partitions._lives), return_when=asyncio.FIRST_COMPLETED)
    await asyncio.sleep(0)
    with pytest.raises(BrokerUnavailable, match="requests"):
        raise partitions.failure or AssertionError("nothing")
    await partitions.close()


async def test_a_writer_whose_partition_is_anothers_now_ends_without_a_word() -> None:
    partitions = owned()
    partitions.reassign({ONE}, missed=False)
    (first,) = partitions._lives
    partitions.reassign(set(), missed=False)
    partitions.reassign({ONE, OTHER}, missed=False)  # and back, before the first writer has ended
    await asyncio.wait({first})
    await partitions.close()
    assert (first.cancelled(), partitions.failure) == (True, None)


async def test_what_is_marked_where_a_partition_is_taken_over_again_is_committed_before_a_flush_is_done() -> None:
    """The mark says that an engine died of it: without it the request would have one engine more."""
    partitions = owned()
    partitions.reassign({ONE, OTHER}, missed=False)
    marked: Any = partitions.writers[ONE]
    marked.ledger.deliver(0)
    marked.ledger.start(0, alone=True)
    flush = asyncio.create_task(partitions.flush(within_s=60))
    await asyncio.wait({flush}, timeout=0.01)
    assert not flush.done()
    marked.written.set_result(None)
    await flush  # the other one has nothing to say
    marked.fenced, marked.written = True, asyncio.get_running_loop().create_future()
    await partitions.flush(within_s=60)  # whose it is by now knows better
    await partitions.close()
