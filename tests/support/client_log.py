"""A log in memory for what a client writes and reads: it stands in for the broker, and for nothing of the client."""

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Iterable
from contextlib import asynccontextmanager

from schemas.base import Origin, Outgoing, Record
from schemas.codec import encode_chunk, encode_result
from schemas.results import Chunk, Outcome, Result, Timing
from service.client.asking import Asking
from service.client.controls import Controls
from service.client.feed import Traffic
from service.client.inbox import Inbox
from service.settings import load

SETTINGS = load(bootstrap_servers="127.0.0.1:1")
REQUESTS = SETTINGS.topics.named(SETTINGS.topics.requests)


class Log:
    """Topics of one partition each. ``gate`` holds back what is being written; ``refuses`` is raised for it."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.refuses: Exception | None = None
        self.lookups = 0
        self.more = asyncio.Event()

    @property
    def requests(self) -> list[Record]:
        return [record for record in self.records if record.topic == REQUESTS]

    async def send(self, record: Outgoing) -> Origin:
        """As the producer does."""
        await self.gate.wait()
        if self.refuses is not None:
            raise self.refuses
        return self.write(record)

    def write(self, record: Outgoing) -> Origin:
        offset = sum(there.topic == record.topic for there in self.records)
        self.records.append(Record(record.topic, 0, offset, 1.0, record.key, record.value, record.headers))
        more, self.more = self.more, asyncio.Event()
        more.set()
        return self.records[-1].origin

    def answer(self, request: Record, *, outcome: Outcome = Outcome.COMPLETED) -> Result:
        """As a worker does."""
        id_ = (request.key or b"").decode()
        timing = Timing(received=1.0, finished=2.0)
        result = Result(id=id_, origin=request.origin, outcome=outcome, status=200, body={}, timing=timing)
        self.write(encode_result("results", result))
        return result

    def piece(self, request: Record, seq: int, *, final: bool = False) -> None:
        id_, data = (request.key or b"").decode(), None if final else {"n": seq}
        self.write(encode_chunk("chunks", Chunk(id=id_, seq=seq, origin=request.origin, data=data, final=final)))

    def reader(self, **how: object) -> "_Reader":
        return _Reader(self, **how)  # type: ignore[arg-type]


class _Reader:
    """As a TopicReader."""

    progress = 0

    def __init__(
        self,
        log: Log,
        *,
        topics: Iterable[str],
        from_end: Collection[str] = (),
        only: Callable[[int], Collection[int]] = range,
        **_: object,
    ) -> None:
        self._log, self._topics, self._next = log, tuple(topics), len(log.records) if from_end else 0
        self.partitions = frozenset(only(1))

    async def __aenter__(self) -> "_Reader":
        return self

    async def __aexit__(self, *_: object) -> None:
        return

    async def backlog(self) -> AsyncIterator[Record]:
        self._log.lookups += "results" in self._topics
        await asyncio.sleep(0)
        for record in self._came():
            yield record

    async def read(self) -> list[Record]:
        while not (found := self._came()):
            await self._log.more.wait()
        return found

    def _came(self) -> list[Record]:
        came, self._next = self._log.records[self._next :], len(self._log.records)
        return [record for record in came if record.topic in self._topics]


@asynccontextmanager
async def asking(log: Log, *, timeout_s: float = 60.0) -> AsyncIterator[tuple[Asking, Inbox]]:
    """What a client asks with, over a log."""
    controls = Controls(settings=SETTINGS, outlet=log, reader=log.reader)  # type: ignore[arg-type]
    inbox = Inbox(
        settings=SETTINGS,
        reply_topic=None,
        reply_partition=None,
        traffic=Traffic(),
        reader=log.reader,  # type: ignore[arg-type]
    )
    made = Asking(
        topics=SETTINGS.topics,
        outlet=log,  # type: ignore[arg-type]
        inbox=inbox,
        controls=controls,
        timeout_s=timeout_s,
    )
    try:
        yield made, inbox
    finally:
        await inbox.close()
        await controls.close()
