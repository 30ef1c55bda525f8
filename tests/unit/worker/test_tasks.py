"""A worker's tasks: the first that fails ends it, whatever way it fails, and none is waited for that has ended."""

import asyncio

import pytest

from service.errors import Stalled
from service.worker.tasks import Tasks


async def for_ever() -> None:
    await asyncio.Event().wait()


class Panic(BaseException):
    """As of a library in Rust, which is no Exception."""


async def fail(error: BaseException) -> None:
    raise error


@pytest.mark.parametrize("kind", ["loop", "spawn"])
@pytest.mark.parametrize("error", [ValueError, Panic])
async def test_what_fails_ends_the_worker_and_all_other_tasks(kind: str, error: type[BaseException]) -> None:
    tasks = Tasks()

    async def main() -> None:
        getattr(tasks, kind)("failing", fail, error("it can't"))
        await for_ever()

    other = tasks.loop("other", for_ever)
    with pytest.raises(BaseExceptionGroup) as failed:
        await tasks.until(main)
    assert [str(error) for error in failed.value.exceptions] == ["it can't"]
    assert other.cancelled()


async def test_a_task_that_is_cancelled_from_inside_has_failed() -> None:
    tasks = Tasks()

    async def lets_another_ones_cancellation_out() -> None:
        raise asyncio.CancelledError

    tasks.spawn("client", lets_another_ones_cancellation_out)
    with pytest.raises(ExceptionGroup) as failed:
        await tasks.until(for_ever)
    (error,) = failed.value.exceptions
    assert isinstance(error, Stalled)
    assert "client was cancelled from inside" in str(error)


async def test_a_task_that_is_cancelled_is_not_waited_for_whether_or_not_it_had_begun() -> None:
    tasks = Tasks()
    begun = tasks.spawn("begun", for_ever)
    await asyncio.sleep(0)
    begun.cancel()
    tasks.spawn("not begun", for_ever).cancel()
    async with asyncio.timeout(10):
        await tasks.idle()
        await tasks.until(_nothing)


async def _nothing() -> None:
    """The worker ends at once."""


async def test_idle_waits_for_work_and_for_no_loop() -> None:
    tasks, done = Tasks(), []

    async def work() -> None:
        await asyncio.sleep(0)
        done.append("first")
        tasks.spawn("second", more)

    async def more() -> None:
        await asyncio.sleep(0)
        done.append("second")

    tasks.loop("loop", for_ever)
    tasks.spawn("first", work)
    async with asyncio.timeout(10):
        await tasks.idle()
    assert done == ["first", "second"]
    await tasks.until(_nothing)
