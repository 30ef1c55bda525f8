"""Brokers that are away, told apart from a consumer that hangs."""

import asyncio
import math
from collections.abc import Awaitable, Callable

import structlog

log = structlog.get_logger(__name__)

_SUSPECT_S = 3.0
"""So long nothing moves before a broker is asked for."""
_AGAIN_S = 1.0


class Outage:
    """Asks for a broker over a connection of its own while nothing moves.

    Where none answers, a new process would find none either; where one does, what stands still here is our fault.
    ``answers`` tells whether there is one, ``stuck_s`` for how many seconds nothing has moved.
    """

    def __init__(self, *, answers: Callable[[], Awaitable[bool]], stuck_s: Callable[[], float]) -> None:
        self._answers = answers
        self._stuck_s = stuck_s
        self._now = asyncio.get_running_loop().time
        self._away_since: float | None = None
        self._back_at = -math.inf

    @property
    def away_s(self) -> float:
        """For how long no broker has answered; 0 while one does."""
        return 0.0 if self._away_since is None else self._now() - self._away_since

    def without(self, stuck_s: float) -> float:
        """Seconds of ``stuck_s`` since a broker was last away; 0 while it is."""
        return 0.0 if self._away_since is not None else min(stuck_s, self._now() - self._back_at)

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            await asyncio.sleep(_AGAIN_S)
            if self._away_since is None and self.without(self._stuck_s()) < _SUSPECT_S:
                continue
            asked_at = self._now()
            if await self._answers():
                self._came_back()
            elif self._away_since is None:
                self._away_since = asked_at
                log.warning("bus.brokers_away", still_s=round(self._stuck_s(), 1))

    def _came_back(self) -> None:
        if self._away_since is not None:
            log.warning("bus.brokers_back", away_s=round(self.away_s, 1))
            self._away_since, self._back_at = None, self._now()
