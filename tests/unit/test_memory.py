"""What a process has let go of goes back to the system, though what is in use lies behind it."""

import asyncio
import ctypes.util
import gc
import os
import subprocess
import sys
import weakref

import psutil
import pytest

from service import memory
from tests.support.bus import until

MIB = 1 << 20
HOLES = """
import os, sys, psutil
from service.memory import give_back

def used():
    return psutil.Process().memory_full_info().uss

large = b"x" * (20 << 20)
del large  # from now on glibc takes pieces of as much from its heap
large, kept = [], []
before = used()
for _ in range(9):
    large.append(b"x" * (9 << 20))
    kept.append([b"x" * (2000 + n) for n in range(100)])
large.clear()
held = used() - before
give_back()
print(held, used() - before)
"""


@pytest.mark.parametrize("preloaded", ["", "libtcmalloc_minimal.so.4"])
def test_holes_in_the_heap_are_given_back(preloaded: str) -> None:
    if preloaded and ctypes.util.find_library("tcmalloc_minimal") is None:
        pytest.skip(f"{preloaded} is not here")
    given = {**os.environ, "LD_PRELOAD": preloaded}
    said = subprocess.run([sys.executable, "-c", HOLES], env=given, capture_output=True, text=True, check=True).stdout
    held, left = map(int, said.split())
    assert held > 40 * MIB, "or there is nothing to be shown here"
    assert left < 4 * MIB


async def test_they_are_given_back_again_and_again_while_a_worker_runs() -> None:
    """In this process, whose heap has holes already, or gets them here."""
    async with memory.given_back(every_s=0.01):
        for _ in range(2):
            large = b"x" * (20 * MIB)
            del large
            pieces = [(b"x" * (9 * MIB + n), b"x" * (2000 + n)) for n in range(6)]
            small = [piece[1] for piece in pieces]
            whole = psutil.Process().memory_full_info().uss
            del pieces
            await until(lambda whole=whole: psutil.Process().memory_full_info().uss < whole - 40 * MIB)
            assert len(small) == 6


async def test_what_refers_to_itself_is_let_go_of_however_old_it_is() -> None:
    async def fails() -> None:
        answer = Answer()
        raise ValueError(answer)

    task = asyncio.ensure_future(fails())
    await asyncio.wait({task})
    error = task.exception()
    error.task = task  # as aiokafka's does, by the frame in which it is looked at
    seen = weakref.ref(error.args[0])
    gc.collect()  # it is among the oldest now
    del task, error
    gc.collect(1)
    assert seen() is not None, "or there is nothing to be shown here"
    async with memory.given_back(every_s=0.01):
        await until(lambda: seen() is None)


async def test_circles_are_looked_for_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    trims: list[int] = []
    searches: list[int] = []

    def searched(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and info["generation"] == 2:
            searches.append(len(trims))

    monkeypatch.setattr(memory, "_release", None)
    monkeypatch.setattr(memory, "_trim", trims.append)
    gc.collect()
    gc.callbacks.append(searched)
    try:
        async with memory.given_back(every_s=0.0001):
            await until(lambda: len(trims) >= 10)
    finally:
        gc.callbacks.remove(searched)
    assert searches == [0], "one takes milliseconds, and the next comes a thousand times as much later"


class Answer:
    """What a broker said last."""
