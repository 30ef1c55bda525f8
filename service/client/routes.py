"""Where a request is written: to its model's own topic, which leads to a worker that has the model."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

import structlog

from schemas.status import Presence
from service.errors import GearshiftError
from service.settings import TopicSettings

log = structlog.get_logger(__name__)

_HEARD_WITHIN_S = 1.0
"""A request does not wait longer to learn who is there; the shared topic takes it too."""
_FRESH_S = 1.0
_AGAIN_AFTER_S = 30.0


class Routes:
    """The topics of the models that present workers have.

    A topic may be left of a model that nobody serves any more: its requests would wait for ever. So not the topics
    that exist count, but what the workers say they have. ``presences`` tells it.
    """

    def __init__(
        self,
        *,
        topics: TopicSettings,
        presences: Callable[[], Awaitable[Sequence[Presence]]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._topics = topics
        self._presences = presences
        self._clock = clock
        self._aliases: frozenset[str] = frozenset()
        self._look_at = 0.0
        self._looking = asyncio.Lock()

    async def topic_for(self, model: object) -> str:
        """The topic for a request of this model; the shared one where the model has none, or that is not known."""
        if self._clock() >= self._look_at:
            async with self._looking:
                if self._clock() >= self._look_at:
                    await self._look()
        if isinstance(model, str) and model in self._aliases:
            return self._topics.for_alias(model)
        return self._topics.named(self._topics.requests)

    async def _look(self) -> None:
        fresh_s = _FRESH_S
        try:
            async with asyncio.timeout(_HEARD_WITHIN_S):
                present = await self._presences()
        except (GearshiftError, TimeoutError) as error:
            log.debug("client.workers_unknown", why=str(error))
            fresh_s = _AGAIN_AFTER_S
        else:
            self._aliases = frozenset(context.alias for presence in present for context in presence.contexts)
        self._look_at = self._clock() + fresh_s
