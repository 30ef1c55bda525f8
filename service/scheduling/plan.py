"""How many devices a pool needs: its own traffic replayed on one, two, and more of them.

Models are placed on devices first, by what they cost and by what fits; then each device is replayed by itself. A model
that costs more than a device has is on several, and its requests go round them. With one more device, the models of the
one that missed most are also tried on two, all others where they were, and so is leaving the new one idle; the best
counts. So more devices are never worse.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from schemas.objectives import Objective
from service.scheduling.coarse import Tally
from service.scheduling.machines import ModelCosts
from service.scheduling.replay import Part, replay
from service.scheduling.traffic import Traffic

Placement = tuple[tuple[int, ...], ...]
"""Of each device the models that it serves, by their place in the traffic's aliases."""
Run = Callable[[Callable[[Part], Tally], Iterable[Part]], Iterable[Tally]]
"""Like ``map``."""
_BATCH = 8
"""Requests that share a step, where what a model costs is guessed to place it."""
_ROUNDED = 0.25
"""Of a device's fair load, how much more than it a model may cost before it is put on two."""
_MOST = 1.25
"""Of the fair load, up to where a device takes a model because there is room in its memory."""
_BEFORE = 8
"""So many numbers of devices before the least that is asked for are tried: all, up to nine."""
EXACT = 100_000
"""Requests times numbers of devices up to which the policy itself is replayed, unless it is said: about a minute."""


@dataclass(frozen=True, slots=True)
class Pool:
    """What is planned for: requests, and of each alias its costs and its objective."""

    traffic: Traffic
    costs: tuple[ModelCosts, ...]
    objectives: tuple[Objective, ...]
    device_bytes: float
    max_wait_s: float = 60.0

    def loads(self) -> list[float]:
        """Seconds of a device that each model's requests cost, in batches."""
        found = [0.0] * len(self.costs)
        for _, of, prompt, output in self.traffic:
            costs = self.costs[of]
            found[of] += prompt / costs.prefill_tokens_s + output * (costs.step_s / _BATCH + costs.row_s)
        return found


@dataclass(frozen=True, slots=True)
class Level:
    """What so many devices give."""

    placement: Placement
    tallies: tuple[Tally, ...]

    @property
    def devices(self) -> int:
        return len(self.placement)

    @property
    def met(self) -> int:
        return sum(tally.met for tally in self.tallies)

    @property
    def met_of(self) -> Counter[int]:
        """The same by model."""
        found: Counter[int] = Counter()
        for tally in self.tallies:
            found.update(tally.met_of)
        return found

    @property
    def counted(self) -> int:
        """Requests that were met or missed: all of them."""
        return sum(tally.met + tally.missed for tally in self.tallies)

    @property
    def busiest(self) -> int:
        """The device that misses most."""
        return max(range(self.devices), key=lambda number: self.tallies[number].missed)


def plan(pool: Pool, devices: Sequence[int], *, exact: bool, run: Run = map) -> list[Level]:
    """A level for each number of devices from the least to the most of ``devices``, and for one more.

    Some before the least are tried, too: a number of devices is placed by what was good for fewer.
    """
    loads = pool.loads()
    sizes = [costs.device_bytes for costs in pool.costs]
    tried = {count: place(loads, sizes, room=pool.device_bytes, devices=count) for count in numbers_of(devices)}
    known = _Replayed(pool, exact, run)
    known.prepare(tried.values())
    levels: list[Level] = []
    for placement in tried.values():
        able = [known.level(placement)]
        if levels:
            able.append(known.level(_halved(levels[-1], loads)))
            able.append(known.level((*levels[-1].placement, ())))
        level = max(able, key=lambda each: each.met)
        levels.append(level)
    return [level for level in levels if level.devices >= min(devices)]


def numbers_of(devices: Sequence[int]) -> range:
    """The numbers of devices that a plan for these replays."""
    return range(max(1, min(devices) - _BEFORE), max(devices) + 2)


def place(loads: Sequence[float], sizes: Sequence[float], *, room: float, devices: int) -> Placement:
    """Every model on at least one device: the dearest first, where there is room for it, else where least is to do."""
    fair = sum(loads) / devices
    copies = [max(1, min(devices, math.ceil(load / fair - _ROUNDED))) if fair else 1 for load in loads]
    while sum(copies) < devices:
        able = [of for of, load in enumerate(loads) if copies[of] < devices and load > 0]
        if not able:
            break
        copies[max(able, key=lambda of: loads[of] / copies[of])] += 1
    placed: list[list[int]] = [[] for _ in range(devices)]
    taken, left = [0.0] * devices, [room] * devices
    for of in sorted(range(len(loads)), key=lambda of: (-loads[of] / copies[of], -sizes[of], of)):
        each = loads[of] / copies[of]
        for _ in range(copies[of]):
            others = [number for number in range(devices) if of not in placed[number]]
            roomy = [number for number in others if left[number] >= sizes[of] and taken[number] + each <= _MOST * fair]
            number = min(roomy or others, key=lambda number: (taken[number], -left[number], number))
            placed[number].append(of)
            taken[number] += each
            left[number] -= sizes[of]
    return tuple(tuple(models) for models in placed)


def resident(pool: Pool, models: Iterable[int], loads: Sequence[float]) -> list[int]:
    """Of a device's models those to hold resident: whose absence would cost the most for their bytes, as far as fit."""
    left, kept = pool.device_bytes, []
    by_worth = sorted(models, key=lambda of: (-loads[of] * pool.costs[of].parked_s / pool.costs[of].device_bytes, of))
    for of in by_worth:
        if pool.costs[of].device_bytes <= left:
            kept.append(of)
            left -= pool.costs[of].device_bytes
    return kept


def _halved(level: Level, loads: Sequence[float]) -> Placement:
    """With one more device, which takes half of what the one that misses most has; of a single model, its half."""
    busiest = level.placement[level.busiest]
    halves: tuple[list[int], list[int]] = ([], [])
    for of in sorted(busiest, key=lambda of: (-loads[of], of)):
        min(halves, key=lambda half: sum(loads[each] for each in half)).append(of)
    if len(busiest) == 1:
        halves = (list(busiest), list(busiest))
    kept = [models for number, models in enumerate(level.placement) if number != level.busiest]
    return (*kept, *(tuple(half) for half in halves))


class _Replayed:
    """Devices that were replayed, by what they have to do: one that has not changed is not replayed again."""

    def __init__(self, pool: Pool, exact: bool, run: Run) -> None:
        self._pool, self._exact, self._run = pool, exact, run
        self._known: dict[tuple[tuple[int, int, int], ...], Tally] = {}

    def level(self, placement: Placement) -> Level:
        """What a placement gives."""
        self.prepare([placement])
        return Level(placement, tuple(self._known[key] for key in _keys(placement)))

    def prepare(self, placements: Iterable[Placement]) -> None:
        """Replay what of these is not known yet."""
        wanted = {key: None for placement in placements for key in _keys(placement) if key not in self._known}
        parts = (self._part(key) for key in wanted)
        self._known.update(zip(wanted, self._run(replay, parts), strict=True))

    def _part(self, key: tuple[tuple[int, int, int], ...]) -> Part:
        """What of the traffic is a device's: of a model on several, every so many'th request."""
        pool = self._pool
        mine = {of: (turn, copies) for of, turn, copies in key}
        made, seen = Traffic(()), [0] * len(pool.costs)
        for at, of, prompt, output in pool.traffic:
            if of in mine:
                turn, copies = mine[of]
                if copies == 1 or seen[of] % copies == turn:
                    made.add(at, of, prompt, output)
                seen[of] += 1
        models = tuple((of, pool.costs[of], pool.objectives[of]) for of, *_ in key)
        return Part(made, models, pool.device_bytes, pool.max_wait_s, self._exact)


def _keys(placement: Placement) -> Iterator[tuple[tuple[int, int, int], ...]]:
    """Of each device its models, each with which of how many copies it is."""
    copies = Counter(of for models in placement for of in models)
    seen: Counter[int] = Counter()
    for models in placement:
        key = []
        for of in models:
            key.append((of, seen[of], copies[of]))
            seen[of] += 1
        yield tuple(sorted(key))
