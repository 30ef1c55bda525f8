"""The schedule against its baselines: ``python -m tests.bench.schedule [--json FILE] [--picture FILE] [--trace FILE]``.

The simulation runs the worker's own policy object on six seeded traces with computed Gaudi 3 costs, as Gaudi's engine
lets it and as the others do; with
``--engine`` three tiny models run on a real engine as well, each alone and all together. With ``--trace`` it is a
recorded trace instead, under objectives: what that fixes is told in ``schedule_trace``. With both, its first requests
come to the engine, too, and to the simulator.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from service.scheduling.simulator import Outcome
from tests.bench import schedule_trace
from tests.bench.baselines import BASELINES, BOUND_S, CONTENDERS, PUBLISHED, contest
from tests.bench.traces import NAMES, trace

SYNTHETIC = tuple(who for who in CONTENDERS if who not in PUBLISHED)
"""What runs on the synthetic traces, whose requests have deadlines and no objectives."""
ENGINES = {"Gaudi": False, "CUDA and CPUs": True}
"""Whether an engine keeps the blocks of a parked model's requests (``Platform.block_bytes``), as each platform lets it.
All of them bring parked models in beside another one's steps."""


def main() -> None:
    options = _options()
    console = Console() if sys.stdout.isatty() else Console(width=100)
    if options.trace and not options.engine:
        figures = schedule_trace.measure(options.trace)
        console.print_json(data=figures)
        if options.json:
            options.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
        return
    started = time.perf_counter()
    outcomes = {
        engine: {
            name: {who: contest(made, who, bound_s=BOUND_S) for who in SYNTHETIC}
            for name in options.traces
            for made in [trace(name, options.requests, options.seed, keeps_blocks=keeps_blocks)]
        }
        for engine, keeps_blocks in ENGINES.items()
    }
    for engine, found in outcomes.items():
        console.print(table(engine, found))
        for claim, holds in claims(found).items():
            console.print(f"[{'green' if holds else 'red'}]{'yes' if holds else 'NO '}[/] {claim}")
    count = len(ENGINES) * len(options.traces) * len(SYNTHETIC) * options.requests
    console.print(f"{count:,} requests simulated in {time.perf_counter() - started:.0f} s")
    figures: dict[str, Any] = {
        "simulation": {
            engine: {
                "claims": claims(found),
                "traces": {name: {w: row(o) for w, o in of.items()} for name, of in found.items()},
            }
            for engine, found in outcomes.items()
        }
    }
    if options.engine:
        from tests.bench.schedule_engine import measure

        figures["engine"] = measure(rounds=options.rounds, recorded=options.trace)
        console.print_json(data=figures["engine"])
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    if options.picture:
        draw(outcomes["Gaudi"], options.picture)


def row(outcome: Outcome) -> dict[str, float]:
    """The figures of one trace under one schedule."""
    return {
        "serving_share": round(outcome.serving_share, 4),
        "within_deadline": round(outcome.within_deadline, 4),
        "switches": outcome.switches,
        "wait_p95_s": round(outcome.wait_p95_s, 2),
        "wait_max_s": round(outcome.wait_max_s, 2),
    }


def claims(outcomes: dict[str, dict[str, Outcome]]) -> dict[str, bool]:
    """What the schedule is to show, each with whether it holds."""
    ours = {name: of["gearshift"] for name, of in outcomes.items()}
    rivals = {name: [of[who] for who in BASELINES] for name, of in outcomes.items()}
    mean = {
        each: sum(of[each].within_deadline for of in outcomes.values()) / len(outcomes)
        for each in (*BASELINES, "gearshift")
    }
    said = {
        "within deadline: at most one point below the best baseline on every trace": all(
            ours[name].within_deadline >= max(o.within_deadline for o in rivals[name]) - 0.01 for name in ours
        ),
        "within deadline: above every baseline on average": all(mean["gearshift"] > mean[each] for each in BASELINES),
        "serving: at least that of every baseline that keeps the bound": all(
            ours[name].serving_share >= o.serving_share for name in ours for o in rivals[name] if o.wait_max_s < BOUND_S
        ),
        "the largest wait is below the bound": all(o.wait_max_s < BOUND_S for o in ours.values()),
    }
    if "interleaved" in outcomes:
        share, fifo = ours["interleaved"].serving_share, outcomes["interleaved"]["fifo"].serving_share
        said["interleaved: at least 90 % serving where FIFO is below 20 %"] = share >= 0.9 and fifo < 0.2
    return said


def table(engine: str, outcomes: dict[str, dict[str, Outcome]]) -> Table:
    made = Table(title=f"Gaudi 3 costs, the engine of {engine}, bound on waiting {BOUND_S:.0f} s")
    for heading in ("trace", "schedule"):
        made.add_column(heading, no_wrap=True)
    for heading in ("serving", "in time", "switches", "wait p95", "max"):
        made.add_column(heading, justify="right")
    for name, of in outcomes.items():
        for who, outcome in of.items():
            made.add_row(
                name,
                who,
                f"{outcome.serving_share:.1%}",
                f"{outcome.within_deadline:.1%}",
                str(outcome.switches),
                f"{outcome.wait_p95_s:.1f} s",
                f"{outcome.wait_max_s:.1f} s",
                style="bold" if who == "gearshift" else None,
                end_section=who == "gearshift",
            )
    return made


def draw(outcomes: dict[str, dict[str, Outcome]], file: Path, *, start: float = 60.0, seconds: float = 120.0) -> None:
    """Timelines of two minutes of each trace: a row per schedule, a colour per model, switching left white."""
    import matplotlib as mpl

    mpl.use("agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(len(outcomes), 1, figsize=(14, 2.4 * len(outcomes)), squeeze=False)
    for axis, (name, of) in zip(axes[:, 0], outcomes.items(), strict=True):
        aliases = sorted({stay.alias for outcome in of.values() for stay in outcome.stays})
        colours = {alias: plt.get_cmap("turbo")((i + 0.5) / len(aliases)) for i, alias in enumerate(aliases)}
        for height, outcome in enumerate(of.values()):
            for stay in outcome.stays:
                if stay.end > start and stay.start < start + seconds:
                    axis.broken_barh(
                        [(stay.start, stay.end - stay.start)], (height - 0.4, 0.8), color=colours[stay.alias]
                    )
        axis.set_yticks(range(len(of)), [f"{who}  {outcome.serving_share:.0%}" for who, outcome in of.items()])
        axis.set_xlim(start, start + seconds)
        axis.set_title(name, loc="left", fontsize=10)
        if len(aliases) <= 8:
            for alias in aliases:
                axis.plot([], [], color=colours[alias], label=alias, linewidth=6)
            axis.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8)
    axes[-1, 0].set_xlabel("seconds")
    figure.tight_layout()
    figure.savefig(file, dpi=110)
    plt.close(figure)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--trace", type=Path, help="a recorded trace, see production.py")
    parser.add_argument("--requests", type=int, default=6000, help="requests per trace")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--traces", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("--engine", action="store_true", help="measure three tiny models on a real engine too")
    parser.add_argument("--rounds", type=int, default=5, help="paired runs on the engine")
    return parser.parse_args()


if __name__ == "__main__":
    main()
