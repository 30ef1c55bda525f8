"""Variables of the process's environment, set for a while or for good."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager


@contextmanager
def environment_of(values: Mapping[str, str | None]) -> Iterator[None]:
    """Variables of this process's environment while something is made that looks at them; None clears one."""
    before = {name: os.environ.get(name) for name in values}
    set_environment(values)
    try:
        yield
    finally:
        set_environment(before)


def set_environment(values: Mapping[str, str | None]) -> None:
    """Set variables of this process's environment; None clears one."""
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
