"""Files and batches in the log: ``files`` has contents in bounded records, ``batches`` what is known of each by its id.

There is no other store, and whatever a process knows of them it has read there.
"""

import asyncio
import hashlib
import re
import secrets
import time
import zlib
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from types import TracebackType
from typing import Self

import structlog
from aiokafka import TopicPartition

from schemas.base import MAX_ATTRIBUTE, Outgoing, Record
from schemas.batches import (
    BatchAsked,
    BatchCancelled,
    BatchEnded,
    BatchProgress,
    Stored,
    StoredFile,
    UnfinishedFile,
    key_of,
)
from schemas.codec import decode_stored, encode_stored, tombstone
from service.errors import BrokerUnavailable, FileLost, Overloaded, RecordRefused, TopicError
from service.kafka.folded import FoldedStore, ended
from service.kafka.reader import partitions_of
from service.settings import Settings

log = structlog.get_logger(__name__)
_BLOCK_BYTES = 1 << 20
_ID_BYTES = 16
_ROLL = "roll"
"""The key of records that say nothing: behind the time of a segment, one makes Kafka begin the next."""
_ROLL_AGAIN_S = 5.0
_WRITTEN_WITHIN_S = 3600.0
"""What is being written for longer is left by a process that has ended. Writers take half of that at most."""
_CLOCKS_DIFFER_S = 60.0
"""By how much the clock of who writes may be ahead of the time that Kafka has for the record."""
BATCH_INPUT, OUTPUT = "batch", "batch_output"
"""The purposes of what batches are made of, and of what they write."""
FILE, BATCH = "file-", "batch_"
"""How ids begin."""
_A_BATCH = re.compile(r"batch_[0-9a-f]{1,64}")
_OWNER_BYTES = 8


def owner_named(tenant: str) -> str:
    """Whose a tenant's things are."""
    return f"tenant {tenant}"


def begin_of(kind: str, owner: str) -> str:
    """How the ids of an owner's things begin, of this kind."""
    return f"{kind}{hashlib.sha256(owner.encode('utf-8', 'replace')).hexdigest()[: 2 * _OWNER_BYTES]}"


def new_id(kind: str, owner: str) -> str:
    """An id of this kind and owner that nobody guesses."""
    return f"{begin_of(kind, owner)}{secrets.token_hex(_ID_BYTES)}"


@dataclass(frozen=True, slots=True)
class Batch:
    """What is known of a batch."""

    asked: BatchAsked
    cancelled: BatchCancelled | None = None
    progress: BatchProgress | None = None
    ended: BatchEnded | None = None

    @property
    def expires_at(self) -> float:
        """Seconds since the epoch."""
        return self.asked.at + self.asked.window_s

    @property
    def stopped(self) -> bool:
        """Whether nothing more of it is to be asked."""
        return self.cancelled is not None or time.time() > self.expires_at

    @property
    def completed(self) -> int:
        """Lines that are known to have an answer."""
        counted = self.ended or self.progress
        return 0 if counted is None else counted.completed

    @property
    def failed(self) -> int:
        """Lines that are known to have none, and never will."""
        counted = self.ended or self.progress
        return 0 if counted is None else counted.failed

    @property
    def status(self) -> str:
        """OpenAI's word for it."""
        return self.ended.end if self.ended is not None else "in_progress" if self.cancelled is None else "cancelling"


class FileIndex:
    """What the topic of batches says, by id. Folding a record again changes nothing. No I/O."""

    def __init__(self) -> None:
        self._files: dict[str, StoredFile] = {}
        self._unfinished: dict[str, UnfinishedFile] = {}
        """By their keys."""
        self._batches: dict[str, Batch] = {}
        self._ends: dict[str, BatchEnded] = {}
        """Known for longer than their batches: what they name was written when those were old."""

    def __len__(self) -> int:
        return len(self._files) + len(self._batches)

    def fold(self, record: Record) -> None:
        """Take a record in; what is none of ours is passed over."""
        if record.damage is not None or record.key is None or len(record.key) > 2 * MAX_ATTRIBUTE:
            return
        if record.value is None:
            key = record.key.decode("utf-8", "replace")
            self._files.pop(key, None)
            self._unfinished.pop(key, None)
            return
        try:
            stored = decode_stored(record)
        except ValueError:
            return
        latest = record.timestamp + _CLOCKS_DIFFER_S
        self._fold(stored if stored.at <= latest else stored.model_copy(update={"at": latest}))

    def _fold(self, stored: Stored) -> None:
        if isinstance(stored, StoredFile):
            self._files[stored.id] = stored
            return
        if isinstance(stored, UnfinishedFile):
            self._unfinished[key_of(stored)] = stored
            return
        if isinstance(stored, BatchAsked):
            if _A_BATCH.fullmatch(stored.id) is None:
                return  # its calls are cancelled by this id: it must be no one's but a batch's
            self._batches.setdefault(stored.id, Batch(stored, ended=self._ends.get(stored.id)))
            return
        if isinstance(stored, BatchEnded):
            stored = self._ends.setdefault(stored.id, stored)
        known = self._batches.get(stored.id)
        if known is None:
            return
        if isinstance(stored, BatchCancelled):
            self._batches[stored.id] = replace(known, cancelled=stored)
        elif isinstance(stored, BatchProgress):
            self._batches[stored.id] = replace(known, progress=stored)
        else:
            self._batches[stored.id] = replace(known, ended=stored)

    def file(self, id_: str) -> StoredFile | None:
        """A file that was uploaded, or that the end of its batch names."""
        found = self._files.get(id_)
        return found if found is not None and self._counts(found) else None

    def files(self, begin: str) -> list[StoredFile]:
        """All whose ids begin so, the youngest last."""
        return [file for id_, file in self._files.items() if id_.startswith(begin) and self._counts(file)]

    def _counts(self, file: StoredFile) -> bool:
        if file.batch is None:
            return True
        end = self._ends.get(file.batch)
        return end is not None and file.id in {end.output, end.errors}

    def unfinished(self) -> list[UnfinishedFile]:
        """What is being written or deleted, and what a batch has written that its end does not name."""
        disowned = [file for file in self._files.values() if self._is_disowned(file)]
        return [*self._unfinished.values(), *map(deletion_of, disowned)]

    def _is_disowned(self, file: StoredFile) -> bool:
        if file.batch is None or self._counts(file):
            return False
        return file.batch in self._ends or file.batch not in self._batches

    def batch(self, id_: str) -> Batch | None:
        return self._batches.get(id_)

    def end(self, id_: str) -> BatchEnded | None:
        """How a batch ended, also one that is forgotten."""
        return self._ends.get(id_)

    def batches(self, begin: str = "") -> list[Batch]:
        """All whose ids begin so, the youngest last."""
        return [batch for id_, batch in self._batches.items() if id_.startswith(begin)]

    def kept_of(self, owner: str) -> int:
        """How many files and batches there are of an owner's, outputs of batches too."""
        begins = begin_of(FILE, owner), begin_of(BATCH, owner)
        return sum(id_.startswith(begins) for id_ in chain(self._files, self._batches))

    def is_read(self, file: str) -> bool:
        """Whether a batch that has not ended is made of this file."""
        return any(batch.asked.file == file and batch.ended is None for batch in self._batches.values())

    def forget_before(self, moment: float) -> None:
        """Leave out what the topics keep no longer, in seconds since the epoch."""
        for id_ in [id_ for id_, file in self._files.items() if file.at < moment]:
            del self._files[id_]
        for key in [key for key, one in self._unfinished.items() if one.at < moment]:
            del self._unfinished[key]
        for id_ in [id_ for id_, batch in self._batches.items() if batch.asked.at < moment]:
            del self._batches[id_]
        for id_ in [id_ for id_, end in self._ends.items() if end.at < moment]:
            del self._ends[id_]


class Files(FoldedStore):
    """Stores files and what is known of batches, and finds them."""

    def __init__(self, *, settings: Settings) -> None:
        topics = settings.topics
        self._topic = topics.named(topics.batches)
        self._contents = topics.named(topics.files)
        self._kept_s = topics.files_retention_s
        self._most = settings.http.http_most_files
        self._share = max(1, int(self._most * settings.http.http_files_share))
        self.most_lines = settings.http.http_most_batch_lines
        """Requests of a batch's input."""
        self.most_line_bytes = settings.worker.max_request_bytes
        self._block_bytes = min(_BLOCK_BYTES, topics.max_message_bytes // 2)
        self._roll_s = topics.segment_of_files_s
        self._kafka = settings.kafka
        self._deleted: dict[TopicPartition, float] = {}
        """Where something was deleted behind which Kafka has begun no other segment, and when, on the loop's clock."""
        self._under_way: dict[str, float] = {}
        """Since when what is not finished has been known, on the loop's clock, by the keys of what says so."""
        self._rolling = AsyncExitStack()
        self.index = FileIndex()
        super().__init__(settings=settings, topics=(self._topic,))

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        rolling = asyncio.create_task(self._roll_on(), name="files roll")
        self._rolling.push_async_callback(ended, rolling)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._rolling.aclose()
        await super().__aexit__(kind, error, trace)

    async def read_up(self) -> None:
        """Come to know what was written by now. Raises BrokerUnavailable."""
        await self._log.read_up(self._topic)

    def require_room(self, owner: str) -> None:
        """Raises Overloaded where as much is kept as may be, of all or of this owner."""
        if len(self.index) >= self._most:
            raise Overloaded(f"{len(self.index)} files and batches are kept already")
        if (ours := self.index.kept_of(owner)) >= self._share:
            raise Overloaded(
                f"{ours} files and batches of yours are kept already: delete some, or wait until they expire"
            )

    async def store(self, stored: Stored) -> None:
        """Write what is known, and return when this process knows it. Raises BrokerUnavailable, RecordRefused."""
        await self._outlet.send(encode_stored(self._topic, stored))
        await self.read_up()

    async def end(self, ended: BatchEnded) -> None:
        """Write how a batch ended, unless it has ended. Raises BrokerUnavailable, RecordRefused.

        What another process has written just before this one is written once more: Kafka keeps the last of them.
        """
        await self.read_up()
        if self.index.end(ended.id) is not None:
            return
        await self.store(ended)
        first = self.index.end(ended.id)
        if first is not None and first != ended:
            await self.store(first)

    async def delete(self, file: StoredFile) -> None:
        """Let nobody find it from now on. Raises BrokerUnavailable, RecordRefused."""
        deletion, where = deletion_of(file), TopicPartition(self._contents, file.partition)
        there = max(0, min(file.last + 1, await self._log.end(where)) - file.first)  # however many it says that it has
        await self.begin(deletion)
        await self.forget(deletion, (block_key(file.id, number) for number in range(min(file.blocks, there))))

    # --- contents ---

    @asynccontextmanager
    async def writing(self, begin: str) -> AsyncIterator["Writing"]:
        """A new file, whose id begins so. What is not finished in the block leaves nothing behind."""
        writing = Writing(self, f"{begin}{secrets.token_hex(_ID_BYTES)}", self._block_bytes)
        try:
            yield writing
        finally:
            if not writing.finished:
                await asyncio.shield(writing.undo())

    async def begin_at(self, id_: str) -> UnfinishedFile:
        """Say where the blocks of a new file are to lie. Raises BrokerUnavailable, RecordRefused, TopicError."""
        where = TopicPartition(self._contents, zlib.crc32(id_.encode()) % await self._log.size(self._contents))
        first = await self._log.end(where)
        unfinished = UnfinishedFile(id=id_, at=time.time(), partition=where.partition, first=first)
        await self.begin(unfinished)
        return unfinished

    async def begin(self, unfinished: UnfinishedFile) -> None:
        """Say that blocks of a file are written or deleted. Raises BrokerUnavailable, RecordRefused."""
        await self._outlet.send(encode_stored(self._topic, unfinished))

    async def finish(self, unfinished: UnfinishedFile) -> None:
        """Say that it is done. Raises BrokerUnavailable, RecordRefused."""
        await self._outlet.send(tombstone(self._topic, key_of(unfinished)))

    async def write_block(self, key: bytes, value: bytes, partition: int) -> int:
        """Its offset. Raises BrokerUnavailable, RecordRefused."""
        origin = await self._outlet.send(Outgoing(self._contents, key, value, partition=partition))
        if origin.offset < 0:
            raise BrokerUnavailable(f"{self._contents}: it is not known where a record lies")
        return origin.offset

    async def forget(self, of: UnfinishedFile, keys: Iterable[bytes]) -> None:
        """Let nobody find a file, then let Kafka forget its blocks. Raises BrokerUnavailable, RecordRefused."""
        await self._outlet.send(tombstone(self._topic, of.id))
        await self.read_up()
        for key in keys:
            await self._outlet.send(Outgoing(self._contents, key, None, partition=of.partition))
            self._note_deletion(TopicPartition(self._contents, of.partition))
        await self.finish(of)
        self._note_deletion(TopicPartition(self._topic, 0))

    def _note_deletion(self, where: TopicPartition) -> None:
        self._deleted[where] = asyncio.get_running_loop().time()

    async def finish_what_others_left(self, now: float) -> None:
        """Take back what was written, or deleted in part, by a process that has ended. ``now`` is on the loop's clock.

        Whose end is not heard of: it is what was under way for too long. Two that do this at a time do no harm.
        """
        unfinished = {key_of(one): one for one in self.index.unfinished()}
        self._under_way = {key: self._under_way.get(key, now) for key in unfinished}
        for key, one in unfinished.items():
            if now - self._under_way[key] >= (self._roll_s if one.deleted else _WRITTEN_WITHIN_S):
                with _trouble_told("file.not_finished_for_another", file=one.id):
                    await self._finish_for_another(one)

    async def _finish_for_another(self, one: UnfinishedFile) -> None:
        if not one.deleted and self.index.file(one.id) is not None:
            await self.finish(one)
            return
        where, begin = TopicPartition(self._contents, one.partition), block_key(one.id, "")
        blocks = self._log.between(where, one.first, await self._log.end(where))
        keys = [record.key async for record in blocks if record.key and record.key.startswith(begin)]
        await self.begin(one)
        await self.forget(one, keys)
        log.info("file.finished_for_another", file=one.id, blocks=len(keys))

    async def _roll_on(self) -> None:
        """Kafka compacts no segment that it still writes to, and begins the next one only with a record that comes.

        A door that begins takes it that another one has deleted something everywhere, and was killed.
        """
        loop = asyncio.get_running_loop()
        topics, began, known = (self._topic, self._contents), loop.time(), False
        while True:
            with _trouble_told("files.not_rolled"):
                if not known:
                    numbers = await partitions_of(self._kafka, topics)
                    everywhere = [TopicPartition(topic, n) for topic in topics for n in range(numbers[topic])]
                    self._deleted, known = {**dict.fromkeys(everywhere, began), **self._deleted}, True
            for where, at in list(self._deleted.items()):
                if loop.time() - at >= self._roll_s:
                    with _trouble_told("files.not_rolled"):
                        await self._roll(where, at)
            await self.finish_what_others_left(loop.time())
            await asyncio.sleep(min(_ROLL_AGAIN_S, self._roll_s / 4))

    async def _roll(self, where: TopicPartition, deleted_at: float) -> None:
        await self._outlet.send(Outgoing(where.topic, _ROLL.encode(), None, partition=where.partition))
        if self._deleted[where] == deleted_at:
            del self._deleted[where]

    async def content(self, file: StoredFile) -> AsyncIterator[bytes]:
        """Its bytes, some at a time. Raises FileLost, BrokerUnavailable."""
        number = 0
        where = TopicPartition(self._contents, file.partition)
        if file.blocks and file.last < await self._log.end(where):
            async for record in self._log.between(where, file.first, file.last + 1):
                if record.key == block_key(file.id, number) and record.value is not None:
                    number += 1
                    yield record.value
        if number < file.blocks:
            raise FileLost(f"{file.id} is not whole any more")

    def _take(self, record: Record) -> None:
        self.index.fold(record)

    def _forget(self) -> None:
        self.index.forget_before(time.time() - self._kept_s)


class Writing:
    """A file that is being written, block by block, into one partition."""

    def __init__(self, files: Files, id_: str, block_bytes: int) -> None:
        self.id = id_
        self.size = 0
        self.finished = False
        self._files = files
        self._block_bytes = block_bytes
        self._rest = bytearray()
        self._unfinished: UnfinishedFile | None = None
        self._until = asyncio.get_running_loop().time() + _WRITTEN_WITHIN_S / 2
        self._first = 0
        self._last = 0
        self._blocks = 0
        """How many are written; what was begun may have one more that nobody has acknowledged."""
        self._begun = 0

    @property
    def held(self) -> int:
        """Bytes that wait for a block of their own."""
        return len(self._rest)

    async def write(self, data: bytes) -> None:
        """Raises BrokerUnavailable, RecordRefused, TopicError, FileLost."""
        self.size += len(data)
        self._rest += data
        while len(self._rest) >= self._block_bytes:
            await self._write_block(self._block_bytes)

    async def _write_block(self, size: int) -> None:
        if asyncio.get_running_loop().time() > self._until:
            raise FileLost(f"{self.id} was being written for more than {_WRITTEN_WITHIN_S / 2:.0f} s")
        if self._unfinished is None:
            self._unfinished = await self._files.begin_at(self.id)
        value = bytes(self._rest[:size])
        partition = self._unfinished.partition
        self._begun = self._blocks + 1
        self._last = await self._files.write_block(block_key(self.id, self._blocks), value, partition)
        del self._rest[:size]
        self._first = self._first if self._blocks else self._last
        self._blocks += 1

    async def finish(
        self,
        *,
        filename: str,
        purpose: str,
        lines: int = 0,
        endpoints: tuple[str, ...] = (),
        batch: str | None = None,
    ) -> StoredFile:
        """Let it be found; a batch's when its end names it. Raises BrokerUnavailable, RecordRefused."""
        if self._rest:
            await self._write_block(len(self._rest))
        file = StoredFile(
            id=self.id,
            filename=filename,
            purpose=purpose,
            at=time.time(),
            size=self.size,
            partition=0 if self._unfinished is None else self._unfinished.partition,
            first=self._first,
            last=self._last,
            blocks=self._blocks,
            lines=lines,
            endpoints=endpoints,
            batch=batch,
        )
        await self._files.store(file)
        self.finished = True
        if self._unfinished is not None:
            await self._files.finish(self._unfinished)
        return file

    async def undo(self) -> None:
        """Take back what was written. Raises BrokerUnavailable, RecordRefused."""
        if self._unfinished is not None:
            keys = [block_key(self.id, number) for number in range(self._begun)]
            await self._files.forget(self._unfinished, keys)


def block_key(id_: str, number: int | str) -> bytes:
    """Of a record that has a piece of a file's content."""
    return f"{id_}/{number}".encode()


@contextmanager
def _trouble_told(event: str, **about: str) -> Iterator[None]:
    """What can't be done now is logged, and tried again in the next round."""
    try:
        yield
    except (BrokerUnavailable, RecordRefused, TopicError) as error:
        log.warning(event, reason=str(error), **about)


def deletion_of(file: StoredFile) -> UnfinishedFile:
    """What says that it is being deleted."""
    return UnfinishedFile(id=file.id, at=time.time(), partition=file.partition, first=file.first, deleted=True)
