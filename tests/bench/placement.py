"""Placement against Kafka's assignors, and by objectives: ``python -m tests.bench.placement [--json FILE]``.

A pool's life is played for each assignor, through the group protocol's own bytes: all workers join at once, each with
the default model only; then 2 % of them leave and as many join, and a tenth of the models changes its popularity,
again and again. Between two assignments a worker loads the models of what it owns, the busiest first, while its memory
lasts. Counted is the share of requests that go to a worker which has their model when the assignment is made. Range
and sticky are aiokafka's own. What placing by objectives brings is told by ``placement_objectives``.
"""

import argparse
import json
import random
import sys
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from aiokafka.coordinator.assignors.range import RangePartitionAssignor
from aiokafka.coordinator.assignors.sticky.sticky_assignor import StickyPartitionAssignor
from aiokafka.coordinator.protocol import ConsumerProtocolMemberAssignment
from rich.console import Console
from rich.table import Table

from schemas.contexts import ContextInfo, Tier
from service.consumer.assignor import Placement
from service.ports import Holdings
from service.settings import TopicSettings
from tests.bench.placement_objectives import ASKED, NEVER, PLANNED, measure
from tests.support.group import cluster, fitting, said

GIB = 1 << 30
MEMORY = 128 * GIB
SIZES = (8 * GIB, 16 * GIB, 32 * GIB, 64 * GIB)
ROUNDS = 10
"""Assignments after the first; those after the second are counted."""
ASSIGNORS = ("range", "sticky", "gearshift")
TOPICS = TopicSettings()


@dataclass
class Pool:
    """What is asked for, and how big it is. ``rates`` are a partition's bytes per second, by topic."""

    models: int
    per_model: int
    chance: random.Random
    sizes: dict[str, int] = field(init=False)
    rates: dict[str, float] = field(init=False)

    def __post_init__(self) -> None:
        self.aliases = [f"model-{number:03}" for number in range(self.models)]
        self.sizes = {alias: self.chance.choice(SIZES) for alias in self.aliases}
        self.rates = {TOPICS.for_alias(a): 1e4 / (n + 1) for n, a in enumerate(self.aliases)}
        self.topics = list(self.rates)

    def shift(self) -> None:
        """Two neighbours in popularity change places, here and there."""
        for number in self.chance.sample(range(self.models - 1), self.models // 10):
            one, other = self.topics[number], self.topics[number + 1]
            self.rates[one], self.rates[other] = self.rates[other], self.rates[one]


class Worker:
    """A member with its assignor, and the models that it has loaded."""

    def __init__(self, pool: Pool, kind: str) -> None:
        self.pool = pool
        self.resident = {pool.aliases[0]}
        self.owned: dict[str, list[int]] = {}
        self.assignor: Any = {
            "range": RangePartitionAssignor,
            "sticky": type("Sticky", (StickyPartitionAssignor,), {}),
            "gearshift": Placement(alias_of=TOPICS.alias_of, holdings=self._holdings, loads=self._rates),
        }[kind]

    def _holdings(self) -> Holdings:
        contexts = [
            ContextInfo(alias=alias, tier=Tier.RESIDENT, weights_bytes=self.pool.sizes[alias])
            for alias in sorted(self.resident)
        ]
        return Holdings(contexts=tuple(contexts), device_bytes=MEMORY)

    def _rates(self) -> Mapping[str, float]:
        return {topic: self.pool.rates[topic] * len(numbers) for topic, numbers in self.owned.items()}

    def take(self, assignment: ConsumerProtocolMemberAssignment, generation: int) -> None:
        self.assignor.on_assignment(assignment)
        self.assignor.generation = generation
        self.owned = {topic: list(numbers) for topic, numbers in assignment.assignment}

    def at_home(self) -> tuple[float, float]:
        """Requests per second of what it owns: those whose model it has, and all."""
        rates = self._rates()
        return sum(r for topic, r in rates.items() if TOPICS.alias_of(topic) in self.resident), sum(rates.values())

    def load(self) -> None:
        """Load what its partitions ask for, the busiest models first, while there is memory."""
        rates = self._rates()
        asked = [TOPICS.alias_of(topic) or "" for topic in sorted(rates, key=lambda topic: (-rates[topic], topic))]
        self.resident = fitting([*asked, *sorted(self.resident)], self.pool.sizes.__getitem__, MEMORY)


def live(kind: str, workers: int, models: int, partitions: int, seed: int) -> list[dict[str, float]]:
    """One pool's life under one assignor: a row per assignment."""
    chance = random.Random(seed)
    pool = Pool(models, partitions // models, chance)
    seen = cluster(dict.fromkeys(pool.topics, pool.per_model))
    members = {f"worker-{number:05}": Worker(pool, kind) for number in range(workers)}
    came, rows = workers, []
    before: dict[tuple[str, int], str] = {}
    for generation in range(1 + ROUNDS):
        if generation:
            pool.shift()
            for gone in chance.sample(sorted(members), max(1, workers // 50)):
                del members[gone]
            for _ in range(max(1, workers // 50)):
                members[f"worker-{came:05}"] = Worker(pool, kind)
                came += 1
        told = {name: said(worker.assignor, pool.topics) for name, worker in members.items()}
        began = time.perf_counter()
        assignments = next(iter(members.values())).assignor.assign(seen, told)
        took = time.perf_counter() - began
        for name, worker in members.items():
            worker.take(assignments[name], generation)
        after = {(t, n): name for name, w in members.items() for t, numbers in w.owned.items() for n in numbers}
        assert len(after) == models * pool.per_model, "every partition has an owner"
        at_home = [worker.at_home() for worker in members.values()]
        loads = [every for _, every in at_home]
        rows.append(
            {
                "seconds": took,
                "share": sum(home for home, _ in at_home) / sum(loads),
                "moves": sum(before.get(partition, name) != name for partition, name in after.items()),
                "orphans": sum(name not in members for name in before.values()),
                "busiest": max(loads) / (sum(loads) / len(loads)),
                "said_bytes": sum(len(one.user_data) for one in told.values()) / len(told),
            }
        )
        for worker in members.values():
            worker.load()
        before = after
    return rows


def summary(rows: list[dict[str, float]]) -> dict[str, float]:
    """Two assignments apart: at the first nothing is known, at the second the first weights are."""
    later = rows[2:]

    def mean(what: str) -> float:
        return sum(row[what] for row in later) / len(later)

    return {
        "share_at_first": round(rows[0]["share"], 4),
        "share_at_second": round(rows[1]["share"], 4),
        "share": round(mean("share"), 4),
        "moves": round(mean("moves"), 1),
        "moves_needed": round(mean("orphans"), 1),
        "busiest": round(mean("busiest"), 2),
        "seconds": round(max(row["seconds"] for row in rows), 3),
        "said_bytes": round(mean("said_bytes")),
    }


def limited(kind: str, size: tuple[int, int, int], seed: int, limit_s: float) -> dict[str, float] | None:
    """The same in a process of its own, which is given up after ``limit_s`` seconds."""
    with get_context("spawn").Pool(1) as process:
        running = process.apply_async(live, (kind, *size, seed))
        running.wait(limit_s)
        return summary(running.get()) if running.ready() else None


def table(size: tuple[int, int, int], found: Mapping[str, dict[str, float] | None], limit_s: float) -> Table:
    workers, models, partitions = size
    made = Table(title=f"{workers:,} workers, {models} models, {partitions:,} partitions; 2 % replaced per assignment")
    headings = ("assignor", "model is there", "1st, 2nd time", "moves", "needed", "busiest worker", "assigning", "said")
    for heading in headings:
        made.add_column(heading, justify="left" if heading == "assignor" else "right", no_wrap=True)
    for kind, row in found.items():
        if row is None:
            made.add_row(kind, f"not done in {limit_s:g} s", *[""] * 6)
            continue
        made.add_row(
            kind,
            f"{row['share']:.1%}",
            f"{row['share_at_first']:.0%}, {row['share_at_second']:.0%}",
            f"{row['moves']:,.0f}",
            f"{row['moves_needed']:,.0f}",
            f"{row['busiest']:.1f} x mean",
            f"{row['seconds']:.3f} s",
            f"{row['said_bytes']:.0f} B",
            style="bold" if kind == "gearshift" else None,
        )
    return made


def main() -> None:
    options = _options()
    console = Console() if sys.stdout.isatty() else Console(width=120)
    figures: dict[str, dict[str, Any]] = defaultdict(dict)
    for size in ((100, 20, 1000), (options.workers, options.models, options.partitions)):
        found = {kind: limited(kind, size, options.seed, options.limit_s) for kind in ASSIGNORS}
        console.print(table(size, found, options.limit_s))
        figures["{}x{}x{}".format(*size)] = found
    ours = [found["gearshift"] for found in figures.values()]
    holds = [all(row is not None and row["share"] >= 0.95 for row in ours)]
    _claim(console, "at least 95 % where the model is", holds[0])
    days = measure(workers=100, models=40, partitions=25, windows=48, seed=options.seed)
    figures["objectives"] = days
    console.print(objectives_table(days))
    asked, never, planned = (days[way]["goodput"] for way in (ASKED, NEVER, PLANNED))
    holds.append(asked > never and asked >= 0.98 * planned)
    _claim(console, "as workers ask, more than as they joined, and 98 % of a plan for each window", holds[1])
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    sys.exit(not all(holds))


def objectives_table(days: Mapping[str, Mapping[str, Any]]) -> Table:
    made = Table(title="100 workers, 40 models that rise and fall, 48 windows of five minutes")
    for heading in ("placed", "objectives met", "in the worst window", "placements", "moves", "loads per window"):
        made.add_column(heading, justify="left" if heading == "placed" else "right", no_wrap=True)
    for way, row in days.items():
        made.add_row(
            way,
            f"{row['goodput']:.1%}",
            f"{row['worst_window']:.1%}",
            f"{row['placements']}",
            f"{row['moved_per_window']:.0f}",
            f"{row['loads_per_window']:.1f}",
            style="bold" if way == ASKED else None,
        )
    return made


def _claim(console: Console, says: str, holds: bool) -> None:
    console.print(f"[{'green' if holds else 'red'}]{'yes' if holds else 'NO '}[/] {says}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--workers", type=int, default=1000)
    parser.add_argument("--models", type=int, default=200)
    parser.add_argument("--partitions", type=int, default=10_000)
    parser.add_argument("--limit-s", type=float, default=120.0, help="give an assignor up after this")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
