"""What is said from code that can't wait: statuses in order, sent by one task beside the work."""

import asyncio
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

import structlog

from schemas.contexts import SwitchReport
from schemas.control import Control
from schemas.status import HoldInfo, Status, StatusState
from service.errors import GearshiftError
from service.ports import Announcements, ControlRecord, Engine, Unreadable, Watcher

log = structlog.get_logger(__name__)
MOST_WAITING = 5_000
"""Of what has to be said; where a broker is away for longer, the steps of the scheduler's switches go first."""


class StatusQueue:
    """An ordered queue in front of the announcements; a status that can't be sent is logged, not lost in silence."""

    def __init__(self, *, announcements: Announcements, watcher: Watcher, engine: Engine, worker: str) -> None:
        self._announcements = announcements
        self._watcher = watcher
        self._engine = engine
        self._worker = worker
        self._waiting: deque[Status] = deque()
        self._some = asyncio.Event()
        self._none = asyncio.Event()
        self._none.set()

    async def run(self) -> None:
        """Send for as long as the worker lives."""
        while True:
            await self._some.wait()
            self._some.clear()
            while self._waiting:
                await self._send(self._waiting.popleft())
            self._none.set()

    async def drain(self, *, within_s: float) -> None:
        """Wait until all is sent, but not for longer than that."""
        try:
            async with asyncio.timeout(within_s):
                await self._none.wait()
        except TimeoutError:
            log.warning("status.undelivered", count=len(self._waiting))

    def answer(
        self,
        event: Control,
        state: StatusState,
        *,
        reason: str | None = None,
        answer: Mapping[str, Any] | None = None,
        hold: HoldInfo | None = None,
    ) -> None:
        """What became of a control event."""
        log.info("control.answered", state=state.value, kind=event.type, control_id=event.id, reason=reason)
        status = Status(
            worker=self._worker,
            state=state,
            kind=event.type,
            at=time.time(),
            control_id=event.id,
            model=getattr(event, "model", None),
            reason=reason,
            contexts=self._engine.contexts(),
            answer=None if answer is None else dict(answer),
            hold=hold,
        )
        self._say(status)

    def reject(self, record: ControlRecord) -> None:
        """A control record is no event."""
        at = str(record.record.origin)
        log.warning("control.rejected", reason=record.problem, at=at)
        status = Status(
            worker=self._worker,
            state=StatusState.REJECTED,
            kind="unknown",
            at=time.time(),
            reason=record.problem,
            control_id=at,
        )
        self._say(status)

    def unreadable(self, found: Unreadable) -> None:
        """Records could not be decoded; each is answered as malformed besides."""
        reason = f"can't be decoded: {found}"
        self._say(Status(worker=self._worker, state=StatusState.REJECTED, kind="record", at=time.time(), reason=reason))

    def switch(
        self,
        state: StatusState,
        model: str,
        *,
        event: Control | None,
        reason: str | None = None,
        report: SwitchReport | None = None,
        hold: HoldInfo | None = None,
    ) -> None:
        """A step of a switch; without ``event`` it is the scheduler's."""
        status = Status(
            worker=self._worker,
            state=state,
            kind="switch",
            at=time.time(),
            control_id=None if event is None else event.id,
            model=model,
            reason=reason,
            switch=report,
            contexts=self._engine.contexts() if state is StatusState.COMPLETED else (),
            hold=hold,
        )
        self._say(status)

    def _say(self, status: Status) -> None:
        """Behind what was said before."""
        self._waiting.append(status)
        if len(self._waiting) > MOST_WAITING:
            self._give_up()
        self._some.set()
        self._none.clear()
        self._watcher.status(status)

    def _give_up(self) -> None:
        """What answers nobody; and of answers, if there are too many of them alone, the older half."""
        answers = [status for status in self._waiting if status.control_id is not None][-(MOST_WAITING // 2) :]
        log.warning("status.given_up", count=len(self._waiting) - len(answers), kept=len(answers))
        self._waiting = deque(answers)

    async def _send(self, status: Status) -> None:
        try:
            await self._announcements.status(status)
        except GearshiftError as error:
            log.warning("status.unsent", state=status.state.value, control_id=status.control_id, reason=str(error))
