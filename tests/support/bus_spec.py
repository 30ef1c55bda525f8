"""What every bus does, as tests over a ``bus`` fixture: run on the fake, on the one of HTTP and on the real one.

The fixture gives a ``Place``: a pool without members yet. Use it with ``from tests.support.bus_spec import *``; a bus
that keeps a log passes ``log_spec`` too.
"""

import asyncio
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

import pytest

from schemas.base import Headers, Origin
from schemas.results import Outcome, Result, Timing
from service.ports import Delivery, RequestSource, Settlement, Settlements
from tests.support.waiting import PATIENCE_S


class Member(RequestSource, Settlements, Protocol):
    """A worker's bus: both ports in one."""


class Place(Protocol):
    """Where requests are asked and answered."""

    def member(self, name: str = "one", **limits: Any) -> AbstractAsyncContextManager[Member]:
        """A worker's bus, opened; it leaves as a worker that is told to stop does."""
        ...

    async def produce(self, *values: bytes | None, headers: Headers = (), alias: str | None = None) -> list[Origin]:
        """Requests, in the shared topic or in a model's own."""
        ...

    async def answered(self) -> Counter[Origin]:
        """How many results each origin has, for whoever reads only what was committed."""
        ...


def settlement(delivery: Delivery, **more: Any) -> Settlement:
    """The least that answers a delivery."""
    origin = delivery.record.origin
    result = Result(
        id=str(origin), origin=origin, outcome=Outcome.COMPLETED, status=200, timing=Timing(received=0, finished=0)
    )
    return Settlement(result.model_copy(update=more))


async def delivered(member: Member, count: int, *, within_s: float = PATIENCE_S) -> list[Delivery]:
    """Read until so many have come."""
    got: list[Delivery] = []
    async with asyncio.timeout(within_s):
        while len(got) < count:
            got.extend((await member.receive()).deliveries)
    return got


async def settle(member: Member, deliveries: Sequence[Delivery]) -> list[Origin]:
    """Settle them all at once; those that were committed."""
    outcomes = await asyncio.gather(*(member.settle(one.record.origin, settlement(one)) for one in deliveries))
    return [one.record.origin for one, outcome in zip(deliveries, outcomes, strict=True) if outcome is not None]


async def turns(member: Member, count: int) -> list[Delivery]:
    """What comes in so many turns of reading."""
    return [one for _ in range(count) for one in (await member.receive()).deliveries]


COMPLAINT_S = 30.0
"""What has not moved for so long is stuck, on a machine that is busy with other things too."""

HOSTILE: list[tuple[bytes | None, Headers]] = [
    (None, []),
    (b"", []),
    (b"\xff\xfe\x00", []),
    (b"[" * 2000, []),
    (b"{}", [("x", b"\xff\xfe")]),
    (b"{}", [("content-type", b"application/cloudevents+json")]),
    (b"{}", [("ce_id", b"x" * 3000), ("deadline", b"nan"), ("ttl", b"-1")]),
    (b"{}", [("x", b"")] * 200),
]


async def test_each_request_is_delivered_once_and_has_one_result(bus: Place) -> None:
    async with bus.member() as member:
        origins = await bus.produce(*(b"%d" % n for n in range(60)))
        got = await delivered(member, 60)
        assert {one.record.origin for one in got} == set(origins)
        assert set(await settle(member, got)) == set(origins)
        assert not await turns(member, 2)
        assert await bus.answered() == dict.fromkeys(origins, 1)


async def test_a_request_is_settled_once_however_often_that_is_tried(bus: Place) -> None:
    async with bus.member() as member:
        await bus.produce(b"{}")
        (one,) = await delivered(member, 1)
        at_once = await asyncio.gather(
            *(member.settle(one.record.origin, settlement(one)) for _ in range(2)), return_exceptions=True
        )
        again = await member.settle(one.record.origin, settlement(one))
        assert sum(outcome is not None for outcome in (*at_once, again)) == 1
        assert await bus.answered() == {one.record.origin: 1}


async def test_no_record_keeps_a_bus_from_delivering_it_and_those_behind_it(bus: Place) -> None:
    async with bus.member() as member:
        for value, headers in HOSTILE:
            await bus.produce(value, headers=headers)
        await bus.produce(b"after")
        got = await delivered(member, len(HOSTILE) + 1)
        assert len({one.record.origin for one in got}) == len(HOSTILE) + 1
        assert b"after" in {one.record.value for one in got}
        assert len(await settle(member, got)) == len(got)


async def test_what_was_started_and_taken_back_is_settled_all_the_same(bus: Place) -> None:
    async with bus.member() as member:
        await bus.produce(b"{}")
        (one,) = await delivered(member, 1)
        await member.started(one.record.origin)
        member.withdraw(one.record.origin)
        await member.started(one.record.origin, alone=True)
        assert await settle(member, [one])


async def test_a_bus_that_was_stopped_delivers_nothing_more_and_settles_what_runs(bus: Place) -> None:
    async with bus.member() as member:
        await bus.produce(b"runs")
        (one,) = await delivered(member, 1)
        await member.started(one.record.origin)
        await member.stop()
        assert not await turns(member, 2)
        assert await settle(member, [one])
        await member.flush()


async def test_a_bus_that_works_does_not_complain(bus: Place) -> None:
    async with bus.member() as member:
        await bus.produce(*[b"{}"] * 20)
        await settle(member, await delivered(member, 20))
        state = member.state()
        assert (state.joined, state.full_s, state.overtaken) == (True, 0.0, 0)
        assert state.stuck_s < COMPLAINT_S


@pytest.mark.parametrize("only", [[], ["llama"], None])
async def test_the_shared_topic_is_read_whichever_models_are_served(bus: Place, only: list[str] | None) -> None:
    async with bus.member() as member:
        member.serve_only(only)
        origins = await bus.produce(*[b"{}"] * 5)
        assert set(await settle(member, await delivered(member, 5))) == set(origins)
