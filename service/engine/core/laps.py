"""Where the time of a command on contexts went, and how much of it is left."""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

from service.platforms import current

_WARMS_UP = frozenset({"initialize_from_config", "compile_or_warm_up_model"})
"""Methods of a worker in which some platforms warm a model up, which is not counted as loading."""
TOLD_S = 1e-3
"""What is shorter is not told as somebody's wait: it is no more than the spread of a step."""


def longest(phases: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Of each phase the longest time."""
    names = {name: None for each in phases for name in each}
    return {name: max(each.get(name, 0.0) for each in phases) for name in names}


class Laps:
    """Where the time of a command went, in milliseconds; all of it no step was run."""

    def __init__(self) -> None:
        self._started = self._last = time.perf_counter()
        self._phases: dict[str, float] = {}

    def lap(self, name: str, *, of_that: Mapping[str, float] = MappingProxyType({})) -> None:
        """The time since the last lap is that of ``name``, but for the parts that are known by names of their own."""
        now = time.perf_counter()
        self._phases[name] = (now - self._last) * 1e3 - sum(of_that.values())
        self._phases.update(of_that)
        self._last = now

    @property
    def seconds(self) -> dict[str, float]:
        """The time of each so far, but for those that took next to none."""
        return {name: round(ms / 1e3, 4) for name, ms in self._phases.items() if ms >= 1e3 * TOLD_S}

    def answer(self, **values: Any) -> dict[str, Any]:
        stall_ms = (time.perf_counter() - self._started) * 1e3
        return {"stall_ms": stall_ms, "phases_ms": self._phases, **values}


class Due:
    """When a load is given up: after ``within_s`` seconds, or never. ``workers`` are those that do it.

    ``warming`` is called when it begins to warm the model up, where the platform has a time of its own for that.
    """

    def __init__(self, within_s: float | None, workers: int, *, warming: Callable[[], None]) -> None:
        self.workers = workers
        self._at = math.inf if within_s is None else time.monotonic() + within_s
        self._warming = warming

    def left(self) -> float | None:
        """Seconds that are left, for a worker to keep to. Raises TimeoutError where none are.

        Several workers are not interrupted in what they do together: one would wait for the other for ever.
        """
        left = self._at - time.monotonic()
        if left <= 0:
            raise TimeoutError("the model did not load in time")
        return left if self.workers == 1 and left < math.inf else None

    @contextmanager
    def warming_up(self, method: Any) -> Iterator[None]:
        """The time that a platform has to warm a model up does not count, where ``method`` is what does that.

        Raises as ``left`` does.
        """
        warm_up_s = current().warm_up_s if method in _WARMS_UP else 0.0
        self.left()
        if warm_up_s:
            self._warming()
        began = time.monotonic()
        self._at += warm_up_s
        try:
            yield
        finally:
            self._at -= max(0.0, warm_up_s - (time.monotonic() - began))
