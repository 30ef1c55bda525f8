"""Which contexts give their memory back so that another one fits. Values in, a plan out; the engine carries it out."""

import math
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Held:
    """A context that is on the device (or parked in host memory, where only ``host_bytes`` counts).

    ``next_use`` ranks when it is expected to run again, soonest smallest; infinity: nobody asks for it.
    ``idle_s`` is how long it had no request; ``idle_ttl`` after how much of that it is to go.
    """

    alias: str
    device_bytes: int = 0
    host_bytes: int = 0
    bring_back_s: float = 1.0
    next_use: float = math.inf
    unfinished: int = 0
    pinned: bool = False
    active: bool = False
    idle_s: float = 0.0
    idle_ttl: float | None = None

    @property
    def worth(self) -> float:
        """What keeping it saves per byte and turn: seconds, sooner ones counting more."""
        size = max(1, self.device_bytes + self.host_bytes)
        return self.bring_back_s * (1 + self.unfinished) / size / (1 + self.next_use)


@dataclass(frozen=True, slots=True)
class Need:
    """A context that is to be resident."""

    alias: str
    device_bytes: int
    host_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do first. ``problem`` says with figures why it can't be done; nothing is to be done then."""

    park: tuple[str, ...] = ()
    drop: tuple[str, ...] = ()
    problem: str | None = None


def plan(need: Need, held: Iterable[Held], *, device_budget: int | None, host_budget: int | None = None) -> Plan:
    """Make room for ``need`` on the device and in host memory, giving up what is worth least.

    A parked context of ``held`` has no ``device_bytes``. A context with unfinished requests may be parked, never
    dropped; the pinned and the active ones stay. None for a budget: no limit.
    """
    contexts = [context for context in held if context.alias != need.alias]
    park = _chosen(
        need.device_bytes,
        device_budget,
        [(context, context.device_bytes) for context in contexts if context.device_bytes],
    )
    if park is None:
        return Plan(problem=_explain(need.alias, "device", need.device_bytes, device_budget, contexts))
    drop = _chosen(
        need.host_bytes,
        host_budget,
        [(context, context.host_bytes) for context in contexts if context.host_bytes],
        droppable=frozenset(context.alias for context in contexts if not context.unfinished),
    )
    if drop is None:
        return Plan(problem=_explain(need.alias, "host", need.host_bytes, host_budget, contexts))
    return Plan(park=tuple(alias for alias in park if alias not in drop), drop=drop)


def idle(held: Iterable[Held]) -> Plan:
    """Which contexts have been idle for longer than they may: resident ones are parked, parked ones dropped."""
    over = [
        context
        for context in held
        if context.idle_ttl is not None
        and context.idle_s >= context.idle_ttl
        and not (context.pinned or context.active or context.unfinished)
    ]
    return Plan(
        park=tuple(context.alias for context in over if context.device_bytes),
        drop=tuple(context.alias for context in over if not context.device_bytes and context.idle_ttl),
    )


def _chosen(
    bytes_needed: int,
    budget: int | None,
    sized: list[tuple[Held, int]],
    *,
    droppable: frozenset[str] | None = None,
) -> tuple[str, ...] | None:
    """Those to give up, least worth first, then without those that turn out not to be needed; None: it can't be."""
    if budget is None:
        return ()
    excess = bytes_needed + sum(size for _, size in sized) - budget
    chosen: list[tuple[Held, int]] = []
    for context, size in sorted(sized, key=lambda pair: (pair[0].worth, pair[0].alias)):
        if excess <= 0:
            break
        movable = not (context.pinned or context.active)
        if movable and (droppable is None or context.alias in droppable):
            chosen.append((context, size))
            excess -= size
    if excess > 0:
        return None
    for context, size in sorted(chosen, key=lambda pair: -pair[0].worth):
        if excess + size <= 0:
            chosen.remove((context, size))
            excess += size
    return tuple(context.alias for context, _ in chosen)


def _explain(alias: str, where: str, needed: int, budget: int | None, contexts: list[Held]) -> str:
    fixed = [context for context in contexts if context.pinned or context.active]
    sizes = {context.alias: context.device_bytes if where == "device" else context.host_bytes for context in fixed}
    kept = ", ".join(f"{name} {_gib(size)}" for name, size in sizes.items() if size)
    detail = f"; pinned or active: {kept}" if kept else ""
    return f"{alias} does not fit: it needs {_gib(needed)} of {where} memory, the budget is {_gib(budget or 0)}{detail}"


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.2f} GiB"
