"""What a worker's models ask of it, as its group is told, and when it asks for another placement. Pure."""

from collections.abc import Mapping

from schemas.objectives import Objective

_LATELY_S = 300.0
"""What ended so long ago counts for half."""
_FEW = 20.0
"""Fewer requests than that tell nothing of a share."""
_PERSISTS_S = 60.0
"""For how long objectives must be missed without a break."""
_PAUSE_S, _LONGEST_PAUSE_S = 300.0, 3600.0
"""How long a placement is given to show what it brings, at first and where none has brought anything."""


class Shortfalls:
    """By how much models miss their objectives lately. Times are seconds of one clock."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str], tuple[float, float, float]] = {}
        """By alias and class: requests that met their objective, all that had one, and when that was."""

    def seen(self, alias: str, request_class: str, met: bool, now: float) -> None:
        """A request has ended."""
        reached, all_of_them = self._until(alias, request_class, now)
        self._counts[alias, request_class] = (reached + met, all_of_them + 1, now)

    def of(self, alias: str, objectives: Mapping[str, Objective], now: float) -> float:
        """The part of its share that a model misses, 0 to 1: of its classes the one that misses most."""
        worst = 0.0
        for request_class, objective in objectives.items():
            reached, all_of_them = self._until(alias, request_class, now)
            if all_of_them >= _FEW:
                worst = max(worst, 1.0 - reached / (all_of_them * objective.share))
        return worst

    def _until(self, alias: str, request_class: str, now: float) -> tuple[float, float]:
        reached, all_of_them, at = self._counts.get((alias, request_class), (0.0, 0.0, now))
        left = 0.5 ** ((now - at) / _LATELY_S)
        return reached * left, all_of_them * left


class Unrest:
    """When a worker that keeps missing objectives asks its group to place models anew.

    A placement, whoever asked for it, is given time to show what it brings: each time twice as long, while it brings
    this worker nothing. So a pool that is too small is not placed again and again.
    """

    def __init__(self, now: float) -> None:
        self._placements = 0
        self._placed_at = now
        self._pause_s = _PAUSE_S
        self._missing_since: float | None = None

    def asks(self, missing: bool, placements: int, now: float) -> bool:
        """Whether to ask now, with ``placements`` made so far; looked at every few seconds."""
        if placements != self._placements:
            if self._missing_since is not None:
                self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
            self._placements, self._placed_at, self._missing_since = placements, now, None
        if not missing:
            self._missing_since = None
            if now - self._placed_at > self._pause_s:
                self._pause_s = _PAUSE_S
            return False
        if self._missing_since is None:
            self._missing_since = now
        return now - self._missing_since >= _PERSISTS_S and now - self._placed_at >= self._pause_s
