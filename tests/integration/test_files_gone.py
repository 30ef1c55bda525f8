"""A file that was deleted is gone from the files of the broker itself, though nobody writes another one."""

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from deploy.local.broker import LocalBroker
from schemas.batches import StoredFile
from service.errors import FileLost
from service.kafka import files as files_module
from service.kafka.files import Files, Writing, deletion_of
from service.kafka.topics import ensure_topics
from service.settings import Settings
from tests.support.bus import until
from tests.support.pool import settings_for

pytestmark = pytest.mark.broker
EAGER = {"log.cleaner.backoff.ms": "200", "log.segment.delete.delay.ms": "200", "log.cleaner.delete.retention.ms": "1"}
"""A broker that looks for work five times a second, and removes at once what it has compacted."""


@pytest.fixture(scope="module")
def own_broker() -> Iterator[LocalBroker]:
    if reason := LocalBroker.missing():
        pytest.skip(f"needs a broker whose files can be looked into: {reason}")
    with LocalBroker(EAGER, say=lambda _line: None) as own:
        yield own


@pytest.fixture
async def settings(own_broker: LocalBroker) -> Settings:
    made = settings_for(own_broker.bootstrap, files_deleted_within_s=2.0)
    await ensure_topics(made, ["llama"])
    return made


async def uploaded(files: Files, content: bytes) -> StoredFile:
    async with files.writing("file-") as writing:
        await writing.write(content)
        return await writing.finish(filename="in.jsonl", purpose="batch", lines=1)


def lies_in(folder: Path, content: bytes) -> list[str]:
    """The broker's files that have it."""
    found = []
    for path in folder.rglob("*.log*"):
        try:
            found += [str(path)] if content in path.read_bytes() else []
        except FileNotFoundError:  # the broker has just removed it
            continue
    return found


@pytest.mark.parametrize("killed", [False, True], ids=["the door goes on", "the door dies, and another one comes"])
async def test_a_deleted_file_is_gone_from_the_segments_though_nothing_else_is_written(
    own_broker: LocalBroker, settings: Settings, killed: bool
) -> None:
    data, gone, stays = own_broker.folder / "data", os.urandom(24).hex().encode(), os.urandom(24).hex().encode()
    async with AsyncExitStack() as doors:
        door = await doors.enter_async_context(Files(settings=settings))
        deleted, kept = await uploaded(door, gone), await uploaded(door, stays)
        assert lies_in(data, gone)
        assert lies_in(data, stays)
        await door.delete(deleted)
        if killed:
            await doors.aclose()
            door = await doors.enter_async_context(Files(settings=settings))
        assert door.index.file(deleted.id) is None
        await until(lambda: asyncio.to_thread(lambda: not lies_in(data, gone)))
        assert lies_in(data, stays)
        assert b"".join([piece async for piece in door.content(kept)]) == stays


async def half_written(door: Files, content: bytes) -> None:
    """What a process leaves that is killed while it takes an upload."""
    await Writing(door, "file-half", block_bytes=len(content)).write(content)


async def half_deleted(door: Files, content: bytes) -> None:
    """What a process leaves that is killed before anything but the intention to delete is written."""
    await door.begin(deletion_of(await uploaded(door, content)))


async def is_finished(door: Files) -> bool:
    """Whether nothing is left that somebody wrote or deleted in part."""
    await door.read_up()
    return not door.index.unfinished()


@pytest.mark.parametrize("left", [half_written, half_deleted])
async def test_what_a_killed_door_left_is_finished_by_another(
    own_broker: LocalBroker, settings: Settings, left: Callable[[Files, bytes], Awaitable[None]]
) -> None:
    data, gone, stays = own_broker.folder / "data", os.urandom(24).hex().encode(), os.urandom(24).hex().encode()
    async with Files(settings=settings) as door:
        kept = await uploaded(door, stays)
        await left(door, gone)
    now = asyncio.get_running_loop().time()
    async with Files(settings=settings) as door:
        await door.finish_what_others_left(now)
        there = bool(lies_in(data, gone)), len(door.index.unfinished())
        long = asyncio.get_running_loop().time() - now >= settings.topics.segment_of_files_s
        # The door looks by itself, too, and takes up a deletion again as soon as that.
        assert there == (True, 1) or (long and left is half_deleted), "whoever does it may do it still"
        await door.finish_what_others_left(now + 4000.0)
        await until(lambda: is_finished(door))  # it may have begun by itself, too, and end after this
        assert door.index.files("file-") == [kept]
        await until(lambda: asyncio.to_thread(lambda: not lies_in(data, gone)))
        assert b"".join([piece async for piece in door.content(kept)]) == stays


async def test_a_file_that_is_whole_stays_though_its_writer_died_before_it_said_so(settings: Settings) -> None:
    async with Files(settings=settings) as door:
        file = await uploaded(door, b"whole")
        await door.begin(deletion_of(file).model_copy(update={"deleted": False}))
        await door.read_up()
        now = asyncio.get_running_loop().time()  # as the door has it, which looks by itself, too
        await door.finish_what_others_left(now)
        await door.finish_what_others_left(now + 4000.0)
        await door.read_up()
        assert (door.index.unfinished(), door.index.file(file.id)) == ([], file)
        assert b"".join([piece async for piece in door.content(file)]) == b"whole"


async def test_an_upload_that_takes_too_long_ends_before_another_process_takes_it_for_left(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files_module, "_WRITTEN_WITHIN_S", -1.0)
    async with Files(settings=settings) as door:
        with pytest.raises(FileLost, match="was being written"):
            await uploaded(door, b"late")
