"""The schedules to beat, as facts/peers.md describes them, for the simulator."""

import math
from collections.abc import Callable, Iterable

from schemas.contexts import Tier
from service.scheduling.machines import Machine
from service.scheduling.policy import Decision, Policy, PolicySettings
from service.scheduling.queues import Queues
from service.scheduling.scheduler import Context, Scheduler
from service.scheduling.simulator import Contender, Outcome, simulate
from service.scheduling.traces import Arrival, Trace

_ALL = 1 << 30


class Ours:
    """The worker's own scheduler, driven as the worker drives it."""

    def __init__(self, queues: Queues[Arrival], active: str, settings: PolicySettings) -> None:
        self._scheduler = Scheduler(policy=Policy(settings), active=active, now=0.0, queues=queues)
        self.decide = self._scheduler.decide
        self.switched = self._scheduler.switched
        self.finished = self._scheduler.costs.finished
        self.worked = self._scheduler.costs.worked

    def admissible(self, _alias: str, /) -> int:
        return _ALL


class Baseline:
    """What the baselines share: they know the true costs, and learn nothing."""

    def __init__(self, queues: Queues[Arrival], machine: Machine, bound_s: float) -> None:
        self._queues = queues
        self._machine = machine
        self._bound_s = bound_s
        self._active = next(iter(machine.models))
        self._since = 0.0
        self._left: dict[str, float] = {}

    def admissible(self, _alias: str, /) -> int:
        return _ALL

    def switched(self, _origin: str | None, to: str, _tier: Tier, seconds: float, now: float, /) -> None:
        self._left[self._active] = now - seconds
        self._active, self._since = to, now

    def finished(self, alias: str, *, seconds: float, tokens: int) -> None:
        """Nothing to learn."""

    def worked(self, alias: str, *, seconds: float, tokens: int) -> None:
        """Nothing to learn."""

    def _oldest(self, alias: str) -> float:
        return self._queues.view(alias).oldest

    def _since_when(self, context: Context) -> float:
        """Since when a context has waited for its turn."""
        left = self._left.get(context.alias, -math.inf)
        if context.unfinished:
            return left
        return max(left, self._oldest(context.alias))

    def _split(self, contexts: Iterable[Context]) -> tuple[bool, list[Context]]:
        """Whether the active model has something to do, and the others that have."""
        busy, others = False, []
        for context in contexts:
            wanted = bool(context.unfinished) or context.alias in self._queues.aliases
            if context.alias == self._active:
                busy = wanted
            elif wanted:
                others.append(context)
        return busy, others


class Fifo(Baseline):
    """Strictly in order of arrival: neighbours of one model run together, and each change of model is a switch."""

    def decide(self, _now: float, contexts: Iterable[Context]) -> Decision:
        contexts = list(contexts)
        if any(context.unfinished for context in contexts if context.alias == self._active):
            return Decision(self._active, None, "drains")
        first = self._first()
        return Decision(first or self._active, None, "the oldest request is its")

    def admissible(self, alias: str) -> int:
        """Those that arrived before every request of another model."""
        rival = min((self._oldest(other) for other in self._queues.aliases if other != alias), default=math.inf)
        count = 0
        for item in self._queues.waiting(alias):
            if item.arrived > rival or count >= 64:
                break
            count += 1
        return count

    def _first(self) -> str | None:
        return min(self._queues.aliases, key=self._oldest, default=None)


class Collate(Baseline):
    """llama-swap's way: whatever waits for the active model goes first, without a bound on the others' waiting."""

    def decide(self, _now: float, contexts: Iterable[Context]) -> Decision:
        busy, others = self._split(contexts)
        if busy or not others:
            return Decision(self._active, None, "collates")
        target = min(others, key=self._since_when)
        return Decision(target.alias, None, "ran dry", order=_order(others, target))


class Exhaustive(Baseline):
    """Serve the active model until it runs dry, but switch when another one has waited for the bound."""

    def decide(self, now: float, contexts: Iterable[Context]) -> Decision:
        busy, others = self._split(contexts)
        if not others:
            return Decision(self._active, None, "alone")
        target = min(others, key=self._since_when)
        needed = sum(self._machine.models[other.alias].parked_s for other in others)
        latest = self._since_when(target) + self._bound_s - needed - 1.0
        earliest = self._since + self._machine.models[self._active].parked_s
        if busy and now < max(latest, earliest):
            return Decision(self._active, max(latest, earliest), "until it runs dry or another can't wait")
        return Decision(target.alias, None, "its turn", order=_order(others, target))


class DeadlineGroups(Baseline):
    """QLM's way: groups by model in order of their earliest deadline; reordered only when a violation is predicted.

    The prediction counts the swap and the time that the group before it still needs.
    """

    def decide(self, now: float, contexts: Iterable[Context]) -> Decision:
        contexts = list(contexts)
        busy, others = self._split(contexts)
        if not others:
            return Decision(self._active, None, "alone")
        target = min(others, key=lambda context: self._due(context, now))
        if not busy:
            return Decision(target.alias, None, "the earliest group", order=_order(others, target))
        active = next(context for context in contexts if context.alias == self._active)
        costs = self._machine.models[target.alias]
        violated = self._due(target, now) - costs.switch_s(target.tier) - costs.step_s * 200
        settled = self._since + 2 * self._machine.models[self._active].parked_s
        if self._due(active, now) <= self._due(target, now):
            return Decision(self._active, now + 1.0, "its group is due first")
        if now >= max(violated, settled):
            return Decision(target.alias, None, "a violation is predicted", order=_order(others, target))
        return Decision(self._active, max(violated, settled), "no violation is predicted")

    def _due(self, context: Context, now: float) -> float:
        reachable = now + self._machine.models[context.alias].switch_s(context.tier)
        return min(
            self._queues.view(context.alias, reachable=reachable).nearest_deadline,
            context.unfinished_deadline if context.unfinished_deadline > now else math.inf,
        )


class RoundRobin(Baseline):
    """A fixed quantum each, in a circle; what is unfinished is frozen."""

    quantum_s = 10.0

    def decide(self, now: float, contexts: Iterable[Context]) -> Decision:
        busy, others = self._split(contexts)
        if not others:
            return Decision(self._active, None, "alone")
        end = self._since + self.quantum_s
        if busy and now < end:
            return Decision(self._active, end, "its quantum")
        names = list(self._machine.models)
        start = names.index(self._active)
        circle = names[start + 1 :] + names[:start]
        waiting = {context.alias: context for context in others}
        target = next(name for name in circle if name in waiting)
        return Decision(target, None, "next", order=_order(others, waiting[target]))


def _order(others: list[Context], target: Context) -> tuple[str, ...]:
    return tuple(other.alias for other in others if other is not target)


Maker = Callable[[Queues[Arrival], Machine, float], Contender]

BASELINES: dict[str, Maker] = {
    "fifo": Fifo,
    "collate": Collate,
    "exhaustive": Exhaustive,
    "deadline groups": DeadlineGroups,
    "round robin": RoundRobin,
}


def ours(queues: Queues[Arrival], machine: Machine, bound_s: float) -> Contender:
    """The worker's scheduler with its defaults."""
    return Ours(queues, next(iter(machine.models)), PolicySettings(max_wait_s=bound_s))


def ours_without_prefetch(queues: Queues[Arrival], machine: Machine, bound_s: float) -> Contender:
    """The same on an engine that can't bring a model in while another one serves."""
    return Ours(queues, next(iter(machine.models)), PolicySettings(max_wait_s=bound_s, prefetch=False))


def contest(trace: Trace, name: str, *, bound_s: float = 60.0) -> Outcome:
    """Run a trace under a schedule of ``CONTENDERS``. The baselines evict the least recently used context."""
    queues: Queues[Arrival] = Queues()
    contender = CONTENDERS[name](queues, trace.machine, bound_s)
    return simulate(trace, contender, queues, lru=name in BASELINES)


CONTENDERS: dict[str, Maker] = {**BASELINES, "gearshift, no prefetch": ours_without_prefetch, "gearshift": ours}
