"""Worker processes around the fake engine, started again whenever they end, as an orchestrator would."""

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO

from deploy.local.guard import die_with_parent
from tests.support.bus import until
from tests.support.waiting import PATIENCE_S

RESTART_AFTER_S = 0.5


@dataclass(frozen=True)
class End:
    """A process that ended. ``signalled``: we told it to. ``said``: its last line that is no log entry."""

    worker: int
    at: float
    code: int
    signalled: bool
    said: str


class Workers:
    """Processes with stable worker ids, one for each of ``settings``; a step of their engines takes ``step_s``.

    Opened with ``async with``; each keeps its log in ``folder``, and the tally of what its engines have said.
    ``checkouts``: by number, the folder of another version's code that a worker is to run.
    """

    def __init__(
        self, *, settings: Sequence[Mapping[str, str]], folder: Path, aliases: tuple[str, ...], step_s: float
    ) -> None:
        self._settings = list(settings)
        self.checkouts: dict[int, Path] = {}
        self._folder = folder
        self._aliases = aliases
        self._step_s = step_s
        self._processes: dict[int, asyncio.subprocess.Process] = {}
        self._keepers: list[asyncio.Task[None]] = []
        self._retired: set[int] = set()
        self._back_after_s: dict[int, float] = {}
        self._signalled: set[int] = set()
        """The ids of processes that were told to end."""
        self.ends: list[End] = []

    @property
    def ids(self) -> tuple[str, ...]:
        return tuple(f"worker-{index}" for index in range(len(self._settings)))

    def pids(self) -> dict[str, int]:
        """The processes that there are just now, by worker id."""
        return {self.ids[i]: process.pid for i, process in self._processes.items() if process.returncode is None}

    async def __aenter__(self) -> "Workers":
        self._keepers = [asyncio.create_task(self._keep(index), name=id_) for index, id_ in enumerate(self.ids)]
        return self

    async def __aexit__(self, *_: object) -> None:
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        for index in self._processes:
            self.send(index, signal.SIGCONT)
            self.send(index, signal.SIGTERM)
        for process in self._processes.values():
            try:
                async with asyncio.timeout(20):
                    await process.wait()
            except TimeoutError:
                process.kill()
                await process.wait()

    def send(self, index: int, number: signal.Signals) -> None:
        """Send a signal to one of them, if it lives."""
        process = self._processes.get(index)
        if process is not None and process.returncode is None:
            if number in {signal.SIGKILL, signal.SIGTERM}:
                self._signalled.add(process.pid)
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(number)

    def add(self, settings: Mapping[str, str], *, checkout: Path | None = None) -> int:
        """Start one more, of a new id, of the code in ``checkout`` if there is one: its number."""
        index = len(self._settings)
        if checkout is not None:
            self.checkouts[index] = checkout
        self._settings.append(settings)
        self._keepers.append(asyncio.create_task(self._keep(index), name=self.ids[index]))
        return index

    async def retire(self, index: int) -> int:
        """SIGTERM, and it is not started again. Returns the exit code when it has ended."""
        self._retired.add(index)
        process = self._processes[index]
        self.send(index, signal.SIGTERM)
        return await process.wait()

    async def until_said(self, index: int, event: str, *, times: int = 1, within_s: float = PATIENCE_S) -> None:
        """Wait until one of them, over all its processes, has logged an event so often. Raises TimeoutError."""
        await until(lambda: self.said(index, event) >= times, within_s=within_s)

    def said(self, index: int, event: str) -> int:
        """How often one of them, over all its processes, has logged an event."""
        log = self.log(index)
        return log.read_bytes().count(f'"event": "{event}"'.encode()) if log.exists() else 0

    def log(self, index: int) -> Path:
        return self._folder / f"worker-{index}.log"

    def kill(self, index: int, *, back_after_s: float) -> None:
        """SIGKILL; it is started again after so long."""
        self._back_after_s[index] = back_after_s
        self.send(index, signal.SIGKILL)

    async def _keep(self, index: int) -> None:
        given = {**self._settings[index], "worker_id": self.ids[index]}
        environment = {key: value for key, value in os.environ.items() if not key.startswith("GEARSHIFT_")}
        command = ["-m", "tests.support.fake_worker", f"--aliases={','.join(self._aliases)}"]
        command += [
            f"--step-s={self._step_s}",
            f"--tally={self._folder}",
            *(f"--set={key}={value}" for key, value in given.items()),
        ]
        path = self.log(index)
        with path.open("ab") as log:
            while index not in self._retired:
                _note(log, "start")
                process = await asyncio.create_subprocess_exec(
                    *(sys.executable, *command),
                    env=environment,
                    cwd=self.checkouts.get(index),
                    stdout=log,
                    stderr=log,
                    preexec_fn=die_with_parent,  # also where this process is killed
                )
                self._processes[index] = process
                code = await process.wait()
                said = _last_words(path)
                _note(log, f"exit {code}")
                self.ends.append(End(index, time.time(), code, process.pid in self._signalled, said))
                await asyncio.sleep(self._back_after_s.pop(index, RESTART_AFTER_S))


def _last_words(log: Path) -> str:
    """The last line of a log that is no log entry: what a process that ends by an error says to a terminal."""
    with log.open("rb") as whole:
        whole.seek(max(0, log.stat().st_size - 65_536))
        lines = whole.read().decode("utf-8", "replace").splitlines()
    return next((line[:500] for line in reversed(lines) if line.strip() and not line.startswith("{")), "")


def _note(log: IO[bytes], what: str) -> None:
    log.write(f"--- {datetime.now(UTC).isoformat()} {what}\n".encode())
    log.flush()
