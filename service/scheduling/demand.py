"""What a worker's models ask of it, as its group is told, and when it asks for another placement. Pure."""

from collections.abc import Mapping

from schemas.objectives import Objective

_LATELY_S = 300.0
"""What ended so long ago counts for half."""
_FEW = 20.0
"""Fewer requests than that tell nothing of a share."""
_LITTLE = 0.05
"""A smaller part of its share that a model misses is no reason for another placement."""
_PERSISTS_S = 60.0
"""For how long objectives must be missed without a break."""
_PAUSE_S, _LONGEST_PAUSE_S = 300.0, 3600.0
"""How long a placement is given to show what it brings, at first and where none has brought anything."""

Objectives = Mapping[str, Objective]
"""By class; "" is of requests that name none."""


class Demand:
    """What this worker's requests have come to, and what follows for the placement of models.

    Times are seconds of one clock. ``placements``: how many were made so far.
    """

    def __init__(self, now: float) -> None:
        self._lately = _Shortfalls()
        self._since_placed = _Shortfalls()
        self._placements = 0
        self._unrest = _Unrest(now)

    def seen(self, alias: str, request_class: str, met: bool, now: float) -> None:
        """A request that had an objective has ended."""
        for each in (self._lately, self._since_placed):
            each.seen(alias, request_class, met, now)

    def short(self, alias: str, objectives: Objectives, now: float) -> float:
        """The part of its share that a model misses lately, 0 to 1: of its classes the one that misses most."""
        return self._lately.of(alias, objectives, now)

    def to_be_placed(self, owned: Mapping[str, Objectives], placements: int, now: float) -> dict[str, float]:
        """The models for which to ask for another placement now, with what they miss; empty: don't ask.

        ``owned`` are those that this worker has topics of. What they missed before the placement that there is tells
        nothing of it. To be called every few seconds.
        """
        if placements != self._placements:
            self._placements, self._since_placed = placements, _Shortfalls()
            self._unrest.placed(now)
        missed = {alias: self._since_placed.of(alias, objectives, now) for alias, objectives in owned.items()}
        missed = {alias: part for alias, part in missed.items() if part > _LITTLE}
        return missed if self._unrest.asks(bool(missed), now) else {}


class _Shortfalls:
    """By how much models miss their objectives."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str], tuple[float, float, float]] = {}
        """By alias and class: requests that met their objective, all that had one, and when that was."""

    def seen(self, alias: str, request_class: str, met: bool, now: float) -> None:
        reached, all_of_them = self._until(alias, request_class, now)
        self._counts[alias, request_class] = (reached + met, all_of_them + 1, now)

    def of(self, alias: str, objectives: Objectives, now: float) -> float:
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


class _Unrest:
    """When a worker that keeps missing objectives asks its group to place models anew.

    A placement, whoever asked for it, is given time to show what it brings: after each that this worker asked for twice
    as long, until nothing was missed for that time. So a pool that is too small is not placed again and again.
    """

    def __init__(self, now: float) -> None:
        self._placed_at = now
        self._pause_s = _PAUSE_S
        self._missing_since: float | None = None
        self._missed_at = now

    def placed(self, now: float) -> None:
        self._placed_at, self._missing_since = now, None

    def asks(self, missing: bool, now: float) -> bool:
        if not missing:
            self._missing_since = None
            if now - max(self._placed_at, self._missed_at) > self._pause_s:
                self._pause_s = _PAUSE_S
            return False
        self._missed_at = now
        if self._missing_since is None:
            self._missing_since = now
        if now - self._missing_since < _PERSISTS_S or now - self._placed_at < self._pause_s:
            return False
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
        self.placed(now)
        return True
