"""How long a log is waited for that takes long to read."""

import asyncio

from service.kafka.folded import while_progressing
from tests.support.virtual_time import virtual_time


def waited(*, steps: int, step_s: float) -> bool:
    """Whether something is waited for that comes so many steps after its beginning, with 10 s of silence allowed."""
    progress, known = 0, asyncio.Event()

    async def read() -> None:
        nonlocal progress
        for _ in range(steps):
            await asyncio.sleep(step_s)
            progress += 1
        known.set()

    async def wait() -> bool:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(read())
            return await while_progressing(known, lambda: progress, silent_s=10)

    with virtual_time() as loop:
        return loop.run_until_complete(wait())


def test_it_may_take_long_as_long_as_it_comes_further():
    assert waited(steps=1000, step_s=9.0)


def test_silence_ends_the_waiting():
    assert not waited(steps=3, step_s=30.0)
