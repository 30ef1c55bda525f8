"""Whether memory grows: each of three models parked, dropped and loaded again and again, in every process and device.

The models are the small ones whatever else is measured: what is left behind is left behind each time, and two hundred
loads of large ones would take an hour.
"""

import os
import statistics
from collections.abc import Sequence

from service.platforms.cpu import resident_bytes
from tests.bench.card.parts import device_bytes
from tests.bench.card.run import ALIASES, Card, Engine


async def measure(card: Card) -> None:
    """``memory_growth`` is the largest growth of any process or device, eager models and compiled ones."""
    largest = []
    for name, eager, cycles in (("eager", True, card.cycles), ("compiled", False, max(4, card.cycles // 10))):
        async with card.engine(eager=eager, shape="small") as engine:
            held = [await _cycle(engine) for _ in range(cycles)]
        grown = {place: growth([each[place] for each in held]) for place in held[0]}
        largest.append(max(grown.values()))
        card.note(**{f"memory_growth_{name}_{place}": each for place, each in grown.items()})
    card.note(memory_growth=max(largest))


async def _cycle(engine: Engine) -> dict[str, int]:
    """Each model parked, brought back, dropped and loaded once; what is held afterwards, in bytes."""
    multi = engine.multi
    for alias, other in zip(ALIASES, (*ALIASES[1:], ALIASES[0]), strict=True):
        await multi.switch(other)
        await multi.park(alias)
        await multi.switch(alias)
        await multi.switch(other)
        await multi.drop(alias)
        await multi.switch(alias)
        await engine.say(alias, 4)
    held = {"frontend": resident_bytes(os.getpid()), "core": resident_bytes(multi.core_pid)}
    held |= {f"worker{rank}": resident_bytes(pid) for rank, pid in enumerate(multi.worker_pids)}
    return {**held, "device": await engine.worker(device_bytes)}


def growth(held: Sequence[int]) -> float:
    """The median of the last ten over that of the eleventh to the twentieth, less one.

    Of fewer than forty, quarters stand for tens.
    """
    some = min(10, len(held) // 4)
    return statistics.median(held[-some:]) / statistics.median(held[some : 2 * some]) - 1
