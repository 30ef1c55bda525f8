"""Memory that this process has let go of, and the system has not got back.

A record of 9 MiB lies in glibc's heap for a moment, as soon as one of that size was freed before. What is made
meanwhile and stays lies behind it, and by itself glibc gives back only what lies behind the last piece in use: after a
day of such records a worker held several times what it needed.
"""

import asyncio
import contextlib
import ctypes
from collections.abc import AsyncIterator

EVERY_S = 30.0
"""Between two looks: one takes 1 ms where little was freed, 7 ms for 70 MB."""
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
    """Give back what is free again and again, for as long as the block lasts."""

    async def again() -> None:
        while True:
            await asyncio.sleep(every_s)
            give_back()

    giving = asyncio.create_task(again(), name="memory")
    try:
        yield
    finally:
        giving.cancel()
        await asyncio.gather(giving, return_exceptions=True)
