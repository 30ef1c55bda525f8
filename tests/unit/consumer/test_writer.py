"""What a partition's writer takes note of before anything is committed; its transactions need a real broker."""

import asyncio
from collections.abc import Sequence
from itertools import pairwise

import pytest
from aiokafka import TopicPartition

from schemas.base import Outgoing
from service import settings as settings_module
from service.consumer.ledger import Ledger
from service.consumer.ledgers_topic import LedgersTopic
from service.consumer.progress_topic import Found, PartitionProgress, ProgressTopic
from service.consumer.transactions import OutcomeUnknown, PartitionTransactions
from service.consumer.writer import LedgerWriter
from tests.support.waiting import PATIENCE_S

PARTITION = TopicPartition("requests", 0)


async def no_ledger() -> Ledger:
    return Ledger()


SETTINGS = settings_module.load(group_id="g")


class NothingSaid(ProgressTopic):
    """A topic in which there is nothing yet."""

    async def read(self, partition: TopicPartition, found: Found) -> None:
        return


def writer(
    transactions: PartitionTransactions | None = None, *, pause_s: float = 0.0, mark_delay_s: float = 0.0
) -> LedgerWriter:
    ledgers = LedgersTopic(settings=SETTINGS)
    return LedgerWriter(
        partition=PARTITION,
        transactions=transactions
        or PartitionTransactions(settings=SETTINGS, partition=PARTITION, ledgers_topic=ledgers),
        read_ledger=no_ledger,
        progress=PartitionProgress(NothingSaid(settings=SETTINGS), PARTITION, most=1 << 20),
        acquired=lambda _writer, _taken: None,
        fenced=lambda: None,
        pause_s=pause_s,
        mark_delay_s=mark_delay_s,
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


class Committed(PartitionTransactions):
    """Transactions of a broker that takes everything at once."""

    ledger = Ledger()
    commits = 0

    async def fence(self) -> int:
        return 1

    async def commit(self, _records: Sequence[Outgoing], offset: int, metadata: str) -> None:
        self.ledger = Ledger.decode(offset, metadata)
        self.commits += 1


@pytest.mark.parametrize("revoked_first", [True, False])
async def test_when_the_engine_died_its_runs_count_though_the_partition_is_being_given_back(
    revoked_first: bool,
) -> None:
    """The group rebalances because workers die: that must not wipe out what a death says."""
    transactions = Committed(settings=SETTINGS, partition=PARTITION, ledgers_topic=LedgersTopic(settings=SETTINGS))
    one = writer(transactions)
    life = asyncio.create_task(one.run())
    await one.flushed()
    for offset in (0, 1):
        one.ledger.deliver(offset)
    assert one.started(0, alone=True)
    if revoked_first:
        one.leave_marks_out()
        await one.flushed()
        assert dict(transactions.ledger.marks) == {}
    one.engine_died(0)
    one.leave_marks_out()
    await one.flushed()
    assert (dict(transactions.ledger.marks), transactions.ledger.evidence(0)) == ({0: 1}, 2)
    life.cancel()
    await asyncio.wait({life})


class Failing(Committed):
    """Transactions that fail as often as they are told to, whatever is done about it."""

    failures = 4

    def __init__(self) -> None:
        super().__init__(settings=SETTINGS, partition=PARTITION, ledgers_topic=LedgersTopic(settings=SETTINGS))
        self.tried_at: list[float] = []

    async def commit(self, records: Sequence[Outgoing], offset: int, metadata: str) -> None:
        self.tried_at.append(asyncio.get_running_loop().time())
        if len(self.tried_at) <= self.failures:
            raise OutcomeUnknown("nobody knows")
        await super().commit(records, offset, metadata)


async def test_what_fails_again_and_again_is_tried_ever_more_seldom() -> None:
    transactions = Failing()
    one = writer(transactions)
    life = asyncio.create_task(one.run())
    await one.flushed()
    one.ledger.deliver(0)
    assert await one.settle(0, [])
    gaps = [after - before for before, after in pairwise(transactions.tried_at)]
    assert [gap >= least for gap, least in zip(gaps, (0.0, 0.2, 0.4, 0.8), strict=True)] == [True] * 4
    life.cancel()
    await asyncio.wait({life})


async def test_what_is_not_to_be_answered_here_is_not_started_here() -> None:
    one = writer()
    one.ledger.deliver(0)
    assert one.started(0)
    assert not one.started(1)
    one.ledger.finish(0)
    assert not one.started(0, alone=True)


NEVER_S = 1000.0


async def test_what_nobody_waits_for_goes_with_what_somebody_does_and_makes_nobody_rest() -> None:
    transactions = Committed(settings=SETTINGS, partition=PARTITION, ledgers_topic=LedgersTopic(settings=SETTINGS))
    one = writer(transactions, pause_s=NEVER_S, mark_delay_s=NEVER_S)
    life = asyncio.create_task(one.run())
    await one.flushed()
    for offset in range(6):
        one.ledger.deliver(offset)
    before = transactions.commits
    moved = [one.settle(offset, [], hurry=False) for offset in range(4)]
    await asyncio.wait(moved, timeout=0.1)
    assert not any(each.done() for each in moved)
    assert await one.settle(4, [])
    assert all([await each for each in moved])
    assert transactions.commits == before + 1
    async with asyncio.timeout(5):
        assert await one.settle(5, []), "it rested behind one that somebody waited for"
    life.cancel()
    await asyncio.wait({life})


async def test_what_nobody_waits_for_is_committed_a_moment_later_all_the_same() -> None:
    transactions = Committed(settings=SETTINGS, partition=PARTITION, ledgers_topic=LedgersTopic(settings=SETTINGS))
    one = writer(transactions, mark_delay_s=0.01)
    life = asyncio.create_task(one.run())
    await one.flushed()
    one.ledger.deliver(0)
    async with asyncio.timeout(5):
        assert await one.settle(0, [], hurry=False)
    life.cancel()
    await asyncio.wait({life})


class Unwritable(Failing):
    """Of a broker that has no leader for one topic, and that takes so many records at once."""

    most = 4

    async def commit(self, records: Sequence[Outgoing], offset: int, metadata: str) -> None:
        if len(records) > self.most or any(record.topic == "away" for record in records):
            raise OutcomeUnknown("too late")
        await Committed.commit(self, records, offset, metadata)


async def test_results_do_not_wait_for_one_that_can_not_be_written_nor_fail_because_they_are_many() -> None:
    transactions = Unwritable()
    one = writer(transactions)
    life = asyncio.create_task(one.run())
    await one.flushed()
    for offset in range(12):
        one.ledger.deliver(offset)
    topics = ["away", *["results"] * 11]
    settled = [one.settle(offset, [Outgoing(topic, b"k", b"v")]) for offset, topic in enumerate(topics)]
    async with asyncio.timeout(PATIENCE_S):
        assert all(await asyncio.gather(*settled[1:]))
    assert not settled[0].done()
    assert one.ledger.pending == {0}
    life.cancel()
    await asyncio.wait({life})
    assert await settled[0] is False
