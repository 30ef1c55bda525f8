"""A switch as a state machine over values: which phase follows which, and the report that grows along the way."""

import time
from collections.abc import Mapping
from typing import Any

from schemas.contexts import SwitchPhase, SwitchReport
from service.ports import Observer, Transition

_FOLLOWS: Mapping[SwitchPhase | None, frozenset[SwitchPhase]] = {
    None: frozenset({SwitchPhase.ACCEPTED}),
    SwitchPhase.ACCEPTED: frozenset(
        {SwitchPhase.NO_OP, SwitchPhase.DRAINING, SwitchPhase.SWITCHING, SwitchPhase.FAILED}
    ),
    SwitchPhase.DRAINING: frozenset({SwitchPhase.SWITCHING, SwitchPhase.FAILED}),
    SwitchPhase.SWITCHING: frozenset({SwitchPhase.COMPLETED, SwitchPhase.ROLLED_BACK, SwitchPhase.FAILED}),
    SwitchPhase.COMPLETED: frozenset(),
    SwitchPhase.NO_OP: frozenset(),
    SwitchPhase.ROLLED_BACK: frozenset(),
    SwitchPhase.FAILED: frozenset(),
}
_MIB = 1 << 20


class SwitchProgress:
    """One switch, from asked to done. Each transition is told to the observer with the report as it stands."""

    def __init__(self, *, asked: float, observe: Observer | None, **known: Any) -> None:
        self.phase: SwitchPhase | None = None
        self._known = {"switched": False, **known}
        self._asked = asked
        self._observe = observe
        self._phases: dict[str, float] = {}
        self._last = asked

    @property
    def report(self) -> SwitchReport:
        """What is known at the phase that was reached."""
        return SwitchReport(**self._known)

    def lap(self, name: str) -> float:
        """The time since the last lap, in seconds, kept under ``name``."""
        now = time.perf_counter()
        seconds, self._last = now - self._last, now
        self._phases[name] = seconds * 1e3
        return seconds

    def phases(self, found: Mapping[str, float]) -> None:
        """Phases that the core measured, in milliseconds."""
        self._phases.update(found)

    def to(self, phase: SwitchPhase, **learnt: Any) -> None:
        """Go on to ``phase``. Raises ValueError where it can't follow."""
        if phase not in _FOLLOWS[self.phase]:
            raise ValueError(f"a switch can't go from {self.phase} to {phase}")
        self.phase = phase
        elapsed = time.perf_counter() - self._asked
        self._known |= {"ms": elapsed * 1e3, "switch_s": elapsed, "phases_ms": dict(self._phases), **learnt}
        if self._observe is not None:
            self._observe(Transition(phase=phase, at=time.time(), report=self.report))


def mib(size: float) -> float:
    """Bytes as MiB."""
    return size / _MIB
