"""The worker's presence, said every few seconds from before its engine is up until it has left."""

import asyncio
import importlib.metadata
import os
import socket
import time
from collections.abc import Callable
from typing import Any

from schemas.contexts import Tier
from schemas.status import Loading, Presence
from service.ports import Announcements, Engine, RequestSource
from service.settings import WorkerSettings
from service.worker.active_time import ActiveTime
from service.worker.dispatch import Dispatcher

VERSION = importlib.metadata.version("gearshift")


async def announce(announcements: Announcements, presence: Callable[[], Presence]) -> None:
    """Say a presence every few seconds, until cancelled."""
    while True:
        said = presence()
        await announcements.presence(said)
        await asyncio.sleep(said.interval_s)


class Startup:
    """A worker whose engine is not up yet."""

    def __init__(self, settings: WorkerSettings, *, http: str | None) -> None:
        self._settings = settings
        self._http = http
        self._loading: Loading | None = None

    def load(self, model: str) -> None:
        """The engine is being started with this model."""
        self._loading = Loading(model=model, since=time.time())

    def progress(self, phase: str) -> None:
        """What that is at, in words."""
        if self._loading is not None:
            self._loading = self._loading.model_copy(update={"phase": phase})

    def presence(self) -> Presence:
        """``starting`` until the engine is opened, then ``loading``."""
        return Presence(
            **_who(self._settings, self._http),
            state="starting" if self._loading is None else "loading",
            loading=self._loading,
        )


def _who(settings: WorkerSettings, http: str | None) -> dict[str, Any]:
    return {
        "worker": settings.worker_id,
        "pool": settings.group_id,
        "at": time.time(),
        "interval_s": settings.presence_interval_s,
        "version": VERSION,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "http": http,
    }


class PresenceLoop:
    """Says who this worker is and how it stands."""

    def __init__(
        self,
        *,
        announcements: Announcements,
        engine: Engine,
        dispatcher: Dispatcher,
        source: RequestSource,
        turns: ActiveTime,
        settings: WorkerSettings,
        state: Callable[[], str],
        trouble: Callable[[], str | None],
        http: str | None = None,
    ) -> None:
        self._announcements = announcements
        self._engine = engine
        self._dispatcher = dispatcher
        self._settings = settings
        self._source = source
        self._turns = turns
        self._state = state
        self._trouble = trouble
        self._http = http

    async def run(self) -> None:
        """Until the worker ends, which says farewell itself."""
        await announce(self._announcements, self.now)

    def now(self) -> Presence:
        """The presence as it stands."""
        source = self._source.state()
        return Presence(
            **_who(self._settings, self._http),
            state=self._state(),
            loading=self._loading(),
            trouble=self._trouble(),
            active=self._engine.active,
            contexts=self._engine.contexts(),
            queues=self._dispatcher.queue_infos(),
            partitions=dict(source.partitions),
            overtaken=source.overtaken,
            forgotten=source.forgotten,
            costs=self._dispatcher.costs.export(),
        )

    def _loading(self) -> Loading | None:
        """The model that a switch under way has to load from its files."""
        if not self._turns.switching:
            return None
        target = self._engine.active
        dropped = any(one.alias == target and one.tier is Tier.DROPPED for one in self._engine.contexts())
        return Loading(model=target, since=time.time() - time.monotonic() + self._turns.left_at) if dropped else None
