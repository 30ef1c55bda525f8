"""Traffic to schedule: seeded, so that every policy sees the same requests."""

import math
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from service.scheduling.machines import Machine, gaudi3, gaudi3_fleet
from service.scheduling.simulator import Arrival, Trace

Gap = Callable[[random.Random, float], float]
"""The time to the next arrival, from the mean one."""
_DEADLINES = ((0.5, 30.0), (0.8, 90.0), (1.0, 300.0))
"""Half of the requests are someone waiting, the rest are jobs: cumulative share, seconds to the deadline."""


def trace(name: str, requests: int, seed: int = 0, *, load: float | None = None, keeps_blocks: bool = True) -> Trace:
    """One of ``NAMES``. ``load`` is the share of the machine that the requests need in full batches.

    ``keeps_blocks``: running requests keep their keys and values while their model is parked.
    """
    maker = _MAKERS[name]
    rng = random.Random(f"{name}/{seed}")
    machine, usual_load, aliases = maker(rng)
    if not keeps_blocks:
        lost = {alias: replace(costs, row_back_s=None) for alias, costs in machine.models.items()}
        machine = replace(machine, models=lost)
    lengths = _short if name == "interleaved" else _heavy if name == "heavy-tailed" else _chat
    arrivals = tuple(_arrive(rng, machine, requests, load or usual_load, aliases, lengths, name))
    return Trace(name, machine, arrivals)


def _arrive(
    rng: random.Random,
    machine: Machine,
    requests: int,
    load: float,
    aliases: "Aliases",
    lengths: "Lengths",
    name: str,
) -> Iterator[Arrival]:
    mean = _mean_cost(machine, aliases, lengths) / load
    now = 0.0
    picks = aliases(rng, lambda: now, mean * requests)
    burst = 0
    for _ in range(requests):
        if name == "bursty":
            burst, gap = _burst(rng, burst, mean)
        else:
            gap = rng.expovariate(1 / mean)
        now += gap
        alias = next(picks)
        prompt, output = lengths(rng)
        draw = rng.random()
        patience = next(seconds for share, seconds in _DEADLINES if draw <= share)
        yield Arrival(now, alias, prompt, output, now + patience)


Lengths = Callable[[random.Random], tuple[int, int]]
Aliases = Callable[[random.Random, Callable[[], float], float], Iterator[str]]
"""From the dice, the time and the trace's length: the models asked for, one after another."""


def _chat(rng: random.Random) -> tuple[int, int]:
    return _tokens(rng, 400, 0.8), _tokens(rng, 150, 0.7)


def _short(rng: random.Random) -> tuple[int, int]:
    """Classification and extraction: a prompt, and a handful of tokens."""
    return _tokens(rng, 300, 0.5), rng.randint(1, 6)


def _heavy(rng: random.Random) -> tuple[int, int]:
    """Most answers are short, some are a hundred times as long."""
    return _tokens(rng, 400, 0.8), min(8000, int(40 * rng.paretovariate(1.2)))


def _tokens(rng: random.Random, median: float, sigma: float) -> int:
    return max(1, min(8000, int(rng.lognormvariate(math.log(median), sigma))))


def _burst(rng: random.Random, left: int, mean: float) -> tuple[int, float]:
    """Some sixty requests within a moment, then silence."""
    if left > 0:
        return left - 1, rng.expovariate(10 / mean)
    size = rng.randint(20, 100)
    return size, rng.expovariate(1 / (0.9 * mean * size))


def _mean_cost(machine: Machine, aliases: Aliases, lengths: Lengths) -> float:
    """Device seconds per request in batches of half the greatest size, by a sample."""
    rng = random.Random(0)
    clock = iter(range(10**9))
    picks = aliases(rng, lambda: float(next(clock)), 2000.0)
    total = 0.0
    for _ in range(2000):
        model = machine.models[next(picks)]
        prompt, output = lengths(rng)
        total += model.alone_s(prompt, output, batch=model.max_running // 2)
    return total / 2000


def _weighted(weights: Iterable[float], names: Iterable[str]) -> Aliases:
    chosen, shares = tuple(names), tuple(weights)

    def pick(rng: random.Random, _now: Callable[[], float], _length: float) -> Iterator[str]:
        while True:
            yield from rng.choices(chosen, shares, k=256)

    return pick


def _sticky(names: tuple[str, ...]) -> Aliases:
    """A burst is of one model, mostly."""

    def pick(rng: random.Random, _now: Callable[[], float], _length: float) -> Iterator[str]:
        alias = names[0]
        while True:
            if rng.random() < 1 / 60:
                alias = rng.choice(names)
            yield alias if rng.random() < 0.9 else rng.choice(names)

    return pick


def _rotating(names: tuple[str, ...]) -> Aliases:
    def pick(_rng: random.Random, _now: Callable[[], float], _length: float) -> Iterator[str]:
        while True:
            yield from names

    return pick


def _diurnal(names: tuple[str, ...]) -> Aliases:
    """Each model has its own popularity and its own time of the day; the trace is two days long."""

    def pick(rng: random.Random, now: Callable[[], float], length: float) -> Iterator[str]:
        shares = [1 / (1 + index) ** 0.9 for index in range(len(names))]
        phases = [rng.random() for _ in names]
        while True:
            day = 2 * now() / length
            weights = [
                share * (1 + 0.9 * math.sin(2 * math.pi * (day + phase)))
                for share, phase in zip(shares, phases, strict=True)
            ]
            yield from rng.choices(names, weights, k=64)

    return pick


def _balanced_maker(_rng: random.Random) -> tuple[Machine, float, Aliases]:
    machine = gaudi3()
    return machine, 0.5, _weighted((4, 3, 2, 2), machine.models)


def _bursty_maker(_rng: random.Random) -> tuple[Machine, float, Aliases]:
    machine = gaudi3()
    return machine, 0.45, _sticky(tuple(machine.models))


def _dominant_maker(_rng: random.Random) -> tuple[Machine, float, Aliases]:
    machine = gaudi3()
    return machine, 0.5, _weighted((85, 5, 5, 5), machine.models)


def _interleaved_maker(_rng: random.Random) -> tuple[Machine, float, Aliases]:
    machine = gaudi3()
    return machine, 0.95, _rotating(tuple(machine.models))


def _heavy_maker(_rng: random.Random) -> tuple[Machine, float, Aliases]:
    machine = gaudi3()
    return machine, 0.5, _weighted((4, 3, 2, 2), machine.models)


def _diurnal_maker(_rng: random.Random) -> tuple[Machine, float, Aliases]:
    machine = gaudi3_fleet()
    return machine, 0.08, _diurnal(tuple(machine.models))


_MAKERS: dict[str, Callable[[random.Random], tuple[Machine, float, Aliases]]] = {
    "balanced": _balanced_maker,
    "bursty": _bursty_maker,
    "dominant": _dominant_maker,
    "interleaved": _interleaved_maker,
    "heavy-tailed": _heavy_maker,
    "diurnal": _diurnal_maker,
}
NAMES = tuple(_MAKERS)
