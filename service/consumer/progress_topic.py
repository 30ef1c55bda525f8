"""What unfinished requests have said so far, kept for whoever owns their partition next.

A compacted topic has the latest of each request. It is written in the transactions of the request's partition, and
taken back in the one that has the result: so only the partition's owner writes it, and behind the fence all that
earlier owners wrote is there to be read. It holds text; nothing of it is logged.
"""

import asyncio
from collections.abc import Collection, Mapping

import structlog
from aiokafka import TopicPartition
from aiokafka.errors import KafkaError

from schemas.base import Outgoing, Record
from schemas.codec import check_progress, decode_progress, encode_progress, explain, tombstone
from schemas.progress import Progress
from service.consumer.ledger import Ledger
from service.errors import BrokerUnavailable, TopicError
from service.kafka.reader import TopicReader
from service.ports import Say
from service.settings import Settings, read_keys

log = structlog.get_logger(__name__)

_MOST_DIGITS = 19
"""Of an offset, which is a signed number of 64 bits."""
_BESIDE_VALUE = 1024
"""Bytes of a record beside its value; an upper bound."""
MOST_BYTES = 4 << 20
"""Of one transaction, whose results wait for them; a record that is larger goes alone."""
MOST_FOUND_BYTES = 16 << 20
"""Of what earlier owners left of one partition's requests, until these are delivered."""


class Found:
    """What a partition's earlier owners left: the latest record of each request, as it was written.

    Only of requests that the ledger has not finished; the records only of those that were not ``delivered`` yet, and
    ``most`` bytes of these: beyond that, those that were written least recently go.
    """

    def __init__(self, ledger: Ledger, delivered: Collection[int] = (), *, most: int = MOST_FOUND_BYTES) -> None:
        self.offsets: set[int] = set()
        """The requests of which the topic has something."""
        self._ledger = ledger
        self._delivered = frozenset(delivered)
        self._most = most
        self._records: dict[int, Record] = {}
        self._bytes = 0

    def add(self, offset: int, record: Record) -> None:
        """Take notice of the next record of a request; one without a value takes back what was there."""
        self.pop(offset)
        if record.value is None or self._ledger.finished(offset):
            self.offsets.discard(offset)
            return
        self.offsets.add(offset)
        if offset in self._delivered or record.size > self._most:
            return
        self._records[offset] = record
        self._bytes += record.size
        while self._bytes > self._most:
            self.pop(next(iter(self._records)))

    def pop(self, offset: int) -> Record | None:
        """A request's record, which is forgotten."""
        record = self._records.pop(offset, None)
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
        self._wanted: dict[str, Found] = {}
        """Where to put what is found of the partitions that were asked for."""
        self._reading = asyncio.Lock()

    def record(self, partition: TopicPartition, offset: int, progress: Progress) -> Outgoing:
        """What to write in order to keep this."""
        return encode_progress(self._topic, f"{self._key(partition)}/{offset}", progress, keys=self._keys)

    def gone(self, partition: TopicPartition, offset: int) -> Outgoing:
        """What to write once the request is settled."""
        return tombstone(self._topic, f"{self._key(partition)}/{offset}")

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
                        self._take(record, wanted)
        except TopicError:
            return  # nobody has said anything
        except BaseException:
            self._wanted = wanted | self._wanted  # whoever waits reads for itself
            raise

    def _take(self, record: Record, wanted: Mapping[str, Found]) -> None:
        key, _, offset = (record.key or b"").decode(errors="replace").rpartition("/")
        found = wanted.get(key)
        if found is None or not (offset.isascii() and offset.isdecimal()) or len(offset) > _MOST_DIGITS:
            return
        try:
            check_progress(record, keys=self._keys)
        except ValueError as error:
            log.warning("progress.malformed", at=str(record.origin), reason=explain(error))
        else:
            found.add(int(offset), record)

    def _key(self, partition: TopicPartition) -> str:
        return f"{self._group_id}/{partition.topic}/{partition.partition}"


class PartitionProgress:
    """What the requests of one partition have said: as earlier owners left it, and what is to be written."""

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

    async def read(self, ledger: Ledger, delivered: Collection[int] = ()) -> None:
        """Learn what earlier owners left, behind the fence; not all of it where that can't be read in time.

        What was ``delivered`` has it, or runs here.
        """
        self._found = found = Found(ledger, delivered)
        try:
            async with asyncio.timeout(self._within_s):
                await self._topic.read(self._partition, found)
        except (BrokerUnavailable, KafkaError, OSError, TimeoutError) as error:
            log.warning("progress.unread", partition=str(self._partition), reason=str(error) or type(error).__name__)
            self._unread = True
            self._written |= found.offsets
        else:
            self._unread = False
            self._written = found.offsets

    def take(self, offset: int) -> Progress | None:
        """What an earlier owner left of a request; asked once."""
        record = self._found.pop(offset)
        return None if record is None else self._topic.progress(record)

    def keep(self, offset: int, say: Say) -> bool:
        """Ask this what to write when the next transaction is; False where nothing can be written."""
        if not self._refused:
            self._waiting[offset] = say
        return not self._refused

    def records(self, pending: Collection[int], finishing: Collection[int]) -> list[Outgoing]:
        """What the next transaction is to write, which finishes some offsets."""
        self._told = {}
        if self._refused:
            return []
        self._waiting = {offset: say for offset, say in self._waiting.items() if offset in pending}
        said: list[Outgoing] = []
        room = MOST_BYTES
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
        return said + [self._topic.gone(self._partition, offset) for offset in gone]

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
        """Write nothing of what waits."""
        self._waiting.clear()

    def committed(self, finished: Collection[int]) -> None:
        """What ``records`` gave is written, in the transaction that finished some offsets."""
        self._written = (self._written | self._told.keys()).difference(finished)
        self._waiting = {
            offset: say
            for offset, say in self._waiting.items()
            if offset not in finished and self._told.get(offset) is not say
        }
        for offset in finished:
            self._found.pop(offset)

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
        self._waiting.clear()


def _size(record: Outgoing) -> int:
    return len(record.value or b"") + _BESIDE_VALUE
