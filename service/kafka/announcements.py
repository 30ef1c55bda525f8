"""What a worker says beside results: status, chunks, presence and control events.

None of it is worth a request's or the worker's life: what the broker does not take is logged, and serving goes on.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any, Self

import structlog

from schemas.base import Origin, Outgoing
from schemas.codec import encode_chunk, encode_presence, encode_status, encode_usage, tombstone
from schemas.control import Control
from schemas.marks import signed
from schemas.requests import ReplyTo
from schemas.results import Chunk
from schemas.status import LEFT, Presence, Status
from service.errors import BrokerUnavailable, GearshiftError, RecordRefused
from service.kafka.control import outgoing
from service.kafka.presence import Roster, listen
from service.kafka.producer import IdempotentProducer
from service.kafka.reader import TopicReader, as_unavailable, partitions_of
from service.kafka.reply_topics import ReplyTopics
from service.settings import Settings, read_keys

log = structlog.get_logger(__name__)

_AGAIN_AFTER_S = 1.0
_CAUGHT_UP_WITHIN_S = 5.0


class Announcer:
    """The announcements of one worker over one idempotent producer. Opened with ``async with``.

    ``outdated``: tombstones that are due, asked for beside each presence.
    """

    def __init__(self, *, settings: Settings, outdated: Callable[[], Iterable[Outgoing]] = tuple) -> None:
        self._outdated = outdated
        topics = settings.topics
        self._topics = topics
        self._worker = settings.worker
        self._workers = topics.named(topics.workers)
        self._keys = read_keys(settings.worker.control_key_file, "control_key_file")
        self._pool_keys = read_keys(settings.worker.pool_key_file, "pool_key_file")
        self._outlet = IdempotentProducer(kafka=settings.kafka, max_record_bytes=topics.max_message_bytes)
        self._replies = ReplyTopics(kafka=settings.kafka, topics=topics)
        self._kafka = settings.kafka
        self._roster = Roster(keys=self._pool_keys)
        self._caught_up = asyncio.Event()
        self._latest: Presence | None = None
        self._open = AsyncExitStack()

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as opening:
            await opening.enter_async_context(self._outlet)
            await partitions_of(self._kafka, [self._workers])
            self._tasks = await opening.enter_async_context(asyncio.TaskGroup())
            listening = self._tasks.create_task(self._listen(), name="presence-reader")
            opening.callback(listening.cancel)
            self._open = opening.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._open.aclose()

    async def status(self, status: Status) -> None:
        """Say what was done about a control event, behind what was said before; nobody waits for the broker's answer.

        A worker that switches has ten of them per turn, and waiting for each would let it say them minutes late.
        """
        try:
            await self._outlet.push(encode_status(self._topics.named(self._topics.status), status))
        except (BrokerUnavailable, RecordRefused) as error:
            log.warning("status.lost", state=status.state.value, control_id=status.control_id, why=str(error))

    async def chunk(self, origin: Origin, chunk: Chunk, reply: ReplyTo | None = None) -> None:  # noqa: ARG002
        """Send a chunk on its way, behind the earlier ones of its request; with its result, where that can be."""
        place = (await self._replies.place(reply)).reply or ReplyTo(self._topics.named(self._topics.chunks))
        try:
            await self._outlet.push(encode_chunk(place.topic, chunk, partition=place.partition))
        except (BrokerUnavailable, RecordRefused) as error:
            log.warning("chunk.lost", why=str(error))

    async def presence(self, presence: Presence) -> None:
        """Renew this worker's presence, and take back those that nobody renews, and whatever else is outdated."""
        self._latest = presence
        await self._say_signed(encode_presence(self._workers, presence))
        for worker in self._roster.gone():
            log.info("presence.gone", worker=worker)
            await self._say_signed(tombstone(self._workers, worker))
        if self._roster.leads(self._worker.worker_id):
            await asyncio.gather(*map(self._say, self._outdated()))

    async def farewell(self) -> None:
        """Say that this worker has left. What it learnt stays until a successor, who reads it, takes it back."""
        if self._latest is None:
            await self._say_signed(tombstone(self._workers, self._worker.worker_id))
        else:
            left: dict[str, Any] = {"state": LEFT, "active": None, "contexts": (), "queues": {}, "partitions": {}}
            await self._say_signed(encode_presence(self._workers, self._latest.model_copy(update=left)))

    def usage(self, usage: Mapping[str, Any]) -> None:
        """Say what a result has cost that is not published itself; nobody waits for the broker to take it."""
        if self._topics.usage_records:
            self._tasks.create_task(self._count(usage), name="usage")

    async def control(self, event: Control) -> None:
        """Publish a control event. Raises BrokerUnavailable, RecordRefused."""
        await self._outlet.send(outgoing(event, self._topics, self._keys))

    async def others(self) -> Sequence[Presence]:
        """The presences of this pool's other workers that are fresh."""
        await self._read_up()
        present = self._roster.present()
        return [p for p in present if p.pool == self._worker.group_id and p.worker != self._worker.worker_id]

    async def predecessors(self) -> Sequence[Presence]:
        """What each worker of this pool said last while it served, also of one that is gone; the latest last."""
        await self._read_up()
        return self._roster.served(self._worker.group_id)

    async def _read_up(self) -> None:
        try:
            async with asyncio.timeout(_CAUGHT_UP_WITHIN_S):
                await self._caught_up.wait()
        except TimeoutError:
            log.warning("presence.not_read_yet")

    async def _say_signed(self, record: Outgoing) -> None:
        """As ``_say``, what other workers go by."""
        await self._say(signed(record, self._pool_keys))

    async def _say(self, record: Outgoing) -> None:
        try:
            await self._outlet.send(record)
        except (BrokerUnavailable, RecordRefused) as error:
            log.warning("announcement.lost", why=str(error))

    async def _count(self, usage: Mapping[str, Any]) -> None:
        try:
            await self._outlet.push(encode_usage(self._topics.named(self._topics.usage), usage, keys=self._pool_keys))
        except (BrokerUnavailable, RecordRefused) as error:
            log.warning("usage.lost", why=str(error))

    async def _listen(self) -> None:
        """Hear the others, until cancelled, and go on behind what was heard where reading fails."""
        while True:
            tail = TopicReader(kafka=self._kafka, topics=[self._workers], places=dict(self._roster.places))
            try:
                with as_unavailable(self._workers):
                    async with tail:
                        await listen(tail, self._roster, self._caught_up)
            except GearshiftError as error:
                log.warning("presence.unreadable", why=str(error))
            await asyncio.sleep(_AGAIN_AFTER_S)
