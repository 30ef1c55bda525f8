"""How long a waiting request will wait, and whether its deadline can be met at all."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from schemas.contexts import Tier
from schemas.objectives import Objective
from service.scheduling.batch import Moments
from service.scheduling.costs import Pace
from service.scheduling.goodput import Goal, under_way
from service.scheduling.policy import Decision, ModelView, Policy, View
from service.scheduling.queues import EMPTY, Place

_DECISIONS = 200
"""How far a forecast goes; by then what recurs is seen, and the rest follows from it."""
_DONE_S = 1e-6

SwitchCost = Callable[[str, Tier], float]
"""Seconds that going to a model takes from a tier."""


@dataclass(frozen=True, slots=True)
class Coming:
    """A request that runs or waits, where some have objectives. ``goal`` is what it is to the policy now.

    ``tokens`` are still to come of each of its answers. ``aside``: it begins behind all that do not stand aside.
    """

    moments: Moments
    goal: Goal
    objective: Objective | None = None
    tokens: float = 1.0
    aside: bool = False


@dataclass(slots=True)
class _Begun:
    """One that runs. ``first_at`` is when its first token came in the forecast: infinity, if it has not."""

    coming: Coming
    first_at: float = math.inf

    def after(self, served_s: float, now: float) -> Goal:
        """What it is to the policy when its model has been served for so long, which it is just being."""
        coming, moments = self.coming, self.coming.moments
        if coming.objective is None:
            return Goal(math.inf, math.inf)
        if served_s < moments.first:
            return coming.goal
        said = coming.tokens * (served_s - moments.first) / max(_DONE_S, moments.end - moments.first)
        if not moments.first:  # it had come
            return replace(coming.goal, next_by=coming.goal.next_by + said * coming.objective.tpot_s)
        if math.isinf(self.first_at):
            self.first_at = now - (served_s - moments.first)
        in_time = self.first_at <= coming.goal.by
        return under_way(coming.objective, coming.goal.by, in_time=in_time, tokens=said, answer=coming.tokens)


@dataclass(frozen=True, slots=True)
class Work:
    """What a model is to be served for, in seconds: until it is dry, until all in its batch have their first token, and
    a step. A turn ends with a step, and the first step of what begins in it is all their prompts'.

    ``coming`` are its requests in the order in which they begin, where any has an objective.
    """

    dry_s: float
    first_s: float = 0.0
    step_s: float = 0.0
    coming: Sequence[Coming] = ()


class _Batch:
    """The requests of a model under objectives, as far as it has been served."""

    def __init__(self, coming: Sequence[Coming]) -> None:
        self._coming = coming
        self._next = 0
        self._running: list[_Begun] = []
        self._served_s = 0.0

    def serve(self, model: ModelView, seconds: float, now: float) -> ModelView:
        """The model once it has been served for so much longer."""
        served_s = self._served_s = self._served_s + seconds
        while self._next < len(self._coming) and self._coming[self._next].moments.start <= served_s:
            self._running.append(_Begun(self._coming[self._next]))
            self._next += 1
        self._running = [each for each in self._running if each.coming.moments.end > served_s + _DONE_S]
        running = tuple(each.after(served_s, now) for each in self._running)
        if all(each.coming.objective is None for each in self._running):
            running = ()
        waiting = self._coming[self._next : self._next + model.slots]
        goals = tuple(coming.goal for coming in waiting if not coming.aside)
        return replace(model, goals=goals, running=running, again_s=0.0)


class Forecast:
    """Which model will run when if nothing else arrives: the policy itself, asked on from decision to decision."""

    def __init__(
        self, view: View, policy: Policy, switch_s: SwitchCost, work: Mapping[str, Work] | None = None
    ) -> None:
        """``work`` by model, where it is known better than the policy is told."""
        self._policy = policy
        self._switch_s = switch_s
        known = work or {}
        self._work = {alias: known.get(alias, Work(model.work_s)) for alias, model in view.models.items()}
        self._start = self._now = view.now
        self._settled = False
        self._wanted = {alias for alias, model in view.models.items() if model.demand}
        self._batches = {alias: _Batch(work.coming) for alias, work in self._work.items() if work.coming}
        self._stays: dict[str, list[tuple[float, float]]] = {alias: [] for alias in view.models}
        self._roll(view)

    def turn_s(self, alias: str) -> float:
        """Seconds until the model has its next turn: none while it has it, infinity where it gets none."""
        return self.served_s(alias, 0.0)

    def served_s(self, alias: str, seconds: float) -> float:
        """Seconds until the model will have been served for so long."""
        stays = self._stays.get(alias, [])
        left = seconds
        for start, end in stays:
            if left <= end - start + _DONE_S:
                return start + left - self._start
            left -= end - start
        if self._settled:
            return self._now + left - self._start if stays else math.inf
        passed = self._now - self._start
        share = (seconds - left) / passed if passed else 0.0
        if share:
            return passed + left / share
        if alias not in self._wanted:
            return math.inf
        others_s = sum(work.dry_s for other, work in self._work.items() if other != alias)
        return passed + others_s + left  # behind all that is here

    def _finish_step(self, view: View) -> View:
        """The view once the step that is being taken is done: nothing else begins before that, whoever's turn it is."""
        active, work = view.models.get(view.active, ModelView()), self._work.get(view.active)
        if work is None or not active.unfinished:
            return view
        end = view.now + min(max(work.first_s, work.step_s / 2), work.dry_s)
        return self._served(view, active, end, Decision(view.active, None, "a step is being taken"))

    def _roll(self, view: View) -> None:
        view = self._finish_step(view)
        self._now = view.now
        for _ in range(_DECISIONS):
            hold = view.hold
            if hold is not None and hold.drained and not view.models.get(hold.alias, ModelView()).demand:
                view = replace(view, hold=None)
            decision = self._policy.decide(view)
            view = replace(view, leaving_since=decision.leaving_since)
            if decision.run != view.active:
                view = self._switched(view, decision)
            else:
                active = view.models.get(view.active, ModelView())
                end = math.inf if decision.until is None else decision.until
                if active.demand:
                    work = self._work[view.active]
                    end = min(max(end, view.now + work.first_s) + work.step_s / 2, view.now + work.dry_s)
                if math.isinf(end):
                    self._settled = True
                    return
                view = self._served(view, active, end, decision)
            self._now = view.now

    def _served(self, view: View, active: ModelView, end: float, decision: Decision) -> View:
        """The view at ``end``, the active model served until then."""
        seconds = end - view.now
        models = dict(view.models)
        idle_since = view.idle_since
        if active.demand:
            self._stays[view.active].append((view.now, end))
            work = self._work[view.active]
            models[view.active] = left = _worked(active, work.dry_s, seconds, end)
            first_s = max(0.0, work.first_s - seconds)
            self._work[view.active] = replace(work, dry_s=work.dry_s - seconds, first_s=first_s)
            if view.active in self._batches:
                models[view.active] = left = self._batches[view.active].serve(left, seconds, end)
            idle_since = math.inf if left.demand else end
        if decision.prefetch is not None:
            coming = models[decision.prefetch]
            resident_s = self._switch_s(decision.prefetch, Tier.RESIDENT)
            left_s = coming.switch_s - seconds
            tier = Tier.RESIDENT if left_s <= resident_s else coming.tier
            models[decision.prefetch] = replace(coming, tier=tier, switch_s=max(resident_s, left_s))
        return replace(view, now=end, models=models, credit_s=self._credit(view, seconds), idle_since=idle_since)

    def _switched(self, view: View, decision: Decision) -> View:
        """The view once the model that the decision names is active."""
        models = dict(view.models)
        target, left = models[decision.run], models.get(view.active)
        now = view.now + target.switch_s
        credit_s = self._credit(view, target.switch_s)
        models[decision.run] = replace(
            target, tier=Tier.RESIDENT, switch_s=0.0, bring_s=target.switch_s, last_again_s=target.again_s
        )
        if left is not None:
            back_s = self._switch_s(view.active, left.tier)
            models[view.active] = replace(left, left=view.now, switch_s=back_s, bring_s=back_s)
            credit_s -= target.switch_s + target.refill_s if left.demand else 0.0
        return replace(
            view, now=now, active=decision.run, since=now, models=models, credit_s=credit_s, idle_since=-math.inf
        )

    def _credit(self, view: View, seconds: float) -> float:
        share, most_s = self._policy.settings.switching_share, self._policy.settings.max_wait_s
        return min(share * most_s, view.credit_s + share * seconds)


def _worked(model: ModelView, work_s: float, seconds: float, now: float) -> ModelView:
    """The model after so many seconds of its turn: what waited has been started as far as there is room for it."""
    left = 1 - seconds / work_s if work_s > seconds + _DONE_S else 0.0
    if not left:
        return replace(model, waiting=EMPTY, unfinished=0, unfinished_priority=None, work_s=0.0, undated=False)
    demand = math.ceil(model.demand * left)
    running = min(demand, model.slots)
    waiting = replace(model.waiting, requests=demand - running) if demand > running else EMPTY
    deadline = min(model.unfinished_deadline, model.waiting.nearest_deadline)
    return replace(
        model,
        waiting=waiting,
        unfinished=running,
        unfinished_deadline=deadline if deadline > now else math.inf,
        unfinished_priority=model.priority,
        work_s=model.work_s * left,
    )


def can_meet(now: float, switch_s: float, place: Place, pace: Pace, deadline: float) -> bool:
    """Whether ``deadline`` could be met if its model's turn came now. False is certain enough to refuse by.

    Where the pace of full batches of the model's is not known yet, nothing is refused. Of the request itself nothing is
    known: others' answers may have been long, and its own be one word.
    """
    if math.isinf(pace.most_requests_s):
        return deadline > now
    return now + switch_s + pace.least_work_s(place.position, place.tokens_ahead) < deadline
