"""Where a pool goes on when the broker has forgotten where it stood."""

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from aiokafka import AIOKafkaProducer, TopicPartition
from aiokafka.admin import NewTopic

from service.consumer import transactions
from service.consumer.ledger import Ledger
from service.consumer.ledgers_topic import LedgersTopic
from service.consumer.positions import Positions
from service.consumer.protocol import StableOffsetFetch
from service.consumer.transactions import OutcomeUnknown, PartitionTransactions
from service.errors import PositionLost
from tests.support.bus import Bus, deliveries, until
from tests.support.waiting import PATIENCE_S

pytestmark = pytest.mark.broker


async def asleep_for_a_week(bus: Bus) -> None:
    """Ten requests, of which all but the third and the last four are answered; then the committed offsets expire."""
    await bus.produce(*(f"request {n}" for n in range(10)), partition=0)
    async with bus.intake("first") as intake:
        for one in await deliveries(intake, 10):
            if one.record.offset in {0, 1, 3, 4, 5}:
                assert await intake.settle(one.record.origin, bus.result(one))
    assert (await bus.committed()).offset == 2
    await bus.forget_offsets()
    assert (await bus.committed()).offset == -1


@pytest.mark.parametrize(("policy", "offsets"), [("resume", [2, 6, 7, 8, 9]), ("beginning", list(range(10)))])
async def test_a_pool_whose_offsets_have_expired_goes_on_as_configured(
    bus: Bus, policy: str, offsets: list[int]
) -> None:
    await asleep_for_a_week(bus)
    async with bus.intake("second", forgotten_offsets=policy) as intake:
        again = await deliveries(intake, len(offsets))
        assert [one.record.offset for one in again] == offsets
        assert intake.state().forgotten == 1, "of four partitions one had been committed to"


async def test_a_group_that_is_still_being_loaded_is_asked_again_and_not_taken_for_forgotten(bus: Bus) -> None:
    await bus.produce(*(f"request {n}" for n in range(3)), partition=0)
    async with bus.intake("first") as intake:
        one, *_ = await deliveries(intake, 3)
        assert await intake.settle(one.record.origin, bus.result(one))
    async with bus.intake("second") as intake:
        admin = intake._committed._admin
        send, silent = admin._send_request, 5

        async def answer(request: object, *rest: object) -> object:
            """As a coordinator answers that is loading the group after a restart: without partitions."""
            nonlocal silent
            if not isinstance(request, StableOffsetFetch):
                return await send(request, *rest)
            silent -= 1
            return await send(request, *rest) if silent < 0 else SimpleNamespace(topics=(), API_VERSION=7)

        admin._send_request = answer
        left = await deliveries(intake, 2)
        assert (silent < 0, intake.state().forgotten) == (True, 0)
    assert [one.record.offset for one in left] == [1, 2]


async def test_of_a_topic_that_is_made_anew_nothing_is_left_out(bus: Bus) -> None:
    """Where the pool stood was a place in another log, and Kafka has dropped the offsets with that one."""
    await asleep_for_a_week(bus)
    await bus.delete_topic(bus.requests)
    async with bus.admin() as admin:
        await admin.create_topics([NewTopic(bus.requests, bus.partitions, 1)])
    await bus.produce(*(f"new {n}" for n in range(10)), partition=0)
    async with Positions(settings=bus.all_settings()) as positions:
        shown = [one for one in await positions.show() if (one.topic, one.partition) == (bus.requests, 0)]
        assert [(one.watermark, one.problem) for one in shown] == [(None, None)]
    async with bus.intake("second") as intake:
        assert [one.record.offset for one in await deliveries(intake, 10)] == list(range(10))
        assert intake.state().forgotten == 0


async def test_nothing_is_committed_to_a_topic_that_was_made_anew_since_it_was_fenced(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A place in the old one would be taken for one in the new one, whose requests before it nobody would read."""
    monkeypatch.setattr(transactions, "_SAME_TOPIC_S", -1.0)
    await bus.produce(*(f"old {n}" for n in range(4)), partition=0)
    settings = bus.all_settings()
    here = TopicPartition(bus.requests, 0)
    owner = PartitionTransactions(settings=settings, partition=here, ledgers_topic=LedgersTopic(settings=settings))
    await owner.fence()
    await owner.commit([], *Ledger(3).encode())
    assert (await bus.committed()).offset == 3
    await bus.delete_topic(bus.requests)
    with pytest.raises(OutcomeUnknown):  # it may come back, or be another one
        await owner.commit([], *Ledger(4).encode())
    async with bus.admin() as admin:
        await admin.create_topics([NewTopic(bus.requests, bus.partitions, 1)])
    await bus.produce(*(f"new {n}" for n in range(10)), partition=0)
    for attempt in (lambda: owner.commit([], *Ledger(4).encode()), owner.fence):
        with pytest.raises(PositionLost, match="was made anew"):
            await attempt()
    await owner.close()
    async with bus.intake("second") as intake:
        assert [one.record.offset for one in await deliveries(intake, 10)] == list(range(10))


async def test_a_pool_may_leave_what_it_does_not_know(bus: Bus) -> None:
    await asleep_for_a_week(bus)
    async with bus.intake("second", forgotten_offsets="end") as intake:
        async with asyncio.timeout(PATIENCE_S):
            while intake.state().forgotten == 0:  # the end is looked for when the partition is taken over
                assert not (await intake.receive()).deliveries
        (new,) = await bus.produce("new", partition=0)
        (one,) = await deliveries(intake, 1)
        assert one.record.origin == new


async def test_a_new_pool_begins_at_the_beginning_and_nothing_is_wrong_with_that(bus: Bus) -> None:
    await bus.produce("request", partition=0)
    async with bus.intake() as intake:
        await deliveries(intake, 1)
        assert intake.state().forgotten == 0


@pytest.mark.parametrize("offset", [1, 3])
async def test_a_stranger_s_ledger_hides_no_request_of_a_pool_that_has_a_key(
    bus: Bus, tmp_path: Path, offset: int
) -> None:
    """Of a new pool, and of one that comes back after its offsets have expired."""
    key = tmp_path / "key"
    key.write_text("secret")
    await bus.produce(*(f"request {n}" for n in range(4)), partition=0)
    name = f"{bus.all_settings().worker.group_id}/{bus.requests}/0".encode()
    ledgers = bus.all_settings().topics.named("ledgers")

    async def forge() -> None:
        async with AIOKafkaProducer(bootstrap_servers=bus.bootstrap) as stranger:
            value = json.dumps({"offset": offset, "metadata": ""}).encode()
            await stranger.send_and_wait(ledgers, value, key=name)

    await forge()
    async with bus.intake("first", pool_key_file=str(key)) as intake:
        found = await deliveries(intake, 4)
        assert [one.record.offset for one in found] == [0, 1, 2, 3]
        assert await intake.settle(found[0].record.origin, bus.result(found[0]))
    await bus.forget_offsets()
    await forge()
    async with bus.intake("second", pool_key_file=str(key)) as intake:
        assert [one.record.offset for one in await deliveries(intake, 3)] == [1, 2, 3]


async def test_offsets_that_have_expired_are_shown_with_where_they_stood(bus: Bus) -> None:
    await asleep_for_a_week(bus)
    async with Positions(settings=bus.all_settings()) as positions:
        shown = {TopicPartition(one.topic, one.partition): one for one in await positions.show()}
        one = shown[TopicPartition(bus.requests, 0)]
        assert (one.watermark, one.problem) == (None, "its offset has expired; it stood at 2")
        await positions.reset(6, topics=[bus.requests], partitions=[0])
    await bus.forget_offsets()
    async with bus.intake("second") as intake:
        rest = await deliveries(intake, 4)
        assert [one.record.offset for one in rest] == [6, 7, 8, 9], "a reset is remembered too"


@pytest.mark.parametrize("metadata", [None, "gs2."], ids=["no such topic", "a later version's"])
async def test_offsets_are_set_whatever_is_remembered_and_where_nothing_can_be(bus: Bus, metadata: str | None) -> None:
    await bus.produce(*(f"request {n}" for n in range(4)), partition=0)
    settings = bus.all_settings()
    ledgers = settings.topics.named("ledgers")
    if metadata is None:
        await bus.delete_topic(ledgers)
    else:
        async with AIOKafkaProducer(bootstrap_servers=bus.bootstrap) as stranger:
            value = json.dumps({"offset": 0, "metadata": metadata}).encode()
            await stranger.send_and_wait(ledgers, value, key=f"{settings.worker.group_id}/{bus.requests}/0".encode())
    async with Positions(settings=settings) as positions:
        assert len(await positions.show()) >= bus.partitions
        moved = await positions.reset(3, topics=[bus.requests])
        assert len(moved) == bus.partitions
    async with bus.intake() as intake:
        assert [one.record.offset for one in await deliveries(intake, 1)] == [3]


async def test_what_was_remembered_after_another_partition_was_looked_up_is_found(bus: Bus) -> None:
    """Partitions are taken over at once, each behind a fence of its own."""
    await bus.produce("request", "request", partition=0)
    settings = bus.all_settings()
    ledgers_topic = LedgersTopic(settings=settings)
    here, other = (TopicPartition(bus.requests, n) for n in (0, 1))
    for position in (1, 2):
        await ledgers_topic.ledger(other, topic_id=None)
        async with Positions(settings=settings) as positions:
            await positions.reset(position, topics=[bus.requests], partitions=[0])
        before = PartitionTransactions(settings=settings, partition=here, ledgers_topic=ledgers_topic)
        await before.fence()
        await before.close()
        found = await ledgers_topic.ledger(here, topic_id=None)
        assert found is not None
        assert found.watermark == position


async def test_positions_are_shown_by_one_reading_of_what_is_remembered(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    await asleep_for_a_week(bus)
    readings, read = [], LedgersTopic._read

    async def counted(ledgers_topic: LedgersTopic) -> None:
        readings.append(ledgers_topic)
        await read(ledgers_topic)

    monkeypatch.setattr(LedgersTopic, "_read", counted)
    async with Positions(settings=bus.all_settings()) as positions:
        assert len(await positions.show()) >= bus.partitions
        assert len(readings) == 1
        await positions.show()
        assert len(readings) == 2, "what was remembered since is shown"


@pytest.mark.parametrize("waits_s", [20.0, 0.3])
async def test_what_was_remembered_behind_somebodys_open_transaction_is_found_when_that_has_ended(
    bus: Bus, monkeypatch: pytest.MonkeyPatch, waits_s: float
) -> None:
    """However long that is: nothing is taken over until then."""
    monkeypatch.setattr("service.consumer.ledgers_topic._OTHERS_S", waits_s)
    await asleep_for_a_week(bus)
    settings = bus.all_settings()
    topic = settings.topics.named(settings.topics.ledgers)
    stranger = AIOKafkaProducer(bootstrap_servers=bus.bootstrap, transactional_id=f"{bus.prefix}stranger")
    await stranger.start()
    try:
        await stranger.begin_transaction()
        for partition in await stranger.partitions_for(topic):
            await stranger.send_and_wait(topic, b"{}", key=b"stranger", partition=partition)
        where, ledgers_topic = TopicPartition(bus.requests, 0), LedgersTopic(settings=settings)
        before = PartitionTransactions(settings=settings, partition=where, ledgers_topic=ledgers_topic)
        await before.fence()
        await before.commit([], 6, "")
        await before.close()
        await bus.forget_offsets()
        async with bus.intake("second") as intake:
            rest = asyncio.create_task(deliveries(intake, 4))
            if waits_s < 1:
                await until(lambda: "has been open for" in intake.state().stuck)
            else:
                await asyncio.wait((rest,), timeout=1)
            assert not rest.done()
            await stranger.abort_transaction()
            assert [one.record.offset for one in await rest] == [6, 7, 8, 9]
    finally:
        await stranger.stop()


async def test_a_position_beyond_the_end_of_its_log_ends_the_worker_with_what_to_do(bus: Bus) -> None:
    await bus.produce("request", partition=0)
    settings, where = bus.all_settings(), TopicPartition(bus.requests, 0)
    before = PartitionTransactions(settings=settings, partition=where, ledgers_topic=LedgersTopic(settings=settings))
    await before.fence()
    await before.commit([], 500, "")
    await before.close()
    async with bus.intake() as intake:
        with pytest.raises(PositionLost, match=r"position 500 lies beyond the end, 1: .* gearshift offsets reset"):
            await deliveries(intake, 1)
    async with Positions(settings=settings) as positions:
        await positions.reset("beginning", topics=[bus.requests], partitions=[0])
    async with bus.intake("second") as intake:
        (one,) = await deliveries(intake, 1)
        assert one.record.offset == 0
