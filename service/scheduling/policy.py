"""Which model runs next, for how long, and why: a pure function of queues, contexts, costs and the clock."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from schemas.contexts import Tier
from service.scheduling.queues import EMPTY, QueueView

FOREVER = math.inf


@dataclass(frozen=True, slots=True)
class PolicySettings:
    """What the policy is asked to keep. Seconds, except the share."""

    max_wait_s: float = 60.0
    """The bound on how long a request waits for its model's turn."""
    switching_share: float = 0.05
    """The share of time that leaving unfinished work for another model may take."""
    min_turn_s: float = 0.05
    """A turn shorter than this serves nobody: a few steps."""
    look_ahead_s: float = 0.0
    """How long an active model that has just run dry may wait for more before it is left."""
    manual: bool = False
    """Only the operator switches."""


@dataclass(frozen=True, slots=True)
class Hold:
    """The operator's hand: stay with ``alias`` until a moment, until nothing is left to do, or (neither) forever."""

    alias: str
    until: float | None = None
    drained: bool = False


@dataclass(frozen=True, slots=True)
class ModelView:
    """One model as the policy sees it. Times are seconds of the caller's clock.

    ``unfinished`` requests were given to the engine, and run or are frozen; ``left`` is when the model was last
    active (its active self: now). ``switch_s`` is what going to it costs, nothing where it is active. ``work_s``
    is the time in which all that waits or is unfinished would be done, ``request_s`` the time one request takes.
    """

    waiting: QueueView = EMPTY
    tier: Tier = Tier.RESIDENT
    unfinished: int = 0
    unfinished_deadline: float = math.inf
    left: float = -math.inf
    switch_s: float = 0.0
    work_s: float = 0.0
    request_s: float = 0.0
    weight: float = 1.0

    @property
    def demand(self) -> int:
        return self.waiting.requests + self.unfinished

    @property
    def waits_since(self) -> float:
        """Since when something has waited for this model's turn; infinity where nothing does."""
        if self.unfinished:
            return min(self.left, math.inf) if self.left > -math.inf else self.waiting.oldest
        return max(self.waiting.oldest, self.left)

    @property
    def due(self) -> float:
        """When it must have its turn for its most urgent request to be answered in time."""
        return min(self.waiting.nearest_deadline, self.unfinished_deadline) - self.request_s


@dataclass(frozen=True, slots=True)
class View:
    """Everything a decision rests on. ``credit_s`` is the switching that the share still allows just now."""

    now: float
    active: str
    since: float
    models: Mapping[str, ModelView]
    hold: Hold | None = None
    credit_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Decision:
    """Run ``run`` now. Decide again at ``until`` (None: when something changes), or when a queue gets more urgent."""

    run: str
    until: float | None
    why: str
    prefetch: str | None = None
    order: tuple[str, ...] = field(default=())
    """Who comes after it, as far as can be said now."""


class Policy:
    """The schedule. It keeps nothing between decisions: the same view gives the same decision."""

    def __init__(self, settings: PolicySettings) -> None:
        self.settings = settings

    def decide(self, view: View) -> Decision:
        """What to run from now on."""
        held = self._held(view)
        if held is not None:
            return held
        others = sorted(
            (alias for alias, model in view.models.items() if alias != view.active and model.demand),
            key=lambda alias: self._urgency(view, alias),
        )
        if not others:
            return Decision(view.active, None, "nothing waits for another model")
        active = view.models.get(view.active, ModelView())
        if not active.demand:
            return self._go(view, others, f"{view.active} has nothing to do")
        latest = self._latest(view, others)
        end = max(min(self._turn_end(view, others), latest), view.since + self._floor(active))
        if view.now >= end:
            why = "its bound on waiting is near" if view.now >= latest else f"the turn of {view.active} is over"
            return self._go(view, others, why)
        first = view.models[others[0]]
        pressing = first.due - first.switch_s
        if self._pays(view, first) and self._outranks(first, active):
            return self._go(view, others, "its priority is better")
        if self._pays(view, first) and pressing < min(end, active.due):
            if pressing <= view.now + self._floor(active):
                return self._go(view, others, "its deadline is near")
            end = min(end, pressing - self._floor(active))
        return Decision(view.active, end, f"{view.active} has its turn", order=tuple(others))

    def _held(self, view: View) -> Decision | None:
        hold = view.hold
        if hold is not None:
            model = view.models.get(hold.alias, ModelView())
            if hold.drained and model.demand:
                return Decision(hold.alias, None, "held by the operator until drained")
            if not hold.drained and hold.until is None:
                return Decision(hold.alias, None, "held by the operator")
            if hold.until is not None and view.now < hold.until:
                return Decision(hold.alias, hold.until, "held by the operator for a time")
        if self.settings.manual:
            return Decision(view.active, None, "only the operator switches")
        return None

    def _go(self, view: View, others: list[str], why: str) -> Decision:
        target = others[0]
        model = view.models[target]
        rest = [*others[1:], view.active] if view.models.get(view.active, ModelView()).demand else others[1:]
        start = view.now + model.switch_s
        if not rest:
            return Decision(target, None, f"{target}: {why}")
        end = min(start + self._quantum(view, target, [target, *rest]), self._latest(view, rest))
        return Decision(target, max(end, start + self._floor(model)), f"{target}: {why}", order=tuple(rest))

    def _urgency(self, view: View, alias: str) -> tuple[float, float, str]:
        model = view.models[alias]
        priority = model.waiting.best_priority
        due = min(self._bound(model), model.due) - model.switch_s
        overdue = self._bound(model) - model.switch_s - view.now <= self._floor(model)
        return (-math.inf if overdue else priority if priority is not None else 0, due, alias)

    def _bound(self, model: ModelView) -> float:
        """When the bound on waiting asks for this model's turn."""
        return model.waits_since + self.settings.max_wait_s

    def _floor(self, model: ModelView) -> float:
        """The least a turn is worth: no more than half of the time may go into switching, whatever is asked."""
        return max(self.settings.min_turn_s, model.switch_s)

    def _latest(self, view: View, others: list[str]) -> float:
        """The latest moment to leave the active model such that every other one gets its turn within the bound."""
        latest, needed = math.inf, 0.0
        for alias in sorted(others, key=lambda alias: self._bound(view.models[alias])):
            model = view.models[alias]
            needed += model.switch_s
            latest = min(latest, self._bound(model) - needed)
            needed += self._floor(model)
        return latest

    def _turn_end(self, view: View, others: list[str]) -> float:
        return view.since + self._quantum(view, view.active, [view.active, *others])

    def _quantum(self, view: View, alias: str, contenders: list[str]) -> float:
        """A turn in proportion to demand, in a cycle just long enough for all of its switches to be worth it."""
        switching = sum(view.models[name].switch_s for name in contenders) or self.settings.min_turn_s
        share = self.settings.switching_share
        cycle = min(switching / share, self.settings.max_wait_s) * (1 - share)
        work = {name: view.models[name].weight * max(view.models[name].work_s, 1e-9) for name in contenders}
        return max(self._floor(view.models[alias]), cycle * work[alias] / sum(work.values()))

    def _pays(self, view: View, model: ModelView) -> bool:
        """Whether the switching share allows to go there out of turn."""
        return view.credit_s >= model.switch_s

    @staticmethod
    def _outranks(model: ModelView, active: ModelView) -> bool:
        if model.waiting.best_priority is None:
            return False
        return active.waiting.best_priority is not None and model.waiting.best_priority < active.waiting.best_priority


def demanded(view: View) -> Iterator[str]:
    """The models for which there is something to do."""
    return (alias for alias, model in view.models.items() if model.demand)
