"""Since when what has not moved: the truth about liveness, from times alone."""

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Complaint:
    """Something that ought to move and does not. ``since`` is the caller's clock, in seconds."""

    reason: str
    since: float


class Progress:
    """Since when each of several counters, which ought to move, has stood still."""

    def __init__(self) -> None:
        self._seen: dict[Hashable, tuple[int, float]] = {}

    def update(self, counters: Mapping[Hashable, int], now: float) -> None:
        """The counters that ought to move now; the others are forgotten."""
        seen = self._seen
        self._seen = {}
        for key, count in counters.items():
            before = seen.get(key)
            self._seen[key] = before if before is not None and before[0] == count else (count, now)

    def since(self, key: Hashable) -> float | None:
        """When the counter last moved, or began to be expected to."""
        entry = self._seen.get(key)
        return None if entry is None else entry[1]


def worst(complaints: Iterable[Complaint]) -> Complaint:
    """The oldest of one or more complaints."""
    return min(complaints, key=lambda complaint: complaint.since)
