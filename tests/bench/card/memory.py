"""Whether memory grows: three models parked, dropped and loaded again and again, in every process and device.

The models are the small ones whatever else is measured: what is left behind is left behind each time, and hundreds of
loads of large ones would take hours. Compiled ones take turns, one a cycle: each takes many seconds to load.
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
    for name, eager, cycles in (("eager", True, card.cycles), ("compiled", False, max(4, card.cycles // 5))):
        async with card.engine(eager=eager, shape="small") as engine:
            await engine.load_all()
            held = []
            for number in range(cycles):
                for alias in ALIASES if eager else ALIASES[number % 3 :][:1]:
                    await _once(engine, alias)
                held.append(await _held(engine))
        grown = {place: growth([each[place] for each in held]) for place in held[0]}
        largest.append(max(grown.values()))
        card.note(**{f"memory_growth_{name}_{place}": each for place, each in grown.items()})
    card.note(memory_growth=max(largest))


async def _once(engine: Engine, alias: str) -> None:
    """A model is parked, brought back, dropped and loaded, and says something."""
    multi, other = engine.multi, ALIASES[ALIASES.index(alias) - 1]
    await multi.switch(other)
    await multi.park(alias)
    await multi.switch(alias)
    await multi.switch(other)
    await multi.drop(alias)
    await multi.switch(alias)
    await engine.say(alias, 4)


async def _held(engine: Engine) -> dict[str, int]:
    """Bytes of each process and of the device."""
    multi = engine.multi
    held = {"frontend": resident_bytes(os.getpid()), "core": resident_bytes(multi.core_pid)}
    held |= {f"worker{rank}": resident_bytes(pid) for rank, pid in enumerate(multi.worker_pids)}
    return {**held, "device": await engine.worker(device_bytes)}


def growth(held: Sequence[int]) -> float:
    """The median of the last ten over that of the eleventh to the twentieth, less one.

    Of fewer than forty, quarters stand for tens.
    """
    some = min(10, len(held) // 4)
    return statistics.median(held[-some:]) / statistics.median(held[some : 2 * some]) - 1
