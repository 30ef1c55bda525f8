"""The worker's presence, said every few seconds for as long as it lives."""

import asyncio
import importlib.metadata
import os
import socket
import time
from collections.abc import Callable

from schemas.status import Presence
from service.ports import Announcements, Engine, RequestSource
from service.scheduling.costs import Costs
from service.settings import WorkerSettings
from service.worker.inspection import Inspection
from service.worker.switcher import Switcher

VERSION = importlib.metadata.version("gearshift")


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
        settings: WorkerSettings,
    ) -> None:
        self._engine = engine
        self._source = source
        self._inspection = inspection
        self._switcher = switcher
        self._costs = costs
        self._settings = settings

    def now(self, *, state: str, trouble: str | None, http: str | None) -> Presence:
        """The presence as it stands."""
        source = self._source.state()
        return Presence(
            worker=self._settings.worker_id,
            pool=self._settings.group_id,
            at=time.time(),
            interval_s=self._settings.presence_interval_s,
            version=VERSION,
            state=state,
            trouble=trouble,
            active=self._engine.active,
            host=socket.gethostname(),
            pid=os.getpid(),
            http=http,
            contexts=self._engine.contexts(),
            queues={alias: info for alias, info in self._inspection.queues().items() if info.waiting + info.running},
            partitions=dict(source.partitions),
            overtaken=source.overtaken,
            forgotten=source.forgotten,
            hold=self._switcher.hold_info(),
            obeyed=self._switcher.obeyed,
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
