"""Durable calls: what was asked over HTTP to outlive its connection, and what became of it, in two topics.

``calls`` has the requests, which workers read as they read all others, and tombstones; ``answers`` their results and
the pieces of their streams. There is no other store: every process folds both into an index that tells where an id's
records lie, and reads them there. Nothing in it is older than the topics keep; settings bound what is unfinished.
"""

import hashlib
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from heapq import heappop, heappush
from types import TracebackType
from typing import NamedTuple

from aiokafka import TopicPartition

from schemas import headers as h
from schemas.base import MAX_ATTRIBUTE, Headers, Origin, Outgoing, Record, immutable
from schemas.codec import decode_answer, kind_of, tombstone
from schemas.control import Cancel
from schemas.results import Chunk, Outcome, Result
from service.errors import CallConflict, Overloaded, Unavailable
from service.kafka.control import outgoing
from service.kafka.folded import FoldedStore
from service.kafka.following import Following
from service.settings import Settings, TopicSettings, read_keys

_OWNER_LENGTH = len("resp_") + 16
"""Characters at the beginning of a call's id that say whose it is."""
_FINGERPRINT = 16
_CLOCKS_DIFFER_S = 60.0
"""By how much the clocks of those who write may differ, and ours from theirs."""


class Place(NamedTuple):
    """Of a record in one of the topics."""

    partition: int
    offset: int


@immutable
class Call:
    """Where the record lies that counts for an id; ``at`` is when the broker took it, in seconds since the epoch."""

    partition: int
    offset: int
    at: float
    fingerprint: bytes
    """Of its endpoint and its body, as that was sent."""
    deleted: bool = False

    @property
    def place(self) -> Place:
        return Place(self.partition, self.offset)


@immutable
class Answer:
    """Where an id's first piece lies, and its result. ``at``: when the first of them came.

    They are in two partitions where the topic grew, and not all who write to it had heard of that.
    """

    at: float
    pieces: Place | None = None
    result: Place | None = None
    late_end: int = 0
    """The offset behind the last piece that came after the result in its partition; 0: none did."""
    completed: bool = False
    """Whether the result is an answer, and not a failure."""


class Tombstone(NamedTuple):
    """The last one of an id in a partition: its offset, and when the broker took it."""

    partition: int
    offset: int
    at: float


class CallIndex:
    """Where the records of each id lie, folded from the log. Folding a record again changes nothing. No I/O.

    Partitions are read in no order: answers and tombstones may come before their calls, and beside the call of an id
    that of an earlier one, which is kept no longer but not yet deleted. An answer counts for the call that it names.
    ``keyed``: the pool has a key, and what it answers of a call that it moved has the call's own origin.
    """

    def __init__(self, topics: TopicSettings, *, keyed: bool) -> None:
        self._topics = topics
        self._keyed = keyed
        self._kept_s = topics.calls_retention_s
        self._calls_topic = topics.named(topics.calls)
        self._calls: dict[bytes, Call] = {}
        self._answers: defaultdict[bytes, dict[Place | None, Answer]] = defaultdict(dict)
        """By id, and where the call lies that is answered; None: that is not said, as by some of a call that was moved.
        """
        self._tombstones: defaultdict[bytes, dict[int, Tombstone]] = defaultdict(dict)
        """By id and partition."""
        self._ages: list[tuple[float, bytes]] = []
        """A heap of when something came, of which id."""
        self._unfinished: set[bytes] = set()
        self._owners: Counter[bytes] = Counter()
        """How many unfinished ones each owner has, by the beginning of their ids."""

    @property
    def unfinished(self) -> int:
        """How many calls have no result, and were not deleted."""
        return len(self._unfinished)

    def unfinished_beside(self, id_: str) -> int:
        """How many of those belong to the owner of this id."""
        return self._owners[_owner_in(id_.encode())]

    def fold(self, record: Record) -> Result | None:
        """Take a record of either topic in, and give the result that a call has now. Others are passed over."""
        key, result = record.key, None
        if key is None or not 0 < len(key) <= MAX_ATTRIBUTE or record.damage is not None:
            return None
        if record.topic == self._calls_topic:
            self._fold_call(key, record)
        elif record.value is not None:
            result = self._fold_answer(key, record)
        self._count(key)
        return result

    def _count(self, key: bytes) -> None:
        """A call was asked, finished, deleted or forgotten, perhaps."""
        call, answer = self._calls.get(key), self._answer(key)
        unfinished = call is not None and not call.deleted and (answer is None or answer.result is None)
        if unfinished and key not in self._unfinished:
            self._unfinished.add(key)
            self._owners[_owner_in(key)] += 1
        elif not unfinished and key in self._unfinished:
            self._unfinished.discard(key)
            self._owners[owner := _owner_in(key)] -= 1
            if not self._owners[owner]:
                del self._owners[owner]

    def _fold_call(self, key: bytes, record: Record) -> None:
        known = self._calls.get(key)
        if record.value is None:
            last = Tombstone(record.partition, record.offset, record.timestamp)
            self._tombstones[key][last.partition] = max(last, self._tombstones[key].get(last.partition, last))
        elif known is None or record.timestamp - known.at > self._kept_s:
            known = Call(record.partition, record.offset, record.timestamp, fingerprint_of(record))
            self._calls[key] = known
        else:
            return
        heappush(self._ages, (record.timestamp, key))
        tombstones = self._tombstones.get(key, {}).values()
        if known is not None and any(_may_delete(one, known) for one in tombstones):
            self._calls[key] = replace(known, deleted=True)

    def _fold_answer(self, key: bytes, record: Record) -> Result | None:
        call, answers = self._calls.get(key), self._answers.get(key, {})
        if call is not None and record.timestamp < call.at + self._kept_s - _CLOCKS_DIFFER_S:
            known = answers.get(call.place)
            if known is not None and not _says_more(record, known):
                return None  # another piece of a stream: it is not even decoded
        if (found := self._said_in(record)) is None:
            return None
        of, place = self._asked_at(found), Place(record.partition, record.offset)
        known = answers.get(of)
        if known is None:
            known = Answer(record.timestamp)
            heappush(self._ages, (known.at, key))
        elif not _says_more(record, known):
            return None
        if isinstance(found, Chunk):
            late = _is_late(record, known)
            self._answers[key][of] = replace(known, late_end=place.offset + 1) if late else replace(known, pieces=place)
            return None
        self._answers[key][of] = replace(known, result=place, completed=found.outcome is Outcome.COMPLETED)
        return found if call is None or (not call.deleted and of in {None, call.place}) else None

    def answer_in(self, record: Record) -> Result | Chunk | None:
        """The answer in a record; None for what is none of ours, or answers something that is no call."""
        found = self._said_in(record)
        if found is None or (of := self._asked_at(found)) is None:
            return found
        call = self._calls.get(record.key or b"")
        return found if call is None or call.place == of else None

    def _said_in(self, record: Record) -> Result | Chunk | None:
        """The same, whichever call of the id it answers.

        One that was moved to its model's own topic is answered from there, where its pool has no key.
        """
        try:
            found = decode_answer(record)
        except ValueError:
            return None
        if found.origin is None or found.id.encode("utf-8", "replace") != record.key:
            return None
        topic = found.origin.topic
        return found if topic == self._calls_topic or (not self._keyed and self._topics.takes_moved(topic)) else None

    def _asked_at(self, found: Result | Chunk) -> Place | None:
        """Where the call lies that is answered, as far as that is said."""
        said = (found.origin, found.says_moved_from)
        return next((Place(one.partition, one.offset) for one in said if one and one.topic == self._calls_topic), None)

    def counts(self, record: Record) -> bool:
        """Whether a record of the topic of calls is to be run: the first of its id, and not deleted.

        One that is too old to be known, or has no id, stands for itself.
        """
        if record.value is None and record.damage is None:
            return False
        call = self._calls.get(record.key or b"")
        return call is None or (call.place == (record.partition, record.offset) and not call.deleted)

    def call(self, id_: str) -> Call | None:
        """The call of an id, also one that was deleted."""
        return self._calls.get(id_.encode())

    def answer(self, id_: str) -> Answer | None:
        """What is known of the answer to the call of an id."""
        return self._answer(id_.encode())

    def _answer(self, key: bytes) -> Answer | None:
        call = self._calls.get(key)
        if call is None or call.deleted:
            return None
        answers = self._answers.get(key, {})
        named, unnamed = answers.get(call.place), answers.get(None)
        if unnamed is None or unnamed.at + _CLOCKS_DIFFER_S < call.at or (named is not None and named.result):
            return named
        return unnamed if named is None or unnamed.result else named

    def spans(self, id_: str, *, since: int, read_to: Callable[[int], int]) -> list[tuple[int, int, int]]:
        """Where the answers of a call lie: a partition, the first offset from ``since`` on, and the one behind them.

        That is where its result is, once there is one, or its last piece that came later, however much of others has
        come since; until then as far as the partition has been read, which ``read_to`` knows. A result in another
        partition than the pieces is a span of its own, the last, and does not end theirs.
        """
        answer = self.answer(id_)
        first = None if answer is None else answer.pieces or answer.result
        if answer is None or first is None:
            return []
        result, begin = answer.result, max(since, first.offset)
        end = 0 if result is None else max(result.offset + 1, answer.late_end)
        if result is not None and result.partition == first.partition:
            return [(first.partition, begin, end)]
        apart = [] if result is None else [(result.partition, result.offset, end)]
        return [(first.partition, begin, read_to(first.partition)), *apart]

    def deleted(self, key: bytes) -> bool:
        call = self._calls.get(key)
        return call is not None and call.deleted

    def forget_before(self, moment: float) -> None:
        """Leave out what the broker has had since before ``moment``, in seconds since the epoch."""
        while self._ages and self._ages[0][0] < moment:
            _, key = heappop(self._ages)
            self._forget(key, moment)
            self._count(key)

    def _forget(self, key: bytes, moment: float) -> None:
        """Leave out what there is of an id since before ``moment``."""
        call, answers, tombstones = self._calls.get(key), self._answers[key], self._tombstones[key]
        if call is not None and call.at < moment:
            del self._calls[key]
        for of in [of for of, answer in answers.items() if answer.at < moment]:
            del answers[of]
        for partition in [partition for partition, one in tombstones.items() if one.at < moment]:
            del tombstones[partition]
        if not answers:
            del self._answers[key]
        if not tombstones:
            del self._tombstones[key]


def _owner_in(id_: bytes) -> bytes:
    """What tells whose a call is: the beginning of its id."""
    return id_[:_OWNER_LENGTH]


def _may_delete(tombstone: Tombstone, known: Call) -> bool:
    """Those of one partition are in order; in another one it was written when there were more partitions, or fewer,
    and is that of an earlier call of the id if it is older."""
    if tombstone.partition == known.partition:
        return known.offset < tombstone.offset
    return known.at < tombstone.at + _CLOCKS_DIFFER_S


def _says_more(record: Record, known: Answer) -> bool:
    """Whether an answer may change what is known."""
    return _is_late(record, known) or _may_add(record, known)


def _may_add(record: Record, known: Answer) -> bool:
    """Whether a record may say where the result lies, or the pieces begin: not behind the result in its partition."""
    result = known.result
    if kind_of(record) != "chunk":
        return result is None
    return known.pieces is None and (result is None or result.partition != record.partition)


def _is_late(record: Record, known: Answer) -> bool:
    """Whether a piece comes behind the result in its partition, and behind all other such pieces."""
    result = known.result
    if kind_of(record) != "chunk" or result is None or result.partition != record.partition:
        return False
    return record.offset >= max(result.offset, known.late_end)


def fingerprint_of(record: Record | Outgoing) -> bytes:
    """Tells one request from another, by what its client sent: the record says so where it has more."""
    said = h.attribute(record.headers, h.FINGERPRINT)
    return said.encode()[:_FINGERPRINT] if said is not None else _fingerprint(record.headers, record.value or b"")


def _fingerprint(headers: Headers, body: bytes) -> bytes:
    """The beginning of a hash over endpoint and body, in hex."""
    endpoint = h.attribute(headers, h.ENDPOINT) or ""
    return hashlib.sha256(endpoint.encode() + b"\0" + body).hexdigest()[:_FINGERPRINT].encode()


@dataclass(slots=True, eq=False)
class Arrivals:
    """Calls whose results are waited for, and what has come of them: None for one that was deleted."""

    waiting: set[bytes] = field(default_factory=set)
    """The ids of those that are not finished."""
    came: list[tuple[bytes, Result | None]] = field(default_factory=list)

    def put(self, id_: bytes, result: Result | None) -> None:
        if id_ in self.waiting:
            self.waiting.discard(id_)
            self.came.append((id_, result))


class Calls(FoldedStore):
    """Asks durably, and finds what was asked."""

    def __init__(self, *, settings: Settings) -> None:
        topics = settings.topics
        self._settings = settings
        self._topics = topics
        self.topic = topics.named(topics.calls)
        self._answers = topics.named(topics.answers)
        self.index = CallIndex(topics, keyed=settings.worker.pool_key_file is not None)
        self._keys = read_keys(settings.worker.control_key_file, "control_key_file")
        super().__init__(settings=settings, topics=(self.topic, self._answers))
        self._following: dict[bytes, set[Following]] = defaultdict(set)
        self._arrivals: list[Arrivals] = []

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for one in {one for several in self._following.values() for one in several}:
            one.end(Unavailable("the worker is stopping; any other one has the answer when it comes"))
        await super().__aexit__(kind, error, trace)

    # --- asking ---

    async def ask(self, id_: str, value: bytes, headers: Headers, *, sent: bytes) -> Call:
        """Write a call, unless there is one of this id. Gives the one that there is, once the log has it.

        ``sent``: the body as its client sent it, by which it is the same request; ``value`` may have more.

        Raises CallConflict where the id is that of another request or of a deleted one, Overloaded, BrokerUnavailable,
        and RecordRefused.
        """
        if sent != value:
            headers = [*headers, (h.FINGERPRINT, _fingerprint(headers, sent))]
        record = self._record(id_, value, headers)
        if self.index.call(id_) is None:
            if not self.room(id_):
                ours = self.index.unfinished_beside(id_)
                raise Overloaded(f"{ours} durable calls of yours are unfinished, and there is no room for more")
            origin = await self._outlet.send(record)
            if origin.offset < 0:
                await self.read_up()
            else:
                await self._log.until_read({TopicPartition(self.topic, origin.partition): origin.offset + 1})
        call = self.index.call(id_)
        if call is None or call.deleted:
            raise _deleted()
        if call.fingerprint != fingerprint_of(record):
            raise CallConflict("This idempotency key was used for another request")
        return call

    async def write(self, calls: Iterable[tuple[str, bytes, Headers]]) -> None:
        """Write calls, by id, body and headers, and return when the index knows them; the first of an id counts.

        Raises BrokerUnavailable and RecordRefused; some may have been written then.
        """
        await self._outlet.send_all([self._record(*call) for call in calls])
        await self.read_up()

    def room(self, id_: str) -> int:
        """How many calls more may be unfinished, of all and of the owner of this id."""
        http = self._settings.http
        share = max(1, int(http.http_most_calls * http.http_calls_share))
        return max(0, min(http.http_most_calls - self.index.unfinished, share - self.index.unfinished_beside(id_)))

    def _record(self, id_: str, value: bytes, headers: Headers) -> Outgoing:
        ours = [("ce_id", id_.encode()), *headers, (h.REPLY_TO, self._answers.encode())]
        return Outgoing(self.topic, id_.encode(), value, ours)

    async def cancel(self, id_: str) -> None:
        """Let it not be run, or not any further. Raises BrokerUnavailable, RecordRefused."""
        await self._outlet.send(outgoing(Cancel(request=id_), self._topics, self._keys))

    async def cancel_all(self, correlation_id: str) -> None:
        """The same for all calls that have this correlation id. Raises BrokerUnavailable, RecordRefused."""
        await self._outlet.send(outgoing(Cancel(correlation_id=correlation_id), self._topics, self._keys))

    async def delete(self, id_: str) -> None:
        """Let nobody find it any more; what runs of it is cancelled. Raises BrokerUnavailable, RecordRefused."""
        await self._outlet.send(tombstone(self.topic, id_))
        await self.cancel(id_)

    # --- finding ---

    async def find(self, id_: str) -> Record | None:
        """The request of a call that was not deleted, by whatever door until now. Raises BrokerUnavailable."""
        await self.read_up()
        call = self.index.call(id_)
        if call is None or call.deleted:
            return None
        async for record in self._log.between(TopicPartition(self.topic, call.partition), call.offset, call.offset + 1):
            return record
        return None

    async def result(self, id_: str) -> Result | None:
        """The result of a call, if there is one. Raises BrokerUnavailable."""
        answer = self.index.answer(id_)
        if answer is None or answer.result is None:
            return None
        where = TopicPartition(self._answers, answer.result.partition)
        async for record in self._log.between(where, answer.result.offset, answer.result.offset + 1):
            found = self.index.answer_in(record)
            return found if isinstance(found, Result) else None
        return None

    async def results(self, ids: Iterable[str]) -> AsyncIterator[Result]:
        """The results that there are of these calls, each partition read through once. Raises BrokerUnavailable."""
        offsets: dict[int, set[int]] = defaultdict(set)
        for id_ in ids:
            answer = self.index.answer(id_)
            if answer is not None and answer.result is not None:
                offsets[answer.result.partition].add(answer.result.offset)
        for partition, wanted in offsets.items():
            where = TopicPartition(self._answers, partition)
            async for record in self._log.between(where, min(wanted), max(wanted) + 1):
                found = self.index.answer_in(record) if record.offset in wanted else None
                if isinstance(found, Result):
                    yield found

    @contextmanager
    def arrivals(self) -> Iterator[Arrivals]:
        """What comes, for as long as the block lasts, of the calls that are added to those it waits for."""
        self._arrivals.append(arrivals := Arrivals())
        try:
            yield arrivals
        finally:
            self._arrivals.remove(arrivals)

    @contextmanager
    def following(self, id_: str) -> Iterator[Following]:
        """All that came of a call and will come, for as long as the block lasts."""
        key = id_.encode()
        one = Following(id_, past=partial(self._past_of, id_), answer_in=self.index.answer_in)
        self._following[key].add(one)
        if self.index.deleted(key):
            one.end(_deleted())
        try:
            yield one
        finally:
            self._following[key].discard(one)
            if not self._following[key]:
                del self._following[key]

    def _past_of(self, id_: str, since: int) -> AsyncIterator[Record]:
        """The answers of a call that have been read by now."""
        spans = self.index.spans(
            id_, since=since, read_to=lambda n: self._log.read_to(TopicPartition(self._answers, n))
        )
        return self._of(id_.encode(), spans)

    async def _of(self, key: bytes, spans: Iterable[tuple[int, int, int]]) -> AsyncIterator[Record]:
        for partition, first, end in spans:
            async for record in self._log.between(TopicPartition(self._answers, partition), first, end):
                if record.key == key:
                    yield record

    # --- reading ---

    def has_read(self, origin: Origin) -> bool:
        """Whether the index knows what is at this place of the topic of calls, and before it."""
        return self._log.read_to(TopicPartition(origin.topic, origin.partition)) > origin.offset

    async def read_up(self) -> None:
        """Come to know what the topic of calls holds now. Raises BrokerUnavailable."""
        await self._log.read_up(self.topic)

    @property
    def partitions(self) -> int:
        """How many the topic of calls has."""
        return len(self._log.partitions(self.topic))

    def watch(self, woken: Callable[[], None]) -> None:
        """Call this whenever the index has come further."""
        self._log.watch(woken)

    def _take(self, record: Record) -> None:
        result = self.index.fold(record)
        if record.key is not None and (result is not None or record.topic == self.topic):
            self._arrived(record.key, result)
        if record.topic == self._answers and record.key in self._following:
            for one in self._following[record.key]:
                one.put(record)

    def _arrived(self, key: bytes, result: Result | None) -> None:
        deleted = self.index.deleted(key)
        if result is not None or deleted:
            for arrivals in self._arrivals:
                arrivals.put(key, result)
        if deleted:
            for one in self._following.get(key, ()):
                one.end(_deleted())

    def _forget(self) -> None:
        """Leave out what is too old, by whatever clock: only then is a call of the same id another one."""
        self.index.forget_before(time.time() - self._topics.calls_retention_s - _CLOCKS_DIFFER_S)


def _deleted() -> CallConflict:
    return CallConflict("The response of this idempotency key was deleted")
