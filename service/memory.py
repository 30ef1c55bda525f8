"""Memory that this process has let go of, and the system has not got back.

A record of 9 MiB lies in glibc's heap for a moment, as soon as one of that size was freed before. What is made
meanwhile and stays lies behind it, and by itself glibc gives back only what lies behind the last piece in use: after a
day of such records a worker held several times what it needed.

What refers to itself in a circle is let go of only where Python looks for it, and it looks among old objects the less
the more there are. Each connection that breaks leaves such a circle, in aiokafka's task that read from it, with the
last answer that was read: some MB. A worker whose brokers restart held the answers of an hour.
"""

import asyncio
import contextlib
import ctypes
import gc
import time
from collections.abc import AsyncIterator

EVERY_S = 30.0
"""Between two looks: one takes 1 ms where little was freed, 7 ms for 70 MB."""
COLLECTING_SHARE = 0.001
"""Of the time, to look for circles: that takes 6 ms for 70,000 objects, in which nothing else is done."""
_process = ctypes.CDLL(None)
_trim = getattr(_process, "malloc_trim", None)
"""Another libc than glibc has no such call, and does without."""
_release = getattr(_process, "MallocExtension_ReleaseFreeMemory", None)
"""tcmalloc's, where that is preloaded, as in the CPU's image: the heap is its own then, and glibc's is empty."""


def give_back() -> None:
    """Give the free pages of the heap back to the system, wherever they lie."""
    if _release is not None:
        _release()
    elif _trim is not None:
        _trim(0)


@contextlib.asynccontextmanager
async def given_back(*, every_s: float = EVERY_S) -> AsyncIterator[None]:
    """Give back what is free again and again, and look for circles, for as long as the block lasts."""

    async def again() -> None:
        collect_at = 0.0
        while True:
            await asyncio.sleep(every_s)
            if (began := time.monotonic()) >= collect_at:
                gc.collect()
                collect_at = began + (time.monotonic() - began) / COLLECTING_SHARE
            give_back()

    giving = asyncio.create_task(again(), name="memory")
    try:
        yield
    finally:
        giving.cancel()
        await asyncio.gather(giving, return_exceptions=True)
