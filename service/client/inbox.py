"""Where a client's answers come in: one partition, unless somebody asks for what is in another one."""

import asyncio
import secrets
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from functools import partial
from typing import TypeVar

import structlog

from schemas.base import Origin, Record
from schemas.codec import decode_answer, decode_result
from schemas.results import Chunk, Result
from service.client.feed import Box, Feed, Traffic
from service.client.ids import made_at, new_id, place_of
from service.errors import GearshiftError, NoAnswer, TopicError
from service.kafka.reader import TopicReader, as_unavailable
from service.settings import Settings

log = structlog.get_logger(__name__)

Answer = Chunk | Result
T = TypeVar("T")

LOOKED_THROUGH = 20_000
"""How many of the latest records of a partition are looked through for a result that this client did not wait for."""
KEPT = 100_000
"""Results of submitted requests that are kept for whoever asks; older ones are found again on the bus."""
_EARLY = 4096
"""Answers that are kept back until the broker has told where their request lies; the latest of them."""
_SKEW_S = 60.0
"""How far the clock that an id was made by may be ahead of the broker's."""


def answers(answer: Answer, sent: Origin) -> bool:
    """Whether what is answered is the record that we sent, and the answer so ours.

    A request that has been moved is answered under the place where we wrote it, if its pool has a key to vouch for
    that. A worker without one says where the record that it read was moved from by its own account, which is ours
    where it names our record: that may be a stranger's account, and no other would do. Chunks of older workers say no
    origin. The broker does not tell the offset of a record that it had already.
    """
    if answer.origin is None:
        return True
    places = [place for place in (answer.origin, answer.says_moved_from) if place is not None]
    if sent.offset < 0:
        return any((place.topic, place.partition) == (sent.topic, sent.partition) for place in places)
    return sent in places


class AnswerBox(Box[Answer]):
    """The chunks and the result of one request: of the record that we wrote, where we wrote one.

    Anyone may write a request under an id that is ours, and it is answered. Until the broker has told where our
    record lies, answers are kept back. Where ``stream`` is set, chunks and the result are taken one by one; any number
    may wait for the ``result``.
    """

    def __init__(self, name: str, *, traffic: Traffic) -> None:
        super().__init__(name, "result")
        self.stream = False
        self.listeners = 0
        self.taken = False
        """Somebody has had the result, or what ended the reading."""
        self.asked: asyncio.Future[None] | None = None
        """Done when our record lies on the bus; None while this is only listened to."""
        self._end: Result | GearshiftError | None = None
        self._ended = asyncio.Event()
        self._traffic = traffic
        self._sent: Origin | None = None
        self._early: deque[Answer] | None = None

    @property
    def held(self) -> int:
        """How many answers are kept back."""
        return len(self._early or ())

    def sending(self) -> None:
        """From now on only answers to our own record count."""
        self.asked = asyncio.get_running_loop().create_future()
        self._early = deque(maxlen=_EARLY)
        self._end, self.taken = None, False
        self._ended.clear()

    def sent(self, origin: Origin) -> None:
        """Our record lies there."""
        self._sent = origin
        self._settled().set_result(None)

    def unsent(self, error: Exception) -> None:
        """Our record does not; those who wait until it does are told why."""
        asked, self.asked = self._settled(), None
        asked.set_exception(error)
        asked.exception()  # there may be nobody who waits

    def put(self, item: Answer | GearshiftError) -> None:
        if isinstance(item, Chunk) and not self.stream:
            return
        if isinstance(item, GearshiftError):
            self._keep(item)
        elif self._early is not None:
            self._early.append(item)
        elif self._sent is None or answers(item, self._sent):
            self._keep(item)
        else:
            self._traffic.not_ours += 1
            log.warning("answer.not_ours", id=self.name, origin=str(item.origin), ours=str(self._sent))

    async def result(self, *, within_s: float) -> Result:
        """The result. Raises NoAnswer when none comes in time, and whatever ended the reading."""
        try:
            async with asyncio.timeout(within_s):
                while self._end is None:
                    await self._ended.wait()
        except TimeoutError:
            raise NoAnswer(f"no result for {self.name} within {within_s:.3g} s") from None
        self.taken = True
        if isinstance(self._end, Result):
            return self._end
        raise self._end

    def _settled(self) -> asyncio.Future[None]:
        """Where our record lies is known, or that it is nowhere: sort what came before."""
        assert self.asked is not None
        early, self._early = self._early or (), None
        for item in early:
            self.put(item)
        return self.asked

    def _keep(self, item: Answer | GearshiftError) -> None:
        if self.stream:
            super().put(item)
        if not isinstance(item, Chunk) and self._end is None:
            self._end = item
            self._ended.set()


class Inbox:
    """The results and chunks of this client's requests.

    Without ``reply_topic`` they come in the topics of all: ``new_id`` makes ids whose records are in one partition,
    which is read; those of other ids are read when somebody waits for them. With it they come in one partition of
    that topic, chunks too, as the requests' headers say: ``reply_partition``, or one chosen at random.
    """

    def __init__(
        self,
        *,
        settings: Settings,
        reply_topic: str | None,
        reply_partition: int | None,
        traffic: Traffic,
        reader: Callable[..., TopicReader] = TopicReader,
    ) -> None:
        self._kafka = settings.kafka
        self._topics = settings.topics
        self._reply_topic = reply_topic
        self._reply_partition = reply_partition
        self._traffic = traffic
        self._reader = reader
        self._drawn = secrets.randbelow(1 << 31)
        self._sizes: dict[str, int] = {}
        self.topic = reply_topic or self._topics.named(self._topics.results)
        """Where results are read."""
        self._results = self._feed("result", self.topic)
        self._chunks = self._results
        if reply_topic is None:
            self._chunks = self._feed("chunk", self._topics.named(self._topics.chunks))
        self._kept: OrderedDict[str, AnswerBox] = OrderedDict()

    async def close(self) -> None:
        """End every wait."""
        await self._results.close()
        await self._chunks.close()

    async def new_id(self) -> str:
        """An id whose result comes where we read, also by its key alone. Raises TopicError, BrokerUnavailable."""
        await self._results.open()
        size = self._sizes[self.topic]
        return new_id(self._home(size), size)

    async def reply_headers(self) -> dict[str, str | int]:
        """What a request says of where its answers go, by the headers' Python names."""
        if self._reply_topic is None:
            return {}
        await self._results.open()
        return {"reply_to": self._reply_topic, "reply_partition": self._home(self._sizes[self.topic])}

    @asynccontextmanager
    async def listening(self, id_: str) -> AsyncIterator[AnswerBox]:
        """A box for as long as somebody listens, and the same for all who do."""
        box = await self._open_box(id_)
        box.listeners += 1
        try:
            yield box
        finally:
            box.listeners -= 1
            self._close_unwanted(box)

    async def hear_pieces(self, box: AnswerBox) -> None:
        """Have a request's chunks come into its box, too."""
        box.stream = True
        await self._chunks.open_box(box.name, box)

    def keep(self, box: AnswerBox) -> None:
        """Keep what comes into a box that is listened to, for whoever asks for it afterwards."""
        self._kept[box.name] = box
        if len(self._kept) > KEPT:
            _, oldest = self._kept.popitem(last=False)
            self._close_unwanted(oldest)

    def is_wanted_elsewhere(self, box: AnswerBox) -> bool:
        """Whether others than the one who asks this listen to a box, or may yet."""
        return box.listeners > 1 or box.name in self._kept

    def _close_unwanted(self, box: AnswerBox) -> None:
        """Once nobody listens, close a box that is not kept, or that somebody has had the result of."""
        if box.listeners:
            return
        if box.taken:
            self._kept.pop(box.name, None)
        if box.name not in self._kept:
            self._results.close_box(box.name)
            self._chunks.close_box(box.name)

    async def find(self, id_: str, *, since: float | None) -> Result | None:
        """A result that was there before anyone here waited for it: in the one partition that its id may be in.

        Among the latest ``LOOKED_THROUGH`` records, of those since the id was made where it tells that, or among all
        records ``since`` a moment (seconds since the epoch).
        """
        made = made_at(id_)
        reader = self._reader(
            kafka=self._kafka,
            topics=[self.topic],
            only=lambda size: {self._place(id_, size)},
            since=since if since is not None or made is None else made - _SKEW_S,
            latest=LOOKED_THROUGH if since is None else None,
        )
        with as_unavailable("result"):
            async with reader:
                async for record in reader.backlog():
                    self._traffic.records += 1
                    self._traffic.bytes += record.size
                    if record.key == id_.encode() and (result := readable(decode_result, record)):
                        return result
        return None

    async def _open_box(self, id_: str) -> AnswerBox:
        box = await self._results.open_box(id_, AnswerBox(id_, traffic=self._traffic))
        assert isinstance(box, AnswerBox)
        return box

    def _home(self, size: int) -> int:
        """The partition that is ours. Raises TopicError where there is no such one."""
        if self._reply_partition is None:
            return self._drawn % size
        if self._reply_partition >= size:
            raise TopicError(f"{self.topic} has {size} partitions: there is no partition {self._reply_partition}")
        return self._reply_partition

    def _place(self, id_: str, size: int) -> int:
        return place_of(id_, size) if self._reply_topic is None else self._home(size)

    def read_of(self, size: int) -> Collection[int]:
        """The partitions of ``topic`` that others' results may be in which we may read."""
        return range(size) if self._reply_topic is None else {self._home(size)}

    def _read_of(self, topic: str, size: int) -> Collection[int]:
        """Which partitions are read. When some are added, keys move between them, and all are."""
        if self._reply_topic is not None or self._sizes.setdefault(topic, size) == size:
            self._sizes[topic] = size
            return {self._home(size)}
        return range(size)

    def _feed(self, expected: str, topic: str) -> Feed[Answer]:
        def opened() -> TopicReader:
            self._sizes.pop(topic, None)
            return self._reader(
                kafka=self._kafka,
                topics=[topic],
                from_end=[topic],
                only=partial(self._read_of, topic),
                within_s=min(10.0, self._kafka.request_timeout_s),
            )

        return Feed(
            expected=expected,
            open_tail=opened,
            name_of=lambda record: (record.key or b"").decode("utf-8", "replace"),
            decode=decode_answer,
            traffic=self._traffic,
            place_of=None if self._reply_topic is not None else lambda id_: place_of(id_, self._sizes[topic]),
        )


def readable(decode: Callable[[Record], T], record: Record) -> T | None:
    """The message in a record; None for what a stranger wrote, and for messages of another kind."""
    try:
        return decode(record)
    except ValueError:
        log.debug("record.malformed", at=str(record.origin))
        return None
