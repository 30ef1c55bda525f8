"""What workers say back: the progress and the answer of every control event, and their own presence."""

from enum import StrEnum
from typing import Any

from pydantic import Field

from schemas.base import Message, Value
from schemas.contexts import ContextInfo, SwitchPhase, SwitchReport


class StatusState(StrEnum):
    """The phases of a switch, and the answers that end any other control event."""

    ACCEPTED = SwitchPhase.ACCEPTED.value
    DRAINING = SwitchPhase.DRAINING.value
    SWITCHING = SwitchPhase.SWITCHING.value
    COMPLETED = SwitchPhase.COMPLETED.value
    NO_OP = SwitchPhase.NO_OP.value
    FAILED = SwitchPhase.FAILED.value
    ROLLED_BACK = SwitchPhase.ROLLED_BACK.value
    REJECTED = "rejected"
    TOO_LATE = "too_late"


TERMINAL = frozenset(
    {
        StatusState.COMPLETED,
        StatusState.NO_OP,
        StatusState.FAILED,
        StatusState.ROLLED_BACK,
        StatusState.REJECTED,
        StatusState.TOO_LATE,
    }
)


class HoldInfo(Value):
    """An operator's hold: the scheduler does not leave ``model``. Times are seconds since the epoch.

    It stands from ``since``, when the switch was done, until ``until``; or until nothing is left to do, where
    ``drained`` is set; or until the next switch.
    """

    model: str
    since: float
    until: float | None = None
    drained: bool = False
    control_id: str | None = None


class Status(Message):
    """One step of what a worker did about a control event. ``at`` is since the epoch.

    ``control_id`` is the event's id, ``kind`` its type; a switch that the scheduler decided has no ``control_id``.
    """

    worker: str
    state: StatusState
    kind: str
    at: float
    control_id: str | None = None
    model: str | None = None
    reason: str | None = None
    switch: SwitchReport | None = None
    contexts: tuple[ContextInfo, ...] = ()
    answer: dict[str, Any] | None = None
    """What a query, a list or any other question was answered with."""
    hold: HoldInfo | None = None
    """What stands from now on, where a switch is done."""


class QueueInfo(Value):
    """The requests that wait for one model."""

    waiting: int = 0
    running: int = 0
    tokens: int = 0
    oldest_s: float = 0.0
    paused: bool = Field(default=False, exclude_if=lambda paused: not paused)
    """Whether an operator lets them wait; those that run go on."""


LEFT = "left"
"""The state of a presence whose worker has ended in good order."""
UNREADY = frozenset({"starting", "loading", "draining", "unhealthy", "disconnected", LEFT})
"""States in which a worker takes no requests."""


class Loading(Value):
    """A model that is being loaded. Until it is there, the worker's engine may run nothing else."""

    model: str
    since: float
    """Seconds since the epoch."""
    phase: str = ""
    """What it is at, in words."""


class TenantShare(Message):
    """What a worker has of one tenant's requests: how many are under way, and their bytes with those that wait."""

    under_way: int = Field(default=0, ge=0)
    bytes: int = Field(default=0, ge=0)


class Presence(Message):
    """A worker as it stands, published every few seconds; the latest per worker id counts."""

    worker: str
    pool: str
    at: float
    interval_s: float = Field(ge=0, allow_inf_nan=False)
    """A presence older than a few intervals is stale."""
    version: str = ""
    state: str = "serving"
    """``starting``, ``loading``, ``serving``, ``paused``, ``draining``, ``unhealthy``, ``disconnected`` (no broker
    answers it), or ``left``: gone, but what it learnt stays for a successor."""
    loading: Loading | None = None
    """What it is loading, at its start or in a switch."""
    trouble: str | None = None
    """What has not moved for too long, where it is unhealthy; that no broker answers, where it is disconnected."""
    active: str | None = None
    host: str = ""
    pid: int = 0
    http: str | None = None
    contexts: tuple[ContextInfo, ...] = ()
    queues: dict[str, QueueInfo] = Field(default_factory=dict)
    partitions: dict[str, tuple[int, ...]] = Field(default_factory=dict)
    overtaken: int = 0
    """Requests that retention took before this worker could read them."""
    forgotten: int = 0
    """Partitions that it took over after the broker had let their committed offsets expire."""
    hold: HoldInfo | None = None
    """What the operator's last switch still holds."""
    obeyed: str | None = None
    """The id of the operator's switch that this worker did last; what it held has ended, where ``hold`` is none."""
    inactive: str = "switch"
    """What becomes of a request for a model that is not active: the worker will ``switch`` by itself, ``park`` it until
    an operator switches, or ``refuse`` it."""
    tenants: dict[str, TenantShare] = Field(default_factory=dict)
    """What it has of those tenants that have quotas."""
    costs: dict[str, Any] = Field(default_factory=dict)
    """What switches have been measured to cost, so that a restarted worker need not learn it again."""
