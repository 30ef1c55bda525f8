"""Estimates: how long a waiting request waits, by the order of turns, and which deadlines are past hope."""

import math
from dataclasses import replace
from typing import Any

import pytest

from schemas.contexts import Tier
from service.scheduling.costs import Pace
from service.scheduling.estimate import Estimate, can_meet, estimate
from service.scheduling.policy import Hold, ModelView, Policy, PolicySettings, View
from service.scheduling.queues import Place, Queues, QueueView, Waiting
from service.scheduling.scheduler import Context, Scheduler

PACE = Pace(request_s=2.0, request_tokens=100.0, tokens_s=50.0, seen=True)
POLICY = Policy(PolicySettings())


def model(requests: int = 1, *, work_s: float, switch_s: float = 0.0, oldest: float = 99.0) -> ModelView:
    waiting = QueueView(requests=requests, tokens=100 * requests, oldest=oldest, best_priority=0, undated=requests)
    return ModelView(waiting=waiting, work_s=work_s, switch_s=switch_s, bring_s=switch_s, request_s=2.0, undated=True)


def view(**models: ModelView) -> View:
    active = next(iter(models))
    return View(now=100.0, active=active, since=100.0, models=models, credit_s=10.0)


def test_a_request_of_the_active_model_waits_for_those_before_it():
    found = estimate(view(a=model(work_s=10.0)), POLICY, "a", Place(3, 250), PACE)
    assert found == Estimate(position=3, tokens_ahead=250, turn_s=0.0, wait_s=5.0)


def test_a_request_of_another_model_waits_for_the_turns_and_switches_before_its_own():
    seen = view(a=model(work_s=4.0), b=model(work_s=3.0, switch_s=0.5), c=model(work_s=9.0, switch_s=0.25, oldest=99.5))
    first = estimate(seen, POLICY, "b", Place(0, 0), PACE)
    second = estimate(seen, POLICY, "c", Place(0, 0), PACE)
    assert 0.5 < first.turn_s <= 4.5
    assert second.turn_s == pytest.approx(first.turn_s + 3.0 + 0.25)
    assert second.wait_s == second.turn_s


def held(hold: Hold, **more: Any) -> View:
    models = {"a": model(work_s=1.0), "b": model(work_s=3.0, switch_s=0.5), "c": model(work_s=1.0, oldest=99.9)}
    return replace(view(**models), hold=hold, **more)


@pytest.mark.parametrize(
    ("hold", "turn_s"), [(Hold("a", until=130.0), 30.5), (Hold("a", drained=True), 1.5), (Hold("a"), math.inf)]
)
def test_under_the_operators_hold_other_models_wait_until_it_ends(hold: Hold, turn_s: float):
    seen = held(hold)
    first = estimate(seen, POLICY, "b", Place(2, 100), PACE)
    assert (first.position, first.turn_s, first.wait_s) == (2, pytest.approx(turn_s), pytest.approx(turn_s + 2.0))
    assert estimate(seen, POLICY, "c", Place(0, 0), PACE).turn_s == pytest.approx(turn_s + 3.0)
    assert estimate(seen, POLICY, "a", Place(0, 0), PACE).turn_s == 0.0


def test_in_manual_mode_only_the_operator_knows():
    seen = view(a=model(work_s=1.0), b=model(work_s=1.0, switch_s=0.5))
    assert estimate(seen, Policy(PolicySettings(manual=True)), "b", Place(0, 0), PACE).wait_s == math.inf


@pytest.mark.parametrize(("deadline", "hope"), [(105.9, False), (106.1, True)])
def test_a_deadline_is_past_hope_only_if_it_could_not_be_met_even_at_once(deadline: float, hope: bool):
    seen = view(a=model(work_s=1.0), b=model(work_s=1.0, switch_s=1.0))
    assert can_meet(seen, "b", Place(4, 200), PACE, deadline) is hope  # 1 s to switch, 4 s ahead, half of 2 s itself


def test_where_the_pace_was_never_measured_nothing_is_refused_before_its_time():
    unseen = Pace(request_s=1.0, request_tokens=500.0, tokens_s=1.0)
    seen = view(a=model(work_s=1.0))
    assert can_meet(seen, "a", Place(9, 9000), unseen, 100.1)
    assert not can_meet(seen, "a", Place(0, 0), unseen, 99.9)


def test_the_scheduler_knows_the_place_of_each_request_that_waits():
    queues: Queues[str] = Queues()
    scheduler = Scheduler(policy=POLICY, active="a", now=0.0, queues=queues)
    for number in range(3):
        queues.admit(Waiting(f"r{number}", "b", "", float(number), tokens=10))
    contexts = [Context("a"), Context("b", tier=Tier.PARKED)]
    found = [scheduler.estimate(f"r{number}", 3.0, contexts) for number in range(3)]
    assert [each.position for each in found] == [0, 1, 2]
    assert [each.tokens_ahead for each in found] == [0, 10, 20]
    assert scheduler.estimate("unknown", 3.0, contexts) is None
