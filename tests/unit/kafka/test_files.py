"""The index over files and batches: what the log says, however often it is folded."""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from typing import Self

import pytest
from aiokafka import TopicPartition
from structlog.testing import capture_logs

from schemas.base import Origin, Outgoing, Record
from schemas.batches import (
    BatchAsked,
    BatchCancelled,
    BatchEnd,
    BatchEnded,
    BatchProgress,
    Stored,
    StoredFile,
    UnfinishedFile,
)
from schemas.codec import encode_stored, tombstone
from service.errors import BrokerUnavailable, RecordRefused
from service.kafka import files as files_module
from service.kafka import folded as folded_module
from service.kafka.files import FileIndex, Files
from service.settings import load
from tests.support.virtual_time import virtual_time

FILE = StoredFile(id="file-a1", filename="in.jsonl", purpose="batch", at=1.0, size=3)
OUTPUT = FILE.model_copy(update={"id": "file-a2", "purpose": "batch_output", "batch": "batch_a1"})
ASKED = BatchAsked(id="batch_a1", file="file-a1", endpoint="/v1/completions", lines=2, at=2.0, window_s=60)
ENDED = BatchEnded(id="batch_a1", at=5.0, end=BatchEnd.COMPLETED, completed=2, output="file-a2")


WRITING = UnfinishedFile(id="file-a1", at=1.0, partition=3, first=7)


def record(stored: Stored) -> Record:
    out = encode_stored("batches", stored)
    return Record("batches", 0, 0, 1.0, out.key, out.value, out.headers)


def folded(*stored: Stored | Record) -> FileIndex:
    index = FileIndex()
    for one in stored:
        index.fold(one if isinstance(one, Record) else record(one))
    return index


def gone(id_: str) -> Record:
    return Record("batches", 0, 9, 1.0, tombstone("batches", id_).key, None)


def test_a_file_is_found_until_it_is_deleted():
    assert folded(FILE).file("file-a1") == FILE
    assert folded(FILE, FILE).files("file-a") == [FILE]
    assert folded(FILE).files("file-b") == []
    assert folded(FILE, gone("file-a1")).file("file-a1") is None


def test_what_a_batch_wrote_is_found_when_its_end_names_it():
    assert folded(ASKED, OUTPUT).file("file-a2") is None
    assert folded(ASKED, OUTPUT, ENDED).file("file-a2") == OUTPUT
    other = ENDED.model_copy(update={"output": "file-a3"})
    for index in (folded(ASKED, OUTPUT, ENDED, other), folded(OUTPUT, ENDED, other, ASKED)):
        assert index.file("file-a2") == OUTPUT, "the first end counts: two processes may have run the batch"
        assert index.batch("batch_a1") == folded(ASKED, ENDED).batch("batch_a1")


def test_a_batch_is_what_was_said_of_it_in_whatever_number_of_readings():
    said = [ASKED, BatchProgress(id="batch_a1", at=3.0, completed=1, failed=0), BatchCancelled(id="batch_a1", at=4.0)]
    once, twice = folded(*said, ENDED), folded(*said, *said, ENDED, ASKED)
    assert once.batch("batch_a1") == twice.batch("batch_a1")
    assert once.batches("batch_b") == []
    assert once.is_read("file-a1") is False
    assert folded(*said).is_read("file-a1") is True


def test_what_is_none_of_ours_changes_nothing():
    strange = record(FILE)
    for odd in (
        Record("batches", 0, 0, 1.0, b"file-other", strange.value, strange.headers),
        Record("batches", 0, 0, 1.0, None, strange.value),
        Record("batches", 0, 0, 1.0, b"file-a1", b"{}"),
        Record("batches", 0, 0, 1.0, b"x" * 1000, strange.value),
        Record("batches", 0, 0, 1.0, b"file-a1", strange.value, (), "torn"),
        record(ENDED),
    ):
        assert len(folded(odd)) == 0


def test_what_is_unfinished_is_no_file_and_is_known_until_it_is_done():
    assert folded(WRITING).file("file-a1") is None
    assert folded(WRITING).unfinished() == [WRITING]
    assert folded(WRITING, FILE).file("file-a1") == FILE
    assert folded(WRITING, FILE, gone("file-a1/unfinished")).unfinished() == []
    assert folded(FILE, WRITING, gone("file-a1")).unfinished() == [WRITING], "its blocks are there still"


def test_what_a_batch_has_written_and_does_not_name_is_to_be_deleted():
    other = ENDED.model_copy(update={"output": "file-a3"})
    left = folded(ASKED, OUTPUT, other).unfinished()
    assert [(one.id, one.deleted) for one in left] == [("file-a2", True)]
    assert folded(ASKED, OUTPUT).unfinished() == [], "it may be named yet"
    assert folded(ASKED, OUTPUT, ENDED).unfinished() == []


def test_what_is_kept_no_longer_is_forgotten():
    index = folded(FILE, ASKED, WRITING)
    index.forget_before(1.5)
    assert (index.file("file-a1"), index.batch("batch_a1") is not None) == (None, True)
    assert index.unfinished() == []


def test_what_a_batch_wrote_is_found_for_its_own_time_whatever_becomes_of_the_batch():
    output = OUTPUT.model_copy(update={"at": 4.0})
    index = folded(FILE, ASKED, output, ENDED)
    index.forget_before(3.5)
    for found in (index, folded(output, ENDED)):
        assert (found.batch("batch_a1"), found.file("file-a2"), found.unfinished()) == (None, output, [])
        found.forget_before(4.5)
        assert (found.file("file-a2"), found.unfinished()) == (None, [])
    other = ENDED.model_copy(update={"output": "file-a3"})
    assert [one.id for one in folded(output, other).unfinished()] == ["file-a2"]


def test_what_no_batch_has_ended_with_is_nobodys_once_the_batch_is_forgotten():
    index = folded(ASKED, OUTPUT.model_copy(update={"at": 4.0}))
    index.forget_before(3.5)
    assert (index.file("file-a2"), [one.id for one in index.unfinished()]) == (None, ["file-a2"])


HOUR_S, SEVERAL = 3600.0, 3
"""``SEVERAL``: partitions of each topic."""


@pytest.mark.parametrize("at", [1e300, 1e12, HOUR_S])
def test_what_says_that_it_is_from_the_future_is_forgotten_when_its_record_is_old(at: float):
    index = folded(*(record(one.model_copy(update={"at": at})) for one in (FILE, ASKED, WRITING)))
    assert (len(index), len(index.unfinished())) == (2, 1)
    index.forget_before(HOUR_S - 1)
    assert (len(index), index.unfinished()) == (0, [])


class Topics:
    """Both topics in memory, as a door writes them and has read them at once.

    Keys that are ``refused`` are not taken in their partition of the topic of files, and such as are ``unsure`` are,
    but nobody acknowledges it.
    """

    def __init__(self) -> None:
        self.take: Callable[[Record], None]
        self.records: defaultdict[TopicPartition, list[Record]] = defaultdict(list)
        self.refused: set[tuple[int, bytes | None]] = set()
        self.meanwhile: list[Record] = []
        """What others write before what is sent next."""
        self.unsure = ""
        """How their keys end."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        """There is nothing to close."""

    async def send(self, out: Outgoing) -> Origin:
        where = TopicPartition(out.topic, out.partition or 0)
        if where.partition >= SEVERAL or (out.topic == "files" and (where.partition, out.key) in self.refused):
            raise RecordRefused(f"{where} does not take {out.key!r}")
        others, self.meanwhile = self.meanwhile, []
        for record in others:
            self.records[where].append(record)
            self.take(record)
        written = Record(*where, len(self.records[where]), asyncio.get_running_loop().time(), out.key, out.value)
        self.records[where].append(written)
        if out.topic == "batches":
            self.take(Record(*where, written.offset, written.timestamp, out.key, out.value, out.headers))
        if self.unsure and out.value is not None and (out.key or b"").endswith(self.unsure.encode()):
            raise BrokerUnavailable("not acknowledged; it may still be written")
        return written.origin

    async def read_up(self, topic: str) -> None:
        assert topic == "batches"

    async def size(self, topic: str) -> int:
        assert topic == "files"
        return SEVERAL

    async def end(self, where: TopicPartition) -> int:
        return len(self.records.get(where, ()))

    async def between(self, where: TopicPartition, first: int, end: int) -> AsyncIterator[Record]:
        for found in self.records[where][first:end]:
            yield found

    def keys(self, topic: str, partition: int) -> list[bytes | None]:
        """Of the tombstones in a partition."""
        return [found.key for found in self.records[TopicPartition(topic, partition)] if found.value is None]


@pytest.fixture
def topics(monkeypatch: pytest.MonkeyPatch) -> Topics:
    made = Topics()

    def log(*, take: Callable[[Record], None], **_: object) -> Topics:
        made.take = take
        return made

    async def partitions_of(_kafka: object, names: tuple[str, ...]) -> dict[str, int]:
        return dict.fromkeys(names, SEVERAL)

    monkeypatch.setattr(folded_module, "FoldedLog", log)
    monkeypatch.setattr(folded_module, "IdempotentProducer", lambda **_: made)
    monkeypatch.setattr(files_module, "partitions_of", partitions_of)
    return made


def left(topics: Topics, *unfinished: UnfinishedFile, blocks: tuple[bytes, ...] = (), for_s: float) -> list[str]:
    """What is unfinished still after a door has been there for so long, by their ids."""

    async def stay() -> list[str]:
        async with Files(settings=load()) as files:
            for one in unfinished:
                await files.begin(one)
            for key in blocks:
                await topics.send(Outgoing("files", key, b"block", partition=1))
            await asyncio.sleep(for_s)
            return [one.id for one in files.index.unfinished()]

    with virtual_time() as loop:
        return loop.run_until_complete(stay())


def unfinished_at(id_: str, partition: int) -> UnfinishedFile:
    return UnfinishedFile(id=id_, at=1000.0, partition=partition, first=0)


def test_what_a_killed_door_left_is_taken_back_whatever_keys_are_written_beside_it(topics: Topics):
    blocks = (b"file-a/0", b"file-a/\xff", b"file-b/0", b"\xff", b"file-a/1")
    assert left(topics, unfinished_at("file-a", 1), blocks=blocks, for_s=2 * HOUR_S) == []
    assert [key for key in topics.keys("files", 1) if key != b"roll"] == [b"file-a/0", b"file-a/\xff", b"file-a/1"]


def test_a_file_in_a_partition_that_is_not_there_keeps_nothing_from_being_finished_and_rolled(topics: Topics):
    with capture_logs() as logs:
        said = unfinished_at("file-a", 99_999), unfinished_at("file-b", 1)
        assert left(topics, *said, blocks=(b"file-b/0",), for_s=2 * HOUR_S) == []
    assert topics.keys("files", 1) == [b"roll", b"file-b/0", b"roll"], "at first a door rolls all"
    assert [topics.keys("files", partition) for partition in (0, 2)] == [[b"roll"]] * 2
    assert [entry["event"] for entry in logs] == ["file.finished_for_another"] * 2


def test_trouble_with_a_file_or_a_partition_is_told_and_stops_no_other(topics: Topics):
    topics.refused = {(1, b"file-a/0"), (0, b"roll")}
    said = unfinished_at("file-a", 1), unfinished_at("file-b", 1)
    with capture_logs() as logs:
        topics.records[TopicPartition("files", 1)].append(Record("files", 1, 0, 1.0, b"file-a/0", b"block"))
        assert left(topics, *said, blocks=(b"file-b/0",), for_s=1.5 * HOUR_S) == ["file-a"]
    assert b"file-b/0" in topics.keys("files", 1)
    assert topics.keys("files", 2) == [b"roll"]
    told = {(entry["event"], entry.get("file")) for entry in logs if entry["log_level"] == "warning"}
    assert told == {("files.not_rolled", None), ("file.not_finished_for_another", "file-a")}


@pytest.mark.parametrize(
    ("first", "last", "partition", "deleted"),
    [
        (0, 1, 1, [b"file-a1/0", b"file-a1/1"]),
        (1, 1 << 52, 1, [b"file-a1/0"]),
        (1 << 52, 1 << 53, 1, []),
        (3, 1, 1, []),
        (0, 1 << 52, 99_999, []),
    ],
)
def test_a_file_has_no_more_blocks_than_its_partition_has_records_whatever_it_says(
    topics: Topics, first: int, last: int, partition: int, deleted: list[bytes]
):
    told = {"blocks": 1 << 52, "first": first, "last": last, "partition": partition}

    async def delete() -> list[bytes | None]:
        async with Files(settings=load()) as files:
            await topics.send(Outgoing("files", b"file-a1/0", b"block", partition=1))
            await topics.send(Outgoing("files", b"file-a1/1", b"block", partition=1))
            await files.delete(FILE.model_copy(update=told))
            return [key for key in topics.keys("files", 1) if key != b"roll"]

    with virtual_time() as loop:
        assert loop.run_until_complete(delete()) == deleted


@pytest.mark.parametrize("unsure", ["/0", "/2"])
def test_a_block_whose_writing_nobody_acknowledged_is_taken_back_with_its_file(topics: Topics, unsure: str):
    """It may have been written: without its tombstone the content of a file that is not there would stay."""
    topics.unsure = unsure

    async def write() -> None:
        async with (
            Files(settings=load(max_message_bytes=20_000)) as files,
            files.writing("file-") as writing,
        ):
            await writing.write(b"x" * 100_000)

    with virtual_time() as loop, pytest.raises(BrokerUnavailable):
        loop.run_until_complete(write())
    contents = [found for where, records in topics.records.items() if where.topic == "files" for found in records]
    last = {found.key: found.value for found in contents}
    assert any(found.value is not None for found in contents)
    assert set(last.values()) == {None}


@pytest.mark.parametrize("before", [True, False], ids=["it is known", "it came meanwhile"])
def test_a_batch_that_another_has_ended_has_that_end_also_when_kafka_keeps_only_the_last_record(
    topics: Topics, before: bool
):
    other = ENDED.model_copy(update={"output": "file-a3", "at": 6.0})

    async def end() -> BatchEnded | None:
        async with Files(settings=load()) as files:
            if before:
                await files.store(ENDED)
            else:
                topics.meanwhile = [record(ENDED)]
            await files.end(other)
            return files.index.end("batch_a1")

    with virtual_time() as loop:
        assert loop.run_until_complete(end()) == ENDED
    *earlier, last = [one.value for one in topics.records[TopicPartition("batches", 0)] if one.key == record(ENDED).key]
    assert last == record(ENDED).value
    assert len(earlier) == (0 if before else 2)
