"""The index over files and batches: what the log says, however often it is folded."""

from schemas.base import Record
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
from service.kafka.files import FileIndex

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
    assert folded(ASKED, OUTPUT, ENDED, other).file("file-a2") is None, "the last end counts"


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
