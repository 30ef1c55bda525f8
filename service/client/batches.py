"""OpenAI's batches without a door: the same files and batches that `/v1/files` and `/v1/batches` show.

What is known of a batch is in the log, so it is found by its id from anywhere, and goes on without whoever asked.
"""

import asyncio
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from schemas import headers as h
from schemas.batches import BatchAsked, BatchCancelled, StoredFile
from service.errors import BatchInvalid
from service.kafka.batch_lines import Arriving, digest, window_of
from service.kafka.files import BATCH, BATCH_INPUT, FILE, Batch, Files, begin_of, new_id, owner_named
from service.kafka.reader import partitions_of
from service.settings import Settings

_PIECE_BYTES = 1 << 20
_LOOK_S = 1.0
_MISSING_S = 2.0
"""How long a topic is waited for that is not there, or may not be seen."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a batch is. ``status`` is OpenAI's: in_progress, cancelling, completed, cancelled, expired, failed."""

    id: str
    status: str
    total: int
    completed: int
    failed: int
    reason: str | None = None
    """Why the batch as a whole has failed."""

    @property
    def done(self) -> int:
        """Lines that have their answer, or never will."""
        return self.completed + self.failed

    @classmethod
    def of(cls, batch: Batch) -> Self:
        """What the log says of it."""
        reason = None if batch.ended is None else batch.ended.reason
        return cls(batch.asked.id, batch.status, batch.asked.lines, batch.completed, batch.failed, reason)


OnProgress = Callable[[Progress], None]


class Batches:
    """A client's ``batch``, or by itself with ``async with``. ``tenant``: whose they are, by a door's name of it.

    Without one they are those of a door that has no keys. The first call reads what is known of all batches. Methods
    raise BatchInvalid, Overloaded, BrokerUnavailable, TopicError, FileLost and RecordRefused.
    """

    def __init__(self, *, settings: Settings, tenant: str = "") -> None:
        self._settings = settings
        self._tenant = tenant
        self._owner = owner_named(tenant)
        self._files: Files | None = None
        self._opening = asyncio.Lock()
        self._open = AsyncExitStack()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._open.aclose()

    async def run(
        self,
        source: Path,
        output: Path,
        *,
        errors: Path | None = None,
        window: str = "24h",
        on_progress: OnProgress | None = None,
    ) -> Progress:
        """Ask all lines of a file, wait, and write the answers.

        Interrupted, it goes on without us: the same call, or ``fetch``, comes back to it. Its id is in a small file
        beside the output until the answers are there.
        """
        beside = _beside(output, errors)
        if beside in {source, output} or output == source:
            raise BatchInvalid(f"input, answers and errors are three files, not {source}, {output}, {beside}")
        begun, files = _Begun(output, beside), await self._read()
        id_ = begun.id_for(source) or new_id(BATCH, self._owner)
        if not id_.startswith(begin_of(BATCH, self._owner)):
            raise BatchInvalid(f"{output} was begun for a batch that is not this tenant's: choose another output")
        if files.index.batch(id_) is None:
            begun.note(id_, source)
            try:
                await self._submit(files, id_, source, window=window, metadata=None)
            except BatchInvalid:
                begun.forget()
                raise
        found = await self._fetch(files, id_, output, beside, on_progress)
        begun.forget()
        return found

    async def submit(self, source: Path, *, window: str = "24h", metadata: Mapping[str, str] | None = None) -> str:
        """Ask all lines of a file, and give the batch's id. ``window``: how long it may take, like 90m, 24h or 1d."""
        id_ = new_id(BATCH, self._owner)
        await self._submit(await self._read(), id_, source, window=window, metadata=metadata)
        return id_

    async def list(self) -> tuple[Progress, ...]:
        """All of this tenant's, the youngest first."""
        files = await self._read()
        return tuple(Progress.of(one) for one in reversed(files.index.batches(begin_of(BATCH, self._owner))))

    async def get(self, id_: str) -> Progress:
        """How far a batch is."""
        return Progress.of(self._found(await self._read(), id_))

    async def cancel(self, id_: str) -> Progress:
        """Let nothing more of a batch be asked. One that has ended stays as it is."""
        files = await self._read()
        batch = self._found(files, id_)
        if batch.ended is None and batch.cancelled is None:
            await files.store(BatchCancelled(id=id_, at=time.time()))
        return Progress.of(self._found(files, id_))

    async def fetch(
        self, id_: str, output: Path, *, errors: Path | None = None, on_progress: OnProgress | None = None
    ) -> Progress:
        """Wait for a batch's end, and write its answers; lines without an answer go to ``errors``, or a file beside.

        What is there already is not written over.
        """
        beside = _beside(output, errors)
        _refuse_existing(output, beside)
        return await self._fetch(await self._read(), id_, output, beside, on_progress)

    async def _fetch(
        self, files: Files, id_: str, output: Path, errors: Path, on_progress: OnProgress | None
    ) -> Progress:
        told = None
        while (ended := (batch := self._found(files, id_)).ended) is None:
            told = _tell(on_progress, Progress.of(batch), told)
            await files.moves(within_s=_LOOK_S)
        progress = Progress.of(batch)
        _tell(on_progress, progress, told)
        await _write(files, output, ended.output)
        await _write(files, errors, ended.errors)
        return progress

    async def _read(self) -> Files:
        """What there is, as it is now."""
        async with self._opening:
            if self._files is None:
                topics = self._settings.topics
                named = (topics.named(topics.batches), topics.named(topics.files))
                await partitions_of(self._settings.kafka, named, within_s=_MISSING_S)
                self._files = await self._open.enter_async_context(Files(settings=self._settings))
        await self._files.read_up()
        return self._files

    def _found(self, files: Files, id_: str) -> Batch:
        batch = files.index.batch(id_) if id_.startswith(begin_of(BATCH, self._owner)) else None
        if batch is None:
            whose = f" of tenant {self._tenant!r}" if self._tenant else ""
            raise BatchInvalid(f"there is no batch {id_[:100]!r}{whose}")
        return batch

    async def _submit(
        self, files: Files, id_: str, source: Path, *, window: str, metadata: Mapping[str, str] | None
    ) -> None:
        now = time.time()
        window_s = window_of(window, file_at=now, now=now, topics=self._settings.topics)
        files.require_room(self._owner)
        file = await self._upload(files, source)
        await files.store(
            BatchAsked(
                id=id_,
                file=file.id,
                endpoint=file.endpoints[0],
                lines=file.lines,
                at=time.time(),
                window_s=window_s,
                metadata=None if metadata is None else dict(metadata),
                headers=((h.TENANT, self._tenant),) if self._tenant else (),
            )
        )

    async def _upload(self, files: Files, source: Path) -> StoredFile:
        """Store a batch's input, checked line by line meanwhile."""
        http, most_bytes = self._settings.http, self._settings.worker.max_request_bytes
        lines = Arriving(most_lines=http.http_most_batch_lines, most_bytes=most_bytes)
        try:
            with _opened(source, most=http.http_max_file_bytes) as file:
                async with files.writing(begin_of(FILE, self._owner)) as writing:
                    while piece := file.read(_PIECE_BYTES):
                        lines.take(piece)
                        await writing.write(piece)
                    lines.end()
                    endpoints = (lines.known.endpoint,)
                    return await writing.finish(
                        filename=_as_text(source.name), purpose=BATCH_INPUT, lines=len(lines.known), endpoints=endpoints
                    )
        except BatchInvalid as wrong:
            raise BatchInvalid(f"{source}: {wrong}") from None


def _as_text(name: str) -> str:
    """A file's name, which need not be text."""
    return os.fsencode(name).decode("utf-8", "replace")


class _Begun:
    """The id of the batch that was begun for an output, in a small file beside it."""

    def __init__(self, output: Path, errors: Path) -> None:
        self._output = output
        self._errors = errors
        self._state = output.with_name(f"{output.name}.state")

    def id_for(self, source: Path) -> str | None:
        """That of an earlier run. Raises BatchInvalid where it had another input, or all of it is done."""
        if not self._state.exists():
            _refuse_existing(self._output, self._errors)
            return None
        try:
            kept = json.loads(self._state.read_text())
            id_, begun_for = str(kept["batch"]), kept["source"]
        except (OSError, ValueError, KeyError, TypeError):
            raise BatchInvalid(f"{self._state} can't be read: remove it to begin anew") from None
        if begun_for != digest(source):
            raise BatchInvalid(f"{self._output} was begun for another input than {source}: choose another output")
        return id_

    def note(self, id_: str, source: Path) -> None:
        """Before anything is asked, so that it is found again whatever happens."""
        self._state.parent.mkdir(parents=True, exist_ok=True)
        self._state.write_text(json.dumps({"batch": id_, "source": digest(source)}))

    def forget(self) -> None:
        self._state.unlink(missing_ok=True)


def _tell(on_progress: OnProgress | None, now: Progress, before: Progress | None) -> Progress:
    if on_progress is not None and now != before:
        on_progress(now)
    return now


async def _write(files: Files, path: Path, id_: str | None) -> None:
    """Write a file of the log, whole or not at all; where there is none, nothing."""
    if id_ is None:
        return
    stored = files.index.file(id_)
    if stored is None:
        raise BatchInvalid(f"there is no file {id_} any more")
    with _whole(path) as made:
        async for piece in files.content(stored):
            made.write(piece)


def _beside(output: Path, errors: Path | None) -> Path:
    return errors or output.with_name(f"{output.stem}.errors{output.suffix}")


def _refuse_existing(*paths: Path) -> None:
    for path in paths:
        if path.exists():
            raise BatchInvalid(f"{path} is there already: choose another output, or remove it")


@contextmanager
def _whole(path: Path) -> Iterator[IO[bytes]]:
    """A file that takes its name when the block ends well."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    with part.open("wb") as made:
        yield made
    part.replace(path)


@contextmanager
def _opened(path: Path, *, most: int) -> Iterator[IO[bytes]]:
    """Raises BatchInvalid where it can't be read or is too large."""
    try:
        file = path.open("rb")
    except OSError as error:
        raise BatchInvalid(str(error.strerror)) from None
    with file:
        if path.stat().st_size > most:
            raise BatchInvalid(f"at most {most} bytes are taken")
        yield file
