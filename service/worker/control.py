"""Control events are read, done and answered: each with a status by every worker that it is for."""

from collections.abc import Awaitable, Sequence

from schemas.control import Control
from schemas.status import Presence, StatusState
from service.errors import ConfigError, EngineDied, GearshiftError, LoraRefused, UnknownModel
from service.ports import ControlSource
from service.worker.commands import Answer, Commands
from service.worker.statuses import StatusQueue
from service.worker.tasks import Tasks


class ControlLoop:
    """Reads control events and has them done; a slow one (a draining switch) does not hold up the next."""

    def __init__(self, *, source: ControlSource, commands: Commands, statuses: StatusQueue, tasks: Tasks) -> None:
        self._source = source
        self._commands = commands
        self._statuses = statuses
        self._tasks = tasks

    async def run(self) -> None:
        """Until the worker ends."""
        async for record in self._source.events():
            if record.event is None:
                self._statuses.reject(record)
            else:
                self.command(record.event)

    def command(self, event: Control) -> None:
        """Do what an event asks, wherever it came from; the answer is a status."""
        self._tasks.spawn(f"control {event.type}", self._perform, event)

    async def _perform(self, event: Control) -> None:
        await self._answer(event, self._commands.perform(event))

    async def restore(self, desired: Sequence[Control], before: Sequence[Presence]) -> None:
        """Take up what was asked before this worker started. Raises EngineDied."""
        for event in desired:
            await self._answer(event, self._commands.restore(event, before))

    async def _answer(self, event: Control, performed: Awaitable[Answer | None]) -> None:
        try:
            answer = await performed
        except EngineDied:
            raise
        except (UnknownModel, ConfigError, LoraRefused) as error:
            self._statuses.answer(event, StatusState.REJECTED, reason=str(error))
        except GearshiftError as error:
            self._statuses.answer(event, StatusState.FAILED, reason=str(error))
        else:
            if answer is not None:
                self._statuses.answer(event, answer[0], answer=answer[1])
