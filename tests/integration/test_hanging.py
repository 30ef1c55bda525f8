"""Transactions that ended for their coordinator and not everywhere: what a broker that starts alone leaves behind."""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest
from aiokafka import AIOKafkaProducer, TopicPartition
from aiokafka.structs import OffsetAndMetadata

from deploy.local.broker import LocalBroker
from schemas.base import Outgoing
from service.consumer.committed import CommittedLedgers
from service.consumer.hanging import HangingTransactions
from service.consumer.ledger import Ledger
from service.consumer.ledgers_topic import LedgersTopic
from service.consumer.transactions import OutcomeUnknown, PartitionTransactions
from service.errors import BrokerUnavailable
from tests.support.bus import Bus, until

pytestmark = pytest.mark.broker


@pytest.fixture(scope="module")
def own_broker() -> Iterator[LocalBroker]:
    """One that takes writes of a transaction in partitions of which its coordinator does not know."""
    if reason := LocalBroker.missing():
        pytest.skip(f"needs a broker of our own: {reason}")
    with LocalBroker({"transaction.partition.verification.enable": "false"}, say=lambda _line: None) as own:
        yield own


@pytest.fixture
async def bus(own_broker: LocalBroker) -> AsyncIterator[Bus]:
    bus = await Bus(own_broker.bootstrap).create()
    yield bus
    await bus.delete()


class Owner:
    """The owner of a partition, as a worker has it."""

    def __init__(self, bus: Bus, committed: CommittedLedgers, partition: int = 0) -> None:
        settings = bus.all_settings()
        self.partition = TopicPartition(bus.requests, partition)
        self.committed = committed
        self.transactions = PartitionTransactions(
            settings=settings,
            partition=self.partition,
            ledgers_topic=LedgersTopic(settings=settings),
            hanging=committed.hanging,
        )

    async def take_over(self) -> Ledger:
        await self.transactions.fence()
        return await self.committed.ledger(self.partition)


@asynccontextmanager
async def owner_of(bus: Bus) -> AsyncIterator[Owner]:
    settings = bus.all_settings()
    committed = CommittedLedgers(settings=settings, ledgers_topic=LedgersTopic(settings=settings))
    await committed.open()
    owner = Owner(bus, committed)
    try:
        yield owner
    finally:
        await owner.transactions.close()
        await committed.close()


async def leave_open(bus: Bus, *, commit: bool, offset: int) -> None:
    """End a transaction that its coordinator knows in one partition of the results, and not where else it wrote."""
    name = f"{bus.group}/{bus.requests}/0"
    async with AIOKafkaProducer(bootstrap_servers=bus.bootstrap, transactional_id=name) as producer:
        await producer.begin_transaction()
        producer._txn_manager._txn_partitions.add(TopicPartition(bus.results, 0))
        producer._txn_manager._txn_consumer_group = bus.group
        await producer.send_and_wait(bus.results, b"hangs", partition=0)
        await producer.send_and_wait(bus.results, b"ends", partition=1)
        _, metadata = Ledger(offset).encode([])
        where = TopicPartition(bus.requests, 0)
        await producer.send_offsets_to_transaction({where: OffsetAndMetadata(offset, metadata)}, bus.group)
        await (producer.commit_transaction() if commit else producer.abort_transaction())


async def answers(bus: Bus) -> set[bytes]:
    """What readers of the results see."""
    return {record.value for record in await bus.read()}


@pytest.mark.parametrize("commit", [True, False])
async def test_what_hangs_is_ended_as_its_transaction_was(bus: Bus, commit: bool) -> None:
    await leave_open(bus, commit=commit, offset=7)
    async with owner_of(bus) as owner:
        with pytest.raises(BrokerUnavailable, match="has been ending"):
            await owner.take_over()
        owner.transactions.doubt()
        ledger = await owner.take_over()
        assert ledger.watermark == (7 if commit else 0)
        await owner.transactions.commit([Outgoing(topic=bus.results, key=None, value=b"next", partition=0)], 8, "")

        async def seen() -> bool:
            return await answers(bus) == ({b"hangs", b"ends", b"next"} if commit else {b"next"})

        await until(seen)


async def test_what_nobody_knows_the_end_of_is_aborted_and_can_be_done_again(bus: Bus) -> None:
    await leave_open(bus, commit=True, offset=7)
    async with AIOKafkaProducer(bootstrap_servers=bus.bootstrap, transactional_id=f"{bus.group}/{bus.requests}/0"):
        pass  # somebody has fenced since
    async with owner_of(bus) as owner:
        owner.transactions.doubt()
        assert (await owner.take_over()).watermark == 0
        await until(lambda: sees(bus, {b"ends"}))


async def sees(bus: Bus, wanted: set[bytes]) -> bool:
    return await answers(bus) == wanted


async def test_what_others_have_open_is_left_alone(bus: Bus) -> None:
    other = f"{bus.group}/{bus.requests}/1"
    async with AIOKafkaProducer(bootstrap_servers=bus.bootstrap, transactional_id=other) as producer:
        await producer.begin_transaction()
        await producer.send_and_wait(bus.results, b"another's", partition=2)
        async with owner_of(bus) as owner:
            owner.transactions.doubt()
            await owner.take_over()
        await producer.commit_transaction()
    await until(lambda: sees(bus, {b"another's"}))


async def test_without_doubt_nothing_is_looked_for(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(*_: object, **__: object) -> int:
        raise AssertionError

    monkeypatch.setattr(HangingTransactions, "end", never)
    async with owner_of(bus) as owner:
        await owner.take_over()
        await owner.transactions.commit([], 1, Ledger(1).encode([])[1])
        assert (await owner.take_over()).watermark == 1


@pytest.mark.long
@pytest.mark.timeout(560)
async def test_owners_go_on_when_the_only_broker_dies_in_the_middle_of_transactions(own_broker: LocalBroker) -> None:
    """Twelve owners commit all the time; each offset is committed once, with its answer, and nothing goes back."""
    bus = await Bus(own_broker.bootstrap, partitions=12).create()
    settings, dice, stop = bus.all_settings(), random.Random(1), asyncio.Event()
    committed = CommittedLedgers(settings=settings, ledgers_topic=LedgersTopic(settings=settings))
    await committed.open()
    reached: dict[int, int] = {}

    async def own(number: int) -> None:
        owner = Owner(bus, committed, number)
        while not stop.is_set():
            try:
                ledger = await owner.take_over()
            except BrokerUnavailable:
                owner.transactions.doubt()
                await asyncio.sleep(0.2)
                continue
            assert ledger.watermark >= reached.get(number, 0)
            try:
                while not stop.is_set():
                    offset = ledger.watermark
                    ledger.deliver(offset)
                    answer = Outgoing(topic=bus.results, key=b"%d" % number, value=b"%d/%d" % (number, offset))
                    await owner.transactions.commit([answer], *ledger.encode([offset]))
                    ledger.finish(offset)
                    reached[number] = ledger.watermark
            except OutcomeUnknown:
                pass
        await owner.transactions.close()

    async def all_go_on() -> None:
        before = dict(reached)
        await until(lambda: all(reached.get(n, 0) > before.get(n, 0) + 3 for n in range(12)))

    async with asyncio.TaskGroup() as owners:
        for number in range(12):
            owners.create_task(own(number))
        for _ in range(4):
            await all_go_on()
            await asyncio.to_thread(own_broker.kill if dice.random() < 0.7 else own_broker.stop)
            await asyncio.to_thread(own_broker.start)
        await all_go_on()
        stop.set()
    await committed.close()
    wanted = Counter({b"%d/%d" % (number, offset): 1 for number, end in reached.items() for offset in range(end)})

    async def whole() -> bool:
        return Counter(record.value for record in await bus.read()) == wanted

    await until(whole)
    await bus.delete()
