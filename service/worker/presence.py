"""The worker's presence, said every few seconds for as long as it lives."""

import asyncio
import importlib.metadata
import os
import socket
import time
from collections.abc import Callable

from schemas.status import Presence
from service.ports import Announcements, Engine, RequestSource
from service.settings import WorkerSettings
from service.worker.dispatch import Dispatcher

VERSION = importlib.metadata.version("gearshift")


class PresenceLoop:
    """Says who this worker is and how it stands."""

    def __init__(
        self,
        *,
        announcements: Announcements,
        engine: Engine,
        dispatcher: Dispatcher,
        source: RequestSource,
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
        self._state = state
        self._trouble = trouble
        self._http = http

    async def run(self) -> None:
        """Until the worker ends, which says farewell itself."""
        while True:
            await self._announcements.presence(self.now())
            await asyncio.sleep(self._settings.presence_interval_s)

    def now(self) -> Presence:
        """The presence as it stands."""
        source = self._source.state()
        return Presence(
            worker=self._settings.worker_id,
            pool=self._settings.group_id,
            at=time.time(),
            interval_s=self._settings.presence_interval_s,
            version=VERSION,
            state=self._state(),
            trouble=self._trouble(),
            active=self._engine.active,
            host=socket.gethostname(),
            pid=os.getpid(),
            http=self._http,
            contexts=self._engine.contexts(),
            queues=self._dispatcher.queue_infos(),
            partitions=dict(source.partitions),
            overtaken=source.overtaken,
            forgotten=source.forgotten,
            costs=self._dispatcher.costs.export(),
        )
