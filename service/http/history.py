"""The last minutes, as the status page draws them: who ran when, switches, freezes, what ended and what went wrong."""

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

from schemas.results import Outcome
from schemas.status import Status
from service.ports import Settlement, Watcher

KEPT_S = 300.0
_SWITCHES = 1000
_ENDS = 20_000
_ERRORS = 30
_RATE_S = 10.0
_MESSAGE = 200


@dataclass(frozen=True, slots=True)
class Switched:
    """A switch that is done. ``at`` is its end, since the epoch."""

    at: float
    left: str
    to: str
    ms: float
    stall_ms: float
    tier: str
    mode: str
    kept: int
    aborted: int
    operator: bool


@dataclass(frozen=True, slots=True)
class Failed:
    """Something that went wrong. ``request`` is empty for a switch."""

    at: float
    request: str
    model: str
    status: int
    what: str


@dataclass(frozen=True, slots=True)
class Judged:
    """An answer that had an objective. ``missed_by`` is empty where that was met."""

    at: float
    model: str
    request_class: str
    missed_by: str


class History(Watcher):
    """Bounded in time and number; what is older is forgotten."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self.switches: deque[Switched] = deque(maxlen=_SWITCHES)
        self.errors: deque[Failed] = deque(maxlen=_ERRORS)
        self._judged: deque[Judged] = deque(maxlen=_ENDS)
        self._ends: deque[float] = deque(maxlen=_ENDS)
        self._began = clock()
        self.tokens = 0
        """Tokens of the answers that have ended."""

    def settled(self, settlement: Settlement, *, alias: str, publish_s: float) -> None:  # noqa: ARG002
        """A request has ended."""
        now, result = self._clock(), settlement.result
        self.tokens += (settlement.usage or {}).get("generated_tokens", 0)
        self._ends.append(now)
        while self._ends[0] < now - _RATE_S:
            self._ends.popleft()
        if (found := result.objective) is not None:
            self._judged.append(Judged(now, alias, found.request_class, found.missed_by or ""))
            while self._judged[0].at < now - KEPT_S:
                self._judged.popleft()
        if result.outcome in {Outcome.FAILED, Outcome.EXPIRED}:
            what = "" if result.error is None else result.error.message[:_MESSAGE]
            self.errors.append(Failed(now, result.id, alias or "?", result.status, what))

    def status(self, status: Status) -> None:
        """A step of a switch."""
        report = status.switch
        if status.state in {"failed", "rolled_back"} and status.kind == "switch":
            self.errors.append(Failed(status.at, "", status.model or "?", 0, (status.reason or "")[:_MESSAGE]))
        if status.state != "completed" or report is None or not report.switched:
            return
        self.switches.append(
            Switched(
                at=status.at,
                left=report.from_model or "",
                to=report.to_model,
                ms=report.ms,
                stall_ms=report.stall_ms,
                tier=report.tier_found.value,
                mode=report.mode.value,
                kept=report.kept,
                aborted=report.aborted,
                operator=status.control_id is not None,
            )
        )

    def attained(self) -> dict[tuple[str, str], Counter[str]]:
        """What became of the objectives of the last minutes' answers: see ``reached``."""
        return reached(self._judged, self._clock() - KEPT_S)

    def shown(self, active: str) -> dict[str, Any]:
        """Everything of the last minutes; times since the epoch. ``active``: who runs now."""
        now = self._clock()
        since = max(now - KEPT_S, self._began)
        switches = [switch for switch in self.switches if switch.at >= since]
        return {
            "since": since,
            "now": now,
            "turns": turns(switches, active, since, now),
            "frozen": frozen(switches, now),
            "switches": [asdict(switch) for switch in switches],
            "errors": [asdict(failed) for failed in reversed(self.errors)],
            "requests_per_s": sum(end >= now - _RATE_S for end in self._ends) / _RATE_S,
        }


def reached(judged: Iterable[Judged], since: float) -> dict[tuple[str, str], Counter[str]]:
    """How many met their objective, by model and class, and by what others missed it: met ones under "". Pure."""
    found: dict[tuple[str, str], Counter[str]] = {}
    for one in judged:
        if one.at >= since:
            found.setdefault((one.model, one.request_class), Counter())[one.missed_by] += 1
    return found


def turns(switches: Iterable[Switched], active: str, since: float, now: float) -> list[dict[str, Any]]:
    """Which model was active from when to when. Pure."""
    found: list[dict[str, Any]] = []
    begin, who = since, None
    for switch in switches:
        left_at = max(begin, switch.at - switch.stall_ms / 1e3)
        found.append({"model": switch.left, "from": begin, "to": left_at})
        begin, who = switch.at, switch.to
    return [*found, {"model": who or active, "from": begin, "to": now}]


def frozen(switches: Iterable[Switched], now: float) -> list[dict[str, Any]]:
    """Which model had requests frozen from when to when: from a switch that kept some until its next turn. Pure."""
    found: list[dict[str, Any]] = []
    open_: dict[str, dict[str, Any]] = {}
    for switch in switches:
        if switch.to in open_:
            open_.pop(switch.to)["to"] = switch.at
        if switch.kept:
            open_[switch.left] = {"model": switch.left, "from": switch.at, "to": now, "requests": switch.kept}
            found.append(open_[switch.left])
    return found
