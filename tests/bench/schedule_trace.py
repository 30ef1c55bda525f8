"""The schedule on a trace of production services, against what others publish and against what no schedule can beat.

Fixed: Gaudi 3 costs; 2, 4 and 8 models; requests drawn to models by a seeded Zipf(1) within each service; arrivals
scaled until the offline bound meets 90 % of them; Aegaeon's objective, counted as there (``schemas.objectives``), and
half and twice of it; beside it how many of those would meet it by the mean time per token since their first one. A
request whose first token can't be in time any more is not started, by any of the schedules: it counts as missed. A
worker answers those, too; what that leaves of its goodput is told beside it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from schemas.objectives import Objective
from service.scheduling.machines import Machine
from service.scheduling.simulator import Outcome, Trace
from tests.bench.baselines import BOUND_S, contest
from tests.bench.offline import goodput_bound
from tests.bench.production import (
    AEGAEON,
    COLD_START,
    COUNTS,
    LLAMA_SWAP,
    OBJECTIVE,
    QLM,
    SLEEP_MODE,
    STRICTNESS,
    Record,
    Switching,
    machine,
    part,
    read,
    scaled,
    traffic,
)

MET = 0.9
"""Of the requests, what the offline bound meets at the rate that is tried."""
_TOLERANCE = 0.002
_INSIDE = 0.1
"""Between two rates, the one that is tried is at least this part of their distance away from both."""
_SLOWEST, _FASTEST = 0.25, 1e3
"""The first rate that is tried, and the last."""
_FEW_SLOTS = 1024
"""Of the first search, which is for a guess."""
OWN_COSTS: dict[str, Switching] = {
    "first come first served": SLEEP_MODE,
    "sleep mode by idle time": SLEEP_MODE,
    "collating (llama-swap)": LLAMA_SWAP,
    "virtual queues (QLM)": QLM,
    "token-level turns (Aegaeon)": AEGAEON,
}
OURS = "gearshift"
FIRST, IDLE, COLLATING, QUEUES, TURNS = OWN_COSTS


def measure(
    file: Path,
    *,
    counts: Sequence[int] = COUNTS,
    strictness: Mapping[str, float] = STRICTNESS,
    seed: int = 0,
) -> dict[str, Any]:
    """All figures of a trace; those of the bar first. Raises what ``read`` does, and ValueError for a short trace."""
    records = read(file)
    settings = {
        f"{count} models, {name}": _setting(records, count, scaled(OBJECTIVE, by), seed)
        for count in counts
        for name, by in strictness.items()
    }
    names = ("goodput_ours_over_best_online", "goodput_ours_over_best_policy")
    names += ("goodput_over_offline_bound", "wait_max_over_bound")
    top = {name: {setting: figures.pop(name) for setting, figures in settings.items()} for name in names}
    return top | {"settings": settings}


def _setting(records: Sequence[Record], count: int, objective: Objective, seed: int) -> dict[str, Any]:
    ours = machine(count)
    rate, bound = _rate(records, ours, objective, seed)
    made = traffic(records, ours, objective, rate=rate, seed=seed)
    own, same = {}, {}
    for who, switching in OWN_COSTS.items():
        own[who] = contest(replace(made, machine=machine(count, switching)), who)
        same[who] = contest(made, who)
    mine = contest(made, OURS)
    return {
        "goodput_ours_over_best_online": _over(mine, own),
        "goodput_ours_over_best_policy": _over(mine, same),
        "goodput_over_offline_bound": round(mine.goodput / bound, 4),
        "wait_max_over_bound": round(mine.wait_max_s / BOUND_S, 4),
        "rate": round(rate, 4),
        "offline_bound": round(bound, 4),
        "ours": _row(mine),
        "ours_if_late_ones_are_answered": _row(contest(made, OURS, refuses=False)),
        "with_their_costs": {who: _row(outcome) for who, outcome in own.items()},
        "with_our_costs": {who: _row(outcome) for who, outcome in same.items()},
        "one_device_per_model": _apart(made),
        "trends": _trends(records, made, own),
    }


def _rate(records: Sequence[Record], on: Machine, objective: Objective, seed: int) -> tuple[float, float]:
    """How many times as fast requests come where the bound meets the share that is asked for, and the bound there.

    Raises ValueError for a trace so short that all of it could be served in time however fast it came.
    """

    def bound(rate: float, slots: int | None = None) -> float:
        return goodput_bound(traffic(records, on, objective, rate=rate, seed=seed), slots=slots)

    guess, _ = _met(lambda rate: bound(rate, _FEW_SLOTS), _SLOWEST, requests=len(records))
    return _met(bound, guess, requests=len(records))


def _met(bound_at: Callable[[float], float], guess: float, *, requests: int) -> tuple[float, float]:
    """The rate at which a bound that falls with it meets the share, and the bound there; from a guess of it on.

    Raises ValueError where the bound does not fall so far.
    """
    low, above, high, bound = 0.0, 1.0, guess, bound_at(guess)
    while bound > MET + _TOLERANCE:
        if high > _FASTEST:
            raise ValueError(f"{requests} requests are too few: they could be served at once")
        low, above, high = high, bound, 2 * high
        bound = bound_at(high)
    nearest, below = (high, bound), bound
    while abs(nearest[1] - MET) > _TOLERANCE and high - low > 1e-3 * high:
        part = (above - MET) / (above - below)
        rate = low + min(max(part, _INSIDE), 1 - _INSIDE) * (high - low)
        bound = bound_at(rate)
        if bound > MET:
            low, above = rate, bound
        else:
            high, below = rate, bound
        nearest = min(nearest, (rate, bound), key=lambda each: abs(each[1] - MET))
    return nearest


def _apart(made: Trace) -> dict[str, float]:
    """Each model on a device of its own: the share met, and the share per device."""
    met = sum(contest(part(made, [alias]), "collating (llama-swap)").met for alias in made.machine.models)
    goodput, devices = met / len(made.arrivals), len(made.machine.models)
    return {"devices": devices, "goodput": round(goodput, 4), "goodput_per_device": round(goodput / devices, 4)}


def _over(mine: Outcome, rivals: dict[str, Outcome]) -> float:
    return round(mine.goodput / max(outcome.goodput for outcome in rivals.values()), 4)


def _row(outcome: Outcome) -> dict[str, Any]:
    return {
        "goodput": round(outcome.goodput, 4),
        "goodput_by_tpot_since_first_token": round(outcome.met_since_first / max(1, outcome.requests), 4),
        "missed": {why.value: count for why, count in sorted(outcome.missed.items(), key=lambda row: row[0].value)},
        "switches": outcome.switches,
        "serving_share": round(outcome.serving_share, 4),
        "wait_max_s": round(outcome.wait_max_s, 2),
    }


def _trend(published: str, here: str, value: float) -> dict[str, Any]:
    return {"published": published, "here": here, "value": round(value, 4)}


def _trends(records: Sequence[Record], made: Trace, own: dict[str, Outcome]) -> dict[str, Any]:
    """What each rival is known for, and what that comes to here with its own costs."""
    count = len(made.machine.models)
    cold = contest(replace(made, machine=machine(count, COLD_START)), IDLE)
    patient = tuple(replace(arrival, objective=None) for arrival in made.arrivals)
    endless = contest(replace(made, machine=machine(count, LLAMA_SWAP), arrivals=patient), COLLATING)
    first = max(own[FIRST].goodput, 1 / len(records))
    return {
        FIRST: _trend("llmux: 4.8 % of the time is served under it", "serving_share", own[FIRST].serving_share),
        IDLE: _trend(
            "vLLM: waking takes an 18th to a 200th of a cold start",
            "goodput_over_cold_start",
            own[IDLE].goodput / max(cold.goodput, 1 / len(records)),
        ),
        COLLATING: _trend(
            "llama-swap #612: no bound on the wait for another model",
            "wait_max_over_bound_if_nothing_is_refused",
            endless.wait_max_s / BOUND_S,
        ),
        QUEUES: _trend(
            "QLM: attainment 40 to 90 % above others",
            "goodput_over_first_come_first_served",
            own[QUEUES].goodput / first,
        ),
        TURNS: _trend(
            "Aegaeon: goodput 1.5 to 9 times that of switching request by request",
            "goodput_over_first_come_first_served",
            own[TURNS].goodput / first,
        ),
    }
