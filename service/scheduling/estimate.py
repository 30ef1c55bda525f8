"""How long a waiting request will wait, and whether its deadline can be met at all."""

import math
from dataclasses import dataclass, replace

from service.scheduling.costs import Pace
from service.scheduling.policy import ModelView, Policy, View
from service.scheduling.queues import Place


@dataclass(frozen=True, slots=True)
class Estimate:
    """Where a request stands: 0 is next of its model. Seconds from now: to its model's turn, and to its start.

    Both are infinite where only the operator knows, in manual mode or under a hold without an end.
    """

    position: int
    tokens_ahead: int
    turn_s: float
    wait_s: float


def estimate(view: View, policy: Policy, alias: str, place: Place, pace: Pace) -> Estimate:
    """What a request of ``alias`` may expect, if nothing else arrives and the order of turns stays as it is."""
    turn_s = _turn_s(view, policy, alias)
    return Estimate(place.position, place.tokens_ahead, turn_s, turn_s + pace.work_s(place.tokens_ahead))


def can_meet(view: View, alias: str, place: Place, pace: Pace, deadline: float) -> bool:
    """Whether ``deadline`` could be met if its model ran from this moment on. False is certain enough to refuse by.

    Where the model's pace is not known yet, nothing is refused.
    """
    model = view.models.get(alias, ModelView())
    if not pace.seen:
        return deadline > view.now
    return view.now + model.switch_s + pace.work_s(place.tokens_ahead) + pace.request_s / 2 <= deadline


def _turn_s(view: View, policy: Policy, alias: str) -> float:
    """Seconds until a model is active: the rest of this turn, then everyone before it, each with its switch."""
    decision = policy.decide(view)
    if decision.run == alias:
        return view.models[alias].switch_s if alias in view.models else 0.0
    running = view.models.get(decision.run, ModelView())
    if (held_until := policy.held_until(view)) is not None:
        held_s = held_until - view.now
        if held_s == math.inf:
            return held_s
        models = dict(view.models)
        if running.switch_s + running.work_s <= held_s:
            models[decision.run] = ModelView()
        after = replace(view, now=held_until, active=decision.run, since=held_until, hold=None, models=models)
        return held_s + _turn_s(after, policy, alias)
    left = running.work_s if decision.until is None else min(running.work_s, max(0.0, decision.until - view.now))
    total = running.switch_s + left
    for name in decision.order:
        model = view.models.get(name, ModelView())
        if name == alias:
            return total + model.switch_s
        total += model.switch_s + min(model.work_s, policy.settings.max_wait_s)
    return total
