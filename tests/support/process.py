"""A worker as a process around the fake engine, and the lines that it logs."""

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from service.settings import Settings


class Process:
    """A worker's process, and the lines that it logs."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.lines: list[dict[str, Any]] = []

    async def until(self, event: str) -> dict[str, Any]:
        """Wait for a log line by its event."""
        async with asyncio.timeout(60):
            while True:
                raw = await self.process.stderr.readline()
                assert raw, f"it ended before {event!r}: {self.lines[-3:]}"
                with contextlib.suppress(ValueError):
                    self.lines.append(line := json.loads(raw))
                    if line["event"] == event:
                        return line

    async def ended(self) -> int:
        """Its exit code; what it still had to say is in ``lines``."""
        async with asyncio.timeout(60):
            rest = await self.process.stderr.read()
            self.lines += [json.loads(line) for line in rest.splitlines() if line.startswith(b"{")]
            return await self.process.wait()


@asynccontextmanager
async def started(*options: str) -> AsyncIterator[Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.support.fake_worker", *options, stderr=asyncio.subprocess.PIPE, limit=1 << 20
    )
    try:
        yield Process(process)
    finally:
        if process.returncode is None:
            process.kill()
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
