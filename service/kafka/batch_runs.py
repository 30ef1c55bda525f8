"""Working on batches: their lines are asked as durable calls, and their answers become files.

A line's id follows from its batch and its number, and of the calls of an id the first counts. So whoever takes a batch
over begins it again, and nothing is asked twice; two workers that have one for a moment do no harm.
"""

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import structlog
from pydantic_core import to_json

from schemas import headers as h
from schemas.base import immutable
from schemas.batches import BatchEnd, BatchEnded, BatchProgress
from schemas.requests import Endpoint
from schemas.results import Outcome, Result
from service.errors import BatchInvalid, BrokerUnavailable, FileLost, GearshiftError
from service.kafka.batch_lines import Line, content_of, never_answered, output_line, parse_line
from service.kafka.calls import Arrivals, Calls
from service.kafka.files import OUTPUT, Batch, Files

log = structlog.get_logger(__name__)
_LOOK_S = 1.0
_TELL_S = 1.0
_MOST_RUNNING = 4
"""Batches that a worker works on at a time: others wait, and hold nothing. As many that are to end do so meanwhile."""
_SILENT_S = 5.0
"""A batch that was cancelled, or whose window is over, ends without the answers that do not come for so long."""
_WINDOW = 4096
"""Lines that are asked and not answered: others wait behind no more, and no more are to be cancelled."""
_AT_ONCE = _WINDOW // 2
"""Lines that are written together. What is asked together is answered together: a transaction costs what it costs,
however much is in it."""
_AT_ONCE_BYTES = 8 << 20
_KEPT_BYTES = 32 << 20
"""Of answers' lines that a batch keeps until all are there. The others are read once more."""
_ID_BYTES = 16
_UNEXPECTED = "Its worker stumbled over something unexpected, which its log tells of"


class BatchRuns:
    """Works on the batches that are this worker's to do. Opened with ``async with``.

    ``owned`` gives the partitions of the topic of calls that this worker has now: a batch's id leads to one of them.
    """

    def __init__(self, *, calls: Calls, files: Files, owned: Callable[[], Collection[int]]) -> None:
        self._calls = calls
        self._files = files
        self._owned = owned
        self._running: dict[str, asyncio.Task[None]] = {}
        self._looking: asyncio.Task[None]

    async def __aenter__(self) -> Self:
        self._looking = asyncio.create_task(self._look_on(), name="batches")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        tasks = (self._looking, *self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _look_on(self) -> None:
        while True:
            self._look()
            await self._files.moves(within_s=_LOOK_S)

    def _look(self) -> None:
        """Begin what is ours, and again what has failed; end what is another worker's now."""
        owned = self._owned()
        unended = [one for one in self._files.index.batches() if one.ended is None]
        by_age = sorted(unended, key=lambda one: one.asked.at)
        ours = {one.asked.id: one for one in by_age if self._place(one.asked.id) in owned}
        for id_, task in list(self._running.items()):
            if task.done():
                del self._running[id_]
                if not task.cancelled() and (error := task.exception()) is not None:
                    log.warning("batch.begun_again", batch=id_, why=repr(error))
            elif id_ not in ours:
                task.cancel()
        self._begin([id_ for id_, one in ours.items() if not one.stopped])
        self._begin([id_ for id_, one in ours.items() if one.stopped])

    def _begin(self, ids: Collection[str]) -> None:
        """Work on the first of these batches."""
        waiting = [id_ for id_ in ids if id_ not in self._running]
        room = _MOST_RUNNING - (len(ids) - len(waiting))
        for id_ in waiting[: max(0, room)]:
            self._running[id_] = asyncio.create_task(_Run(id_, self._calls, self._files).run(), name=f"batch {id_}")

    def _place(self, id_: str) -> int:
        return place_of(id_, max(1, self._calls.partitions))


def place_of(batch: str, partitions: int) -> int:
    """Which of the partitions of the topic of calls a batch belongs to: who has it works on the batch."""
    return int.from_bytes(hashlib.sha256(batch.encode()).digest()[:8]) % partitions


def line_id(batch: str, number: int) -> str:
    """The id of a line's call: its owner's, as the batch's is."""
    owner = batch.removeprefix("batch_")[: 2 * 8]
    return f"resp_{owner}{hashlib.sha256(f'{batch}/{number}'.encode()).hexdigest()[: 2 * _ID_BYTES]}"


@dataclass(slots=True)
class Unsent:
    """Lines that are to be written together, by the ids of their calls, and what they ask with."""

    lines: list[tuple[str, Endpoint, bytes]] = field(default_factory=list)
    size: int = 0

    @property
    def is_full(self) -> bool:
        return len(self.lines) >= _AT_ONCE or self.size >= _AT_ONCE_BYTES

    def add(self, id_: str, line: Line) -> None:
        body = to_json(line.body)
        self.lines.append((id_, line.endpoint, body))
        self.size += len(body)


class _Run:
    """A batch, from whatever was done of it to its end."""

    def __init__(self, id_: str, calls: Calls, files: Files) -> None:
        self._id = id_
        self._calls = calls
        self._files = files
        self._custom_ids: dict[str, str] = {}
        """Of each line's call."""
        self._unsent = Unsent()
        self._answers = Arrivals()
        self._lines: dict[bytes, _Answered] = {}
        """By the ids of their calls; the others are in the log."""
        self._kept = 0
        """Bytes of these lines."""
        self._completed = 0
        self._failed = 0
        self._told = 0
        self._told_at = time.monotonic()
        self._withdrawn = False
        self._heard_at = time.monotonic()
        """When a line was answered last, or there was still time for it."""

    @property
    def _batch(self) -> Batch:
        """As it is now."""
        found = self._files.index.batch(self._id)
        assert found is not None
        return found

    async def run(self) -> None:
        """Ask what was not asked, wait for all of it, and end the batch. Raises BrokerUnavailable.

        Whatever else goes wrong would go wrong again: the batch has failed, and what it has asked is cancelled.
        """
        try:
            with self._calls.arrivals() as self._answers:
                await self._whole()
        except BrokerUnavailable:
            raise
        except Exception as error:
            log.warning("batch.failed", batch=self._id, why=repr(error))
            await self._calls.cancel_all(self._id)
            reason = str(error) if isinstance(error, GearshiftError) else _UNEXPECTED
            await self._files.end(BatchEnded(id=self._id, at=time.time(), end=BatchEnd.FAILED, reason=reason))

    async def _whole(self) -> None:
        await self._calls.read_up()
        async for line in lines_of(self._files, self._batch.asked.file):
            await self._take(line)
        await self._ask()
        self._heard_at = time.monotonic()
        while self._answers.waiting and not self._given_up:
            await self._turn()
        await self._end()

    async def _take(self, line: Line) -> None:
        id_ = line_id(self._id, line.number)
        self._custom_ids[id_] = line.custom_id
        if not self._is_asked(id_) and not self._batch.stopped:
            self._unsent.add(id_, line)
            if self._unsent.is_full:
                await self._ask()
        self._hear()

    def _is_asked(self, id_: str) -> bool:
        """Whether the log has a line's call: what has come of it is counted, or waited for."""
        call, answer = self._calls.index.call(id_), self._calls.index.answer(id_)
        if answer is not None and answer.result is not None:
            self._count(completed=answer.completed)
        elif call is not None and not call.deleted:
            self._answers.waiting.add(id_.encode())
        return call is not None

    async def _ask(self) -> None:
        """Write what was taken, as soon as there is room for it. Raises BrokerUnavailable, RecordRefused."""
        asked = self._batch.asked
        common = [(name, value.encode()) for name, value in asked.headers]
        common += [(h.CORRELATION_ID, self._id.encode()), (h.DEADLINE, repr(self._batch.expires_at).encode())]
        lines, self._unsent = self._unsent.lines, Unsent()
        while lines and not self._batch.stopped:
            room = self._calls.room(lines[0][0])
            if not room or len(self._answers.waiting) + min(room, len(lines)) > _WINDOW:
                await self._turn()
                continue
            now, lines = lines[:room], lines[room:]
            now = [one for one in now if not self._is_asked(one[0])]  # it may have come while there was no room
            self._answers.waiting.update(id_.encode() for id_, *_ in now)
            await self._calls.write(
                (id_, body, [(h.ENDPOINT, endpoint.value.encode()), *common]) for id_, endpoint, body in now
            )

    async def _turn(self) -> None:
        """Wait until there is news, and see what is answered. After the window each line's own deadline ends it."""
        await self._calls.moves(within_s=_LOOK_S)
        if self._batch.cancelled is not None and not self._withdrawn:
            await self._calls.cancel_all(self._id)
            self._withdrawn = True
        self._hear()
        await self._tell()
        if not self._batch.stopped:
            self._heard_at = time.monotonic()

    def _hear(self) -> None:
        """Take in what has come."""
        came, self._answers.came = self._answers.came, []
        for id_, result in came:
            if result is not None:
                self._count(completed=result.outcome is Outcome.COMPLETED)
                self._keep(id_, result)
        if came:
            self._heard_at = time.monotonic()

    def _count(self, *, completed: bool) -> None:
        self._completed += completed
        self._failed += not completed

    def _keep(self, id_: bytes, result: Result) -> None:
        """Keep an answer's line until all are there, as long as there is room for it."""
        if self._kept < _KEPT_BYTES:
            answered = self._lines[id_] = self._answered(result)
            self._kept += len(answered.line)

    def _answered(self, result: Result) -> "_Answered":
        return _Answered(result.outcome, _encoded(output_line(self._custom_ids[result.id], result)))

    @property
    def _given_up(self) -> bool:
        """Whether nobody answers what is still waited for, in a batch that is to end."""
        return self._batch.stopped and time.monotonic() > self._heard_at + _SILENT_S

    async def _tell(self) -> None:
        """Say how far it is, now and then."""
        done, now = self._completed + self._failed, time.monotonic()
        if done > self._told and now > self._told_at + _TELL_S:
            self._told, self._told_at = done, now
            await self._files.store(
                BatchProgress(id=self._id, at=time.time(), completed=self._completed, failed=self._failed)
            )

    async def _end(self) -> None:
        """Write what was answered, each line once, and why the others were not."""
        batch = self._batch
        stopped = BatchEnd.CANCELLED if batch.cancelled is not None else BatchEnd.EXPIRED
        completed, expired, left = 0, False, dict(self._custom_ids)
        begin = f"file-{self._id.removeprefix('batch_')[:16]}"
        async with AsyncExitStack() as stack:
            output = await stack.enter_async_context(self._files.writing(begin))
            errors = await stack.enter_async_context(self._files.writing(begin))
            async for id_, answered in self._all_answered():
                whole = answered.outcome is Outcome.COMPLETED
                completed += whole
                expired = expired or answered.outcome is Outcome.EXPIRED
                await (output if whole else errors).write(answered.line)
                del left[id_]
            for id_, custom_id in left.items():
                await errors.write(_encoded(never_answered(id_, custom_id, stopped.value)))
            names = [
                None
                if not writing.size
                else (await writing.finish(filename=f"{self._id}_{what}.jsonl", purpose=OUTPUT, batch=self._id)).id
                for writing, what in ((output, "output"), (errors, "errors"))
            ]
            end = stopped if batch.cancelled is not None or left or expired else BatchEnd.COMPLETED
            await self._files.end(
                BatchEnded(
                    id=self._id,
                    at=time.time(),
                    end=end,
                    completed=completed,
                    failed=len(self._custom_ids) - completed,
                    output=names[0],
                    errors=names[1],
                )
            )

    async def _all_answered(self) -> AsyncIterator[tuple[str, "_Answered"]]:
        """Each call's id and its line: those that are kept, then those that are read once more."""
        for id_ in self._custom_ids:
            answered = self._lines.get(id_.encode())
            if answered is not None and not self._calls.index.deleted(id_.encode()):
                yield id_, answered
        async for result in self._calls.results(id_ for id_ in self._custom_ids if id_.encode() not in self._lines):
            yield result.id, self._answered(result)


@immutable
class _Answered:
    """An answer as a line of its batch's files."""

    outcome: Outcome
    line: bytes


async def lines_of(files: Files, id_: str) -> AsyncIterator[Line]:
    """The requests of a batch's input. Raises FileLost, BatchInvalid, BrokerUnavailable."""
    file = files.index.file(id_)
    if file is None:
        raise FileLost(f"there is no file {id_} any more: upload it again")
    rest, number, count = b"", 0, 0
    async for block in files.content(file):
        *whole, rest = (rest + block).split(b"\n")
        if max(map(len, (*whole, rest))) > files.most_line_bytes:
            raise BatchInvalid(f"a line has more than {files.most_line_bytes} bytes")
        for raw in whole:
            number += 1
            if content := content_of(number, raw):
                count += 1
                if count > files.most_lines:
                    raise BatchInvalid(f"there are more than {files.most_lines} lines")
                yield parse_line(number, content)
    if content := content_of(number + 1, rest):
        yield parse_line(number + 1, content)


def _encoded(line: Mapping[str, object]) -> bytes:
    return to_json(line, inf_nan_mode="null") + b"\n"
