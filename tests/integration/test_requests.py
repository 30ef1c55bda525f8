"""Reading and settling as members of a group, on the real broker."""

import asyncio

import pytest

from service.consumer import requests
from service.consumer.committed import CommittedLedgers
from service.errors import BrokerUnavailable
from tests.support.bus import Bus, Member, deliveries, until

pytestmark = pytest.mark.broker


async def test_each_request_is_answered_once_in_a_transaction(bus: Bus) -> None:
    origins = await bus.produce(*(f"request {n}" for n in range(200)))
    async with bus.intake() as intake:
        got = await deliveries(intake, 200)
        outcomes = await asyncio.gather(*(intake.settle(one.record.origin, bus.result(one)) for one in got))
    assert all(outcomes)
    assert await bus.answered() == {str(origin): 1 for origin in origins}


async def test_what_is_settled_is_not_delivered_again_though_it_finished_out_of_order(bus: Bus) -> None:
    await bus.produce(*(f"request {n}" for n in range(10)), partition=0)
    async with bus.intake("first") as intake:
        got = {one.record.offset: one for one in await deliveries(intake, 10)}
        for offset in (1, 4, 5, 9):
            assert await intake.settle(got[offset].record.origin, bus.result(got[offset]))
    assert (await bus.committed()).offset == 0
    async with bus.intake("second") as intake:
        again = await deliveries(intake, 6)
    assert [one.record.offset for one in again] == [0, 2, 3, 6, 7, 8]


async def test_a_request_settles_once(bus: Bus) -> None:
    await bus.produce("request")
    async with bus.intake() as intake:
        (one,) = await deliveries(intake, 1)
        first, second = await asyncio.gather(
            intake.settle(one.record.origin, bus.result(one, worker="first")),
            intake.settle(one.record.origin, bus.result(one, worker="second")),
        )
        third = await intake.settle(one.record.origin, bus.result(one, worker="third"))
    assert (first is not None, second, third) == (True, None, None)
    assert [result.worker for result in await bus.read_results()] == ["first"]


async def test_a_start_that_was_never_settled_counts_as_an_attempt(bus: Bus) -> None:
    await bus.produce("poison", "harmless", "handed back", partition=0)
    async with bus.intake("first") as intake:
        poison, _, back = await deliveries(intake, 3)
        assert poison.attempt.n == 1
        await intake.started(poison.record.origin)
        await intake.started(back.record.origin)
        intake.withdraw(back.record.origin)
        await intake.flush()
    async with bus.intake("second") as intake:
        poison, harmless, back = await deliveries(intake, 3)
        assert (poison.attempt.n, harmless.attempt.n, back.attempt.n) == (2, 1, 1)
        await intake.started(poison.record.origin, alone=True)
    async with bus.intake("third") as intake:
        third, harmless, _ = await deliveries(intake, 3)
        assert (third.attempt.n, third.evidence) == (3, 1)
        await intake.started(harmless.record.origin)
        await intake.started(third.record.origin, alone=True)
        intake.engine_died(third.record.origin)
    async with bus.intake("fourth") as intake:
        fourth, harmless, _ = await deliveries(intake, 3)
    assert [(one.attempt.n, one.evidence) for one in (fourth, harmless)] == [(4, 3), (2, 0)]
    assert fourth.attempt.epoch > third.attempt.epoch > poison.attempt.epoch


async def test_two_members_share_the_partitions_and_a_rebalance_repeats_nothing(bus: Bus) -> None:
    one, two = Member(bus, "one"), Member(bus, "two")
    origins = await bus.produce(*(f"before {n}" for n in range(300)))

    async def all_are_answered() -> bool:
        """Asked of the log: a member that hears too late of its commit says that it is another's."""
        return len(await bus.answered()) == len(origins)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(one.run())
        await until(lambda: len(one.settled) > 100)
        tasks.create_task(two.run())
        for round_ in range(10):
            origins += await bus.produce(*(f"during {round_}.{n}" for n in range(50)))
        await until(all_are_answered)
        origins += await bus.produce(*(f"after {n}" for n in range(200)))
        await until(all_are_answered)
        one.stop()
        origins += await bus.produce(*(f"alone {n}" for n in range(200)))
        await until(all_are_answered)
        two.stop()
    assert two.settled
    assert await bus.answered() == {str(origin): 1 for origin in origins}


async def test_work_goes_on_through_a_rebalance_where_its_partition_comes_back(bus: Bus) -> None:
    await bus.produce(*(f"slow {n}" for n in range(40)))
    one, two = Member(bus, "one"), Member(bus, "two")
    joined = asyncio.Event()

    async def wait_for_the_rebalance(_delivery: object) -> None:
        await joined.wait()

    one.hold = wait_for_the_rebalance
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(one.run())
        await until(lambda: len(one.attempts) == 40)
        tasks.create_task(two.run())
        await until(lambda: bool(two.attempts) and bool(one.lost))
        joined.set()
        await until(lambda: len(one.settled) + len(two.settled) == 40)
        one.stop()
        two.stop()
    kept = set(one.attempts) - one.lost
    assert kept
    assert set(one.settled) == kept
    assert set(two.settled) == one.lost == set(one.refused)
    assert set(one.attempts.values()) == {1}
    assert set((await bus.answered()).values()) == {1}


async def test_a_rebalance_blames_no_run_that_it_ends(bus: Bus) -> None:
    await bus.produce(*(f"slow {n}" for n in range(40)))
    one, two = Member(bus, "one"), Member(bus, "two")
    done = asyncio.Event()

    async def wait(_delivery: object) -> None:
        await done.wait()

    one.hold = two.hold = wait
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(one.run())
        await until(lambda: len(one.attempts) == 40)
        await one.intake.flush()
        tasks.create_task(two.run())
        await until(lambda: bool(one.lost) and one.lost == set(two.attempts))
        done.set()
        one.stop()
        two.stop()
    assert set(two.attempts.values()) == {1}


async def test_a_marker_at_the_end_of_the_log_leaves_no_lag(bus: Bus) -> None:
    (origin,) = await bus.produce("request", partition=0, transactional=True)
    member = Member(bus, "one")

    async def stepped_over() -> bool:
        return (await bus.committed()).offset == origin.offset + 2

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(member.run())
        await until(stepped_over)
        assert set(member.intake.state().lag.values()) == {0}
        member.stop()


async def test_an_assignment_that_aiokafka_has_not_told_yet_has_no_positions_and_hurts_nobody(bus: Bus) -> None:
    await bus.produce("request", partition=0)
    async with bus.intake() as intake:
        (one,) = await deliveries(intake, 1)
        assert await intake.settle(one.record.origin, bus.result(one))
        consumer = intake._consumer
        assignment = consumer._subscription.subscription.assignment
        for partition in assignment.tps:
            assignment.state_value(partition)._position = None
        intake._liveness._looked_at = 0.0
        intake._liveness.look()
        for partition in assignment.tps:
            consumer.seek(partition, 0)
    assert (await bus.committed()).offset == 1


async def test_retention_that_overtakes_the_backlog_is_noticed_and_reading_goes_on(bus: Bus) -> None:
    await bus.produce(*(f"old {n}" for n in range(10)), partition=0)
    async with bus.intake("first") as intake:
        got = await deliveries(intake, 10)
        assert await intake.settle(got[1].record.origin, bus.result(got[1]))
    await bus.forget_before(8)
    async with bus.intake("second") as intake:
        kept = await deliveries(intake, 2)
        assert [one.record.offset for one in kept] == [8, 9]
        assert intake.state().overtaken == 7, "offsets 0 to 7, of which one was settled"


async def test_partitions_added_while_running_are_read(bus: Bus) -> None:
    member = Member(bus, "one")
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(member.run())
        await until(lambda: bool(member.intake.state().partitions))
        await bus.grow(6)

        async def noticed() -> bool:
            await member.intake._consumer._client.force_metadata_update()  # aiokafka does it twice a minute
            return member.intake.state().partitions.get(bus.requests) == (0, 1, 2, 3, 4, 5)

        await until(noticed)
        (origin,) = await bus.produce("on a new one", partition=5)
        await until(lambda: member.settled == [origin])
        member.stop()


async def test_a_backlog_is_read_only_as_far_as_there_is_room(bus: Bus) -> None:
    await bus.produce(*(f"request {n}" for n in range(300)))
    async with bus.intake(max_waiting=100) as intake:
        got = await deliveries(intake, 100)
        for _ in range(4):
            assert not (await intake.receive()).deliveries
        await asyncio.gather(*(intake.settle(one.record.origin, bus.result(one)) for one in got[:24]))
        assert not (await intake.receive()).deliveries, "it resumes at three quarters"
        await asyncio.gather(*(intake.settle(one.record.origin, bus.result(one)) for one in got[24:40]))
        more = await deliveries(intake, 1)
        assert len(more) <= 40


async def test_what_is_paused_stays_paused_through_a_rebalance(bootstrap: str) -> None:
    bus = await Bus(bootstrap, aliases=("llama", "qwen")).create()
    one, two = Member(bus, "one"), Member(bus, "two")
    for member in (one, two):
        member.intake.serve_only(["llama"])
    parked = await bus.produce(*(f"for qwen {n}" for n in range(8)), topic=bus.topics.for_alias("qwen"))
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(one.run())
        await until(lambda: one.intake.state().rebalances > 0)
        tasks.create_task(two.run())
        await until(lambda: bool(two.intake.state().partitions) and one.intake.state().rebalances > 1)
        served = await bus.produce(*(f"for either {n}" for n in range(40)))
        await until(lambda: len(one.settled) + len(two.settled) == len(served))
        one.stop()
        two.stop()
    assert not (one.attempts.keys() | two.attempts.keys()) & set(parked)
    await bus.delete()


async def test_at_a_rebalance_what_one_does_not_serve_goes_whole_to_another_who_does(bootstrap: str) -> None:
    bus = await Bus(bootstrap, aliases=("llama", "qwen")).create()
    held, other = Member(bus, "held"), Member(bus, "other")
    qwen = bus.topics.for_alias("qwen")
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(held.run())
        await until(lambda: qwen in held.intake.state().partitions)
        before = held.intake.state().partitions[qwen]
        held.intake.serve_only(["llama"])
        tasks.create_task(other.run())
        await until(lambda: bool(other.intake.state().partitions) and held.intake.state().rebalances > 1)
        assert qwen not in held.intake.state().partitions
        assert other.intake.state().partitions[qwen] == before
        held.stop()
        other.stop()
    await bus.delete()


async def test_one_joins_when_it_begins_to_receive_and_with_what_it_serves_then(bootstrap: str) -> None:
    bus = await Bus(bootstrap, aliases=("llama", "qwen")).create()
    held, other = Member(bus, "held"), Member(bus, "other")
    llama, qwen = map(bus.topics.for_alias, bus.aliases)
    every = tuple(range(bus.partitions))
    async with asyncio.TaskGroup() as tasks, held.intake:
        tasks.create_task(other.run())
        await until(lambda: other.intake.state().partitions.get(llama) == every)
        held.intake.serve_only([])
        while not held.intake.state().joined:
            await held.intake.receive()
        assert {llama, qwen}.isdisjoint(held.intake.state().partitions)
        other.stop()
    await bus.delete()


async def test_what_was_written_for_a_model_that_is_gone_is_still_read(bootstrap: str) -> None:
    """By who had it, and after that by who never did: somebody must tell those who asked."""
    bus = await Bus(bootstrap, partitions=1, aliases=("llama", "qwen")).create()
    gone = bus.topics.for_alias("qwen")
    await bus.produce("first", "second", topic=gone)
    async with bus.intake() as intake:
        first, second = await deliveries(intake, 2)
        assert await intake.settle(first.record.origin, bus.result(first))
        await intake.follow(["llama"])
        intake.serve_only(["llama"])
        (third,) = await bus.produce("third", topic=gone)
        found = await deliveries(intake, 1)
        assert third in {one.record.origin for one in found}
    later = Bus(bootstrap, partitions=1, aliases=("llama",), prefix=bus.prefix)
    async with later.intake("two") as intake:
        intake.serve_only(["llama"])
        found = await deliveries(intake, 2)
        assert [one.record.origin for one in found] == [second.record.origin, third]
    await bus.delete()


async def test_topics_of_models_that_are_gone_are_found_later_where_the_first_look_failed(
    bootstrap: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bus = await Bus(bootstrap, partitions=1, aliases=("llama", "qwen")).create()
    await bus.produce("first", "second", topic=bus.topics.for_alias("qwen"))
    async with bus.intake() as intake:
        first, second = await deliveries(intake, 2)
        assert await intake.settle(first.record.origin, bus.result(first))
    theirs, asked = CommittedLedgers.topics, []

    async def fails_twice(self: CommittedLedgers) -> frozenset[str]:
        asked.append(None)
        if len(asked) < 3:
            raise BrokerUnavailable("not yet")
        return await theirs(self)

    monkeypatch.setattr(CommittedLedgers, "topics", fails_twice)
    monkeypatch.setattr(requests, "_STRAYS_AGAIN_S", 0.1)
    later = Bus(bootstrap, partitions=1, aliases=("llama",), prefix=bus.prefix)
    async with later.intake("two") as intake:
        found = await deliveries(intake, 1)
        assert [one.record.origin for one in found] == [second.record.origin]
        assert len(asked) == 3
    await bus.delete()


async def test_only_the_topics_of_models_that_are_served_are_read(bootstrap: str) -> None:
    bus = await Bus(bootstrap, aliases=("llama", "qwen")).create()
    llama, qwen = (bus.topics.for_alias(alias) for alias in bus.aliases)
    async with bus.intake() as intake:
        intake.serve_only(["llama"])
        await bus.produce("for llama", topic=llama)
        await bus.produce("for qwen", topic=qwen)
        await bus.produce("for either")
        first = await deliveries(intake, 2)
        assert {one.record.topic for one in first} == {llama, bus.requests}
        assert not (await intake.receive()).deliveries
        intake.serve_only(None)
        (second,) = await deliveries(intake, 1)
        assert second.record.topic == qwen
    await bus.delete()


async def test_a_model_that_costs_more_than_was_thought_is_shared_out_when_a_member_asks(bootstrap: str) -> None:
    """Nothing is repeated by that, and who is alone in its group has all as it is."""
    bus = await Bus(bootstrap, aliases=("ant", "bee")).create()
    topics = {alias: bus.topics.for_alias(alias) for alias in bus.aliases}
    members = [Member(bus, "one"), Member(bus, "two")]
    cost = dict.fromkeys(bus.aliases, 1.0)
    for member in members:
        member.intake.weigh(lambda alias, requests_per_s: cost[alias] * requests_per_s)

    def owned(alias: str) -> list[int]:
        return sorted(len(member.intake.state().partitions.get(topics[alias], ())) for member in members)

    try:
        for partition in range(bus.partitions):
            await bus.produce("request", topic=topics["ant"], partition=partition)
            await bus.produce("request", topic=topics["bee"], partition=partition)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(members[0].run())
            await until(lambda: len(members[0].settled) == 2 * bus.partitions)
            members[0].intake.place_anew({})
            assert not members[0].intake._consumer._coordinator._rejoin_needed_fut.done()
            tasks.create_task(members[1].run())
            await until(lambda: owned("ant") == owned("bee") == [0, bus.partitions])
            cost["ant"] = 100.0
            members[1].intake.place_anew({"ant": 0.5})
            await until(lambda: owned("ant") == [2, 2])
            for member in members:
                member.stop()
        assert len(members[0].settled) + len(members[1].settled) == 2 * bus.partitions
    finally:
        await bus.delete()
