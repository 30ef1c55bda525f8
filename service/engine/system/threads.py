"""What threads this process has, whoever started them."""

import os
from pathlib import Path


def tasks() -> set[int]:
    """The ids of this process's threads."""
    return {int(task.name) for task in Path("/proc/self/task").iterdir()}


def further_threads() -> list[str]:
    """The names that the system has for all but the main one."""
    return sorted(Path(f"/proc/self/task/{task}/comm").read_text().strip() for task in tasks() - {os.getpid()})
