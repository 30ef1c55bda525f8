"""Who waits for a trial leaves when it is aborted or cancelled; the trial keeps its room until it ends."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from service.engine.answering.constraints import Constraints
from service.engine.processes.trial import Limits
from tests.support.trials import WITHIN_S, configuration, under_way

pytest.importorskip("vllm")


def params(regex: str) -> Any:
    return SimpleNamespace(structured_outputs=SimpleNamespace(regex=regex))


async def test_an_aborted_one_leaves_at_once_and_its_trial_keeps_its_room() -> None:
    constraints = Constraints(Limits(cpu_s=30, memory_bytes=1 << 30))
    constraints.room = asyncio.Semaphore(1)
    model = constraints.of("sleeping", configuration(sleeps=True))
    try:
        tried, waiting = asyncio.Event(), asyncio.Event()
        first = asyncio.create_task(model.check(params("a"), tried))
        found = await asyncio.to_thread(under_way, constraints.trials)
        second = asyncio.create_task(model.check(params("b"), waiting))
        third = asyncio.create_task(model.check(params("c")))
        waiting.set()
        await asyncio.wait_for(second, 5)
        tried.set()
        await asyncio.wait_for(first, 5)
        third.cancel()
        await asyncio.wait((third,), timeout=5)
        assert third.cancelled()
        assert constraints.room.locked()
        found[1].kill()
        async with asyncio.timeout(WITHIN_S):
            await constraints.room.acquire()
        constraints.room.release()
        constraints.remove("sleeping")
        with pytest.raises(RuntimeError, match="was removed"):
            await model.check(params("a"))
    finally:
        await constraints.close()
