"""What processes hold of the machine."""

import contextlib
import re
from collections import Counter
from pathlib import Path


def descriptors(pid: int) -> Counter[str]:
    """How many files of each name a process has open; sockets, pipes and the like by their kind."""
    kinds: Counter[str] = Counter()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            kinds[re.sub(r":\[\d+\]$", "", str(entry.readlink()))] += 1
    return kinds


def threads(pid: int) -> Counter[str]:
    """How many threads of each name a process has."""
    return Counter((entry / "comm").read_text().strip() for entry in Path(f"/proc/{pid}/task").iterdir())


def shared_segments(pid: int) -> frozenset[str]:
    """The shared-memory segments that a process has mapped."""
    maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return frozenset(line.split()[5] for line in maps if "/dev/shm/" in line)
