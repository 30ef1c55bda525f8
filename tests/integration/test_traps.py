"""What aiokafka and the broker let go wrong (facts of transactions), each beside what is done about it here.

The first half of each test is the trap on the real broker; the second is our way out of it.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import NewPartitions, NewTopic
from aiokafka.errors import KafkaError, ProducerFenced
from aiokafka.partitioner import DefaultPartitioner
from aiokafka.structs import OffsetAndMetadata

from schemas.base import Outgoing
from schemas.errors import FailureClass
from schemas.results import Outcome
from service.consumer.committed import commits_of
from service.consumer.encoding import records
from service.consumer.ledger import MAX_METADATA, Ledger
from service.consumer.ledgers_topic import LedgersTopic
from service.consumer.transactions import OutcomeUnknown, PartitionTransactions, Refused
from service.errors import BrokerUnavailable, Fenced, RecordRefused
from service.kafka.producer import IdempotentProducer
from service.kafka.reply_topics import Place
from tests.support.bus import Bus, Member, deliveries, until
from tests.support.waiting import PATIENCE_S

pytestmark = pytest.mark.broker


@asynccontextmanager
async def bare_producer(bus: Bus, name: str, **options: Any) -> AsyncIterator[AIOKafkaProducer]:
    """A transactional producer as aiokafka has it."""
    producer = AIOKafkaProducer(bootstrap_servers=bus.bootstrap, transactional_id=name, retry_backoff_ms=5, **options)
    await producer.start()
    try:
        yield producer
    finally:
        try:
            async with asyncio.timeout(3):
                await producer.stop()
        except (KafkaError, TimeoutError):
            await producer.client.close()


def transactions(bus: Bus, partition: int = 0) -> PartitionTransactions:
    settings = bus.all_settings()
    where = TopicPartition(bus.requests, partition)
    return PartitionTransactions(settings=settings, partition=where, ledgers_topic=LedgersTopic(settings=settings))


def transactional_id(bus: Bus, partition: int = 0) -> str:
    return f"{bus.group}/{bus.requests}/{partition}"


async def small_topic(bus: Bus) -> str:
    """A topic that takes records of two kilobytes at most."""
    name = f"{bus.prefix}small"
    async with bus.admin() as admin:
        await admin.create_topics([NewTopic(name, 1, 1, topic_configs={"max.message.bytes": "2000"})])
    return name


async def test_a_refused_record_does_not_move_its_offset(bus: Bus) -> None:
    small, here = await small_topic(bus), TopicPartition(bus.requests, 0)
    async with bare_producer(bus, f"{bus.prefix}bare") as bare, bare.transaction():
        lost = await bare.send(small, bytes(5000))
        await bare.send_offsets_to_transaction({here: OffsetAndMetadata(7, "")}, bus.group)
    assert lost.exception() is not None

    async def moved() -> bool:
        return (await bus.committed(at_once=True)).offset == 7

    await until(moved)  # the trap: committed although the record was refused; its marker takes a moment

    ours = transactions(bus)
    await ours.fence()
    with pytest.raises(Refused):
        await ours.commit([Outgoing(topic=small, key=None, value=bytes(5000))], 8, "")
    await ours.fence()
    assert (await bus.committed(at_once=True)).offset == 7
    await ours.close()


async def test_what_a_topics_own_rules_refuse_is_the_records_fault_and_others_are_written(bus: Bus) -> None:
    """aiokafka tells such an answer as any unknown one, after which a writer would try the same again for ever."""
    name = f"{bus.prefix}compacted"
    async with bus.admin() as admin:
        await admin.create_topics([NewTopic(name, 1, 1, topic_configs={"cleanup.policy": "compact"})])
    without, keyed = Outgoing(name, None, b"without a key"), Outgoing(name, b"key", b"with one")
    ours = transactions(bus)
    await ours.fence()
    with pytest.raises(Refused, match="InvalidRecordError"):
        await ours.commit([without], 8, "")
    await ours.fence()
    await ours.commit([keyed], 8, "")
    await ours.close()
    async with IdempotentProducer(kafka=bus.kafka, max_record_bytes=1 << 20) as outlet:
        with pytest.raises(RecordRefused, match="InvalidRecordError"):
            await outlet.send(without)
        await outlet.send(keyed)
    assert len(await bus.read(name)) == 2


async def test_what_is_committed_together_is_no_larger_than_a_topic_takes(bus: Bus) -> None:
    small = await small_topic(bus)
    settings = bus.all_settings()
    topics = settings.topics.model_copy(update={"max_message_bytes": 2000})
    settings, here = settings.model_copy(update={"topics": topics}), TopicPartition(bus.requests, 0)
    ours = PartitionTransactions(settings=settings, partition=here, ledgers_topic=LedgersTopic(settings=settings))
    await ours.fence()
    await ours.commit([Outgoing(small, b"k", b"%d" % n + b"x" * 400) for n in range(40)], 1, "")
    await ours.close()
    assert len(await bus.read(small)) == 40
    assert (await bus.committed(at_once=True)).offset == 1


async def test_what_has_a_key_lies_where_the_key_leads_also_when_its_topic_has_grown(bus: Bus) -> None:
    name, keys = f"{bus.prefix}grows", [f"key {n}".encode() for n in range(40)]
    partitioner = DefaultPartitioner()
    async with bus.admin() as admin:
        await admin.create_topics([NewTopic(name, 2, 1)])
        ours = transactions(bus)
        await ours.fence()
        await ours.commit([Outgoing(topic=name, key=key, value=b"before") for key in keys], 1, "")
        await admin.create_partitions({name: NewPartitions(7)})
    assert ours._producer is not None

    async def noticed() -> bool:
        await ours._producer.client.force_metadata_update()
        return len(ours._producer.client.cluster.partitions_for_topic(name)) == 7

    await until(noticed)  # as aiokafka does by itself within minutes
    await ours.commit([Outgoing(topic=name, key=key, value=b"after") for key in keys], 2, "")
    await ours.close()
    found: set[tuple[bytes, bytes, int]] = set()

    async def all_there() -> bool:
        found.update((one.key, one.value, one.partition) for one in await bus.read(name))
        return len(found) == 2 * len(keys)

    await until(all_there)
    sizes = {b"before": 2, b"after": 7}
    assert found == {
        (key, value, partitioner(key, list(range(size)), [])) for key in keys for value, size in sizes.items()
    }


async def test_a_refused_record_fails_alone_and_its_neighbours_are_published(bus: Bus) -> None:
    small = await small_topic(bus)
    await bus.produce(*(f"request {n}" for n in range(6)), partition=0)
    async with bus.intake() as intake:
        got = await deliveries(intake, 6)
        wanted = [
            bus.result(one, reply_to=small, body={"text": "x" * (5000 if n == 3 else 100)}) for n, one in enumerate(got)
        ]
        settled = await asyncio.gather(
            *(intake.settle(one.record.origin, want) for one, want in zip(got, wanted, strict=True))
        )
    instead = settled.pop(3)
    assert instead is not None
    assert instead.result.failure is FailureClass.TOO_LARGE
    assert settled == wanted[:3] + wanted[4:]
    assert await bus.read_results() == []
    assert len(await bus.read(small)) == 6, "where its producer looks"


async def test_a_topic_that_does_not_exist_fails_its_own_settlement(bus: Bus) -> None:
    await bus.produce("here", "nowhere", partition=0)
    async with bus.intake() as intake:
        here, nowhere = await deliveries(intake, 2)
        settled = await asyncio.gather(
            intake.settle(here.record.origin, wanted := bus.result(here)),
            intake.settle(nowhere.record.origin, bus.result(nowhere, reply_to=f"{bus.prefix}nowhere")),
        )
    assert settled[0] == wanted
    assert settled[1] is not None
    assert settled[1].result.outcome is Outcome.COMPLETED, "whole, in the topic of all"
    notes = {str(record.headers): record for record in await bus.read() if "reply-failed" in dict(record.headers)}
    assert len(notes) == 1
    assert len(await bus.answered()) == 2


async def test_a_result_larger_than_any_record_is_replaced_before_it_is_sent(bus: Bus) -> None:
    await bus.produce("request", partition=0)
    async with bus.intake() as intake:
        (one,) = await deliveries(intake, 1)
        huge = bus.result(one, body={"text": "x" * bus.topics.max_message_bytes})
        settled = await intake.settle(one.record.origin, huge)
    assert settled is not None
    assert await bus.read_results() == [settled.result]


async def test_a_commit_outside_the_transaction_would_win_over_it(bus: Bus) -> None:
    here = TopicPartition(bus.requests, 0)
    await bus.produce(*(f"earlier {n}" for n in range(20)), partition=0)
    async with bare_producer(bus, f"{bus.prefix}bare") as bare:
        outsider = AIOKafkaConsumer(bootstrap_servers=bus.bootstrap, group_id=bus.group, enable_auto_commit=False)
        outsider.assign([here])
        await outsider.start()
        await bare.begin_transaction()
        await bare.send_offsets_to_transaction({here: OffsetAndMetadata(20, "ledger")}, bus.group)
        await outsider.commit({here: OffsetAndMetadata(10, "")})
        await bare.commit_transaction()
        await outsider.stop()
    assert (await bus.committed(at_once=True)).offset == 10, "the trap: the result is out and the ledger is old"

    member = Member(bus, "one")
    assert member.intake._consumer._enable_auto_commit is False
    await bus.produce(*(f"request {n}" for n in range(30)), partition=1)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(member.run())
        await until(lambda: len(member.settled) == 40)
        member.stop()
    commit = await bus.committed(1)
    assert commit.offset == 30
    assert commit.metadata.startswith("gs1."), "every commit is the writer's own, with its ledger"


async def test_the_ledger_is_read_behind_the_fence(bus: Bus) -> None:
    here = TopicPartition(bus.requests, 0)
    await bus.produce(*(f"request {n}" for n in range(3)), partition=0)
    async with bare_producer(bus, transactional_id(bus)) as zombie:
        await zombie.begin_transaction()
        await (await zombie.send(bus.results, b"{}", key=b"zombie"))
        await zombie.send_offsets_to_transaction({here: OffsetAndMetadata(2, "")}, bus.group)
        assert (await bus.committed(at_once=True)).offset == -1, (
            "the trap: a read before the fence does not see what is pending"
        )
        intake = bus.intake()
        read, zombies = intake._committed.ledger, []

        async def read_and_let_the_zombie_commit(partition: TopicPartition) -> Ledger:
            """The moment in which a stale ledger would be made: it was read, and the old owner is still at work."""
            ledger = await read(partition)
            if partition == here and not zombies:
                zombies.extend(await asyncio.gather(zombie.commit_transaction(), return_exceptions=True))
            return ledger

        intake._committed.ledger = read_and_let_the_zombie_commit
        async with intake:
            got = await deliveries(intake, 3)
            assert all([await intake.settle(one.record.origin, bus.result(one)) for one in got])
        assert isinstance(zombies[0], ProducerFenced)
    assert set((await bus.answered()).values()) == {1}
    assert len(await bus.read()) == 3


async def test_an_offset_that_a_transaction_is_about_to_change_is_never_read(bus: Bus) -> None:
    here = TopicPartition(bus.requests, 0)
    async with bare_producer(bus, transactional_id(bus)) as owner, bus.admin() as admin:
        for offset in range(1, 30):
            await owner.begin_transaction()
            await owner.send_offsets_to_transaction({here: OffsetAndMetadata(offset, f"ledger {offset}")}, bus.group)
            if offset == 1:
                assert (await bus.committed(at_once=True)).offset == -1, (
                    "the trap: aiokafka's request reads what was before"
                )
                with pytest.raises(BrokerUnavailable, match="has been ending for 1 s"):
                    await commits_of(admin, bus.group, [here], within_s=1.0)
            await owner.commit_transaction()
            commit = (await commits_of(admin, bus.group, [here]))[here]
            assert commit == OffsetAndMetadata(offset, f"ledger {offset}")
        elsewhere = TopicPartition(bus.requests, 1)
        assert await commits_of(admin, bus.group, [elsewhere]) == {elsewhere: None}


async def test_a_fenced_owner_publishes_nothing(bus: Bus) -> None:
    old, new = transactions(bus), transactions(bus)
    first = await old.fence()
    second = await new.fence()
    assert second > first
    with pytest.raises(Fenced):
        await old.commit([Outgoing(topic=bus.results, key=None, value=b"zombie")], 1, "")
    await new.commit([Outgoing(topic=bus.results, key=None, value=b"owner")], 1, "")
    assert [record.value for record in await bus.read()] == [b"owner"]
    await old.close()
    await new.close()


async def test_a_member_that_is_fenced_while_assigned_rejoins_and_settles(bus: Bus) -> None:
    await bus.produce(*(f"request {n}" for n in range(5)), partition=0)
    async with bus.intake() as intake:
        got = await deliveries(intake, 5)
        stranger = transactions(bus)
        await stranger.fence()
        ledger = Ledger()
        for offset in range(5):
            ledger.deliver(offset)
        offset, metadata = ledger.encode([3])
        await stranger.commit(records(bus.result(got[3], worker="stranger"), bus.topics, Place()), offset, metadata)
        await stranger.close()
        settling = asyncio.gather(*(intake.settle(one.record.origin, bus.result(one)) for one in got))
        async with asyncio.timeout(PATIENCE_S):
            while not settling.done():
                await intake.receive()
        await settling
    assert set((await bus.answered()).values()) == {1}
    assert len(await bus.answered()) == 5


async def test_after_an_unknown_outcome_only_what_the_ledger_lacks_is_published(bus: Bus) -> None:
    await bus.produce("one", "two", partition=0)
    async with bus.intake() as intake:
        one, two = await deliveries(intake, 2)
        writer = intake._owned.writers[TopicPartition(bus.requests, 0)]
        real = writer._transactions
        writer._transactions = Forgetful(real, committed=True)
        assert await intake.settle(one.record.origin, bus.result(one))
        writer._transactions = Forgetful(real, committed=False)
        assert await intake.settle(two.record.origin, bus.result(two))
    assert set((await bus.answered()).values()) == {1}
    assert len(await bus.answered()) == 2


class Forgetful:
    """Real transactions whose first answer is lost on the way, after the commit or before it."""

    def __init__(self, real: PartitionTransactions, *, committed: bool) -> None:
        self._real = real
        self._committed = committed
        self._forgot = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    async def commit(self, *transaction: Any) -> None:
        if not self._forgot:
            self._forgot = True
            if self._committed:
                await self._real.commit(*transaction)
            raise OutcomeUnknown("no answer")
        await self._real.commit(*transaction)


@pytest.mark.delicate
async def test_a_hung_transaction_hides_other_results_only_until_its_short_timeout(bus: Bus) -> None:
    hung = transactions(bus)
    await hung.fence()
    producer = hung._producer
    assert producer is not None
    async with bare_producer(bus, f"{bus.prefix}bare") as bare, bare_producer(bus, f"{bus.prefix}other") as other:
        await bare.begin_transaction()
        await (await bare.send(bus.results, b"never committed", partition=0))
        async with other.transaction():
            await (await other.send(bus.results, b"good", partition=0))
        reader = AIOKafkaConsumer(
            bus.results, bootstrap_servers=bus.bootstrap, isolation_level="read_committed", auto_offset_reset="earliest"
        )
        await reader.start()
        assert not await reader.getmany(timeout_ms=1000), "the trap: committed, and not to be seen for 60 s"
        await producer.begin_transaction()
        await (await producer.send(bus.results, b"never committed", partition=0))
        await bare.abort_transaction()
        async with other.transaction():
            await (await other.send(bus.results, b"behind ours", partition=0))
        async with asyncio.timeout(55):  # aiokafka's default of 60 s would take longer
            seen = [await reader.getone(), await reader.getone()]
        await reader.stop()
    assert [one.value for one in seen] == [b"good", b"behind ours"]
    await hung.close()


async def test_what_an_open_transaction_hides_is_no_lag_and_is_told_by_its_age(bus: Bus) -> None:
    async with bus.intake() as intake, bare_producer(bus, f"{bus.prefix}other") as other:

        async def open_s() -> float:
            await intake.receive()
            return intake.state().transaction_open_s.get(bus.requests, 0.0)

        await other.begin_transaction()
        await (await other.send(bus.requests, b"open", partition=0))
        await bus.produce("behind it", partition=0)
        ages: list[float] = []

        async def older() -> bool:
            ages.append(await open_s())
            return ages[-1] > 2.5

        await until(older)
        assert ages == sorted(ages)
        assert intake.state().lag.get(bus.requests, 0) == 0
        await other.commit_transaction()
        assert len(await deliveries(intake, 2)) == 2

        async def ended() -> bool:
            return await open_s() == 0.0

        await until(ended)


async def test_a_new_owner_ends_the_hung_transaction_of_the_old_one_at_once(bus: Bus) -> None:
    await bus.produce("request", partition=0)
    async with bare_producer(bus, transactional_id(bus), transaction_timeout_ms=120_000) as hung:
        await hung.begin_transaction()
        for partition in range(3):
            await (await hung.send(bus.results, b"never committed", partition=partition))
        async with bus.intake() as intake:
            (one,) = await deliveries(intake, 1, within_s=100)  # the broker itself ends it after 120
            assert await intake.settle(one.record.origin, bus.result(one))
        assert len(await bus.read()) == 1


async def test_metadata_that_is_too_long_kills_a_producer_and_ours_never_is(bus: Bus) -> None:
    ours = transactions(bus)
    await ours.fence()
    with pytest.raises(OutcomeUnknown):
        await ours.commit([Outgoing(topic=bus.results, key=None, value=b"x")], 1, "x" * (MAX_METADATA + 1))
    await ours.fence()
    await ours.commit([Outgoing(topic=bus.results, key=None, value=b"x")], 1, "x" * MAX_METADATA)
    await ours.close()
    assert len(await bus.read()) == 1


@pytest.mark.long
async def test_a_partition_pauses_before_its_metadata_overflows_and_its_neighbours_are_read(bus: Bus) -> None:
    await bus.produce(*(f"wide {n}" for n in range(4000)), partition=0)
    async with bus.intake(max_waiting=10_000) as intake:
        got = await deliveries(intake, 2000)
        await bus.produce("neighbour", partition=1)
        while not any(one.record.partition == 1 for one in got):
            got.extend((await intake.receive()).deliveries)
        wide = [one for one in got if one.record.partition == 0]
        assert len(wide) < 4000
        odd = [one for one in wide if one.record.offset % 2]
        for one in wide:
            await intake.started(one.record.origin)
        assert all(await asyncio.gather(*(intake.settle(one.record.origin, bus.result(one)) for one in odd)))
        assert len((await bus.committed(at_once=True)).metadata) <= MAX_METADATA
        even = [one for one in wide if not one.record.offset % 2]
        settled = asyncio.gather(*(intake.settle(one.record.origin, bus.result(one)) for one in even))
        assert len(await deliveries(intake, 4000 - len(wide))) == 4000 - len(wide)
        assert all(await settled)
