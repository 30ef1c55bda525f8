"""How long nothing came out, and how long a request took, in each part of a run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class Phase:
    """A part of a run, from when to when, in seconds since the epoch."""

    name: str
    began: float
    ended: float


def pauses(moments: Sequence[float], phases: Sequence[Phase]) -> dict[str, float]:
    """Per phase the longest time in it between two results, in seconds. ``moments``: when each was written, unsorted.

    A phase's beginning and end count as results: a pause that goes on is in each phase with its part.
    """
    found: dict[str, float] = {}
    for phase in phases:
        inside = sorted(moment for moment in moments if phase.began < moment < phase.ended)
        gaps = [later - earlier for earlier, later in pairwise([phase.began, *inside, phase.ended])]
        found[phase.name] = round(max(gaps), 3)
    return found


def longest_pause(moments: Sequence[float], phases: Sequence[Phase]) -> float:
    """The same over all phases at once."""
    whole = Phase("whole", min(phase.began for phase in phases), max(phase.ended for phase in phases))
    return pauses(moments, [whole])[whole.name]


def waits(asked: Mapping[str, float], answered: Mapping[str, float], phases: Sequence[Phase]) -> dict[str, float]:
    """Per phase the longest time from a request that was asked in it to its result, in seconds; 0: none was asked.

    ``asked`` and ``answered``: when, by id, in seconds since the epoch.
    """
    return {
        phase.name: round(
            max(
                (
                    answered[id_] - at
                    for id_, at in asked.items()
                    if phase.began <= at < phase.ended and id_ in answered
                ),
                default=0.0,
            ),
            3,
        )
        for phase in phases
    }
