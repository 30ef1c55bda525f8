"""The operator's half of the client: control events and what workers answer."""

import asyncio
from collections.abc import Callable, Iterable

from schemas.base import Record
from schemas.codec import decode_status
from schemas.control import EVERYONE, Control
from schemas.status import TERMINAL, Presence, Status, StatusState
from service.client.feed import Feed
from service.errors import BrokerUnavailable, GearshiftError, NoAnswer
from service.kafka.control import outgoing
from service.kafka.folded import while_progressing
from service.kafka.presence import Roster, listen
from service.kafka.producer import IdempotentProducer
from service.kafka.reader import TopicReader, as_unavailable
from service.settings import Settings, read_keys

DONE = frozenset({StatusState.COMPLETED, StatusState.NO_OP})
"""The answers that mean yes."""
_LOOK_S = 1.0
"""How often it is looked who of those that have not answered is still there."""
_SILENT_S = 10.0
"""How long reading the workers' presences may come no further: their topic may be long, whoever wrote to it."""


def meant(target: str, present: Iterable[Presence]) -> set[str]:
    """The workers whom an event for ``target`` is for."""
    return {presence.worker for presence in present if target in {EVERYONE, presence.pool, presence.worker}}


class Controls:
    """Publishes control events, and waits for one answer of every worker that they are for."""

    def __init__(
        self, *, settings: Settings, outlet: IdempotentProducer, reader: Callable[..., TopicReader] = TopicReader
    ) -> None:
        self._settings = settings
        self._topics = settings.topics
        self._keys = read_keys(settings.worker.control_key_file, "control_key_file")
        self._outlet = outlet
        self._reader = reader
        self._roster = Roster()
        self._heard = asyncio.Event()
        self._listening: asyncio.Task[None] | None = None
        """Ends with a GearshiftError only."""
        self._tailing: TopicReader | None = None
        self._statuses = Feed(
            expected="status",
            open_tail=lambda: self._tail(self._topics.status, from_end=True),
            name_of=_control_id,
            decode=decode_status,
        )

    async def close(self) -> None:
        await self._statuses.close()
        if self._listening is not None:
            self._listening.cancel()
            await asyncio.gather(self._listening, return_exceptions=True)

    async def publish(self, event: Control) -> None:
        """Raises BrokerUnavailable, RecordRefused."""
        await self._outlet.send(outgoing(event, self._topics, self._keys))

    async def ask(
        self, event: Control, *, timeout_s: float, on_status: Callable[[Status], None] | None = None
    ) -> tuple[Status, ...]:
        """Publish an event, and give the last word of every worker that is meant and there; of one at least.

        One that goes meanwhile is waited for no longer. ``on_status`` hears the steps on the way. Raises NoAnswer with
        who did not answer.
        """
        asked = meant(event.target, await self.presences())
        answers: dict[str, Status] = {}
        now = asyncio.get_running_loop().time
        end = now() + timeout_s
        async with self._statuses.listening(event.id) as box:
            await self.publish(event)
            while (silent := (await self._there(asked, until=end)) - answers.keys()) or not answers:
                try:
                    status = await box.take(within_s=max(0.0, min(_LOOK_S, end - now())))
                except NoAnswer:
                    if now() < end:
                        continue
                    who = ", ".join(sorted(silent)) or "any worker"
                    raise NoAnswer(f"{event.type}: no answer of {who} within {timeout_s:g} s") from None
                if on_status is not None:
                    on_status(status)
                if status.state in TERMINAL:
                    answers[status.worker] = status
        return tuple(answers.values())

    async def _there(self, asked: set[str], *, until: float) -> set[str]:
        """Those who were asked and are there still; all of them where that can't be read."""
        try:
            async with asyncio.timeout_at(until):
                return asked & meant(EVERYONE, await self.presences())
        except (GearshiftError, TimeoutError):
            return asked

    async def presences(self) -> tuple[Presence, ...]:
        """The workers that are there now. Raises TopicError, BrokerUnavailable, NoAnswer."""
        if self._listening is None or self._listening.done():
            self._heard = asyncio.Event()
            self._listening = asyncio.create_task(self._follow_presences(self._heard), name="client-presences")
        await self._until_heard(self._listening, self._heard)
        return self._roster.present()

    async def _until_heard(self, listening: asyncio.Task[None], heard: asyncio.Event) -> None:
        waiting = asyncio.ensure_future(while_progressing(heard, self._progress, silent_s=_SILENT_S))
        try:
            await asyncio.wait([waiting, listening], return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()
        if listening.cancelled():
            raise BrokerUnavailable("presences: the client is closed")
        if listening.done():
            listening.result()
        if not heard.is_set():
            raise NoAnswer(f"the workers' presences could not be read: nothing came for {_SILENT_S:g} s")

    def _progress(self) -> int:
        return 0 if self._tailing is None else self._tailing.progress

    async def _follow_presences(self, heard: asyncio.Event) -> None:
        with as_unavailable("presences"):
            async with self._tail(self._topics.workers, from_end=False) as self._tailing:
                await listen(self._tailing, self._roster, heard)

    def _tail(self, topic: str, *, from_end: bool) -> TopicReader:
        name = self._topics.named(topic)
        return self._reader(kafka=self._settings.kafka, topics=[name], from_end=[name] if from_end else ())


def _control_id(record: Record) -> str | None:
    return decode_status(record).control_id
