"""Batches: files of requests, run and waited for, or left on the bus and fetched later.

A batch's requests carry its id in theirs, ``BATCH.LINE`` (and ``.ROUND`` when a line is asked again), and its size
and their custom ids in headers: so what was sent and what was answered is read from the bus, and nowhere else.
"""

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

from schemas import headers as h
from schemas.results import Outcome, Result
from service.client.client import Client
from service.errors import BatchInvalid
from service.kafka.batch_lines import AnswerFiles, Line, check_file, digest, read_lines

SIZE, CUSTOM_ID = "batch-size", "custom-id"
_OURS = frozenset({h.canonical(SIZE), h.canonical(CUSTOM_ID)})
_SKEW_S = 300.0
"""How far hosts' clocks may be apart."""
_DAY_S = 24 * 3600.0


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a batch is. ``rate`` is in lines per second, of this run alone."""

    total: int
    completed: int
    failed: int
    rate: float = 0.0
    sent: int = 0

    @property
    def done(self) -> int:
        return self.completed + self.failed

    @property
    def remaining_s(self) -> float | None:
        """The estimate; None where nothing moves yet."""
        return (self.total - self.done) / self.rate if self.rate else None


OnProgress = Callable[[Progress], None]


@dataclass(slots=True)
class _Journal:
    """What a later run must know of this one: a small file beside the output, gone when all is answered."""

    path: Path
    batch: str
    source: str
    round: int = 1

    @classmethod
    def open(cls, output: Path, source: Path) -> "_Journal":
        """Raises BatchInvalid where the output was begun for another input."""
        path = output.with_name(f"{output.name}.state")
        if not path.exists():
            return cls(path, new_batch_id(), digest(source))
        try:
            kept = json.loads(path.read_text())
            journal = cls(path, kept["batch"], kept["source"], kept["round"] + 1)
        except (ValueError, KeyError, TypeError):
            raise BatchInvalid(f"{path} can't be read: remove it to begin anew") from None
        if journal.source != digest(source):
            raise BatchInvalid(f"{output} was begun for another input than {source}: choose another output")
        return journal

    def write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps({"batch": self.batch, "source": self.source, "round": self.round}))


def new_batch_id() -> str:
    """An id that tells when the batch was begun, which bounds how far back the bus is read for it."""
    return f"batch-{round(time.time() * 1000):x}-{uuid.uuid4().hex[:8]}"


def begun(batch: str) -> float:
    """When a batch was begun, in seconds since the epoch. Raises BatchInvalid."""
    try:
        return int(batch.split("-")[1], 16) / 1000
    except (IndexError, ValueError):
        raise BatchInvalid(f"{batch!r} is no batch's id") from None


async def run_batch(
    client: Client,
    source: Path,
    output: Path,
    *,
    errors: Path | None = None,
    concurrency: int = 256,
    timeout_s: float = _DAY_S,
    on_progress: OnProgress | None = None,
) -> Progress:
    """Ask all of ``source``, and write answers as they come; lines that have their answer are not asked again.

    Cancelled, it withdraws what it has asked and can be run again: so can one that was killed, which collects what
    was answered in the meantime. Raises BatchInvalid, and what the client raises.
    """
    total = check_file(source)
    journal = _Journal.open(output, source)
    with AnswerFiles(output, errors) as files:
        run = _Run(client, journal, files, total, timeout_s, on_progress)
        if journal.round > 1:
            await run.recover(source)
        journal.write()
        try:
            await run.ask(source, concurrency)
        except asyncio.CancelledError:
            await asyncio.shield(client.cancel(correlation_id=run.correlation_id))
            raise
        except ExceptionGroup as group:
            raise group.exceptions[0] from group
        journal.path.unlink()
        return run.progress()


class _Run:
    """One run of a batch file."""

    def __init__(
        self,
        client: Client,
        journal: _Journal,
        files: AnswerFiles,
        total: int,
        timeout_s: float,
        on_progress: OnProgress | None,
    ) -> None:
        self._client = client
        self._journal = journal
        self._files = files
        self._total = total
        self._timeout_s = timeout_s
        self._on_progress = on_progress
        self._under_way: dict[int, set[str]] = {}
        self._began = time.monotonic()
        self._before = 0
        self.correlation_id = f"{journal.batch}.{journal.round}"

    def progress(self) -> Progress:
        """How far it is now."""
        done = self._files.completed + self._files.failed - self._before
        rate = done / max(1e-9, time.monotonic() - self._began)
        return Progress(self._total, self._files.completed, self._files.failed, rate)

    async def recover(self, source: Path) -> None:
        """Collect what earlier runs asked: answered lines are written, those still under way waited for.

        Boxes are opened before results are read, so that none falls between the reading and the waiting.
        """
        custom_ids = {line.number: line.custom_id for line in read_lines(source)}
        async for number, request_id, _ in _sent(self._client, self._journal.batch):
            if custom_ids[number] not in self._files.done:
                await self._client.expect(request_id)
                self._under_way.setdefault(number, set()).add(request_id)
        async for number, result in _answered(self._client, self._journal.batch):
            if result.outcome is not Outcome.CANCELLED:
                self._files.write(custom_ids[number], result)
            self._under_way.get(number, set()).discard(result.id)
            self._client.forget(result.id)
        self._before = self._files.completed + self._files.failed

    async def ask(self, source: Path, concurrency: int) -> None:
        """Ask every line that is not done."""
        slots = asyncio.Semaphore(concurrency)
        self._tell()
        async with asyncio.TaskGroup() as tasks:
            for line in read_lines(source):
                if line.custom_id not in self._files.done:
                    await slots.acquire()
                    task = tasks.create_task(self._one(line), name=f"batch-line-{line.number}")
                    task.add_done_callback(lambda _: slots.release())

    async def _one(self, line: Line) -> None:
        """Answer a line: by what an earlier run asked, unless that run took it back, or else by asking."""
        for request_id in self._under_way.get(line.number, ()):
            result = await self._client.result(request_id, timeout_s=self._timeout_s)
            if result.outcome is not Outcome.CANCELLED:
                break
        else:
            request_id = await _send(
                self._client, self._journal.batch, line, self._total, self.correlation_id, round_=self._journal.round
            )
            result = await self._client.result(request_id, timeout_s=self._timeout_s)
        self._files.write(line.custom_id, result)
        self._tell()

    def _tell(self) -> None:
        if self._on_progress is not None:
            self._on_progress(self.progress())


async def submit_batch(client: Client, source: Path, *, concurrency: int = 256) -> str:
    """Ask all of a file and wait for nothing; gives the batch's id once the broker has every request."""
    total, batch = check_file(source), new_batch_id()
    slots = asyncio.Semaphore(concurrency)
    async with asyncio.TaskGroup() as tasks:
        for line in read_lines(source):
            await slots.acquire()
            task = tasks.create_task(_send(client, batch, line, total, batch), name=f"batch-line-{line.number}")
            task.add_done_callback(lambda _: slots.release())
    return batch


async def batch_status(client: Client, batch: str) -> Progress:
    """How far a batch is that was submitted, by anyone. Raises BatchInvalid where the bus knows of none."""
    numbers: set[int] = set()
    total = 0
    async for number, _, headers in _sent(client, batch):
        numbers.add(number)
        total = int(headers.get(SIZE, "0"))
    if not numbers:
        raise BatchInvalid(f"no request of {batch} is on the bus")
    outcomes = {number: result.outcome async for number, result in _answered(client, batch)}
    completed = sum(outcome is Outcome.COMPLETED for outcome in outcomes.values())
    return Progress(total, completed, len(outcomes) - completed, sent=len(numbers))


async def fetch_batch(client: Client, batch: str, output: Path, *, errors: Path | None = None) -> Progress:
    """Write the answers that are there, and say how far the batch is; those fetched before are not written again."""
    sent = {number: headers async for number, _, headers in _sent(client, batch)}
    if not sent:
        raise BatchInvalid(f"no request of {batch} is on the bus")
    with AnswerFiles(output, errors) as files:
        async for number, result in _answered(client, batch):
            files.write(sent[number][CUSTOM_ID], result)
        total = int(next(iter(sent.values())).get(SIZE, "0"))
        return Progress(total, files.completed, files.failed, sent=len(sent))


async def cancel_batch(client: Client, batch: str) -> None:
    """Cancel what is left of a submitted batch."""
    begun(batch)
    await client.cancel(correlation_id=batch)


async def _send(client: Client, batch: str, line: Line, total: int, correlation_id: str, *, round_: int = 1) -> str:
    request_id = f"{batch}.{line.number}" if round_ == 1 else f"{batch}.{line.number}.{round_}"
    return await client.submit(
        line.body,
        endpoint=line.endpoint,
        request_id=request_id,
        correlation_id=correlation_id,
        headers={SIZE: str(total), CUSTOM_ID: line.custom_id},
    )


async def _sent(client: Client, batch: str) -> AsyncIterator[tuple[int, str, dict[str, str]]]:
    """Line number, request id and headers of every request of a batch that is on the bus."""
    async for record in client.requests(past=begun(batch) - _SKEW_S):
        number = _line_number(record.key, batch)
        if number is not None:
            found = h.attributes(record.headers, _OURS)
            headers = {name: given for name in (SIZE, CUSTOM_ID) if (given := found.get(name)) is not None}
            yield number, (record.key or b"").decode(), headers


async def _answered(client: Client, batch: str) -> AsyncIterator[tuple[int, Result]]:
    """Line number and result of every answer to a batch, the latest round's last."""
    async for result in client.results(past=begun(batch) - _SKEW_S, follow=False, prefix=batch):
        number = _line_number(result.id.encode(), batch)
        if number is not None:
            yield number, result


def _line_number(key: bytes | None, batch: str) -> int | None:
    parts = (key or b"").decode("utf-8", "replace").split(".")
    return int(parts[1]) if parts[0] == batch and len(parts) > 1 and parts[1].isdigit() else None
