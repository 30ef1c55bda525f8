"""What a turn is worth in objectives, and the turns that the policy takes by it."""

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.contexts import Tier
from schemas.objectives import Objective
from service.models_file import Scheduling
from service.scheduling.goodput import Goal, turn
from service.scheduling.policy import ModelView, Policy, PolicySettings, View
from service.scheduling.queues import QueueView, Waiting
from service.scheduling.scheduler import Context, Scheduler
from service.scheduling.simulator import Arrival, Trace
from tests.bench.baselines import contest
from tests.bench.production import OBJECTIVE, machine

NOW = 1000.0


def model(
    goals: Sequence[Goal] = (),
    *,
    back_by: Sequence[float] = (),
    switch_s: float = 1.0,
    oldest: float = NOW - 1,
    priority: int = 0,
) -> ModelView:
    waiting = QueueView(len(goals), 100 * len(goals), oldest, best_priority=priority) if goals else QueueView()
    return ModelView(
        waiting=waiting,
        tier=Tier.PARKED if switch_s else Tier.RESIDENT,
        unfinished=len(back_by),
        left=oldest if switch_s else NOW,
        switch_s=switch_s,
        bring_s=switch_s,
        work_s=1.0,
        request_s=1.0,
        goals=tuple(goals),
        back_by=tuple(back_by),
    )


def decide(since: float = NOW - 10, **models: ModelView) -> str:
    policy = Policy(PolicySettings(max_wait_s=60.0))
    return policy.decide(View(now=NOW, active="a", since=since, models=models)).run


def cheap(count: int, *, first_by: float = NOW + 10) -> list[Goal]:
    return [Goal(first_by, 0.1)] * count


def test_a_turn_meets_what_it_can_start_in_time_and_no_more():
    goals = [Goal(NOW + 2, 1.0), Goal(NOW - 1, 1.0), Goal(NOW + 9, 1.0)]
    assert turn(model(goals, switch_s=0.0), NOW).met == 2
    assert turn(model(goals, switch_s=0.0), NOW + 5).met == 1


def test_a_request_that_costs_more_than_it_is_worth_is_left_out():
    dear = Goal(NOW + 10, 5.0)
    assert turn(model([*cheap(10), dear]), NOW) == turn(model(cheap(10)), NOW)
    assert turn(model([dear]), NOW).met == 1


def test_who_has_been_away_too_long_counts_little():
    kept, lost = (turn(model(back_by=[moment]), NOW).met for moment in (NOW + 1, NOW - 1))
    assert 0 < lost < kept == 1


@given(st.lists(st.builds(Goal, st.floats(NOW, NOW + 20), st.floats(0.01, 5)), max_size=20), st.floats(0, 20))
def test_a_turn_never_meets_more_for_beginning_later(goals: list[Goal], later: float):
    of = model([Goal(goal.first_by, 0.1) for goal in goals])
    assert turn(of, NOW + later).met <= turn(of, NOW).met


def test_the_turn_goes_where_more_objectives_are_met_for_its_time():
    assert decide(a=model(cheap(1), switch_s=0.0), b=model(cheap(20))) == "b"
    assert decide(a=model(cheap(20), switch_s=0.0), b=model(cheap(20))) == "a"


def test_a_model_that_was_just_brought_in_is_not_left_before_it_has_served_as_long():
    of = {"a": model(cheap(1), switch_s=0.0), "b": model(cheap(20))}
    assert decide(since=NOW - 0.01, **of) == "a"


def test_a_better_priority_goes_before_any_number_of_objectives():
    assert decide(a=model(cheap(20), switch_s=0.0), b=model(cheap(1), priority=-1)) == "b"
    assert decide(a=model(cheap(1), switch_s=0.0, priority=-1), b=model(cheap(20))) == "a"


def test_who_has_waited_for_the_bound_has_its_turn_however_little_it_meets():
    starved = model([Goal(NOW - 50, 0.1)], oldest=NOW - 58)
    assert decide(a=model(cheap(50), switch_s=0.0), b=starved) == "b"


def test_what_a_turn_does_again_keeps_nobody_beyond_the_bound():
    again = replace(model(cheap(50), switch_s=0.0), again_s=40.0)
    starved = model([Goal(NOW - 50, 0.1)], oldest=NOW - 58)
    assert decide(since=NOW - 16, a=again, b=starved) == "b"
    assert decide(since=NOW - 14, a=again, b=starved) == "a", "it is worth a quarter of the bound, of two models"


def test_models_yaml_gives_a_model_its_objective():
    objective = Objective(ttft_s=2.0, tpot_s=0.1)
    of: Scheduler[str] = Scheduler(
        policy=Policy(PolicySettings()), active="a", now=NOW, models={"b": Scheduling(objective=objective)}
    )
    assert (of.objective("a"), of.objective("b")) == (None, objective)


def test_without_objectives_nothing_is_counted():
    of: Scheduler[str] = Scheduler(policy=Policy(PolicySettings()), active="a", now=NOW)
    of.queues.admit(Waiting("1", "b", "", NOW))
    assert of.view(NOW, [Context("b")]).models["b"].goals == ()
    of.queues.admit(Waiting("2", "b", "", NOW, first_by=NOW + 5))
    assert [goal.first_by for goal in of.view(NOW, [Context("b")]).models["b"].goals] == [math.inf, NOW + 5]
    of.queues.remove("2")
    assert of.view(NOW, [Context("b")]).models["b"].goals == ()


@st.composite
def bursts(draw: st.DrawFn) -> Trace:
    on, now, arrivals = machine(4), 0.0, []
    for _ in range(draw(st.integers(1, 60))):
        now += draw(st.floats(0, 2))
        alias = draw(st.sampled_from(tuple(on.models)))
        prompt, output = draw(st.integers(1, 4000)), draw(st.integers(1, 1500))
        arrivals.append(Arrival(now, alias, prompt, output, objective=OBJECTIVE, claim=256))
    return Trace("bursts", on, tuple(arrivals))


@pytest.mark.parametrize("bound_s", [30.0, 60.0])
@given(made=bursts())
@settings(deadline=None, max_examples=20)
def test_under_objectives_too_no_wait_is_longer_than_the_bound_and_one_switch(bound_s: float, made: Trace):
    longest = max(model.parked_s for model in made.machine.models.values())
    assert contest(made, "gearshift", bound_s=bound_s).wait_max_s <= bound_s + longest
