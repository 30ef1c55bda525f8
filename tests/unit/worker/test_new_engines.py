"""When a worker whose engine died runs again in the same process, and when it ends."""

import asyncio
import weakref
from types import SimpleNamespace

import pytest

from service import app
from service.errors import EngineDied, Stalled
from service.settings import load

DIED = ExceptionGroup("", [ExceptionGroup("", [EngineDied("it was killed")])])


class Runs:
    """What each run of the worker ends by, in order, and how many there were; after the last it stops as told."""

    def __init__(self, *ends: BaseException) -> None:
        self.ends = list(ends)
        self.count = 0

    async def __call__(self) -> None:
        self.count += 1
        if self.ends:
            raise self.ends.pop(0)


async def ran(runs: Runs, *, restarts: int = 2, stopped: bool = False) -> int:
    """How many runs there were."""
    stop, settings = asyncio.Event(), load(engine_restarts=restarts)
    if stopped:
        stop.set()
    await app.with_new_engines(runs, stop, settings)
    return runs.count


@pytest.mark.parametrize("restarts", [2, 10**20])
async def test_each_death_is_followed_by_a_run(restarts: int) -> None:
    assert await ran(Runs(DIED, DIED), restarts=restarts) == 3


@pytest.mark.parametrize("restarts", [0, 1, 3])
async def test_so_many_deaths_in_ten_minutes_are_enough(restarts: int) -> None:
    runs = Runs(*[DIED] * 10)
    with pytest.raises(ExceptionGroup):
        await ran(runs, restarts=restarts)
    assert runs.count == restarts + 1


async def test_deaths_that_are_far_from_each_other_are_no_reason_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter(range(0, 10_000, 301))
    monkeypatch.setattr(app, "time", SimpleNamespace(monotonic=lambda: next(now)))
    assert await ran(Runs(*[DIED] * 10)) == 11


@pytest.mark.parametrize(
    "end",
    [
        EngineDied("it did not start"),
        ExceptionGroup("", [Stalled("nothing moves")]),
        ExceptionGroup("", [EngineDied("it was killed"), Stalled("nothing moves")]),
    ],
)
async def test_whatever_else_ends_it_is_the_end(end: Exception) -> None:
    runs = Runs(end)
    with pytest.raises(type(end)) as raised:
        await ran(runs)
    assert raised.value is end
    assert runs.count == 1


class Engine:
    """One that refers to itself, as what holds a loop and its tasks does."""

    def __init__(self) -> None:
        self.itself = self


async def test_what_a_dead_engine_left_in_circles_is_gone_before_the_next_one_opens() -> None:
    engines: list[weakref.ref[Engine]] = []
    left: list[int] = []

    async def run() -> None:
        left.append(sum(engine() is not None for engine in engines))
        engine = Engine()
        engines.append(weakref.ref(engine))
        with app.seldom_collected():
            del engine
            if len(engines) < 3:
                raise DIED

    await app.with_new_engines(run, asyncio.Event(), load())
    assert left == [0, 0, 0]


async def test_who_is_told_to_stop_needs_no_new_engine() -> None:
    runs = Runs(DIED)
    with pytest.raises(ExceptionGroup):
        await ran(runs, stopped=True)
    assert runs.count == 1
