"""What the worker and the simulator drive alike: queues, costs and turns, made into the view that the policy needs."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Generic, TypeVar

from schemas.contexts import Tier
from schemas.objectives import Objective
from service.models_file import Scheduling
from service.scheduling.costs import Costs
from service.scheduling.estimate import Forecast, Work, can_meet
from service.scheduling.goodput import FEW, FREE, LATELY_S, Goal, Portion, SwitchShare, price, too_many
from service.scheduling.pauses import Pauses
from service.scheduling.policy import CAUTION, Decision, Hold, ModelView, Policy, View, outranks
from service.scheduling.queues import EMPTY, Came, Queues, Speed, Standing, Waiting

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Context:
    """A model's context as the engine has it. ``unfinished``: requests given to the engine and not answered yet.

    ``undated``: whether one of those has no deadline. ``ready_at``: when a preload that is under way will have made it
    resident. ``running``: where one of them has an objective, when the next token of each is due, and when it must be
    answered for that to be met; ``again``: the tokens that are to be prefilled again before they go on.
    """

    alias: str
    tier: Tier = Tier.RESIDENT
    unfinished: int = 0
    unfinished_tokens: int = 0
    unfinished_deadline: float = math.inf
    unfinished_priority: int | None = None
    undated: bool = True
    ready_at: float | None = None
    running: tuple[Goal, ...] = ()
    again: float = 0.0


@dataclass(slots=True)
class _Credit:
    """Switching that the share allows: grows with time up to ``most``, and is spent by switches out of turn."""

    share: float
    most: float
    amount: float
    at: float

    def now(self, now: float) -> float:
        return min(self.most, self.amount + self.share * (now - self.at))

    def spend(self, now: float, seconds: float) -> None:
        self.amount, self.at = max(-self.most, self.now(now) - seconds), now


_DEFAULT = Scheduling()
_PRICE_S = 0.5
"""How often it is looked at what came lately."""
_MOST = 1000
"""Requests that are too dear, of which so many are looked at again then."""


_AMONG_OTHERS = 3.0
"""How many times as long as it takes the device a prompt keeps the next ones waiting: steps come between, and turns."""
_SURE_S = 600.0
"""For so long requests are refused early by what was seen, without seeing it again."""


class Scheduler(Generic[T]):
    """Queues and memory of turns around a policy. All times are arguments, seconds of one monotonic clock."""

    def __init__(
        self,
        *,
        policy: Policy,
        active: str,
        now: float,
        models: Mapping[str, Scheduling] | None = None,
        costs: Costs | None = None,
        queues: Queues[T] | None = None,
        pauses: Pauses | None = None,
        max_running: int = 256,
    ) -> None:
        self.policy = policy
        self.queues: Queues[T] = queues if queues is not None else Queues()
        self.costs = costs or Costs()
        self.models = models or {}
        """What models.yaml says of each alias."""
        self._objectives: dict[str, dict[str, Objective]] = {}
        """What an operator says instead, by alias and class."""
        self.pauses = pauses or Pauses()
        self.active = active
        self.since = now
        self._max_running = max_running
        self._left: dict[str, float] = {}
        self._unfinished_business = False
        self._brought_s = 0.0
        self._refills_s: dict[str, float] = {}
        """What the last switch to each model lost beside the time in which no step ran."""
        self._again_s: dict[str, float] = {}
        """What is to be prefilled again of each model, and of the active one what was when it was gone to."""
        self._price = FREE
        self._priced = -math.inf
        self._rows: dict[str, float] = {}
        """How many requests of what came lately run at once where each is given the time that its objective allows."""
        self._switching: defaultdict[str, SwitchShare] = defaultdict(SwitchShare)
        """What each request of a model costs by the switches to it."""
        self._away_s: dict[str, float] = {}
        """How long a model may be away: half of the time that a first token may take."""
        self._steps: dict[str, float] = {}
        """How many steps of a model bring what runs ahead of its objective by that, as a turn is to bring it."""
        self._taking: dict[str, tuple[float, int]] = {}
        """Of each model, when the next requests are taken, and the best priority of those that were taken last."""
        self._spare = 0
        """How many run at once of the model whose turn it is while those that stand aside are begun, too."""
        self._idle_since = -math.inf
        self._leaving_since = math.inf
        self._ends: float | None = None
        """When the active model's turn ends, once nothing more is begun in it."""
        self._refusing: dict[str, tuple[int, float]] = {}
        """Of models whose requests were refused early: what had been seen of it by then, and since when."""
        share, most = policy.settings.switching_share, policy.settings.max_wait_s
        self._credit = _Credit(share, share * most, share * most, now)

    def slots(self, alias: str) -> int:
        """How many requests of a model are given to the engine at once."""
        own = self.models.get(alias, _DEFAULT).max_concurrency
        return self._max_running if own is None else min(own, self._max_running)

    def objective(self, alias: str, request_class: str = "") -> Objective | None:
        """What the requests of a model are to get, or those of one of its classes."""
        said, own = self._objectives.get(alias, {}), self.models.get(alias, _DEFAULT)
        if request_class in said:
            return said[request_class]
        return own.classes.get(request_class) if request_class else own.objective

    def objectives(self, alias: str) -> dict[str, Objective]:
        """The same for all classes that there are; "" is for requests that name none."""
        names = {"", *self.models.get(alias, _DEFAULT).classes, *self._objectives.get(alias, {})}
        return {name: found for name in sorted(names) if (found := self.objective(alias, name)) is not None}

    def set_objective(self, alias: str, request_class: str, objective: Objective | None) -> None:
        """What they are to get from now on; None: what models.yaml says."""
        said = self._objectives.setdefault(alias, {})
        if objective is None:
            said.pop(request_class, None)
        else:
            said[request_class] = objective

    def left(self, alias: str) -> float:
        """When a model that is not active was left last; minus infinity: it never was active."""
        return self._left.get(alias, -math.inf)

    def entered(self, alias: str, now: float) -> None:
        """``alias`` is active from now on; the model before it was left."""
        if alias != self.active:
            self._left[self.active] = now
            self.active, self.since = alias, now
            self.queues.turn_begins(alias)
            self._idle_since = -math.inf
            self._leaving_since, self._ends = math.inf, None

    def switched(
        self, origin: str | None, to: str, tier: Tier, seconds: float, now: float, *, refill_s: float = 0.0
    ) -> None:
        """A switch is done: learn what it cost, the seconds in which no step ran, and that ``to`` is active.

        ``refill_s`` is what was lost beside those: no step is prepared while the one before it runs then.
        """
        self.costs.switched(origin, to, tier, seconds)
        self._refills_s[to] = refill_s
        self._switching[to].switched(seconds + refill_s)
        self._brought_s = seconds
        if self._unfinished_business:
            self._credit.spend(now, seconds + refill_s)
        self.entered(to, now)

    def decide(self, now: float, contexts: Iterable[Context], hold: Hold | None = None) -> Decision:
        """What to run from now on. ``hold`` is the operator's, where there is one."""
        self._sort_out(now)
        view = self.view(now, contexts, hold)
        active = view.models.get(view.active)
        self._unfinished_business = active is not None and active.demand > 0
        if self._unfinished_business:
            self._idle_since = math.inf
        elif math.isinf(self._idle_since):
            self._idle_since = now
            view = replace(view, idle_since=now)
        decision = self.policy.decide(view)
        self._leaving_since = decision.leaving_since
        self._ends = decision.until if now >= decision.closes else None
        if self.queues.objectives:  # who is late or too dear changes with time, and what stands aside is begun then
            until = math.inf if decision.until is None else decision.until
            decision = replace(decision, until=min(now + _PRICE_S, until))
        self._spare = self.spare(view, decision.run)
        self._again_s = {
            alias: model.last_again_s if alias == view.active else model.again_s for alias, model in view.models.items()
        }
        return decision

    def spare(self, view: View, run: str, *, behind: bool = False) -> int:
        """How many of a model may run while those that stand aside are begun: the device has time for them.

        All slots where the operator holds it: no other one could be served instead. Where nobody else is there, all but
        those that will be asked for. A few where it has its turn for them alone, or there is time for all that comes.
        ``behind``: what it will be once all that do not stand aside are begun.
        """
        if view.hold is not None or self.policy.settings.manual:
            return self.slots(run)
        model = view.models.get(run, ModelView())
        others = [
            alias
            for alias, other in view.models.items()
            if alias != run and (other.goals or other.running) and not outranks(model, other)
        ]
        if not others:
            return max(FEW, self.slots(run) - math.ceil(self._rows.get(run, 0.0)))
        return FEW if behind or self._price == FREE or not (model.goals or model.running) else 0

    def takes_at(self, alias: str) -> float:
        """When more of a model's waiting requests are taken, though others run.

        Infinity where none waits. Where its turn is about to end, none are taken before that.
        """
        if alias not in self.queues.aliases:
            return math.inf
        if self._ends is not None and alias == self.active:
            return self._ends
        return self._taking.get(alias, (-math.inf, 0))[0]

    def take(self, alias: str, n: int, now: float) -> list[Waiting[T]]:
        """Remove and return the next ``n`` requests of the active model: whom the switch was paid for among them.

        ``n`` are all for which there is room. What stands aside is left for when there is time for it, but for what has
        done so for long. Where requests have objectives, no more are taken at once than have their prompts done in a
        few tokens' time, and the next ones some steps later (``takes_at``), unless nothing runs: what has its first
        token waits for the prompts that come after it, and a short answer could not make up for many. Who is more
        urgent than those, or would be late by then, does not wait. None are taken where the turn is about to end.
        """
        if self._ends is not None and alias == self.active:
            return []
        pace = self.costs.pace(alias)
        self._sort_out(now)
        opens, best = self._taking.get(alias, (-math.inf, 0))
        if n < self.slots(alias) and now < opens:
            if not self._presses(alias, opens, best):
                return []
            n = 1
        for item in self.queues.in_turn(alias, n) if self.queues.objectives else ():
            self._judge(item, now)
        self._shorten(alias, now)
        work, running = self.costs.work(alias), self.slots(alias) - n
        speed = Speed(now, pace.request_s, pace.tokens_s)
        since = now - CAUTION * self.policy.settings.max_wait_s / 2
        taken: list[Waiting[T]] = []
        portion, urgent = Portion(), math.inf
        while len(taken) < n and not portion.full:
            some = self.queues.take(alias, 1, speed=speed, since=since)
            if not some and running + len(taken) < self._spare:
                some = self.queues.take(alias, 1, aside=1)
            if not some:
                break
            taken += some
            portion.add(some[0].prompt * work.prompt_token_s, some[0].tpot_s)
            urgent = min(urgent, some[0].priority)
        if math.isfinite(portion.room_s):
            again = now + portion.lasts_s(work, running + len(taken))
            self._taking[alias] = max(again, opens), int(urgent)
        return taken

    def _presses(self, alias: str, until: float, best: int) -> bool:
        """Whether the next request can't wait so long, beside those of the priority that were begun."""
        return any(first.priority < best or self.starts_by(first) < until for first in self.queues.in_turn(alias, 1))

    def starts_by(self, item: Waiting[T]) -> float:
        """When one that waits must be begun, or it is late: for its deadline, or for its first token."""
        deadline = math.inf if item.deadline is None else item.deadline
        if item.first_by is None:
            return deadline
        return min(deadline, item.first_by - item.prompt * self.costs.work(item.alias).prompt_token_s)

    def _sort_out(self, now: float) -> None:
        """Set those aside that can't be in time, and those that cost more than the device has time for just now."""
        if not self.queues.objectives:
            return
        fresh = self.queues.fresh()
        for item in fresh:
            assert item.first_by is not None, "only those with an objective are"
            away_s = self._away_s[item.alias] = item.ttft_s / 2
            if math.isfinite(item.tpot_s):
                self._steps[item.alias] = away_s / item.tpot_s
        if now >= self._priced + _PRICE_S:
            self._set_price(now)
            fresh += self.queues.dear(_MOST)
            for alias in self.queues.aliases:
                fresh += self.queues.in_turn(alias, self.slots(alias))
        for item in fresh:
            self._judge(item, now)

    def _judge(self, item: Waiting[T], now: float) -> None:
        if item.first_by is None:
            return
        standing = Standing.IN_TURN
        if now + self.costs.work(item.alias).prompt_token_s * item.prompt > item.first_by:
            standing = Standing.LATE
        elif (item.priority, self._cost_s(item)) > self._price:
            standing = Standing.DEAR
        self.queues.place_as(item.id, standing)

    def _shorten(self, alias: str, now: float) -> None:
        """Of those that wait for a model and can't all be begun in time, those with the longest prompts stand aside for
        the others of their priority: it is so many fewer that are late.
        """
        token_s, begins = self.costs.work(alias).prompt_token_s, now
        waiting = self.queues.in_turn(alias, self.slots(alias)) if self.queues.objectives else []
        waiting = [item for item in waiting if self.queues.standing(item.id) is Standing.IN_TURN]
        for _, some in groupby(waiting, key=lambda item: item.priority):
            items = list(some)
            prompts = [(math.inf if item.first_by is None else item.first_by, token_s * item.prompt) for item in items]
            left_out, begins = too_many(prompts, begins, _AMONG_OTHERS)
            for number in left_out:
                self.queues.place_as(items[number].id, Standing.DEAR)

    def _cost_s(self, item: Waiting[T] | Came) -> float:
        """What a request costs the device in a batch of the usual size, with its part of the switches to its model."""
        said = min(item.answer, self.costs.said(item.alias))
        served_s = self.costs.work(item.alias).request_s(item.prompt, said, self._rows.get(item.alias, 1.0))
        return served_s + self._switching[item.alias].each_s

    def _set_price(self, now: float) -> None:
        """What came lately is what will come: of that, the cheapest that the device has time for are to be served.

        What came for a model that is paused takes no time from the others.
        """
        self._priced, self._rows, self._price = now, {}, FREE
        recent = [came for came in self.queues.came if came.at > now - LATELY_S and came.alias not in self.pauses]
        if not recent:
            return
        seconds = max(_PRICE_S, now - recent[0].at)
        for alias, count in Counter(came.alias for came in recent).items():
            self._switching[alias].among(count / seconds * self._away_s.get(alias, 0.0))
        rates: dict[str, float] = {}
        for came in recent:
            said = min(came.answer, self.costs.said(came.alias))
            row_s = said * came.tpot_s if said else 0.0
            rates[came.alias] = rates.get(came.alias, 0.0) + row_s / seconds
        for alias, each in rates.items():
            self._rows[alias] = min(float(self.slots(alias)), max(1.0, each))
        self._price = price(((float(came.priority), self._cost_s(came)) for came in recent), seconds)

    def forecast(self, view: View, work: Mapping[str, Work] | None = None) -> Forecast:
        """What will run when, if nothing else arrives; good for any number of estimates.

        ``work`` by model, where it is known better than by its pace.
        """

        def switch_s(alias: str, tier: Tier) -> float:
            return self.costs.switch(None, alias, tier).mean

        return Forecast(view, self.policy, switch_s, work)

    def can_meet(self, item: Waiting[T], now: float, context: Context | None) -> bool:
        """Whether the deadline of a request that comes now can be met: if not, refuse it early.

        ``context`` is its model's, where that is known. A switch counts for what one to this model was seen to take
        here at least. Who refuses everything by what was seen once sees nothing else any more: where nothing new was
        seen for ten minutes, one request is let in, whatever its deadline.
        """
        if item.deadline is None:
            return True
        pace = self.costs.pace(item.alias)
        switch_s = 0.0
        if context is not None and context.alias != self.active:
            switch_s = min(self._switch_s(now, context), self.costs.least_switch_s(context.alias, context.tier))
        if can_meet(now, switch_s, self.queues.end(item.alias), pace, item.deadline):
            return True  # as most would, wherever they stand
        return can_meet(now, switch_s, self.queues.prospect(item), pace, item.deadline) or self._doubts(item, now)

    def _doubts(self, item: Waiting[T], now: float) -> bool:
        """Whether what refuses a request is so old that it is to be seen again."""
        seen = self.costs.observations(item.alias)
        known, since = self._refusing.get(item.alias, (-1, now))
        if known != seen:
            known, since = seen, now
        doubtful = item.deadline is not None and item.deadline > now and now - since >= _SURE_S
        self._refusing[item.alias] = (known, now if doubtful else since)
        return doubtful

    def view(self, now: float, contexts: Iterable[Context], hold: Hold | None = None) -> View:
        """Everything that the policy looks at, as values."""
        return View(
            now=now,
            active=self.active,
            since=self.since,
            models={context.alias: self._model(now, context) for context in contexts},
            hold=hold,
            credit_s=self._credit.now(now),
            idle_since=self._idle_since,
            leaving_since=self._leaving_since,
        )

    def _model(self, now: float, context: Context) -> ModelView:
        alias = context.alias
        pace = self.costs.pace(alias)
        switch_s = self._switch_s(now, context)
        reachable = now + switch_s + pace.request_s / 2
        waiting = EMPTY if alias in self.pauses else self.queues.view(alias, reachable=reachable)
        return ModelView(
            waiting=waiting,
            tier=context.tier,
            unfinished=context.unfinished,
            unfinished_deadline=context.unfinished_deadline,
            unfinished_priority=context.unfinished_priority,
            undated=waiting.undated > 0 or (context.unfinished > 0 and context.undated),
            left=now if alias == self.active else self.left(alias),
            switch_s=switch_s,
            bring_s=self._brought_s if alias == self.active else self._found_s(context),
            refill_s=self._refills_s.get(alias, 0.0),
            work_s=max(pace.request_s, pace.work_s(waiting.tokens + context.unfinished_tokens)),
            request_s=pace.request_s,
            slots=self.slots(alias),
            weight=self.models.get(alias, _DEFAULT).weight,
            goals=self._goals(alias),
            running=context.running,
            again_s=self.costs.work(alias).prompt_token_s * context.again,
            last_again_s=self._again_s.get(alias, 0.0),
            work=self.costs.work(alias),
            steps=max(1.0, min(self.costs.said(alias), self._steps.get(alias, math.inf))),
        )

    def _found_s(self, context: Context) -> float:
        """What a switch to a model costs, found where it is."""
        return self.costs.switch(self.active, context.alias, context.tier).cautious

    def _switch_s(self, now: float, context: Context) -> float:
        """The same for one that may be on its way already."""
        if context.ready_at is None:
            return self._found_s(context)
        resident_s = self.costs.switch(self.active, context.alias, Tier.RESIDENT).cautious
        return min(self._found_s(context), max(0.0, context.ready_at - now) + resident_s)

    def _goals(self, alias: str) -> tuple[Goal, ...]:
        """What waits for a model, as far as one batch goes; nothing where no request has an objective.

        One without is to be begun within the bound on waiting.
        """
        if not self.queues.objectives or alias in self.pauses:
            return ()
        return tuple(self.goal(item) for item in self.queues.in_turn(alias, self.slots(alias)))

    def goal(self, item: Waiting[T]) -> Goal:
        """What a request that waits is to the policy where others have objectives."""
        prompt_s, most_s = self.costs.work(item.alias).prompt_token_s * item.prompt, self.policy.settings.max_wait_s
        if item.first_by is None:
            return Goal(item.arrived + most_s, item.arrived + most_s, prompt_s, most_s)
        return Goal(item.first_by, item.first_by, prompt_s, item.ttft_s)
