"""What threads this process has, whoever started them, and which CPUs they run on."""

import os
import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_NODES = Path("/sys/devices/system/node")


def tasks() -> set[int]:
    """The ids of this process's threads."""
    return {int(task.name) for task in Path("/proc/self/task").iterdir()}


def further_threads() -> list[str]:
    """The names that the system has for all but the main one."""
    return sorted(Path(f"/proc/self/task/{task}/comm").read_text().strip() for task in tasks() - {os.getpid()})


def spread() -> set[int]:
    """Let this thread run on every CPU that the process has threads on; the answer is where it might run beside them.

    A thread inherits the CPUs of the one that starts it. In vLLM's CPU worker that is a single one, as each of OpenMP's
    threads has one: a second team of them would all be on the main thread's. Beside them are CPUs near the same
    memory that the parent may run on: vLLM leaves some to the engine's other processes, which have little to do while
    steps run.
    """
    ours = set().union(*map(_of_task, tasks()))
    _run_on(ours)
    return _of_task(os.getppid()) - ours - _far(ours)


@contextmanager
def aside(cpus: Collection[int]) -> Iterator[None]:
    """Have this thread run on these CPUs, if there are any."""
    before = os.sched_getaffinity(0)
    _run_on(cpus or before)
    try:
        yield
    finally:
        _run_on(before)


def listed(text: str) -> list[int]:
    """The CPUs of a list as the kernel and libraries of OpenMP write it, such as ``0-3,8``."""
    ranges = re.findall(r"(\d+)(?:-(\d+))?", text)
    return [cpu for first, last in ranges for cpu in range(int(first), int(last or first) + 1)]


def _run_on(cpus: Collection[int]) -> None:
    with suppress(OSError):  # they were taken from the process meanwhile
        os.sched_setaffinity(0, cpus)


def _of_task(task: int) -> set[int]:
    try:
        return os.sched_getaffinity(task)
    except OSError:  # it has ended
        return set()


def _far(cpus: Collection[int]) -> set[int]:
    """All CPUs of the NUMA nodes that none of these ones is of; none where the kernel knows no nodes."""
    nodes = [set(listed(path.read_text())) for path in _NODES.glob("node*/cpulist")]
    return set().union(*(node for node in nodes if node.isdisjoint(cpus)))
