"""How long each model has been active, and how long switching has taken. Pure; time is an argument."""


class ActiveTime:
    """Running totals, from which a request's wait is divided into its reasons by two snapshots."""

    def __init__(self, active: str, now: float) -> None:
        self._active: str | None = active
        self._since = now
        self._totals: dict[str, float] = {}
        self._switching = 0.0
        self.active_since = now
        self.left_at = now
        """When the last switch began to stall."""

    def leave(self, now: float) -> None:
        """A switch begins to stall the active model."""
        self._add(now)
        self._active = None
        self.left_at = now

    def enter(self, alias: str, now: float) -> None:
        """A model is active (again)."""
        self._add(now)
        self._active = alias
        self.active_since = now

    @property
    def active(self) -> str | None:
        """The model that takes steps; None while a switch stalls the engine."""
        return self._active

    @property
    def switching(self) -> bool:
        """Whether a switch is stalling the engine just now."""
        return self._active is None

    def totals(self, now: float) -> tuple[dict[str, float], float]:
        """Seconds that each model has been active so far, and seconds of switching."""
        self._add(now)
        return dict(self._totals), self._switching

    def snapshot(self, alias: str, now: float) -> tuple[float, float]:
        """Seconds that ``alias`` has been active so far, and seconds of switching so far."""
        self._add(now)
        return self._totals.get(alias, 0.0), self._switching

    def _add(self, now: float) -> None:
        spent, self._since = now - self._since, now
        if self._active is None:
            self._switching += spent
        else:
            self._totals[self._active] = self._totals.get(self._active, 0.0) + spent


def waited_for(total: float, before: tuple[float, float], after: tuple[float, float]) -> dict[str, float]:
    """A wait of ``total`` seconds by reason: no ``turn`` for its model, a ``switch``, its place in the ``queue``."""
    own = min(total, after[0] - before[0])
    switching = min(total - own, after[1] - before[1])
    return {"turn": max(0.0, total - own - switching), "switch": switching, "queue": own}
