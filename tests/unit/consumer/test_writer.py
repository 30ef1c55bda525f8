"""What a partition's writer takes note of before anything is committed; its transactions need a real broker."""

import asyncio

from aiokafka import TopicPartition

from service import settings as settings_module
from service.consumer.ledger import Ledger
from service.consumer.ledgers_topic import LedgersTopic
from service.consumer.transactions import PartitionTransactions
from service.consumer.writer import LedgerWriter

PARTITION = TopicPartition("requests", 0)


async def no_ledger() -> Ledger:
    return Ledger()


def writer() -> LedgerWriter:
    settings = settings_module.load(group_id="g")
    return LedgerWriter(
        partition=PARTITION,
        transactions=PartitionTransactions(
            settings=settings, partition=PARTITION, ledgers_topic=LedgersTopic(settings=settings)
        ),
        read_ledger=no_ledger,
        acquired=lambda _writer, _taken: None,
        fenced=lambda: None,
        pause_s=0.0,
        mark_delay_s=0.0,
        max_record_bytes=1 << 20,
    )


async def test_a_run_that_has_ended_is_not_to_blame_for_what_dies_while_its_result_waits() -> None:
    one = writer()
    one.ledger.deliver(0)
    one.started(0, alone=True)
    assert (dict(one.ledger.marks), one.ledger.evidence(0)) == ({0: 1}, 1)
    committed = one.settle(0, [])
    assert isinstance(committed, asyncio.Future)
    assert dict(one.ledger.marks) == {}
    assert one.ledger.pending == {0}
