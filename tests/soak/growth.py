"""What processes hold while they run, and whether it grows."""

import asyncio
import contextlib
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import psutil

EVERY_S = 5.0


@dataclass(frozen=True, slots=True)
class Sample:
    """One process at one moment. ``memory``: bytes that are its own (USS)."""

    memory: int
    descriptors: int
    """But for its connections."""
    threads: int
    connections: int = 0
    """To brokers: clients make them where a partition's leader or a coordinator is, and close those that are idle."""


@dataclass(frozen=True, slots=True)
class Growth:
    """The median of the last quarter against that of the second: of memory the part that came on top.

    Connections come and go with brokers: of them the last quarter's median has grown by what it has over the most
    that there were in the first half.
    """

    memory: float
    descriptors: int
    threads: int
    connections: int
    samples: int


def growth(samples: Sequence[Sample]) -> Growth:
    """Of one process over its life; the first quarter is for growing into its work."""
    quarter = len(samples) // 4
    second, last = samples[quarter : 2 * quarter], samples[len(samples) - quarter :]

    def median(part: Sequence[Sample], name: str) -> float:
        return statistics.median(getattr(sample, name) for sample in part)

    return Growth(
        memory=round(median(last, "memory") / median(second, "memory") - 1, 4),
        descriptors=round(median(last, "descriptors") - median(second, "descriptors")),
        threads=round(median(last, "threads") - median(second, "threads")),
        connections=max(0, round(median(last, "connections")) - max(one.connections for one in samples[: 2 * quarter])),
        samples=len(samples),
    )


def course(samples: Sequence[Sample], points: int = 20) -> list[float]:
    """The medians of so many parts of a process's life: MiB that were its own."""
    return [round(statistics.median(one.memory for one in part) / (1 << 20), 1) for part in _parts(samples, points)]


def kinds(samples: Sequence[Sample], points: int = 20) -> list[str]:
    """The same of its descriptors, and of its connections."""
    middle = statistics.median_low
    return [
        f"{middle([one.descriptors for one in part])} and {middle([one.connections for one in part])}"
        for part in _parts(samples, points)
    ]


def _parts(samples: Sequence[Sample], points: int) -> list[Sequence[Sample]]:
    size = max(1, len(samples) // points)
    return [samples[first : first + size] for first in range(0, len(samples), size)]


class Watch:
    """Looks at processes again and again. ``pids``: who is there, by name."""

    def __init__(self, pids: Callable[[], Mapping[str, int]]) -> None:
        self._pids = pids
        self.seen: defaultdict[tuple[str, int], list[Sample]] = defaultdict(list)

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            for name, pid in self._pids().items():
                with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                    self.seen[name, pid].append(sample(pid))
            await asyncio.sleep(EVERY_S)


def sample(pid: int) -> Sample:
    """Raises psutil.NoSuchProcess."""
    process = psutil.Process(pid)
    with process.oneshot():
        connected = [one for one in process.net_connections("tcp") if one.raddr]
        others = process.num_fds() - len(connected)
        return Sample(process.memory_full_info().uss, others, process.num_threads(), len(connected))
