"""What can be said of a model's context: its tier, its size, and what a switch between two of them did."""

from enum import StrEnum

from pydantic import Field

from schemas.base import Value


class Tier(StrEnum):
    """Where a context's weights are, which decides what coming back costs."""

    RESIDENT = "resident"
    """Weights and KV cache on the device: under a millisecond."""
    PARKED = "parked"
    """Weights in host memory, and what is in use of the KV cache, the rest of which is given back: one copy in."""
    DROPPED = "dropped"
    """Nothing held: a load from disk."""


class KvKept(StrEnum):
    """What of its KV cache a parked context has kept: its blocks come back under the same ids."""

    ALL = "all"
    """What unfinished requests have, and the prefix cache."""
    IN_USE = "in_use"
    """What unfinished requests have; of the prefix cache as much as the budget allowed, or nothing."""
    NONE = "none"
    """Nothing: its requests were preempted, and are prefilled again."""


class SwitchMode(StrEnum):
    """What happens to the requests that the model being left is running."""

    KEEP = "keep"
    """Freeze them; they go on when their model is active again."""
    DRAIN = "drain"
    """Finish them first, up to a deadline."""
    ABORT = "abort"
    """End them now with what they have."""


class Leftover(StrEnum):
    """What happens to requests that a drain's deadline leaves unfinished."""

    KEEP = "keep"
    ABORT = "abort"


class SwitchPhase(StrEnum):
    """The states of a switch, in order; ``failed`` and ``rolled_back`` end one that did not work."""

    ACCEPTED = "accepted"
    DRAINING = "draining"
    SWITCHING = "switching"
    COMPLETED = "completed"
    NO_OP = "no_op"
    FAILED = "failed"
    ROLLED_BACK = "rolled_back"


class ContextInfo(Value):
    """A context as it stands. Sizes are bytes, on the device or in host memory, this model's alone."""

    alias: str
    tier: Tier
    active: bool = False
    asleep: bool = Field(default=False, exclude_if=lambda asleep: not asleep)
    """Put to sleep by its operator: only a wake brings it back. Left out where it is not: presences stay small."""
    pinned: bool = False
    unfinished: int = 0
    weights_bytes: int = 0
    kv_bytes: int = 0
    host_bytes: int = 0
    kv_kept: KvKept | None = Field(default=None, exclude_if=lambda kept: kept is None)
    """Of a parked context. Left out otherwise."""
    kv_kept_bytes: int = Field(default=0, exclude_if=lambda kept: not kept)
    """What that takes, as copies on the host or in its place; in ``host_bytes`` where it is copied."""
    kv_borrowed_bytes: int = Field(default=0, exclude_if=lambda borrowed: not borrowed)
    """What it had of other models' KV memory, beyond its own, when it was last left. Left out where nothing was."""
    kv_wait_s: float = Field(default=0.0, exclude_if=lambda waited: not waited)
    """The longest time, in seconds, that one of its steps waited for memory which others had, when it last ran."""
    kv_preempted: int = Field(default=0, exclude_if=lambda preempted: not preempted)
    """How many requests of other models were preempted for that, who had borrowed what was its own."""
    stall_s: dict[str, float] = Field(default_factory=dict, exclude_if=lambda stalls: not stalls)
    """What was last done to it while another model was active, by phase: the longest time, in seconds, that the other
    one's steps waited in one piece, or would have where it had nothing to do; beyond a slice, where it was done in
    slices. Left out where nothing was."""
    max_model_len: int | None = None
    """Tokens of prompt and answer together, as resolved; a load may still settle on less."""
    loras: tuple[str, ...] = ()


class SwitchReport(Value):
    """What a switch did. Times are seconds except those named ``_ms``; memory is MiB.

    The fields ``switched`` to ``stash_memory_after_mb`` are those that vllm-gaudi's multi-model engine answers with.
    """

    from_model: str | None
    to_model: str
    mode: SwitchMode
    tier_left: Tier = Tier.RESIDENT
    tier_found: Tier = Tier.DROPPED
    kv_kept: KvKept | None = None
    """What of its KV cache the model that was left has kept; null where it was not parked."""
    kv_kept_mb: float = 0.0
    kv_borrowed_mb: float = 0.0
    """What the model that was left had of other models' KV memory, beyond its own."""
    kv_wait_s: float = 0.0
    """The longest time that one of its steps had waited for memory which others had, since it was switched to."""
    kv_preempted: int = 0
    """How many requests of other models were preempted for that, who had borrowed what was its own."""
    ms: float = 0.0
    """The whole switch, as its caller saw it: asked until done."""
    stall_ms: float = 0.0
    """The part of it in which the core ran no step."""
    stall_s: dict[str, float] = Field(default_factory=dict)
    """Before it, when the model was brought in beside others: its context's ``stall_s``."""
    phases_ms: dict[str, float] = Field(default_factory=dict)
    kept: int = 0
    aborted: int = 0
    switched: bool = True
    drain_s: float = 0.0
    reconfigure_s: float = 0.0
    switch_s: float = 0.0
    memory_before_mb: float = 0.0
    memory_after_mb: float = 0.0
    memory_after_unload_mb: float = 0.0
    freed_memory_mb: float = 0.0
    stash_memory_after_mb: float = 0.0
    host_memory_before_mb: float = 0.0
    host_memory_after_mb: float = 0.0
    core_pid: int = 0
    worker_pids: tuple[int, ...] = ()
