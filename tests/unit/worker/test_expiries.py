"""Deadlines of many jobs behind one timer, on a loop whose clock is ours."""

import asyncio
import gc
import time
import weakref
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.worker.expiries import Expiries


class Clock(asyncio.SelectorEventLoop):
    """Time passes as the test says."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0

    def time(self) -> float:
        return self.now

    def pass_to(self, moment: float) -> None:
        self.now = moment

        async def look() -> None:
            await asyncio.sleep(0)
            await asyncio.sleep(0)

        self.run_until_complete(look())


class One:
    """What has a deadline, if any, ``left`` seconds from now."""

    def __init__(self, left: float | None) -> None:
        self.deadline = None if left is None else time.time() + left


@pytest.fixture
def clock() -> Iterator[Clock]:
    loop = Clock()
    yield loop
    loop.close()


def on(clock: Clock, work):
    """Do it as if called from the loop."""

    async def done():
        return work()

    return clock.run_until_complete(done())


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.floats(-5, 200)),
        st.tuples(st.just("add"), st.none()),
        st.tuples(st.just("discard"), st.integers(0, 400)),
        st.tuples(st.just("pass"), st.floats(0.1, 50)),
        st.tuples(st.just("many"), st.floats(100, 500)),
    ),
    max_size=60,
)


@given(STEPS)
def test_each_expires_at_its_deadline_unless_it_was_discarded(steps) -> None:
    clock = Clock()
    expired: list[One] = []
    expiries = Expiries(expired.append)
    due: dict[One, float] = {}

    def add(left: float | None) -> None:
        one = One(left)
        on(clock, lambda: expiries.add(one))
        if left is not None:
            due[one] = clock.now + max(0.0, left)

    try:
        for what, value in steps:
            if what == "add":
                add(value)
            elif what == "many":
                for n in range(100):
                    add(value + n)
            elif what == "discard" and due:
                one = list(due)[value % len(due)]
                del due[one]
                on(clock, lambda one=one: expiries.discard(one))
            elif what == "pass":
                clock.pass_to(clock.now + value)
            gone = {one for one, at in due.items() if at <= clock.now - 0.5}
            assert gone <= set(expired), "late"
            assert not [one for one in expired if one in due and due[one] > clock.now + 0.5], "early, or discarded"
            for one in expired:
                due.pop(one, None)
            assert len(expiries) == len(due)
        clock.pass_to(clock.now + 10_000)
        assert set(due) <= set(expired)
        assert len(expired) == len(set(expired))
        assert not len(expiries)
    finally:
        clock.close()


def test_one_that_is_gone_is_not_held_until_its_deadline(clock: Clock) -> None:
    expiries = Expiries(lambda _one: None)
    kept = [One(86_400) for _ in range(10)]
    gone = [One(86_400) for _ in range(1000)]
    on(clock, lambda: [expiries.add(one) for one in (*kept, *gone)])
    held = [weakref.ref(one) for one in gone]
    on(clock, lambda: [expiries.discard(one) for one in gone])
    gone.clear()
    gc.collect()
    assert not [ref for ref in held if ref() is not None]
    assert len(expiries._due) < 100
    assert len(expiries) == len(kept)


def test_what_expires_may_discard_itself_and_add_others(clock: Clock) -> None:
    said: list[object] = []
    later = One(50)

    def expire(one: One) -> None:
        said.append(one)
        expiries.discard(one)
        if one is not later:
            expiries.add(later)

    expiries = Expiries(expire)
    first = One(1)
    on(clock, lambda: expiries.add(first))
    clock.pass_to(1002.0)
    assert said == [first]
    clock.pass_to(1060.0)
    assert said == [first, later]


def test_one_that_fails_stops_no_other(clock: Clock) -> None:
    said: list[object] = []
    first, second = One(1), One(2)

    def expire(one: One) -> None:
        if one is first:
            raise KeyError(one)
        said.append(one)

    clock.set_exception_handler(lambda _loop, _context: None)
    expiries = Expiries(expire)
    on(clock, lambda: [expiries.add(one) for one in (first, second)])
    clock.pass_to(1001.5)
    clock.pass_to(1003.0)
    assert said == [second]


def test_what_has_no_deadline_is_not_kept(clock: Clock) -> None:
    expiries = Expiries(lambda _one: None)
    on(clock, lambda: expiries.add(SimpleNamespace(deadline=None)))
    assert len(expiries) == 0
