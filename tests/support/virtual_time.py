"""A clock that runs as fast as there is nothing to do: for tests of what takes minutes, exact and without waiting.

The event loop jumps to its next timer when nothing is ready, and ``time`` tells that loop's time. Only for code
that does no real I/O.
"""

import asyncio
import selectors
import time
from collections.abc import Iterator
from contextlib import contextmanager

_EPOCH = 1_760_000_000.0


class _Jump(selectors.SelectSelector):
    """Waits for nothing but the clock."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1_000.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        found = super().select(0)
        if not found:
            if timeout is None:
                raise RuntimeError("nothing will ever happen: no task is ready and no timer is set")
            self.now += timeout
        return found


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop on virtual time, in seconds."""

    def __init__(self) -> None:
        self.clock = _Jump()
        super().__init__(self.clock)

    def time(self) -> float:
        return self.clock.now


@contextmanager
def virtual_time() -> Iterator[VirtualLoop]:
    """A loop, and ``time.time``, ``time.monotonic`` and ``time.perf_counter`` by it while the block runs."""
    real = time.time, time.monotonic, time.perf_counter
    loop = VirtualLoop()
    time.time, time.monotonic, time.perf_counter = (lambda: _EPOCH + loop.time()), loop.time, loop.time
    try:
        yield loop
    finally:
        try:
            loop.run_until_complete(_end())
        finally:
            time.time, time.monotonic, time.perf_counter = real
            loop.close()


async def _end() -> None:
    """Cancel what still runs, as ``asyncio.Runner`` does, which waits for threads besides: on this clock in vain.

    What is destroyed instead says so from within whatever a search for garbage comes in: where that is Python's own
    parser, the traceback that goes with it needs the parser again, and Python 3.11's fails.
    """
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)
    await asyncio.get_running_loop().shutdown_asyncgens()
