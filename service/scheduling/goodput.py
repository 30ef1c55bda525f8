"""How many objectives a model's turn meets, and in what time: the value by which turns are compared."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

LATE = 0.05
"""What a request counts that can't meet its objective any more: it is still to be answered."""


@dataclass(frozen=True, slots=True)
class Goal:
    """A waiting request: when its first token must be there, and the seconds that it adds to a batch."""

    first_by: float
    work_s: float


@dataclass(frozen=True, slots=True)
class Turn:
    """Objectives that a turn meets, and the seconds that it takes with its switch."""

    met: float
    seconds: float

    @property
    def rate(self) -> float:
        return self.met / self.seconds if self.seconds else 0.0


class Batch(Protocol):
    """What of a model a turn's value depends on; see ModelView."""

    @property
    def goals(self) -> Sequence[Goal]: ...
    @property
    def back_by(self) -> Sequence[float]: ...
    @property
    def unfinished_s(self) -> float: ...
    @property
    def again_s(self) -> float: ...
    @property
    def request_s(self) -> float: ...
    @property
    def switch_s(self) -> float: ...
    @property
    def weight(self) -> float: ...


def turn(model: Batch, begins: float) -> Turn:
    """The best turn of a model that begins at a moment.

    A request that would come too late is left out, and so is one that costs more than it is worth: whose own rate is
    below that of the turn without it.
    """
    met = sum(1.0 if moment >= begins else LATE for moment in model.back_by)
    work_s = model.unfinished_s + (model.again_s if model.switch_s else 0.0)
    seconds = model.switch_s + max(model.request_s, work_s)
    for goal in model.goals:
        if begins + work_s > goal.first_by or goal.work_s * met > seconds:
            continue
        met += 1.0
        work_s += goal.work_s
        seconds = model.switch_s + max(model.request_s, work_s)
    return Turn(model.weight * met, seconds)
