"""What unfinished requests have said so far, and sessions, kept for whoever owns their partition next.

A compacted topic has the latest of each request. It is written in the transactions of the request's partition, and
taken back in the one that has the result: so only the partition's owner writes it, and behind the fence all that
earlier owners wrote is there to be read. It holds text; nothing of it is logged.

Keys have the id of the request's topic: what was said of a topic that has been made anew since is nobody's.

What a session has come to is written with the result of each of its parts, under the session's digest, until the last
part's, or until no part has come for ``session_idle_s``.
"""

import asyncio
import re
from collections.abc import Collection, Mapping

import structlog
from aiokafka import TopicPartition

from schemas.base import Outgoing, Record
from schemas.codec import check_progress, decode_progress, encode_progress, explain, tombstone
from schemas.progress import Progress
from service.consumer.ledger import Ledger
from service.errors import BrokerUnavailable, TopicError
from service.kafka.reader import TopicReader, as_unavailable
from service.ports import Say
from service.settings import Settings, read_keys

log = structlog.get_logger(__name__)

_MOST_DIGITS = 19
"""Of an offset, which is a signed number of 64 bits."""
_BESIDE_VALUE = 1024
"""Bytes of a record beside its value; an upper bound."""
MOST_BYTES = 4 << 20
"""Of one transaction, whose results wait for them; a record that is larger goes alone."""
_LEFT_OUT_S = 60.0
"""How long nothing is written after transactions with it failed again and again; results wait for each try."""
MOST_FOUND_BYTES = 16 << 20
"""Of what earlier owners left of one partition's requests, until these are delivered, and of its sessions."""
_SESSION = "/session"
_DIGEST = re.compile("[0-9a-f]{64}")


class Found:
    """What a partition's earlier owners left: the latest record of each request, as it was written.

    Only of requests that the ledger has not finished; the records only of those that were not ``delivered`` yet, and
    ``most`` bytes of these: beyond that, those that were written least recently go. Of sessions, by their digests, it
    has the latest, whoever wrote it.
    """

    def __init__(self, ledger: Ledger, delivered: Collection[int] = (), *, most: int = MOST_FOUND_BYTES) -> None:
        self.offsets: set[int] = set()
        """The requests of which the topic has something."""
        self.sessions: set[str] = set()
        """The sessions of which it has."""
        self._ledger = ledger
        self._delivered = frozenset(delivered)
        self._most = most
        self._records: dict[int | str, Record] = {}
        self._bytes = 0

    def add(self, offset: int, record: Record) -> None:
        """Take notice of the next record of a request; one without a value takes back what was there."""
        self.pop(offset)
        if record.value is None or self._ledger.finished(offset):
            self.offsets.discard(offset)
            return
        self.offsets.add(offset)
        if offset not in self._delivered:
            self._hold(offset, record)

    def add_session(self, name: str, record: Record, *, decided: bool = True) -> None:
        """Take notice of the next record of a session; one without a value: it is over.

        One that is not ``decided`` may have been aborted: the one before it is held as well.
        """
        self.pop(_undecided(name))
        if decided:
            self.pop(name)
        if record.value is None:
            self.sessions.discard(name)
        else:
            self.sessions.add(name)
            self._hold(name if decided else _undecided(name), record)

    def session(self, name: str) -> list[Record]:
        """A session's records, of which one was committed last."""
        held = (self._records.get(each) for each in (_undecided(name), name))
        return [record for record in held if record is not None]

    def drop_session(self, name: str) -> None:
        """It is over: hold nothing of it."""
        self.pop(_undecided(name))
        self.pop(name)
        self.sessions.discard(name)

    def _hold(self, what: int | str, record: Record) -> None:
        if record.size > self._most:
            return
        self._records[what] = record
        self._bytes += record.size
        while self._bytes > self._most:
            self.pop(next(iter(self._records)))

    def pop(self, what: int | str) -> Record | None:
        """A request's record, or a session's, which is forgotten."""
        record = self._records.pop(what, None)
        if record is not None:
            self._bytes -= record.size
        return record


class ProgressTopic:
    """The progress of one group's requests."""

    def __init__(self, *, settings: Settings) -> None:
        self._kafka = settings.kafka
        self._topic = settings.topics.named(settings.topics.progress)
        self._group_id = settings.worker.group_id
        self._keys = read_keys(settings.worker.pool_key_file, "pool_key_file")
        self.session_idle_s = settings.engine.session_idle_s
        """How long a session is kept for its next part."""
        self.topic_ids: dict[str, str | None] = {}
        """Of topics with requests, as they were when one of their partitions was taken over last."""
        self._wanted: dict[str, Found] = {}
        """Where to put what is found of the partitions that were asked for."""
        self._reading = asyncio.Lock()

    def record(self, partition: TopicPartition, offset: int, progress: Progress) -> Outgoing:
        """What to write in order to keep this."""
        return encode_progress(self._topic, f"{self._key(partition)}/{offset}", progress, keys=self._keys)

    def gone(self, partition: TopicPartition, offset: int) -> Outgoing:
        """What to write once the request is settled."""
        return tombstone(self._topic, f"{self._key(partition)}/{offset}")

    def session(self, partition: TopicPartition, name: str, progress: Progress) -> Outgoing:
        """What to write in order to keep what a session has come to."""
        return encode_progress(self._topic, f"{self._key(partition)}{_SESSION}/{name}", progress, keys=self._keys)

    def session_gone(self, partition: TopicPartition, name: str) -> Outgoing:
        """What to write once it is over."""
        return tombstone(self._topic, f"{self._key(partition)}{_SESSION}/{name}")

    def progress(self, record: Record) -> Progress | None:
        """What a record says; None where that is no progress."""
        try:
            return decode_progress(record, keys=self._keys)
        except ValueError as error:
            log.warning("progress.malformed", at=str(record.origin), reason=explain(error))
            return None

    async def read(self, partition: TopicPartition, found: Found) -> None:
        """Find what is kept of a partition's requests, as it is now: read once for all who ask meanwhile.

        Whoever asks behind the partition's fence finds all that its owners have committed, whatever transactions
        others have open: of what lies behind the first of those, also values (and no end of one) that were aborted.
        Those are true as well: their run said them, and whether its request is finished is the ledger's to say.

        One who stops waiting keeps what was found until then: it is true as far as it goes. Raises BrokerUnavailable.
        """
        key = self._key(partition)
        self._wanted[key] = found
        try:
            async with self._reading:
                if self._wanted.get(key) is found:
                    await self._read()
        finally:
            if self._wanted.get(key) is found:
                del self._wanted[key]

    async def _read(self) -> None:
        wanted, self._wanted = self._wanted, {}
        try:
            async with TopicReader(kafka=self._kafka, topics=[self._topic], within_s=0) as tail:
                async for record in tail.backlog():
                    self._take(record, wanted)
                await tail.see_undecided()
                async for record in tail.backlog():
                    if record.value is not None:
                        self._take(record, wanted, decided=False)
        except TopicError:
            return  # nobody has said anything
        except BaseException:
            self._wanted = wanted | self._wanted  # whoever waits reads for itself
            raise

    def _take(self, record: Record, wanted: Mapping[str, Found], *, decided: bool = True) -> None:
        key, _, what = (record.key or b"").decode(errors="replace").rpartition("/")
        found = wanted.get(key.removesuffix(_SESSION))
        if found is None or not (_is_digest(what) if key.endswith(_SESSION) else _is_offset(what)):
            return
        try:
            check_progress(record, keys=self._keys)
        except ValueError as error:
            log.warning("progress.malformed", at=str(record.origin), reason=explain(error))
        else:
            if key.endswith(_SESSION):
                found.add_session(what, record, decided=decided)
            else:
                found.add(int(what), record)

    def _key(self, partition: TopicPartition) -> str:
        topic_id = self.topic_ids.get(partition.topic)
        topic = partition.topic if topic_id is None else f"{partition.topic}@{topic_id}"
        return f"{self._group_id}/{topic}/{partition.partition}"


def _undecided(name: str) -> str:
    return f"{name}?"


def _is_offset(name: str) -> bool:
    return name.isascii() and name.isdecimal() and len(name) <= _MOST_DIGITS


def _is_digest(name: str) -> bool:
    return _DIGEST.fullmatch(name) is not None


class PartitionProgress:
    """What the requests of one partition have said, and its sessions: as earlier owners left it, and what is to be
    written."""

    def __init__(self, topic: ProgressTopic, partition: TopicPartition, *, most: int, within_s: float = 5.0) -> None:
        """A record takes ``most`` bytes."""
        self._topic = topic
        self._partition = partition
        self._most = most
        self._within_s = within_s
        self._found = Found(Ledger())
        self._written: set[int] = set()
        """The offsets of which the topic has something."""
        self._unread = False
        """Whether it may have something of others, too."""
        self._waiting: dict[int, Say] = {}
        self._told: dict[int, Say] = {}
        """What was written last, or is being written."""
        self._refused = False
        self._left_out_until = float("-inf")
        self._owed: set[int] = set()
        """Finished offsets of which the topic has something: they were finished while nothing was written."""
        self._repaid: set[int] = set()
        self._sessions: dict[str, float] = {}
        """Those of which the topic has something, and the loop's time at which they have waited for too long."""
        self._parts: dict[int, tuple[str, int]] = {}
        """The offsets that are parts of sessions and under way: of which, and which one."""
        self._come_to: dict[int, Outgoing] = {}
        """What is to be written of their sessions with their results."""
        self._over: list[str] = []
        """Those that had waited for too long when ``records`` was asked."""

    async def read(self, ledger: Ledger, delivered: Collection[int] = (), *, topic_id: str | None = None) -> None:
        """Learn what earlier owners left, behind the fence; not all of it where that can't be read in time.

        ``topic_id`` is the partition's topic's, as it is now.

        What was ``delivered`` has it, or runs here.
        """
        self._topic.topic_ids[self._partition.topic] = topic_id
        self._found = found = Found(ledger, delivered)
        try:
            async with asyncio.timeout(self._within_s):
                with as_unavailable("reading progress"):
                    await self._topic.read(self._partition, found)
        except (BrokerUnavailable, TimeoutError) as error:
            log.warning("progress.unread", partition=str(self._partition), reason=str(error) or type(error).__name__)
            self._unread = True
            self._written |= found.offsets
            left = found.sessions | self._sessions.keys() | {name for name, _ in self._parts.values()}
        else:
            self._unread = False
            self._written = found.offsets
            left = found.sessions
        self._sessions = dict.fromkeys(left, self._idle_end())
        under_way = {offset for offset in delivered if not ledger.finished(offset)}
        self._parts = {offset: part for offset, part in self._parts.items() if offset in under_way}
        self._come_to = {offset: record for offset, record in self._come_to.items() if offset in under_way}

    def take(self, offset: int) -> Progress | None:
        """What an earlier owner left of a request; asked once."""
        record = self._found.pop(offset)
        return None if record is None else self._topic.progress(record)

    def keep(self, offset: int, say: Say) -> bool:
        """Ask this what to write when the next transaction is; False where nothing can be written."""
        if self._silent:
            return False
        self._waiting[offset] = say
        return True

    def session(self, offset: int, name: str, part: int) -> Progress | None:
        """What a session had come to when its part at ``offset`` was asked for; that one is under way from now on.

        None where another part is the next one, and where one before it is under way, or itself at an earlier offset:
        what the session comes to is theirs to say, and what is found may have been aborted.
        """
        self._parts[offset] = name, part
        before = ((n, at) < (part, offset) for at, (other, n) in self._parts.items() if other == name)
        if part == 0 or any(before):
            return None
        known = map(self._topic.progress, self._found.session(name))
        return next((each for each in known if each is not None and len(each.parts) == part), None)

    def keep_session(self, offset: int, progress: Progress) -> None:
        """Write what a session has come to with the result of its part at ``offset``."""
        if offset not in self._parts:
            return
        name, _ = self._parts[offset]
        record = self._topic.session(self._partition, name, progress)
        if not progress.parts or _size(record) > self._most:
            record = self._topic.session_gone(self._partition, name)
        self._come_to[offset] = record

    @property
    def next_end(self) -> float | None:
        """The loop's time at which a session will have waited for too long; None: none waits."""
        end = min(self._waiting_sessions().values(), default=None)
        return None if self._refused or end is None else max(end, self._left_out_until)

    @property
    def _silent(self) -> bool:
        return self._refused or asyncio.get_running_loop().time() < self._left_out_until

    def _waiting_sessions(self) -> dict[str, float]:
        busy = {name for name, _ in self._parts.values()}
        return {name: end for name, end in self._sessions.items() if name not in busy}

    def _idle_end(self) -> float:
        return asyncio.get_running_loop().time() + self._topic.session_idle_s

    def records(self, pending: Collection[int], finishing: Collection[int]) -> list[Outgoing]:
        """What the next transaction is to write, which finishes some offsets."""
        self._told, self._over, self._repaid = {}, [], set()
        if self._silent:
            self._owed |= self._written.intersection(finishing)
            for offset in self._come_to.keys() & set(finishing):
                del self._come_to[offset]
            return []
        self._waiting = {offset: say for offset, say in self._waiting.items() if offset in pending}
        said, room = self._of_sessions(finishing)
        for offset, say in list(self._waiting.items()):
            if offset in finishing:
                continue
            record = self._record(offset, say)
            if record is None:
                del self._waiting[offset]
                continue
            room -= _size(record)
            if room < 0 and said:
                break
            self._told[offset] = say
            said.append(record)
        gone = [offset for offset in finishing if self._unread or offset in self._written]
        self._repaid = self._owed.difference(pending, finishing)
        gone += sorted(self._repaid)
        return said + [self._topic.gone(self._partition, offset) for offset in gone]

    def _of_sessions(self, finishing: Collection[int]) -> tuple[list[Outgoing], int]:
        """What is to be written of sessions, and the room that it leaves for what others have said."""
        now, room = asyncio.get_running_loop().time(), MOST_BYTES
        self._over = [name for name, end in self._waiting_sessions().items() if end <= now]
        written = [self._topic.session_gone(self._partition, name) for name in self._over]
        there = set(self._sessions)
        for offset in sorted(self._come_to.keys() & set(finishing)):
            name, _ = self._parts[offset]
            room -= _size(self._come_to[offset])
            if room < 0 and written:
                self._come_to[offset] = self._topic.session_gone(self._partition, name)
            if self._come_to[offset].value is not None:
                there.add(name)
            if self._unread or name in there:
                written.append(self._come_to[offset])
        return written, room

    def _record(self, offset: int, say: Say) -> Outgoing | None:
        """None where there is nothing to keep, or too much."""
        progress = say()
        record = None if progress is None else self._topic.record(self._partition, offset, progress)
        return record if record is not None and _size(record) <= self._most else None

    @property
    def waits(self) -> bool:
        """Whether there is something to write."""
        return bool(self._waiting)

    def forget(self) -> None:
        """Write nothing of what waits; a session whose part's result waits has nothing to be gone on with then."""
        self._waiting.clear()
        for offset in self._come_to:
            name, _ = self._parts[offset]
            self._come_to[offset] = self._topic.session_gone(self._partition, name)

    def leave_out(self) -> None:
        """Write nothing for a while, not even that something is over: the ledger says what is finished."""
        self._left_out_until = asyncio.get_running_loop().time() + _LEFT_OUT_S

    def committed(self, finished: Collection[int]) -> None:
        """What ``records`` gave is written, in the transaction that finished some offsets."""
        self._written = (self._written | self._told.keys()).difference(finished)
        self._owed -= self._repaid
        self._waiting = {
            offset: say
            for offset, say in self._waiting.items()
            if offset not in finished and self._told.get(offset) is not say
        }
        for offset in sorted(finished):
            self._found.pop(offset)
            name, _ = self._parts.pop(offset, ("", 0))
            record = self._come_to.pop(offset, None)
            if record is not None:
                at = Record(record.topic, 0, 0, 0.0, record.key, record.value, record.headers)
                self._found.add_session(name, at)
            if record is not None and record.value is None:
                self._sessions.pop(name, None)
            elif record is not None or name in self._sessions:
                self._sessions[name] = self._idle_end()
        for name in self._over:
            self._sessions.pop(name, None)
            self._found.drop_session(name)

    def refused(self, reasons: Mapping[int, str], *, first: int) -> None:
        """The broker did not take some records; those from ``first`` on are ours. Results must not fail with them."""
        ours = [reason for index, reason in reasons.items() if index >= first]
        if ours:
            log.error("progress.refused", partition=str(self._partition), reason=ours[0])
            self._refused = True
            self._waiting.clear()

    def close(self) -> None:
        """The partition is another's: forget what was found, and what waits."""
        self._found = Found(Ledger())
        for kept in (self._waiting, self._sessions, self._parts, self._come_to, self._owed):
            kept.clear()


def _size(record: Outgoing) -> int:
    return len(record.value or b"") + _BESIDE_VALUE
