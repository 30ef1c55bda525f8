"""Variables of the process's environment, set for a while or for good."""

import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

CHANGING = threading.Lock()
"""Held by who sets variables in a frontend's process for a while, in whichever thread: they are the process's."""


@contextmanager
def environment_of(values: Mapping[str, str | None]) -> Iterator[None]:
    """Variables of this process's environment while something is made that looks at them; None clears one."""
    before = {name: os.environ.get(name) for name in values}
    set_environment(values)
    try:
        yield
    finally:
        set_environment(before)


@contextmanager
def set_apart(prefix: str) -> Iterator[dict[str, str | None]]:
    """What is set inside of variables with this prefix, known when the block is left: they are as before then."""
    before = _of(prefix)
    found: dict[str, str | None] = {}
    try:
        yield found
    finally:
        after = _of(prefix)
        found |= {name: value for name, value in after.items() if before.get(name) != value}
        set_environment({**dict.fromkeys(after.keys() - before.keys()), **before})


def _of(prefix: str) -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(prefix)}


def set_environment(values: Mapping[str, str | None]) -> None:
    """Set variables of this process's environment; None clears one."""
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
