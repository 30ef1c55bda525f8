"""Which model runs next, for how long, and why: a pure function of queues, contexts, costs and the clock."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from schemas.contexts import Tier
from service.scheduling.goodput import Goal, turn
from service.scheduling.queues import EMPTY, QueueView
from service.scheduling.work import UNSEEN, WorkCosts

CAUTION = 0.9
"""Of the bound on waiting, how much is planned with: costs are estimates."""
_SETTLE = 0.25
"""A turn cut short by a deadline lasts at least this part of the time that a request takes: it shall finish some."""
_GRACE = 0.5
"""How far into the work of an earlier-due model a fuller batch may go on: this part of that work."""
_LOOK = 1 / 16
"""How often turns are compared where requests have objectives: in parts of the time that a request takes."""
_BETTER = 1.25
"""How much more a turn must be worth for the active model to be left for it: what was begun has its prompts done."""
_LAST_STEPS = 16.0
"""Steps at the end of a turn in which nothing is begun: a short answer that was would be left in its middle, too late
for its pace when its model has its next turn."""
_LEAVES_WITHIN_S = 2.0
"""How long a turn goes on at the most once another one is worth more, also for that one's model to be brought in."""
_UNREAD_S = 1.0
"""How often to look whether what a hold waits for has been read."""
_HIDDEN = 2.0
"""A model that is brought in beside another one's turn is hidden by a turn of at least twice that time."""


@dataclass(frozen=True, slots=True)
class PolicySettings:
    """What the policy is asked to keep. Seconds, except the share."""

    max_wait_s: float = 60.0
    """The bound on how long a request waits for its model's turn."""
    switching_share: float = 0.05
    """The share of time that leaving unfinished work for another model may take."""
    min_turn_s: float = 0.05
    """A turn shorter than this serves nobody: a few steps."""
    wait_and_see: float = 0.1
    """How long a model that has just run dry is kept for more to come, in costs of the switch away from it."""
    beside: frozenset[Tier] = frozenset({Tier.PARKED, Tier.DROPPED})
    """The tiers from which the next model is brought in while this one serves, where memory allows."""
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

    ``undated``: something waits, or is frozen, that has no deadline and so only a turn to hope for.
    ``unfinished`` requests were given to the engine, and run or are frozen; ``left`` is when the model was last
    active (its active self: now). ``switch_s`` is what going to it costs just now, nothing where it is active;
    ``bring_s`` the same without what a preload under way has done already, and where it is active, what it has cost to
    go to it. ``refill_s`` is what is lost behind a switch to it, beside that. ``work_s`` is the time in which all that
    waits or is unfinished would be done, ``request_s`` the time one request takes. ``slots`` of it may run at once.
    """

    waiting: QueueView = EMPTY
    tier: Tier = Tier.RESIDENT
    unfinished: int = 0
    unfinished_deadline: float = math.inf
    unfinished_priority: int | None = None
    undated: bool = False
    left: float = -math.inf
    switch_s: float = 0.0
    bring_s: float = 0.0
    refill_s: float = 0.0
    work_s: float = 0.0
    request_s: float = 0.0
    slots: int = 256
    weight: float = 1.0
    goals: tuple[Goal, ...] = ()
    """What waits and does not stand aside, in the order in which it is taken; none where nobody has an objective."""
    running: tuple[Goal, ...] = ()
    """The same for the unfinished ones."""
    again_s: float = 0.0
    """What it takes to prefill those again whose keys and values were not kept while others had their turns."""
    last_again_s: float = 0.0
    """The same when the model was last gone to: what it would be after another one's turn."""
    work: WorkCosts = UNSEEN
    steps: float = 1.0
    """How many steps a turn makes, once its prompts are taken in."""

    @property
    def demand(self) -> int:
        return self.waiting.requests + self.unfinished

    @property
    def priority(self) -> int | None:
        """The best of all that waits or is unfinished."""
        known = [each for each in (self.waiting.best_priority, self.unfinished_priority) if each is not None]
        return min(known, default=None)

    @property
    def waits_since(self) -> float:
        """Since when something has waited for this model's turn; infinity where nothing does."""
        if self.unfinished and self.left > -math.inf:
            return self.left
        return max(self.waiting.oldest, self.left)

    @property
    def due(self) -> float:
        """When it must have its turn for its most urgent request to be answered in time; half-done ones need half."""
        return min(self.waiting.nearest_deadline - self.request_s, self.unfinished_deadline - self.request_s / 2)

    @property
    def loses_s(self) -> float:
        """Time of the device that going to it takes from all work."""
        return self.bring_s + self.refill_s

    @property
    def density(self) -> float:
        """Requests answered per second, were it to run now until it is dry."""
        return self.weight * self.demand / (self.switch_s + self.work_s + 1e-9)


def outranks(model: ModelView, other: ModelView) -> bool:
    """Whether what a model has to do is of a better priority."""
    return model.priority is not None and other.priority is not None and model.priority < other.priority


def closing(now: float, since: float, work: WorkCosts, rows: int, brought_s: float) -> tuple[float, float]:
    """From when on nothing is begun in a turn that is to end since a moment, and when it does.

    Short ones of the ``rows`` that run have ended by then, and the next model is there, which takes ``brought_s`` more.
    """
    last_s = min(_LEAVES_WITHIN_S, work.steps_s(_LAST_STEPS, rows))
    least = since + last_s
    ends = max(least, min(now + brought_s, since + _LEAVES_WITHIN_S))
    return (since if ends == least else ends - last_s), ends


@dataclass(frozen=True, slots=True)
class View:
    """Everything a decision rests on. ``credit_s`` is the switching that the share still allows just now."""

    now: float
    active: str
    since: float
    models: Mapping[str, ModelView]
    hold: Hold | None = None
    credit_s: float = 0.0
    idle_since: float = -math.inf
    """Since when the active model has had nothing to do."""
    leaving_since: float = math.inf
    """Since when it is about to be left for a turn that meets more objectives; infinity: it is not."""


@dataclass(frozen=True, slots=True)
class Decision:
    """Run ``run`` now. Decide again at ``until`` (None: when something changes), or when a queue gets more urgent.

    ``order`` is who comes after it, as far as can be said now; ``prefetch`` the one to bring in meanwhile.
    ``leaving_since`` is the next view's. ``closes``: from when on nothing more is begun, for the turn is about to end.
    """

    run: str
    until: float | None
    why: str
    prefetch: str | None = None
    order: tuple[str, ...] = ()
    leaving_since: float = math.inf
    closes: float = math.inf


class Policy:
    """The schedule. It keeps nothing between decisions: the same view gives the same decision."""

    def __init__(self, settings: PolicySettings) -> None:
        self.settings = settings

    def decide(self, view: View) -> Decision:
        """What to run from now on."""
        return self._held(view) or self._scheduled(view)

    def _held(self, view: View) -> Decision | None:
        """What the operator's hand says, while it lies on the lever."""
        hold = view.hold
        if hold is not None:
            if hold.drained:  # whoever gives it says when it is over: what is unread yet is not seen here
                demand = view.models.get(hold.alias, ModelView()).demand
                until = None if demand else view.now + _UNREAD_S
                return Decision(hold.alias, until, "held by the operator until drained")
            if hold.until is None:
                return Decision(hold.alias, None, "held by the operator")
            if hold.until is not None and view.now < hold.until:
                return Decision(hold.alias, hold.until, "held by the operator for a time")
        if self.settings.manual:
            return Decision(view.active, None, "only the operator switches")
        return None

    def _scheduled(self, view: View) -> Decision:
        active = view.models.get(view.active, ModelView())
        others = [alias for alias, model in view.models.items() if alias != view.active and model.demand]
        if not others:
            return Decision(view.active, None, "nothing waits for another model")
        if any(model.goals or model.running for model in view.models.values()):
            return self._best_turn(view, active, others)
        others = self._ordered(view, others)
        if not active.demand:
            return self._leave_idle(view, others)
        end, why = self._end(view, active, others)
        if view.now >= end:
            return self._go(view, others, why)
        return Decision(
            view.active, end, f"it is the turn of {view.active}", self._prefetch(view, others), tuple(others)
        )

    def _best_turn(self, view: View, active: ModelView, others: list[str]) -> Decision:
        """The turn that meets most objectives per second, as long as all others still come within the bound."""
        urgent = sorted(others, key=lambda alias: self._urgency(view, alias))
        settled = view.since + self._floor(active)
        latest = max(settled, self._latest(view, others))
        if view.now >= latest:
            return self._go(view, urgent, "the bound on waiting is near")
        others.sort(key=lambda alias: (view.models[alias].priority or 0, -self._worth(view, alias)))
        first = view.models[others[0]]
        better = outranks(first, active) or (
            not outranks(active, first) and self._worth(view, others[0]) > _BETTER * self._worth(view, view.active)
        )
        if active.demand and (view.now < settled or not better):
            look = max(settled, view.now + max(self.settings.min_turn_s, active.request_s * _LOOK))
            why = f"the turn of {view.active} meets the most objectives"
            return Decision(view.active, min(look, latest), why, self._prefetch(view, others), tuple(others))
        if view.now + first.switch_s + self._floor(first) > self._latest(view, others[1:]):
            return self._go(view, urgent, "the bound on waiting is near")
        if active.running and not outranks(first, active):
            since = min(view.leaving_since, view.now)
            prefetch = self._prefetch(view, others)
            brought_s = 0.0 if prefetch is None else first.switch_s
            closes, ends = closing(view.now, since, active.work, len(active.running), brought_s)
            if view.now < ends:
                until = min(closes if view.now < closes else ends, latest)
                why = f"the turn of {view.active} is about to end"
                return Decision(view.active, until, why, prefetch, tuple(others), since, closes)
        return self._go(view, others, "its turn meets the most objectives")

    @staticmethod
    def _worth(view: View, alias: str) -> float:
        """Objectives that its turn meets per second, were it to begin now; with the way back to what is left for it."""
        model, active = view.models[alias], view.models.get(view.active)
        back_s = 0.0
        if active is not None and active.demand and alias != view.active:
            back_s = active.loses_s + active.last_again_s
        return turn(model, view.now + model.switch_s, back_s).rate

    def _ordered(self, view: View, others: list[str]) -> list[str]:
        """Whose turn comes next: by urgency; of those that are all late already, whoever has most to save."""
        others.sort(key=lambda alias: self._urgency(view, alias))
        first = view.models[others[0]]
        if self._overdue(view, first):
            return others
        late = [
            alias
            for alias in others
            if view.models[alias].due - view.models[alias].switch_s < view.now + first.switch_s
            and view.models[alias].priority == first.priority
        ]
        best = max(late, key=lambda alias: view.models[alias].density, default=others[0])
        return [best, *(alias for alias in others if alias != best)]

    def _leave_idle(self, view: View, others: list[str]) -> Decision:
        """The active model has run dry: wait for more a moment, far shorter than the switch, then go."""
        first = view.models[others[0]]
        patience = view.idle_since + self.settings.wait_and_see * first.switch_s
        pressing = min(first.due, self._bound(first)) - first.switch_s
        if first.unfinished == 0 and view.now < min(patience, pressing):
            return Decision(view.active, patience, "waits for more", self._prefetch(view, others), tuple(others))
        return self._go(view, others, f"{view.active} has nothing to do")

    def _end(self, view: View, active: ModelView, others: Sequence[str]) -> tuple[float, str]:
        """When the active model's turn ends, and why then. Only the bound ends it beyond the share of switching."""
        settled = view.since + self._floor(active)
        bound = max(settled, self._latest(view, others)), "the bound on waiting is near"
        turn = view.since + self._quantum(view, [view.active, *others]), f"the turn of {view.active} is over"
        first = view.models[others[0]]
        if view.credit_s < first.switch_s:
            affordable = view.now + (first.switch_s - view.credit_s) / self.settings.switching_share
            return min((max(turn[0], affordable), turn[1]), bound)
        if outranks(first, active):
            return min((settled, "its priority is better"), bound)
        if any(view.models[alias].undated for alias in others):
            bound = min(turn, bound)
        if math.isinf(first.due):
            return bound
        soon = view.now + max(active.request_s / 4, self.settings.min_turn_s)
        if active.due <= first.due and active.due >= view.now:
            return min((soon, f"{view.active} is due first"), bound)
        if active.due < first.due + _GRACE * first.work_s and active.density > first.density:
            return min((soon, f"{view.active} has more to save"), bound)
        pressing = max(settled, view.since + _SETTLE * active.request_s, first.due - first.switch_s)
        return min((pressing, "its deadline is near"), bound)

    def _go(self, view: View, others: list[str], why: str) -> Decision:
        target = others[0]
        rest = others[1:]
        if (active := view.models.get(view.active)) is not None and active.demand:
            rest.append(view.active)
        prefetch = self._prefetch(view, rest)
        return Decision(target, None, f"{target}: {why}", prefetch=prefetch, order=tuple(rest))

    def _prefetch(self, view: View, order: Sequence[str]) -> str | None:
        return order[0] if order and view.models[order[0]].tier in self.settings.beside else None

    def _urgency(self, view: View, alias: str) -> tuple[float, float, str]:
        """The order in which models get their turn: overdue ones by their bound, then by priority, then who is due."""
        model = view.models[alias]
        bound = self._bound(model)
        if self._overdue(view, model):
            return (-math.inf, bound - model.switch_s, alias)
        return (model.priority or 0, min(bound, model.due) - model.switch_s, alias)

    def _bound(self, model: ModelView) -> float:
        """When the bound on waiting asks for this model's turn."""
        return model.waits_since + CAUTION * self.settings.max_wait_s

    def _overdue(self, view: View, model: ModelView) -> bool:
        """Whether it must have its turn now, whoever else is urgent."""
        return self._bound(model) - model.switch_s - view.now <= self._floor(model)

    def _floor(self, model: ModelView) -> float:
        """The least a turn is worth: no more than half of the time may go into switching, whatever is asked."""
        return max(self.settings.min_turn_s, model.loses_s)

    def _latest(self, view: View, others: Sequence[str]) -> float:
        """The latest moment to leave the active model such that every other one gets its turn within the bound."""
        latest, needed = math.inf, 0.0
        for alias in sorted(others, key=lambda alias: self._bound(view.models[alias])):
            model = view.models[alias]
            needed += model.switch_s
            latest = min(latest, self._bound(model) - needed)
            needed += self._floor(model)
        return latest

    def _quantum(self, view: View, contenders: Sequence[str]) -> float:
        """The active model's turn, in proportion to its demand, in a cycle just long enough for all switches in it."""
        share = self.settings.switching_share
        cycle, work = 0.0, 0.0
        for alias in contenders:
            model = view.models[alias]
            cycle += model.loses_s * _HIDDEN if model.tier in self.settings.beside else model.loses_s / share
            work += model.weight * model.work_s
        active = view.models[view.active]
        part = active.weight * active.work_s / work if work else 1.0
        return max(self._floor(active), min(cycle, self.settings.max_wait_s) * part)
