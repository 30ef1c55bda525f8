"""The schedules to beat, each as its own papers or documentation describe it, for the simulator."""

import math
from collections.abc import Callable, Iterable
from itertools import islice

from schemas.contexts import Tier
from service.scheduling.machines import Machine
from service.scheduling.policy import Decision, PolicySettings
from service.scheduling.queues import Queues, Waiting
from service.scheduling.replay import Ours
from service.scheduling.scheduler import Context
from service.scheduling.simulator import Arrival, Contender, Outcome, Trace, simulate

_ALL = 1 << 30
BOUND_S = 60.0
"""The bound on any wait that the benches ask for: the default."""


class Baseline:
    """What the baselines share: they know the true costs, and learn nothing."""

    def __init__(self, queues: Queues[Arrival], machine: Machine, bound_s: float) -> None:
        self._queues = queues
        self._machine = machine
        self._bound_s = bound_s
        self._active = next(iter(machine.models))
        self._since = 0.0
        self._left: dict[str, float] = {}

    def take(self, alias: str, most: int, _now: float, /) -> list[Waiting[Arrival]]:
        return self._queues.take(alias, min(most, self.admissible(alias)))

    def takes_at(self, _alias: str, /) -> float:
        return -math.inf

    def admissible(self, _alias: str, /) -> int:
        """How many waiting requests of the active model may start now."""
        return _ALL

    def switched(self, _origin: str | None, to: str, _tier: Tier, seconds: float, now: float, /) -> None:
        self._left[self._active] = now - seconds
        self._active, self._since = to, now

    def finished(self, alias: str, *, seconds: float, tokens: int, said: int) -> None:
        """Nothing to learn."""

    def did(self, alias: str, *, seconds: float, prompt: float, steps: float, rows: float) -> None:
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


class IdleSwap(Baseline):
    """Sleep mode by idle time: a model sleeps when it has been idle as long as its successor takes to wake."""

    def __init__(self, queues: Queues[Arrival], machine: Machine, bound_s: float) -> None:
        super().__init__(queues, machine, bound_s)
        self._idle_since: float | None = None

    def decide(self, now: float, contexts: Iterable[Context]) -> Decision:
        busy, others = self._split(contexts)
        if busy or not others:
            self._idle_since = None if busy else now if self._idle_since is None else self._idle_since
            return Decision(self._active, None, "not idle, or nobody else waits")
        self._idle_since = now if self._idle_since is None else self._idle_since
        target = min(others, key=self._since_when)
        until = self._idle_since + self._machine.models[target.alias].switch_s(target.tier)
        if now < until:
            return Decision(self._active, until, "idle, but not for long")
        self._idle_since = None
        return Decision(target.alias, None, "was idle", order=_order(others, target))


class TokenTurns(Baseline):
    """Aegaeon's way: prompts in groups of one model, first come first served; decoding by weighted turns.

    It has devices for prompts and devices for decoding; on one, a group's prompts and a turn of decoding alternate, and
    the turn follows on the prompts of its own model where there were any. A turn's length is the paper's:
    ``q_i = c / (n_i (alpha - sum 1/n_k))`` with ``n_k`` the steps that fit into the time per token, ``c`` the switches
    of a round, and ``alpha`` such that no turn is longer than four seconds. It is no shorter than half a second, for
    where switches are all but free the formula comes to less than a step.
    """

    group = 8
    longest_s = 4.0
    shortest_s = 0.5

    def __init__(self, queues: Queues[Arrival], machine: Machine, bound_s: float) -> None:
        super().__init__(queues, machine, bound_s)
        self._seconds = 0.0
        self._until = 0.0
        self._prompts = False
        self._allowed = 0
        self._round: list[str] = []

    def admissible(self, _alias: str) -> int:
        allowed, self._allowed = self._allowed, 0
        return allowed

    def decide(self, now: float, contexts: Iterable[Context]) -> Decision:
        known = {context.alias: context for context in contexts}
        running = {alias: context for alias, context in known.items() if context.unfinished}
        waiting = [alias for alias in self._queues.aliases if self._room(known[alias])]
        begun = self._active in running or (self._allowed and self._active in waiting)
        if begun and now < self._until:
            return self._turn(self._active, running)
        if not running and not waiting:
            return Decision(self._active, None, "nothing to do")
        self._prompts = bool(waiting) and not (self._prompts and running)
        if self._prompts:
            alias = min(waiting, key=self._oldest)
            self._allowed = min(self.group, self._room(known[alias]))
            group = [item.payload.prompt for item in islice(self._queues.waiting(alias), self._allowed)]
            seconds = sum(group) / self._machine.models[alias].prefill_tokens_s
        else:
            self._round = [alias for alias in self._round if alias in running] or sorted(running)
            alias = self._active if self._active in self._round else self._round[0]
            self._round.remove(alias)
            seconds = self._quotas(running)[alias]
        self._seconds, self._until = seconds, now + seconds
        return self._turn(alias, running)

    def switched(self, origin: str | None, to: str, tier: Tier, seconds: float, now: float, /) -> None:
        super().switched(origin, to, tier, seconds, now)
        self._until = now + self._seconds

    def _room(self, context: Context) -> int:
        return self._machine.models[context.alias].max_running - context.unfinished

    def _turn(self, alias: str, running: dict[str, Context]) -> Decision:
        coming = [other for other in (*self._round, *running) if other != alias and other in running]
        parked = next((other for other in coming if running[other].tier is not Tier.RESIDENT), None)
        return Decision(alias, self._until, "its turn", prefetch=parked, order=tuple(dict.fromkeys(coming)))

    def _quotas(self, running: dict[str, Context]) -> dict[str, float]:
        steps = {}
        for alias, context in running.items():
            costs = self._machine.models[alias]
            steps[alias] = self.tpot_s / (costs.step_s + context.unfinished * costs.row_s)
        demand = sum(1 / n for n in steps.values())
        overhead = sum(self._machine.models[alias].switch_s(context.tier) for alias, context in running.items())
        alpha = max(overhead / (min(steps.values()) * self.longest_s) + demand, 0.5)
        return {alias: max(self.shortest_s, overhead / (n * (alpha - demand))) for alias, n in steps.items()}

    @property
    def tpot_s(self) -> float:
        """The time per token that is asked for; 0.1 s where nobody says."""
        for alias in self._queues.aliases:
            for item in self._queues.waiting(alias):
                self._asked = item.payload.objective.tpot_s if item.payload.objective else self._asked
                return self._asked
        return self._asked

    _asked = 0.1


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
PUBLISHED: dict[str, Maker] = {
    "first come first served": Fifo,
    "sleep mode by idle time": IdleSwap,
    "collating (llama-swap)": Collate,
    "virtual queues (QLM)": DeadlineGroups,
    "token-level turns (Aegaeon)": TokenTurns,
}
"""What others do, on a trace with objectives."""


def ours(queues: Queues[Arrival], machine: Machine, bound_s: float) -> Contender:
    """The worker's scheduler with its defaults."""
    return Ours(queues, machine, PolicySettings(max_wait_s=bound_s))


def contest(trace: Trace, name: str, *, bound_s: float = BOUND_S, refuses: bool = True) -> Outcome:
    """Run a trace under a schedule of ``CONTENDERS``. The baselines evict the least recently used context.

    ``refuses``: what can't have its first token in time any more is not begun; else it is answered late, as the worker
    does.
    """
    queues: Queues[Arrival] = Queues()
    contender = CONTENDERS[name](queues, trace.machine, bound_s)
    return simulate(trace, contender, queues, lru=name in BASELINES or name in PUBLISHED, refuses=refuses)


CONTENDERS: dict[str, Maker] = {
    **BASELINES,
    **PUBLISHED,
    "gearshift": ours,
}
