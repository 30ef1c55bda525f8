"""What is measured of one engine with three models, in the order in which a card's half hour is spent."""

import asyncio
import statistics
import time
from typing import Any

from tests.bench.card.run import ALIASES, LOAD, Card, Engine
from tests.bench.setting import percentile

FIRST, SECOND, THIRD = ALIASES
_MIB = 1 << 20


async def start(card: Card, engine: Engine) -> None:
    """How long the engine took to start, and each further model to load."""
    loads = {}
    for alias in ALIASES[1:]:
        report = await engine.multi.switch(alias)
        loads[f"first_load_{alias}_s"] = report.switch_s
        print("  ", alias, "  ".join(f"{name} {ms:.1f}" for name, ms in report.phases_ms.items()), flush=True)
    card.note(start_s=engine.start_s, **loads)


async def resident(card: Card, engine: Engine) -> None:
    """Between the first two models, resident both: from the call to its report, with nothing running and under load."""
    await engine.load_all()
    phases: list[dict[str, float]] = []
    idle = [await _switch_ms(engine, (FIRST, SECOND)[number % 2], phases) for number in range(500)]
    card.note(resident_p50_ms=statistics.median(idle), resident_p99_ms=percentile(idle, 0.99))
    _tell(phases)
    tokens = card.shape.max_model_len // 2
    work = [asyncio.create_task(engine.say(alias, tokens, n)) for alias in (FIRST, SECOND) for n in range(LOAD)]
    for alias in (FIRST, SECOND):
        await engine.multi.switch(alias)
        await _next_token_ms(engine, alias)
    trips, steps, resumed = [], [], []
    phases.clear()
    for number in range(60):
        alias = (FIRST, SECOND)[number % 2]
        trips.append(await _switch_ms(engine, alias, phases))
        resumed.append(trips[-1] + await _next_token_ms(engine, alias))
        steps.append(await _next_token_ms(engine, alias))
    await engine.multi.abort(engine.running(), internal=True)
    await asyncio.gather(*work)
    card.note(
        step_ms=statistics.median(steps),
        resident_loaded_p50_ms=statistics.median(trips),
        resident_loaded_p99_ms=percentile(trips, 0.99),
        resumed_token_p50_ms=statistics.median(resumed),
    )
    _tell(phases)


async def _switch_ms(engine: Engine, alias: str, phases: list[dict[str, float]]) -> float:
    started = time.perf_counter()
    report = await engine.multi.switch(alias)
    phases.append(dict(report.phases_ms))
    return (time.perf_counter() - started) * 1e3


def _tell(phases: list[dict[str, float]]) -> None:
    """The median of each phase of some switches."""
    names = dict.fromkeys(name for each in phases for name in each)
    found = {name: statistics.median(each.get(name, 0.0) for each in phases) for name in names}
    print("  ", "  ".join(f"{name} {ms:.2f}" for name, ms in found.items()), flush=True)


async def _next_token_ms(engine: Engine, alias: str) -> float:
    def generated() -> int:
        states = engine.multi.context(alias).output_processor.request_states.values()
        return sum(len(state.detokenizer.output_token_ids) for state in states)

    started, before = time.perf_counter(), generated()
    while generated() == before:  # noqa: ASYNC110 - seen at the next turn of the loop
        await asyncio.sleep(0)
    return (time.perf_counter() - started) * 1e3


async def parked(card: Card, engine: Engine) -> None:
    """Parking and coming back, beside a plain copy of as many bytes from pinned memory in the same process."""
    await engine.load_all()
    away, back = [], []
    for _ in range(10):
        await engine.multi.switch(SECOND)
        started = time.perf_counter()
        await engine.multi.park(FIRST)
        away.append(time.perf_counter() - started)
        started = time.perf_counter()
        await engine.multi.switch(FIRST)
        back.append(time.perf_counter() - started)
    info = engine.multi.info(FIRST)
    copy_s = await engine.worker(plain_copy_s, info.weights_bytes)
    zero_s = await engine.worker(zero_s_of, info.kv_bytes)
    parked_s = statistics.median(back)
    card.note(
        first_park_s=away[0],
        park_s=statistics.median(away[1:]),
        parked_s=parked_s,
        parked_weights_mib=info.weights_bytes / _MIB,
        parked_mib_per_s=info.weights_bytes / _MIB / parked_s,
        plain_copy_s=copy_s,
        kv_zero_s=zero_s,
        parked_over_plain=parked_s / (copy_s + zero_s),
    )


def plain_copy_s(_worker: Any, size: int) -> float:
    """Runs in a worker: seconds of one copy of ``size`` bytes to the device, from pinned memory where there is any."""
    import time as clock

    import torch

    apart = torch.cuda.is_available()
    source = torch.zeros(size, dtype=torch.uint8, pin_memory=apart)
    target = torch.zeros(size, dtype=torch.uint8, device="cuda" if apart else "cpu")
    took = []
    for _ in range(3):
        started = clock.perf_counter()
        target.copy_(source, non_blocking=True)
        if apart:
            torch.cuda.synchronize()
        took.append(clock.perf_counter() - started)
    del source, target
    if apart:
        torch.cuda.empty_cache()
    return min(took)


def zero_s_of(_worker: Any, size: int) -> float:
    """Runs in a worker: seconds of allocating and zeroing ``size`` bytes on the device."""
    import time as clock

    import torch

    apart = torch.cuda.is_available()
    started = clock.perf_counter()
    zeros = torch.zeros(size, dtype=torch.uint8, device="cuda" if apart else "cpu")
    if apart:
        torch.cuda.synchronize()
    took = clock.perf_counter() - started
    del zeros
    if apart:
        torch.cuda.empty_cache()
    return took


async def pause(card: Card, engine: Engine) -> None:
    """The longest time between two tokens of the active model while another one is loaded beside it."""
    await engine.load_all()
    await engine.multi.switch(FIRST)
    usual, longest, loads = [], [], []
    for _ in range(3):
        await engine.multi.drop(SECOND)
        gaps: list[float] = []
        watch = asyncio.create_task(_gaps(engine, gaps, card.shape.max_model_len // 2))
        while len(gaps) < 20:  # noqa: ASYNC110 - seen at the next turn of the loop
            await asyncio.sleep(0.001)
        usual.append(statistics.median(gaps))
        started = time.perf_counter()
        await engine.multi.preload(SECOND)
        loads.append(time.perf_counter() - started)
        print("   waited for in one piece:", engine.multi.info(SECOND).stall_s, flush=True)
        seen = len(gaps)
        while len(gaps) < seen + 5 and not watch.done():  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        longest.append(max(gaps))
        await engine.multi.abort(engine.running(), internal=True)
        await watch
    card.note(
        load_beside_s=statistics.median(loads),
        load_pause_ms=max(longest) * 1e3,
        token_ms=statistics.median(usual) * 1e3,
    )


async def _gaps(engine: Engine, gaps: list[float], tokens: int) -> None:
    """Seconds between the tokens of requests that follow each other until they are aborted."""
    last, said = time.perf_counter(), tokens
    while said == tokens:
        said = 0
        async for ids in engine.stream(FIRST, tokens):
            now = time.perf_counter()
            gaps.append(now - last)
            last, said = now, len(ids)


async def equal(card: Card, engine: Engine) -> None:
    """Two hundred switches in the middle of answers, each answer as its model gives it alone; memory before and after.

    Every tenth time the model that was left is parked; its request was finished first, since what is prefilled again
    is the same in float32 only.
    """
    tokens, multi = 60, engine.multi
    expected = {}
    for alias in ALIASES:
        await multi.switch(alias)
        expected[alias] = await engine.say(alias, tokens)
    if len(set(expected.values())) < len(ALIASES):
        raise RuntimeError(f"models that say the same show nothing: {expected}")
    switches, wrong, used = 0, 0, []
    while switches < 200:
        tasks = {alias: asyncio.create_task(engine.say(alias, tokens)) for alias in ALIASES}
        while not all(task.done() for task in tasks.values()):
            for alias, task in tasks.items():
                if task.done():
                    continue
                await multi.switch(alias)
                switches += 1
                await asyncio.wait((task,), timeout=0.05)
        wrong += sum(task.result() != expected[alias] for alias, task in tasks.items())
        left = next(alias for alias in ALIASES if alias != multi.active)
        await multi.park(left)
        await multi.switch(left)
        switches += 1
        used.append(await engine.worker(device_bytes))
    card.note(
        equal=float(wrong == 0),
        equal_switches=float(switches),
        equal_device_growth=statistics.median(used[-3:]) / statistics.median(used[1:4]) - 1,
    )


def device_bytes(_worker: Any) -> int:
    """Runs in a worker: bytes in use on its device."""
    from service.platforms import current

    return current().memory_used()


async def crowd(card: Card, engine: Engine) -> None:
    """Three models where one fits at a time: each says what it says alone, and how long a switch takes."""
    expected, took, wrong = {}, [], 0
    for alias in ALIASES:
        await engine.multi.switch(alias)
        expected[alias] = await engine.say(alias, 40)
    for number in range(12):
        alias = ALIASES[number % 3]
        started = time.perf_counter()
        await engine.multi.switch(alias)
        took.append(time.perf_counter() - started)
        wrong += await engine.say(alias, 40) != expected[alias]
    tiers = [info.tier for info in engine.multi.contexts()]
    card.note(
        crowd_switch_s=statistics.median(took),
        crowd_equal=float(wrong == 0),
        crowd_resident=float(sum(tier == "resident" for tier in tiers)),
    )


PARTS = {"start": start, "resident": resident, "parked": parked, "pause": pause, "equal": equal}
"""Of one engine, in this order; ``crowd`` has an engine of its own, which is too small for its models."""
