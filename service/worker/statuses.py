"""What is said from code that can't wait: statuses in order, sent by one task beside the work."""

import asyncio

import structlog

from schemas.status import Status
from service.errors import GearshiftError
from service.ports import Announcements, Watcher

log = structlog.get_logger(__name__)


class StatusQueue:
    """An ordered queue in front of the announcements; a status that can't be sent is logged, not lost in silence."""

    def __init__(self, announcements: Announcements, watcher: Watcher) -> None:
        self._announcements = announcements
        self._watcher = watcher
        self._queue: asyncio.Queue[Status] = asyncio.Queue()

    def status(self, status: Status) -> None:
        """Say it after what was said before."""
        self._queue.put_nowait(status)
        self._watcher.status(status)

    async def run(self) -> None:
        """Send for as long as the worker lives."""
        while True:
            await self._send(await self._queue.get())

    async def drain(self) -> None:
        """Send what is left, at the end."""
        while not self._queue.empty():
            await self._send(self._queue.get_nowait())

    async def _send(self, status: Status) -> None:
        try:
            await self._announcements.status(status)
        except GearshiftError as error:
            log.warning("status.unsent", state=status.state.value, control_id=status.control_id, reason=str(error))
