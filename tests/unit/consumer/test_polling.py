"""How far partitions are read: a ledger that has little room slows its partition down, and never stops it."""

import asyncio

import pytest
from aiokafka import TopicPartition

from schemas.base import Origin, Record
from service.consumer import polling
from service.errors import BrokerUnavailable
from tests.support.fake_kafka import CAUSES, FakeBroker, FakeMember
from tests.support.waiting import PATIENCE_S

QWEN = TopicPartition("requests.qwen", 0)


def due(record: Record) -> float:
    """Requests say themselves when they are due."""
    return float(record.value or b"inf")


async def member_of(broker: FakeBroker) -> FakeMember:
    member = FakeMember(broker, now=lambda: 100.0)
    member.scan.look_again(due)
    member.assign([QWEN])
    return member


async def settle_what_comes(member: FakeMember, *, turns: int) -> list[Origin]:
    """Read for some turns, and settle at once what came."""
    settled = []
    for _ in range(turns):
        await member.scan.turn()
        if got := [one.record.origin for one in (await member.receive()).deliveries]:
            assert member.settle(got)
            settled += got
    return settled


@pytest.mark.parametrize("every", [3, 40, 333])
async def test_a_partition_drains_whatever_was_finished_ahead_of_it_while_its_model_was_held(every: int) -> None:
    broker = FakeBroker()
    for number in range(20_000):
        broker.append(QWEN.topic, b"0" if number % every == every - 1 else b"inf")
    member = await member_of(broker)
    member.polling.serve_only(["requests.llama"])
    ahead = await settle_what_comes(member, turns=30)
    assert ahead, "what had expired was answered while another model was held"
    member.polling.serve_only(None)
    rest = await settle_what_comes(member, turns=20_000 // 64)
    assert len(ahead) + len(rest) == len({*ahead, *rest}) == 20_000
    assert broker.commits[QWEN][0] == 20_000


async def test_a_ledger_without_any_room_is_read_on_one_by_one() -> None:
    """As an owner of another version may leave it: more finished ahead than we would have picked."""
    broker = FakeBroker()
    for _ in range(50_000):
        broker.append(QWEN.topic, b"inf")
    member = await member_of(broker)
    ledger = member.writers[QWEN].ledger
    offset = 1
    while ledger.takes(1, upto=offset + 1):
        ledger.pick(offset)
        ledger.finish(offset)
        offset += 31
    got = (await member.receive()).deliveries
    assert len(got) < 64
    assert member.settle([one.record.origin for one in got])
    assert len(await settle_what_comes(member, turns=100)) >= 100


async def test_one_request_that_does_not_end_holds_up_no_more_than_its_ledger_must() -> None:
    broker = FakeBroker()
    for _ in range(4_000):
        broker.append(QWEN.topic, b"inf")
    member = await member_of(broker)
    first, *others = (await member.receive()).deliveries
    for one in others:
        assert member.settle([one.record.origin])
    assert len(await settle_what_comes(member, turns=40)) == 4_000 - 256
    assert broker.commits[QWEN][0] == 0
    assert member.settle([first.record.origin])
    assert broker.commits[QWEN] == (4_000, broker.commits[QWEN][1])


async def test_what_was_picked_for_an_owner_that_lost_its_partition_is_not_delivered() -> None:
    broker = FakeBroker()
    broker.append(QWEN.topic, b"0")
    member = await member_of(broker)
    member.polling.serve_only([])
    await member.receive()
    await member.scan.turn()
    member.assign([])
    member.assign([QWEN])
    assert not (await member.receive()).deliveries
    assert member.in_flight.requests == 0
    await member.scan.turn()
    (again,) = (await member.receive()).deliveries
    assert member.settle([again.record.origin])


async def test_what_is_lost_is_told_though_no_record_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(polling, "_TURN_S", 3600.0)
    member = await member_of(broker := FakeBroker())
    broker.append(QWEN.topic, b"inf")
    (one,) = (await member.receive()).deliveries
    monkeypatch.setattr(member.consumer, "getmany", never)
    turn = asyncio.create_task(member.receive())
    await asyncio.sleep(0)
    member.assign([])
    member.polling.wake()
    async with asyncio.timeout(PATIENCE_S):
        assert (await turn).lost == {one.record.origin}
    member.polling.close()


async def never(**_limits: object) -> None:
    await asyncio.Event().wait()


@pytest.mark.parametrize("back", [False, True])
async def test_a_partition_that_is_another_owners_once_retention_is_looked_at_is_left_alone(back: bool) -> None:
    """What is asked of the broker takes a while; the group goes on meanwhile."""
    broker = FakeBroker()
    for _ in range(10):
        broker.append(QWEN.topic, b"inf")
    member = await member_of(broker)
    assert len((await member.receive()).deliveries) == 10
    for _ in range(20):
        broker.append(QWEN.topic, b"inf")
    broker.forget_before(QWEN.topic, 20)
    bounds = member.bounds

    async def meanwhile(partition: TopicPartition) -> tuple[int, int]:
        member.bounds = bounds  # type: ignore[method-assign]
        found = await bounds(partition)
        member.assign([])
        if back:
            member.assign([QWEN])
        return found

    member.bounds = meanwhile  # type: ignore[method-assign]
    member.consumer.seek(QWEN, 10)
    await member.receive()
    assert member.polling.overtaken == 0


@pytest.mark.parametrize("cause", CAUSES)
async def test_whatever_ends_a_poll_is_a_broker_that_is_away(
    cause: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def stumble(**_limits: object) -> None:
        raise cause

    member = await member_of(FakeBroker())
    monkeypatch.setattr(member.consumer, "getmany", stumble)
    with pytest.raises(BrokerUnavailable, match="reading requests"):
        await member.receive()
    monkeypatch.setattr(member.consumer, "getmany", never)
    turn = asyncio.create_task(member.receive())
    await asyncio.sleep(0)
    member.polling.close()
    turn.cancel()
    await asyncio.wait((turn,))
    assert turn.cancelled()
