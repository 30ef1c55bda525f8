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
    """The broker stops and comes back."""
    SWITCH = "switch"
    HOLD = "hold"
    """A switch that stands for so long that requests for the other model are parked on the bus."""
    CANCEL = "cancel"


WEIGHTS = {
    Kind.SIGKILL: 3,
    Kind.SIGSTOP: 2,
    Kind.LEAVE: 2,
    Kind.ENGINE: 1,
    Kind.BROKER: 1,
    Kind.SWITCH: 4,
    Kind.HOLD: 2,
    Kind.CANCEL: 4,
}


@dataclass(frozen=True)
class Fault:
    at_s: float
    kind: Kind
    worker: int
    back_after_s: float = 0.5
    """When whoever was killed is started again: at once, or after its session has timed out."""


BACK_AFTER_S = (0.5, 20.0)


def plan(*, seed: int, faults: int, over_s: float, workers: int, kinds: frozenset[Kind]) -> list[Fault]:
    """``faults`` of them at random moments; each kind that is allowed comes, if there are enough."""
    dice = random.Random(seed)
    allowed = [kind for kind in Kind if kind in kinds]
    weights = [WEIGHTS[kind] for kind in allowed]
    chosen = [*allowed, *dice.choices(allowed, weights, k=max(0, faults - len(allowed)))][:faults]
    dice.shuffle(chosen)
    moments = sorted(dice.uniform(0.05, 0.95) * over_s for _ in chosen)
    return [
        Fault(at, kind, dice.randrange(workers), dice.choice(BACK_AFTER_S))
        for at, kind in zip(moments, chosen, strict=True)
    ]
