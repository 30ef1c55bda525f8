"""A hundred workers whose models rise and fall: how many objectives they meet by the way in which models are placed.

A day of windows. In each, every worker's requests are replayed on its device by ``service.scheduling.coarse``; between
two of them its group may place anew, through the protocol's own bytes. Four ways: as they joined, and never again; anew
in each window, by bytes that were read; as workers do it, by what requests cost and what objectives they miss, when one
of them asks; and the plan for each window alone, which knows what will come and moves what it likes.

What waits at the end of a window is not taken into the next one. A model that a worker has not had before is loaded
first, and what comes for it meanwhile is missed.
"""

import math
import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing import get_context
from typing import Any

from schemas.contexts import ContextInfo, Tier
from schemas.objectives import Objective
from service.consumer.assignor import Placement
from service.ports import Holdings
from service.scheduling import plan
from service.scheduling.coarse import Tally
from service.scheduling.demand import Demand
from service.scheduling.machines import GB, ModelCosts, gaudi_model
from service.scheduling.replay import Part, replay
from service.scheduling.traffic import Traffic
from service.settings import TopicSettings
from tests.bench.production import SIZES
from tests.support.group import cluster, fitting, said

OBJECTIVE = Objective(ttft_s=10.0, tpot_s=0.1, share=0.9)
ROOM = 120 * GB
WINDOW_S, REPLAYED_S = 300.0, 60.0
"""A window lasts so long, and so much of it is replayed."""
_LOOKS = 5
_DISK_BYTES_S = 5e9
_BATCH = 8
_PROMPT, _OUTPUT = 1000, 200
NEVER, BYTES, ASKED, PLANNED = "as they joined", "each window, by bytes", "as workers ask", "a plan for each window"
WAYS = (NEVER, BYTES, ASKED, PLANNED)
TOPICS = TopicSettings()


@dataclass
class Day:
    """What is asked in each window: models that rise and fall, each in its own time, and one that is found by all."""

    workers: int
    models: int
    windows: int
    seed: int
    load: float = 0.9
    """Of all devices' time, what requests cost in batches, on average over the day."""
    costs: list[ModelCosts] = field(init=False)
    each_s: list[float] = field(init=False)
    """Seconds of a device that a model's request costs."""
    rates: list[list[float]] = field(init=False)
    """Requests per second, by window and model."""

    def __post_init__(self) -> None:
        chance = random.Random(self.seed)
        sizes = list(SIZES.values())
        self.costs = [
            gaudi_model(
                f"model-{number}",
                billions=size.billions,
                byte_per_weight=size.byte_per_weight,
                kv_bytes_per_token=size.kv_bytes_per_token,
                row_tokens=_PROMPT + _OUTPUT,
            )
            for number in range(self.models)
            for size in [sizes[number % len(sizes)]]
        ]
        self.each_s = [_PROMPT / c.prefill_tokens_s + _OUTPUT * (c.step_s / _BATCH + c.row_s) for c in self.costs]
        order = chance.sample(range(self.models), self.models)
        phases = [chance.random() for _ in range(self.models)]
        shares = [1 / (1 + rank) for rank in order]
        found = order.index(self.models // 2)  # by everybody, from the middle of the day on
        waves = [
            [
                share / each_s * (1.0 + 0.9 * math.sin(2 * math.pi * (window / self.windows + phase)))
                for share, phase, each_s in zip(shares, phases, self.each_s, strict=True)
            ]
            for window in range(self.windows)
        ]
        for wave in waves[self.windows // 2 :]:
            wave[found] *= 10.0
        asked = sum(rate * each_s for wave in waves for rate, each_s in zip(wave, self.each_s, strict=True))
        by = self.load * self.workers * self.windows / asked
        self.rates = [[by * rate for rate in wave] for wave in waves]

    def requests(self, window: int) -> Traffic:
        """What comes in the part of a window that is replayed; the same for every way."""
        chance = random.Random(f"{self.seed}/{window}")
        came = []
        for of, rate in enumerate(self.rates[window]):
            at = chance.expovariate(rate)
            while at < REPLAYED_S:
                prompt, output = (round(chance.lognormvariate(-0.5, 1.0) * mean) for mean in (_PROMPT, _OUTPUT))
                came.append((at, of, prompt, output))
                at += chance.expovariate(rate)
        made = Traffic(tuple(costs.alias for costs in self.costs))
        for each in sorted(came):
            made.add(*each)
        return made


class Worker:
    """A member of the group, and what it has learnt."""

    def __init__(self, day: Day, way: str) -> None:
        self.day, self.way = day, way
        self.has: set[int] = set()
        self.owned: dict[int, int] = {}
        self.rates: dict[int, float] = {}
        self.demand = Demand(0.0)
        self.now = 0.0
        self.assignor = Placement(alias_of=TOPICS.alias_of, holdings=self._holdings, loads=self._loads)

    def _holdings(self) -> Holdings:
        costs = [self.day.costs[of] for of in sorted(self.has)]
        infos = [
            ContextInfo(alias=one.alias, tier=Tier.RESIDENT, weights_bytes=round(one.device_bytes)) for one in costs
        ]
        return Holdings(contexts=tuple(infos), device_bytes=ROOM)

    def _loads(self) -> Mapping[str, float]:
        def load(of: int) -> float:
            if self.way == BYTES:
                return self.rates[of] * _PROMPT
            short = self.demand.short(self.day.costs[of].alias, {"": OBJECTIVE}, self.now)
            return self.rates[of] * self.day.each_s[of] * (1.0 + short)

        return {TOPICS.for_alias(self.day.costs[of].alias): load(of) for of in self.rates}

    def asks(self, placements: int, now: float) -> bool:
        """Whether it asks for another placement now."""
        self.now = now
        owned = {self.day.costs[of].alias: {"": OBJECTIVE} for of in self.owned}
        return bool(self.demand.to_be_placed(owned, placements, now))

    def keeps(self) -> set[int]:
        """The models that it has after a window: what it was asked for, and of the others what fits beside that."""
        asked = sorted(self.owned, key=lambda of: -self.rates.get(of, 0.0) * self.day.each_s[of])
        return fitting([*asked, *sorted(self.has)], lambda of: self.day.costs[of].device_bytes, ROOM)


@dataclass
class Pool:
    """One way's day."""

    day: Day
    way: str
    partitions: int
    members: list[Worker] = field(init=False)
    owner: dict[tuple[int, int], int] = field(default_factory=dict)
    """Who has a model's partition."""
    placements: int = 0
    moves: int = 0

    def __post_init__(self) -> None:
        self.members = [Worker(self.day, self.way) for _ in range(self.day.workers)]

    def place(self) -> None:
        """The group places anew, by what its members say."""
        names = {f"worker-{number:04}": worker for number, worker in enumerate(self.members)}
        topics = {TOPICS.for_alias(costs.alias): of for of, costs in enumerate(self.day.costs)}
        told = {name: said(worker.assignor, topics) for name, worker in names.items()}
        given = self.members[0].assignor.assign(cluster(dict.fromkeys(topics, self.partitions)), told)
        before, self.owner = self.owner, {}
        for place, (name, worker) in enumerate(names.items()):
            worker.assignor.on_assignment(given[name])
            worker.assignor.generation += 1
            worker.owned = {topics[topic]: len(numbers) for topic, numbers in given[name].assignment}
            self.owner |= {(topics[t], n): place for t, numbers in given[name].assignment for n in numbers}
        self.placements += 1
        self.moves += sum(before.get(each, place) != place for each, place in self.owner.items())

    def plan(self, window: int) -> None:
        """As the plan for a window has it: each model's requests go round those that it puts it on."""
        loads = [rate * each_s for rate, each_s in zip(self.day.rates[window], self.day.each_s, strict=True)]
        sizes = [costs.device_bytes for costs in self.day.costs]
        placed = plan.place(loads, sizes, room=ROOM, devices=self.day.workers)
        before, self.owner = self.owner, {}
        for of in range(self.day.models):
            on = [number for number, models in enumerate(placed) if of in models]
            self.owner |= {(of, number): on[number % len(on)] for number in range(self.partitions)}
        for number, worker in enumerate(self.members):
            worker.owned = dict(Counter(of for (of, _), owner in self.owner.items() if owner == number))
        self.placements += 1
        self.moves += sum(before.get(each, place) != place for each, place in self.owner.items())


def live(day: Day, way: str, partitions: int) -> dict[str, Any]:
    """A day of one way."""
    pool = Pool(day, way, partitions)
    pool.place()
    shares, loads, asked = [], 0, 0
    with get_context("fork").Pool(2) as processes:
        for window in range(day.windows):
            if way == PLANNED:
                pool.plan(window)
            elif window and (way == BYTES or (way == ASKED and asked)):
                pool.place()
            for worker in pool.members:
                worker.asks(pool.placements, WINDOW_S * window)
            met, came, loaded = _window(pool, day.requests(window), processes.imap)
            shares.append(met / came)
            loads += loaded if window else 0
            ends = [WINDOW_S * (window + (look + 1) / _LOOKS) for look in range(_LOOKS)]
            asked = sum([any(worker.asks(pool.placements, now) for now in ends) for worker in pool.members])
    return {
        "goodput": round(sum(shares) / len(shares), 4),
        "worst_window": round(min(shares), 4),
        "placements": pool.placements,
        "moved_per_window": round(pool.moves / day.windows, 1),
        "loads_per_window": round(loads / day.windows, 1),
    }


def _window(pool: Pool, requests: Traffic, run: Callable[..., Any]) -> tuple[int, int, int]:
    """Replay a window: requests that met their objective, all that came, and models that were loaded."""
    day, members = pool.day, pool.members
    seen = [0] * day.models
    mine = [Traffic(requests.aliases) for _ in members]
    late: list[Counter[int]] = [Counter() for _ in members]
    came: list[Counter[int]] = [Counter() for _ in members]
    loaded = sum(of not in worker.has for worker in members for of in worker.owned)
    for at, of, prompt, output in requests:
        place = pool.owner[of, seen[of] % pool.partitions]
        seen[of] += 1
        came[place][of] += 1
        load_s = day.costs[of].device_bytes / _DISK_BYTES_S * REPLAYED_S / WINDOW_S
        if of not in members[place].has and at < load_s:
            late[place][of] += 1
        else:
            mine[place].add(at, of, prompt, output)
    parts = [
        Part(traffic, tuple((of, day.costs[of], OBJECTIVE) for of in sorted(worker.owned)), ROOM, 60.0, exact=False)
        for worker, traffic in zip(members, mine, strict=True)
    ]
    tallies: list[Tally] = list(run(replay, parts))
    met = 0
    for worker, tally, got in zip(members, tallies, came, strict=True):
        worker.rates = {of: got[of] / REPLAYED_S for of in worker.owned}
        for of, count in got.items():
            reached = tally.met_of.get(of, 0)
            for number in range(count):
                worker.demand.seen(day.costs[of].alias, "", number < reached, worker.now)
        met += tally.met
        worker.has = worker.keeps()
    return met, len(requests), loaded


def measure(*, workers: int, models: int, partitions: int, windows: int, seed: int) -> dict[str, dict[str, Any]]:
    """Each way's figures."""
    day = Day(workers, models, windows, seed)
    return {way: live(day, way, partitions) for way in WAYS}
