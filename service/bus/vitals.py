"""Since when what has not moved: the truth about liveness, from times alone."""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass

from service.errors import Stalled


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


def trouble(complaints: list[Complaint], *, now: float, after_s: float) -> str | None:
    """The complaint that is the oldest of those older than ``after_s``, in words."""
    old = [complaint for complaint in complaints if now - complaint.since > after_s]
    if not old:
        return None
    worst = min(old, key=lambda complaint: complaint.since)
    return f"{worst.reason}, for {now - worst.since:.0f} s"


def check(complaints: list[Complaint], *, now: float, after_s: float) -> None:
    """Raises Stalled where something has not moved for longer than ``after_s``."""
    reason = trouble(complaints, now=now, after_s=after_s)
    if reason is not None:
        raise Stalled(reason)
