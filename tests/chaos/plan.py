"""What is to happen and when, drawn from a seed."""

import random
from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    SIGKILL = "sigkill"
    SIGSTOP = "sigstop"
    """For longer than the session timeout: the others take over, and then a zombie comes back."""
    LEAVE = "leave"
    """SIGTERM: a rebalance without a death."""
    ENGINE = "engine"
    """A prompt that kills the engine of whoever runs it."""
    BROKER = "broker"
    """A broker stops and comes back."""
    BROKER_KILL = "broker-kill"
    """A broker is killed, and comes back after a while."""
    SWITCH = "switch"
    HOLD = "hold"
    """A switch that stands for so long that requests for the other model are parked on the bus."""
    CANCEL = "cancel"
    HOSTILE = "hostile"
    """A stranger writes every shape of record to every topic."""


WEIGHTS = {
    Kind.SIGKILL: 3,
    Kind.SIGSTOP: 2,
    Kind.LEAVE: 2,
    Kind.ENGINE: 1,
    Kind.BROKER: 1,
    Kind.BROKER_KILL: 2,
    Kind.SWITCH: 4,
    Kind.HOLD: 2,
    Kind.CANCEL: 4,
    Kind.HOSTILE: 1,
}


@dataclass(frozen=True)
class Fault:
    at_s: float
    kind: Kind
    worker: int
    back_after_s: float = 0.5
    """When whoever was killed is started again: at once, or after its session has timed out."""


BACK_AFTER_S = (0.5, 20.0)
QUIET_BEFORE_S, QUIET_AFTER_S = 32.0, 16.0
"""Around a SIGKILL whose recovery is to be measured nothing else happens for so long."""
QUIET_SHARE = 3
"""One of so many faults is such a SIGKILL, if there is time for it."""


def plan(*, seed: int, faults: int, over_s: float, workers: int, kinds: frozenset[Kind]) -> list[Fault]:
    """``faults`` of them at random moments; each kind that is allowed comes, if there are enough.

    Where there is time, every third one is a SIGKILL that nothing else disturbs.
    """
    dice = random.Random(seed)
    window = QUIET_BEFORE_S + QUIET_AFTER_S
    quiet = min(faults // QUIET_SHARE, int(over_s / 2 / window)) if Kind.SIGKILL in kinds else 0
    free = 0.9 * over_s - quiet * window
    before = sorted(dice.uniform(0, free) for _ in range(quiet))
    """How much of the free time lies before each quiet window."""
    timed = [(at + n * window + QUIET_BEFORE_S, Kind.SIGKILL) for n, at in enumerate(before)]
    for kind in _chosen(dice, faults - quiet, kinds):
        at = dice.uniform(0, free)
        timed.append((at + window * sum(begins <= at for begins in before), kind))
    return [
        Fault(0.05 * over_s + at, kind, dice.randrange(workers), dice.choice(BACK_AFTER_S))
        for at, kind in sorted(timed)
    ]


def _chosen(dice: random.Random, faults: int, kinds: frozenset[Kind]) -> list[Kind]:
    allowed = [kind for kind in Kind if kind in kinds]
    weights = [WEIGHTS[kind] for kind in allowed]
    chosen = [*allowed, *dice.choices(allowed, weights, k=max(0, faults - len(allowed)))][:faults]
    dice.shuffle(chosen)
    return chosen
