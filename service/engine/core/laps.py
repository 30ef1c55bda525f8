"""Where the time of a command on contexts went."""

import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any


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

    def answer(self, **values: Any) -> dict[str, Any]:
        stall_ms = (time.perf_counter() - self._started) * 1e3
        return {"stall_ms": stall_ms, "phases_ms": self._phases, **values}
