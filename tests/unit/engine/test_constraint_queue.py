"""Who waits for a trial leaves when it is aborted or cancelled; the trial keeps its room until it ends."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from service.engine.answering.constraints import Constraints, Room
from service.engine.processes.trial import Limits
from tests.support.trials import WITHIN_S, configuration, under_way

pytest.importorskip("vllm")

pytestmark = pytest.mark.usefixtures("one_import")


def params(regex: str) -> Any:
    return SimpleNamespace(structured_outputs=SimpleNamespace(regex=regex))


async def test_an_aborted_one_leaves_at_once_and_its_trial_keeps_its_room() -> None:
    constraints = Constraints(Limits(cpu_s=30, memory_bytes=1 << 30))
    constraints.room = Room(1)
    model = constraints.of("sleeping", configuration(sleeps=True))
    try:
        tried, waiting = asyncio.Event(), asyncio.Event()
        first = asyncio.create_task(model.check(params("a"), tried))
        found = await asyncio.to_thread(under_way, constraints.trials)
        second = asyncio.create_task(model.check(params("b"), waiting))
        third = asyncio.create_task(model.check(params("c")))
        waiting.set()
        await asyncio.wait_for(second, WITHIN_S)
        tried.set()
        await asyncio.wait_for(first, WITHIN_S)
        third.cancel()
        await asyncio.wait((third,), timeout=WITHIN_S)
        assert third.cancelled()
        assert constraints.room.is_full
        found[1].kill()
        async with asyncio.timeout(WITHIN_S):
            await constraints.room.acquire("")
        constraints.room.release()
        constraints.remove("sleeping")
        with pytest.raises(RuntimeError, match="was removed"):
            await model.check(params("a"))
    finally:
        await constraints.close()


async def test_who_waits_for_room_waits_behind_its_own_and_not_behind_all_of_anothers() -> None:
    room, order = Room(1), []
    await room.acquire("first")

    async def wait(owner: str, number: int) -> None:
        await room.acquire(owner)
        order.append((owner, number))
        room.release()

    red = [asyncio.create_task(wait("red", number)) for number in range(4)]
    await asyncio.sleep(0)
    others = [asyncio.create_task(wait(owner, number)) for owner in ("blue", "green") for number in range(2)]
    await asyncio.sleep(0)
    red[1].cancel()
    room.release()
    await asyncio.wait([*red, *others], timeout=WITHIN_S)
    assert order == [("red", 0), ("blue", 0), ("green", 0), ("red", 2), ("blue", 1), ("green", 1), ("red", 3)]
    assert not room.is_full


async def test_room_that_was_given_to_one_who_is_cancelled_goes_to_the_next() -> None:
    room = Room(1)
    await room.acquire("")
    waiting = [asyncio.create_task(room.acquire(owner)) for owner in ("red", "blue")]
    await asyncio.sleep(0)
    room.release()
    waiting[0].cancel()
    await asyncio.wait(waiting, timeout=WITHIN_S)
    assert waiting[0].cancelled()
    assert waiting[1].done()
    assert room.is_full
    room.release()
    assert not room.is_full
