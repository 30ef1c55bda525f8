"""Shared memory that processes have mapped, and what is left of it when they were killed."""

from collections.abc import Iterable
from contextlib import suppress
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

_FOLDER = Path("/dev/shm")  # noqa: S108 - where Linux has them


def segments_of(pids: Iterable[int]) -> frozenset[str]:
    """The names of the segments that these processes have mapped now, as Python knows them."""
    found: set[str] = set()
    for pid in pids:
        with suppress(OSError):  # it has ended, or this system has no such files
            lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
            paths = (Path(line.split(maxsplit=5)[-1]) for line in lines)
            found.update(path.name for path in paths if path.parent == _FOLDER)
    return frozenset(found)


def unlink(names: Iterable[str]) -> None:
    """Give back those that are still there: who made one and was killed has not."""
    for name in names:
        with suppress(FileNotFoundError):
            segment = SharedMemory(name)
            segment.close()
            segment.unlink()
