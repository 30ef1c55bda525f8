"""What every bus does whose requests are a log that a pool shares, as tests over a ``bus`` fixture.

Run on the fake and on the real one, beside ``bus_spec``. The fixture's models are ``llama`` and ``qwen``; each topic
has the number of partitions that the fixture says.
"""

import asyncio
import contextlib
from functools import partial
from typing import Protocol

from schemas.base import Origin, Record
from schemas.progress import Begun, Part, Progress, Said
from service.ports import Delivery
from tests.support.bus_spec import COMPLAINT_S, Member, Place, delivered, settle, settlement, turns
from tests.support.waiting import PATIENCE_S


class Log(Place, Protocol):
    """A pool's topics, and what happens to them."""

    async def withdraw_interest(self, origin: Origin) -> None:
        """Make a request that was delivered another's to answer.

        A worker learns of that when it writes something of that partition, at the latest.
        """
        ...

    async def forget(self, origin: Origin) -> None:
        """Retention takes what was written before this record, in its partition."""
        ...

    async def skip(self) -> None:
        """Offsets without records: what a transaction leaves behind."""
        ...

    async def share(self, first: Member, second: Member) -> None:
        """Both are members now, and may go on: each of them is to have partitions of the shared topic."""
        ...

    async def kill(self, member: Member) -> None:
        """End it without a goodbye; what it says afterwards is not heard."""
        ...

    async def kept(self) -> set[Origin]:
        """The requests of which it is kept what they have said."""
        ...

    async def kept_sessions(self) -> set[str]:
        """The digests of the sessions of which it is kept what they have come to."""
        ...


def due(record: Record) -> float:
    """Requests say themselves when they are due."""
    try:
        return float(record.value or b"inf")
    except ValueError:
        return float("inf")


async def settle_until(member: Member, settled: list[Origin], least: int, *, within_s: float = PATIENCE_S) -> None:
    """Read and settle until so many are settled; none of them twice."""
    async with asyncio.timeout(within_s):
        while len(settled) < least:
            settled += await settle(member, (await member.receive()).deliveries)
    assert len(set(settled)) == len(settled)


# --- a served partition always drains ---


async def test_it_drains_after_a_hold_in_which_requests_far_from_each_other_were_answered(bus: Log) -> None:
    """These are runs ahead of the position in its ledger, more than leave room for a whole batch."""
    await bus.produce(*(b"0" if n % 40 == 39 else b"inf" for n in range(32_000)), alias="qwen")
    settled: list[Origin] = []
    async with bus.member() as member:
        member.serve_only(["llama"])
        member.scan_parked(due)
        await settle_until(member, settled, 700)
        member.serve_only(None)
        await settle_until(member, settled, 3_000)
        assert member.state().stuck_s < COMPLAINT_S


async def test_a_partition_that_is_held_back_is_read_no_further_and_complains_of_nothing_until_it_is_let_go(
    bus: Log,
) -> None:
    origins = await bus.produce(*(b"%d" % n for n in range(50)))
    partitions = {(origin.topic, origin.partition) for origin in origins}
    async with bus.member() as member:
        first = await delivered(member, len(origins))
        member.hold_back(partitions)
        await settle(member, first)
        await bus.produce(*(b"%d" % n for n in range(50)))
        more = [one for _ in range(8) for one in (await member.receive()).deliveries]
        other = (await bus.produce(b"0", alias="llama"))[0]
        assert [one.record.origin for one in (*more, *await delivered(member, 1)) if one.record.origin == other] == [
            other
        ]
        assert len(more) < 50, "what was on its way when it was said"
        assert member.state().stuck_s < COMPLAINT_S
        member.hold_back(())
        await delivered(member, 50 - len(more))


async def test_it_drains_with_less_room_than_one_batch_and_delivers_no_more_than_there_is_room_for(bus: Log) -> None:
    origins = await bus.produce(*(b"%d" % n for n in range(300)))
    settled: list[Origin] = []
    async with bus.member(max_waiting=8) as member:
        first = await delivered(member, 8)
        first += await turns(member, 3)
        assert len(first) < 300
        settled += await settle(member, first)
        await settle_until(member, settled, 300)
    assert set(settled) == set(origins)


async def test_it_drains_over_offsets_that_have_no_record(bus: Log) -> None:
    origins: list[Origin] = []
    for n in range(5):
        origins += await bus.produce(b"%d" % n)
        await bus.skip()
    settled: list[Origin] = []
    async with bus.member() as member:
        await settle_until(member, settled, 5)
    assert set(settled) == set(origins)


async def test_it_drains_behind_one_request_that_does_not_end(bus: Log) -> None:
    await bus.produce(*(b"%d" % n for n in range(2_000)))
    settled: list[Origin] = []
    async with bus.member() as member:
        hung, *others = await delivered(member, 1)
        await member.started(hung.record.origin)
        settled += await settle(member, others)
        await settle_until(member, settled, 1_999)
        assert await settle(member, [hung])


async def test_it_drains_from_where_retention_left_it_and_says_what_was_lost(bus: Log) -> None:
    origins = await bus.produce(*(b"%d" % n for n in range(40)))
    async with bus.member() as member:
        await settle(member, await delivered(member, 40))
    more = await bus.produce(*(b"more %d" % n for n in range(40)))
    kept = [origin for origin in more if origin.partition == more[-1].partition]
    await bus.forget(kept[-1])
    left = {origin for origin in more if origin not in kept[:-1]}
    settled: list[Origin] = []
    async with bus.member("two") as member:
        await settle_until(member, settled, len(left))
        assert member.state().overtaken == len(kept) - 1
    assert set(settled) == left
    assert await bus.answered() == dict.fromkeys([*origins, *left], 1)


# --- what is paused is resumed ---


async def test_a_model_that_is_not_served_waits_and_is_read_when_it_is(bus: Log) -> None:
    async with bus.member() as member:
        member.serve_only(["llama"])
        await turns(member, 1)
        parked = await bus.produce(b"parked", alias="qwen")
        ours = await bus.produce(b"read", alias="llama")
        assert await settle(member, await delivered(member, 1)) == ours
        assert not await turns(member, 3)
        member.serve_only(["qwen"])
        assert await settle(member, await delivered(member, 1)) == parked


async def test_what_is_due_is_delivered_while_its_model_waits_and_not_again_with_its_neighbours(bus: Log) -> None:
    origins = await bus.produce(b"inf", b"0", b"inf", b"0", alias="qwen")
    async with bus.member() as member:
        member.serve_only(["llama"])
        member.scan_parked(due)
        early = await settle(member, await delivered(member, 2))
        member.serve_only(None)
        late = await settle(member, await delivered(member, 2))
    assert len(early) == len(late) == 2
    assert {*early, *late} == set(origins)
    assert await bus.answered() == dict.fromkeys(origins, 1)


# --- one result each, whoever owns the partition ---


async def test_what_is_not_ours_any_more_is_told_once_and_settles_nothing(bus: Log) -> None:
    async with bus.member() as member:
        await bus.produce(b"gone", b"elsewhere", b"stays")
        got = {one.record.value: one for one in await delivered(member, 3)}
        await bus.withdraw_interest(got[b"gone"].record.origin)
        assert await member.started(got[b"stays"].record.origin)
        lost: list[Origin] = []
        async with asyncio.timeout(PATIENCE_S):
            while not lost:
                lost += (await member.receive()).lost
        assert lost == [got[b"gone"].record.origin]
        assert not await member.started(got[b"gone"].record.origin)
        assert not await member.started(got[b"gone"].record.origin, alone=True)
        assert not await settle(member, [got[b"gone"]])
        assert len(await settle(member, [got[b"stays"], got[b"elsewhere"]])) == 2
        assert not (await member.receive()).lost


async def test_what_a_member_loses_in_a_rebalance_is_told_and_delivered_to_the_other(bus: Log) -> None:
    origins = await bus.produce(*(b"%d" % n for n in range(40)))
    async with contextlib.AsyncExitStack() as stack:
        one = await stack.enter_async_context(bus.member("one"))
        held: dict[Origin, Delivery] = {d.record.origin: d for d in await delivered(one, 40)}
        two = await stack.enter_async_context(bus.member("two"))
        await bus.share(one, two)
        got: dict[Origin, Delivery] = {}
        async with asyncio.timeout(PATIENCE_S):
            while len(got) < 40 - len(held) or not got:
                first, second = await asyncio.gather(one.receive(), two.receive())
                for origin in first.lost:
                    del held[origin]
                got |= {delivery.record.origin: delivery for delivery in second.deliveries}
        assert held
        assert not held.keys() & got.keys()
        assert {delivery.attempt.n for delivery in got.values()} == {1}, "what was never started died of nothing"
        settled = await asyncio.gather(settle(one, list(held.values())), settle(two, list(got.values())))
        assert {*settled[0], *settled[1]} == set(origins)
    assert await bus.answered() == dict.fromkeys(origins, 1)


async def test_a_member_that_was_killed_settles_nothing_and_its_successor_does(bus: Log) -> None:
    origins = await bus.produce(*(b"%d" % n for n in range(20)))
    async with bus.member() as first:
        got = await delivered(first, 20)
        done, started = got[:5], got[5:10]
        assert len(await settle(first, done)) == 5
        for one in started:
            await first.started(one.record.origin)
        await first.flush()
        await bus.kill(first)
        async with bus.member() as second:
            rest = await delivered(second, 15)
            runs = {one.record.origin: one.attempt.n for one in rest}
            assert runs == {one.record.origin: 2 if one in started else 1 for one in got[5:]}
            assert len(await settle(second, rest)) == 15
    assert await bus.answered() == dict.fromkeys(origins, 1)


def said(count: int) -> Progress:
    begun = Begun(id="r", prompt="p", sequences=(Said(tokens=list(range(count))),))
    return Progress(call="c", engine="e", requests=(begun,))


async def test_what_was_said_is_there_for_the_next_owner_and_goes_with_the_result(bus: Log) -> None:
    await bus.produce(*(b"%d" % n for n in range(6)))
    async with bus.member() as first:
        got = await delivered(first, 6)
        for one in got:
            assert one.progress is None
            await first.started(one.record.origin)
        for count in (3, 5):
            for one in got[:4]:
                first.keep(one.record.origin, partial(said, count))
            await first.flush()
        assert len(await settle(first, got[:2])) == 2
        first.keep(got[0].record.origin, partial(said, 9))
        first.keep(got[5].record.origin, partial(said, 9))
        await bus.kill(first)
        async with bus.member() as second:
            rest = await delivered(second, 4)
            assert {one.record.origin: one.progress for one in rest} == {
                one.record.origin: said(5) if one in got[2:4] else None for one in got[2:]
            }
            assert len(await settle(second, rest)) == 4
    assert not await bus.kept()


async def test_a_member_that_leaves_hands_over_what_was_said_last(bus: Log) -> None:
    (origin,) = await bus.produce(b"{}")
    async with bus.member() as first:
        await delivered(first, 1)
        assert await first.started(origin)
        first.keep(origin, partial(said, 7))
        first.withdraw(origin)
    async with bus.member() as second:
        (one,) = await delivered(second, 1)
        assert (one.progress, one.attempt.n) == (said(7), 1)
        assert await settle(second, [one])


async def test_a_result_that_the_bus_does_not_take_is_replaced_by_one_that_it_does(bus: Log) -> None:
    (origin,) = await bus.produce(b"{}")
    async with bus.member() as member:
        (one,) = await delivered(member, 1)
        huge = settlement(one, body={"text": "x" * (24 << 20)})
        committed = await member.settle(origin, huge)
        assert committed is not None
        assert committed.result.failure is not None
    assert await bus.answered() == {origin: 1}


# --- sessions go on with whoever has their partition ---

SESSION = "5e" * 32


def come_to(parts: int) -> Progress:
    """What a session has come to after so many parts."""
    answered = tuple(Part(prompt=[number], said=[10, number]) for number in range(parts))
    return Progress(call="c", engine="e", parts=answered)


async def answered(member: Member, one: Delivery, parts: int) -> None:
    """Settle a part, after which the session has come to so many; none: it is over."""
    member.keep_session(one.record.origin, come_to(parts))
    assert await settle(member, [one])


async def test_whoever_has_the_partition_next_knows_what_a_session_has_come_to(bus: Log) -> None:
    await bus.produce(*(b"%d" % n for n in range(10)))
    async with bus.member() as first:
        got = await delivered(first, 10)
        mine = [one for one in got if one.record.partition == got[0].record.partition]
        elsewhere = next(one for one in got if one not in mine)
        for part in range(2):
            known = first.session(mine[part].record.origin, SESSION, part)
            assert known == (come_to(1) if part else None)
            await answered(first, mine[part], part + 1)
        assert await bus.kept_sessions() == {SESSION}
        first.session(mine[2].record.origin, SESSION, 2)
        first.keep_session(mine[2].record.origin, come_to(3))  # its result is never committed
        await bus.kill(first)
        async with bus.member() as second:
            rest = {one.record.origin: one for one in await delivered(second, 8)}
            assert second.session(elsewhere.record.origin, SESSION, 2) is None, "another partition's"
            assert second.session(mine[3].record.origin, SESSION, 3) is None, "not the next part"
            assert second.session(mine[2].record.origin, "0" * 64, 2) is None, "another session"
            assert second.session(mine[2].record.origin, SESSION, 2) == come_to(2)
            await answered(second, rest[mine[2].record.origin], 3)
            assert second.session(mine[3].record.origin, SESSION, 3) == come_to(3)
            await answered(second, rest[mine[3].record.origin], 0)
            assert second.session(mine[4].record.origin, SESSION, 3) is None, "it is over"
            assert await bus.kept_sessions() == set()
