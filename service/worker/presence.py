"""The worker's presence, said every few seconds from before its engine is up until it has left."""

import asyncio
import importlib.metadata
import os
import socket
import time
from collections.abc import Callable
from typing import Any

from schemas.contexts import Tier
from schemas.status import Loading, Presence, QueueInfo
from service.ports import Announcements, Engine, RequestSource
from service.scheduling.costs import Costs
from service.scheduling.quotas import Quotas
from service.settings import WorkerSettings
from service.worker.active_time import ActiveTime
from service.worker.inspection import Inspection
from service.worker.switcher import Switcher

_MOST_TENANTS = 200
VERSION = importlib.metadata.version("gearshift")


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


def loading(engine: Engine, active_time: ActiveTime) -> Loading | None:
    """The model that a switch under way has to load from its files, if there is one."""
    if not active_time.switching:
        return None
    target = engine.active
    dropped = any(one.alias == target and one.tier is Tier.DROPPED for one in engine.contexts())
    return Loading(model=target, since=time.time() - time.monotonic() + active_time.left_at) if dropped else None


class PresenceView:
    """What is said of this worker, but for how it is."""

    def __init__(
        self,
        *,
        engine: Engine,
        source: RequestSource,
        inspection: Inspection,
        switcher: Switcher,
        costs: Costs,
        quotas: Quotas,
        settings: WorkerSettings,
    ) -> None:
        self._engine = engine
        self._source = source
        self._inspection = inspection
        self._switcher = switcher
        self._costs = costs
        self._quotas = quotas
        self._settings = settings

    def now(self, *, state: str, trouble: str | None, http: str | None, loading: Loading | None) -> Presence:
        """The presence as it stands."""
        source = self._source.state()
        return Presence(
            **_who(self._settings, http),
            state=state,
            loading=loading,
            trouble=trouble,
            active=self._engine.active,
            contexts=self._engine.contexts(),
            queues={alias: info for alias, info in self._inspection.queues().items() if info != QueueInfo()},
            partitions=dict(source.partitions),
            overtaken=source.overtaken,
            forgotten=source.forgotten,
            hold=self._switcher.hold_info(),
            obeyed=self._switcher.obeyed,
            inactive=self._settings.inactive.value,
            tenants=self._quotas.shares(_MOST_TENANTS),
            costs=self._costs.export(),
        )


class PresenceLoop:
    """Says ``presence`` every ``interval_s`` seconds."""

    def __init__(self, *, announcements: Announcements, presence: Callable[[], Presence], interval_s: float) -> None:
        self._announcements = announcements
        self._interval_s = interval_s
        self.now = presence

    async def run(self) -> None:
        """Until the worker ends, which says farewell itself."""
        while True:
            await self._announcements.presence(self.now())
            await asyncio.sleep(self._interval_s)
