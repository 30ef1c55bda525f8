"""A worker as a process around the fake engine, and the lines that it logs."""

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from service.settings import Settings
from tests.support.waiting import PATIENCE_S


class Process:
    """A worker's process, and the lines that it logs."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.lines: list[dict[str, Any]] = []

    async def until(self, event: str, *, within_s: float = PATIENCE_S) -> dict[str, Any]:
        """Wait for a log line by its event."""
        async with asyncio.timeout(within_s):
            while True:
                raw = await self.process.stderr.readline()
                assert raw, f"it ended before {event!r}: {self.lines[-3:]}"
                with contextlib.suppress(ValueError):
                    self.lines.append(line := json.loads(raw))
                    if line["event"] == event:
                        return line

    async def ended(self) -> int:
        """Its exit code; what it still had to say is in ``lines``."""
        async with asyncio.timeout(PATIENCE_S):
            rest = await self.process.stderr.read()
            self.lines += [json.loads(line) for line in rest.splitlines() if line.startswith(b"{")]
            return await self.process.wait()


@asynccontextmanager
async def started(*options: str, checkout: Path | None = None, models: Path | None = None) -> AsyncIterator[Process]:
    """``checkout``: the folder of another version's code to run. ``models``: a models.yaml, for a real engine."""
    worker = ("tests.support.fake_worker",) if models is None else ("service.cli", "worker", f"--models={models}")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", *worker, *options), cwd=checkout, stderr=asyncio.subprocess.PIPE, limit=1 << 20
    )
    try:
        yield Process(process)
    finally:
        if process.returncode is None:
            process.kill()
            with contextlib.suppress(RuntimeError):  # somebody else reads it
                await process.stderr.read()  # one that waits for its reader would not be seen to end
            await process.wait()


def options_of(settings: Settings, **given: object) -> list[str]:
    values = {
        "bootstrap_servers": settings.kafka.bootstrap_servers,
        "topic_prefix": settings.topics.topic_prefix,
        "group_id": settings.worker.group_id,
        "request_partitions": 2,
        **given,
    }
    return [word for name, value in values.items() for word in ("--set", f"{name}={value}")]


class Worker:
    """A worker's process whose log lines are read as they come, however many."""

    def __init__(self, process: Process) -> None:
        self.process = process

    @property
    def pid(self) -> int:
        """Of a process that lives."""
        assert self.process.process.returncode is None, self.process.lines[-3:]
        return self.process.process.pid

    def said(self, event: str) -> list[dict[str, Any]]:
        """The log lines of an event."""
        return [line for line in self.process.lines if line["event"] == event]

    async def read(self) -> None:
        """Until the process ends."""
        while raw := await self.process.process.stderr.readline():
            with contextlib.suppress(ValueError):
                self.process.lines.append(json.loads(raw))


@asynccontextmanager
async def working(
    settings: Settings, *options: str, checkout: Path | None = None, models: Path | None = None, **given: object
) -> AsyncIterator[Worker]:
    """A worker that is ready; ``given`` are settings that its process does not have from ``settings``."""
    set_ = options_of(settings, **given)
    async with started(*options, *set_, checkout=checkout, models=models) as process:
        worker = Worker(process)
        await process.until("worker.ready", within_s=PATIENCE_S if models is None else 2 * PATIENCE_S)
        reading = asyncio.create_task(worker.read())
        yield worker
        reading.cancel()
