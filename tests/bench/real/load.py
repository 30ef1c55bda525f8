"""What a stream feels while another model is loaded beside it, and how much longer that load takes."""

import asyncio
import mmap
import time
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from itertools import pairwise
from statistics import median

from tests.bench.card.run import Card, Engine
from tests.bench.setting import percentile

_ACTIVE, _LOADED = "llama", "qwen"
_ROUNDS = 3
_PAIRS = 8
_TOKENS = 1800
_BEFORE = 20
"""Tokens before a load begins."""
_MEMORY_BYTES = 2 << 30
"""More than a load takes."""
BARS = {
    "load_pause_over_step": ("<=", 3),
    "load_total_over_alone": ("<=", 3),
    "load_idle_over_alone": ("<=", 1.1),
    "load_equal": (">=", 1),
}


async def figures(card: Card) -> dict[str, float]:
    """Each load is of safetensors that are in the page cache, into memory that the machine has just let go of.

    Where the host of a virtual machine takes what is free there, new pages cost six times as much: as much as a load.
    Medians of three, and of eight pairs by turns.

    ``load_pause_over_step``: the longest gap between two tokens of the active model's stream while another one is
    loaded, over the p99 of that stream alone. ``load_total_over_alone``: how long that load takes over one that a
    switch makes, for which nothing else runs; ``load_idle_over_alone``: how long it takes where the active model has
    nothing to do. ``load_equal``: whether both models say the same as ever.
    """
    async with card.engine() as engine:
        expected = await _said(engine)
        alone, idle, beside, pauses, equal = [], [], [], [], True
        for number in range(_PAIRS):
            pair = [(alone, engine.multi.switch), (idle, engine.multi.preload)]
            for seconds, load in pair if number % 2 else reversed(pair):
                await _drop(engine)
                seconds.append(await _took(load, await asyncio.to_thread(_memory)))
            card.note(alone_s=alone[-1], idle_s=idle[-1])
        steps = await _gaps(engine, 200)
        for _ in range(_ROUNDS):
            await _drop(engine)
            seconds, gaps = await _load_beside(engine)
            beside.append(seconds)
            pauses.append(max(gaps))
            card.note(beside_s=seconds, pause_ms=pauses[-1] * 1e3)
            equal = equal and await _said(engine) == expected
        p99 = percentile(steps, 0.99)
        card.note(step_p50_ms=median(steps) * 1e3, step_p99_ms=p99 * 1e3, pause_ms=median(pauses) * 1e3)
        card.note(alone_s=median(alone), idle_s=median(idle), beside_s=median(beside))
        return {
            "load_pause_over_step": median(pauses) / p99,
            "load_total_over_alone": median(beside) / median(alone),
            "load_idle_over_alone": median(idle) / median(alone),
            "load_equal": float(equal),
        }


async def _said(engine: Engine) -> list[tuple[int, ...]]:
    said = []
    for alias in (_LOADED, _ACTIVE):
        await engine.multi.switch(alias)
        said.append(await engine.say(alias, 40))
    return said


async def _drop(engine: Engine) -> None:
    await engine.multi.switch(_ACTIVE)
    await engine.multi.drop(_LOADED)


def _memory() -> mmap.mmap:
    """As much as a load takes, each page of it written to."""
    memory = mmap.mmap(-1, _MEMORY_BYTES)
    memory.madvise(mmap.MADV_HUGEPAGE)  # they are let go of in no time
    for at in range(0, _MEMORY_BYTES, mmap.PAGESIZE):
        memory[at] = 1
    return memory


async def _took(load: Callable[[str], Awaitable[object]], memory: mmap.mmap) -> float:
    """How long a load takes that finds this memory free."""
    await asyncio.to_thread(memory.close)
    began = time.perf_counter()
    await load(_LOADED)
    return time.perf_counter() - began


async def _gaps(engine: Engine, tokens: int) -> list[float]:
    """Seconds between tokens of one stream, from the second on."""
    times = [time.perf_counter() async for _ in engine.stream(_ACTIVE, tokens)]
    return [later - earlier for earlier, later in pairwise(times[1:])]


async def _load_beside(engine: Engine) -> tuple[float, list[float]]:
    """How long a load takes beside a stream, and the gaps of that stream until shortly afterwards."""
    times: list[float] = []
    loading: asyncio.Task[float] | None = None
    after = _BEFORE
    memory = await asyncio.to_thread(_memory)
    async with aclosing(engine.stream(_ACTIVE, _TOKENS)) as stream:
        async for _ in stream:
            times.append(time.perf_counter())
            if len(times) == _BEFORE:
                loading = asyncio.create_task(_took(engine.multi.preload, memory))
            if loading is not None and loading.done():
                after -= 1
            if not after:
                break
    assert loading is not None
    seconds = await loading
    return seconds, [later - earlier for earlier, later in pairwise(times[_BEFORE - 1 :])]
