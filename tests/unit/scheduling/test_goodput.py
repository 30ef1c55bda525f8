"""What a turn is worth in objectives, and the turns that the policy takes by it."""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations, zip_longest
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from schemas.contexts import Tier
from schemas.objectives import Objective
from service.models_file import Scheduling
from service.scheduling.goodput import (
    EARLY,
    FREE,
    LATE,
    Goal,
    SwitchShare,
    Turn,
    counts,
    price,
    too_many,
    turn,
    under_way,
)
from service.scheduling.policy import Decision, Hold, ModelView, Policy, PolicySettings, View, closing
from service.scheduling.queues import QueueView, Standing, Waiting
from service.scheduling.scheduler import Context, Scheduler
from service.scheduling.simulator import Arrival, Trace
from service.scheduling.work import Work, WorkCosts
from tests.bench.baselines import contest
from tests.bench.production import OBJECTIVE, machine

NOW = 1000.0


def model(
    goals: Sequence[Goal] = (),
    *,
    running: Sequence[Goal] = (),
    switch_s: float = 1.0,
    oldest: float = NOW - 1,
    priority: int = 0,
    steps: float = 0.0,
) -> ModelView:
    waiting = QueueView(len(goals), 100 * len(goals), oldest, best_priority=priority) if goals else QueueView()
    return ModelView(
        waiting=waiting,
        tier=Tier.PARKED if switch_s else Tier.RESIDENT,
        unfinished=len(running),
        left=oldest if switch_s else NOW,
        switch_s=switch_s,
        bring_s=switch_s,
        work_s=1.0,
        request_s=1.0,
        goals=tuple(goals),
        running=tuple(running),
        steps=steps,
        work=WorkCosts(1e-4, 0.01, 0.001),
    )


def decide(since: float = NOW - 10, **models: ModelView) -> str:
    policy = Policy(PolicySettings(max_wait_s=60.0))
    return policy.decide(View(now=NOW, active="a", since=since, models=models, leaving_since=since)).run


def cheap(count: int, *, first_by: float = NOW + 10) -> list[Goal]:
    return [Goal(NOW, first_by, 0.1)] * count


def test_a_turn_meets_what_it_can_start_in_time_and_no_more():
    goals = [Goal(NOW, NOW + 2, 1.0), Goal(NOW, NOW - 1, 1.0), Goal(NOW, NOW + 9, 1.0)]
    assert turn(model(goals, switch_s=0.0), NOW).met == 2
    assert turn(model(goals, switch_s=0.0), NOW + 5).met == 1


def test_a_turn_takes_its_switch_its_prompts_and_steps_of_all_that_run_in_it():
    of = model([Goal(NOW, NOW + 9, 0.5)] * 2, running=[Goal(NOW, NOW + 9)] * 3, switch_s=2.0, steps=50)
    assert turn(of, NOW) == Turn(5.0, pytest.approx(2.0 + 1.0 + 50 * (0.01 + 5 * 0.001)))


def test_what_was_not_kept_is_prefilled_again_before_anything_else_of_its_turn():
    of = model([Goal(NOW, NOW + 2.5, 1.0)], running=[Goal(NOW, NOW + 9)], switch_s=0.0, steps=50)
    lost = replace(of, again_s=2.0)
    assert turn(lost, NOW).seconds == pytest.approx(2.0 + 50 * (0.01 + 0.001))
    assert (turn(of, NOW).met, turn(lost, NOW).met) == (2, 1)


@pytest.mark.parametrize(("last_again_s", "run"), [(0.0, "b"), (1.0, "a")])
def test_a_turn_is_left_for_what_is_worth_its_being_prefilled_again_too(last_again_s: float, run: str):
    half_due = model(running=[Goal(NOW + 5, NOW + 30, ttft_s=10.0)] * 4, switch_s=0.0, steps=50)
    due = model([Goal(NOW, NOW + 3)] * 3, switch_s=0.0, steps=50)
    assert decide(a=replace(half_due, last_again_s=last_again_s), b=due) == run


def test_what_a_model_has_to_prefill_again_is_told_by_the_last_time_that_it_was_gone_to():
    of = scheduler()
    runs = Context("b", unfinished=1, running=(Goal(NOW, NOW + 9, ttft_s=10.0),), again=1000)
    assert of.view(NOW, [Context("a"), runs]).models["b"].last_again_s == 0.0
    assert of.decide(NOW, [Context("a"), runs]).run == "b"
    of.entered("b", NOW)
    assert of.view(NOW, [replace(runs, again=0.0)]).models["b"].last_again_s == pytest.approx(1000 * 2e-5)
    of.decide(NOW, [replace(runs, again=0.0), Context("a")])
    assert of.view(NOW, [replace(runs, again=0.0)]).models["b"].last_again_s > 0.0, "it has not been left"
    of.entered("a", NOW)
    of.decide(NOW, [Context("a"), replace(runs, again=0.0)])
    assert of.view(NOW, [runs]).models["b"].last_again_s == 0.0, "its blocks were kept this time"
    assert of.decide(NOW, [Context("a"), runs], Hold("a")).run == "a"
    of.entered("b", NOW)
    assert of.view(NOW, [runs]).models["b"].last_again_s > 0.0, "the operator went to it"


def test_what_runs_has_its_next_token_due_by_its_pace_since_the_first_one_was_due():
    asked = Objective(ttft_s=10.0, tpot_s=0.1)
    assert under_way(asked, NOW + 1, in_time=True, tokens=30, answer=200) == Goal(NOW + 4, NOW + 21, ttft_s=10.0)


def test_an_answer_that_is_longer_than_expected_is_lost_once_its_next_token_is():
    asked = Objective(ttft_s=10.0, tpot_s=0.1)
    assert under_way(asked, NOW, in_time=True, tokens=300, answer=100) == Goal(NOW + 30, NOW + 30, ttft_s=10.0)


def test_what_a_request_counts_rises_as_its_next_token_comes_due():
    assert [counts(left_s, 10.0) for left_s in (math.inf, 10.0, 8.0, 6.0, 4.0, 2.0, -1.0)] == pytest.approx(
        [EARLY, EARLY, 0.25, 0.5, 0.75, 1.0, 1.0]
    )
    assert counts(math.inf, math.inf) == EARLY, "where there is no bound on waiting"
    goal = Goal(NOW + 5, NOW + 9, ttft_s=10.0)
    assert [goal.worth(NOW + at) for at in (-5, 1, 3, 9, 9.1)] == pytest.approx([EARLY, 0.75, 1.0, 1.0, LATE])


def test_a_turn_counts_what_waits_by_how_soon_its_first_token_is_due_once_its_prompt_is_done():
    of = model([Goal(NOW + 6, NOW + 6, 1.0, ttft_s=10.0)] * 2, switch_s=0.0)
    assert turn(of, NOW).met == pytest.approx(0.5 / 0.8 + 0.6 / 0.8)


def test_a_request_has_its_part_of_what_switches_to_its_model_took_lately_there_and_back():
    share = SwitchShare()
    share.among(4.0)
    assert share.each_s == 0.0
    share.switched(1.0)
    share.among(4.0)
    assert share.each_s == pytest.approx(2 * 1.0 / 4)
    share.among(0.3)
    assert share.each_s == pytest.approx(2 * 1.0), "nobody shares it"
    for _ in range(30):
        share.switched(0.0)
    share.among(4.0)
    assert share.each_s < 0.001, "it has been brought in beside others since"


@pytest.mark.parametrize(
    ("switch_s", "refill_s", "ttft_s", "unread_s", "in_turn"),
    [
        pytest.param(1.0, 0.0, 60.0, 0.0, "near", id="far"),
        pytest.param(0.5, 0.5, 60.0, 0.0, "near", id="with what is lost behind it"),
        pytest.param(0.5, 0.0, 60.0, 0.0, "far", id="half as far"),
        pytest.param(1.0, 0.0, 120.0, 0.0, "far", id="twice as many share it"),
        pytest.param(1.0, 0.0, 120.0, 80.0, "far", id="read long after they were asked"),
    ],
)
def test_in_a_rush_a_model_that_takes_long_to_switch_to_stands_aside_for_others(
    switch_s, refill_s, ttft_s, unread_s, in_turn
):
    """There is time for half of the requests. Those of the other model take a twentieth more, once they are begun."""
    of = Scheduler[str](policy=Policy(PolicySettings()), active="a", now=NOW - 60)
    of.switched("a", "far", Tier.PARKED, switch_s, NOW - 50, refill_s=refill_s)
    of.switched("far", "near", Tier.RESIDENT, 0.0, NOW - 40)
    prompts = {"far": 50_000, "near": 52_500}
    for number in range(40):
        alias = "far" if number % 2 else "near"
        arrived = NOW - 20 + number / 2
        item = wish(str(number), alias, arrived=arrived, prompt=prompts[alias], ttft_s=ttft_s)
        of.queues.admit(replace(item, first_by=arrived + ttft_s - unread_s))
    of.decide(NOW, [Context("near"), Context("far")])
    assert [alias for alias in prompts if of.queues.in_turn(alias, 99)] == [in_turn]


def test_what_runs_without_a_first_token_is_lost_once_that_is_late_and_so_is_what_had_it_late():
    asked = Objective(ttft_s=10.0, tpot_s=0.1)
    for tokens in (0, 30):
        found = under_way(asked, NOW + 5, in_time=False, tokens=tokens, answer=200)
        assert found == Goal(NOW + 5, NOW + 5, ttft_s=10.0)


def test_no_more_is_begun_than_there_are_slots():
    of = replace(model(cheap(9), running=[Goal(NOW, NOW + 9)]), slots=4)
    assert turn(of, NOW).met == 4


def test_what_has_time_yet_counts_little_and_what_is_lost_least():
    pressing, early, lost = (
        turn(model(running=[Goal(next_by, by)]), NOW).met
        for next_by, by in ((NOW - 1, NOW + 9), (NOW + 5, NOW + 9), (NOW - 9, NOW - 1))
    )
    assert 0 < lost < early < pressing == 1


def test_a_batch_that_others_may_be_served_before_is_left_for_what_would_be_late():
    ahead = model(running=[Goal(NOW + 5, NOW + 30)] * 20, switch_s=0.0, steps=50)
    late_soon = [Goal(NOW - 1, NOW + 3, 0.5)] * 2
    assert decide(a=ahead, b=model(late_soon, steps=50)) == "b"
    behind = replace(ahead, running=(Goal(NOW - 1, NOW + 30),) * 20)
    assert decide(a=behind, b=model(late_soon, steps=50)) == "a"


@given(st.lists(st.builds(Goal, st.just(NOW), st.floats(NOW, NOW + 20)), max_size=20), st.floats(0, 20))
def test_a_turn_never_meets_more_for_beginning_later(goals: list[Goal], later: float):
    of = model([replace(goal, prompt_s=0.1) for goal in goals])
    assert turn(of, NOW + later).met <= turn(of, NOW).met + LATE


@given(st.lists(st.tuples(st.integers(-1, 1), st.floats(0.01, 5)), max_size=40), st.floats(0.1, 60))
def test_what_is_at_the_price_or_below_it_is_all_that_there_is_time_for(
    costs: list[tuple[float, float]], seconds: float
):
    at = price(costs, seconds)
    below = sum(cost for key in costs if key < at for cost in [key[1]])
    assert below <= seconds
    if at == FREE:
        assert sum(cost for _, cost in costs) <= seconds
    else:
        assert at in costs
        assert below + at[1] * costs.count(at) > 0.8 * seconds


def test_the_turn_goes_where_more_objectives_are_met_for_its_time():
    assert decide(a=model(cheap(1), switch_s=0.0, steps=100), b=model(cheap(20), steps=100)) == "b"
    assert decide(a=model(cheap(20), switch_s=0.0, steps=100), b=model(cheap(20), steps=100)) == "a"


def test_a_model_that_was_just_brought_in_is_not_left_before_it_has_served_as_long():
    of = {"a": model(cheap(1), switch_s=0.0), "b": model(cheap(20))}
    assert decide(since=NOW - 0.01, **of) == "a"


def test_a_better_priority_goes_before_any_number_of_objectives():
    assert decide(a=model(cheap(20), switch_s=0.0), b=model(cheap(1), priority=-1)) == "b"
    assert decide(a=model(cheap(1), switch_s=0.0, priority=-1), b=model(cheap(20))) == "a"


AHEAD = model(running=[Goal(NOW + 5, NOW + 30)] * 4, switch_s=0.0, steps=50)
"""What runs need not be served just now. Its last sixteen steps take 0.224 s."""
LAST_S = 16 * (0.01 + 4 * 0.001)


def leaving(
    switch_s: float, *, leaving_since: float = math.inf, a: ModelView = AHEAD, beside: bool = True, **of: Any
) -> Decision:
    """What is decided where a turn of ``b``, so far away, is worth more than the one of ``a``."""
    b = model(cheap(20), switch_s=switch_s, steps=50, **of)
    if switch_s < 0.01:
        b = replace(b, tier=Tier.RESIDENT)
    tiers = frozenset({Tier.PARKED, Tier.DROPPED}) if beside else frozenset[Tier]()
    policy = Policy(PolicySettings(max_wait_s=60.0, beside=tiers))
    return policy.decide(View(NOW, "a", NOW - 10, {"a": a, "b": b}, leaving_since=leaving_since))


@pytest.mark.parametrize(("switch_s", "beside"), [(0.001, True), (1.0, False)])
def test_in_the_last_steps_of_a_turn_nothing_is_begun(switch_s: float, beside: bool):
    found = leaving(switch_s, beside=beside)
    assert (found.run, found.closes, found.until) == ("a", pytest.approx(NOW), pytest.approx(NOW + LAST_S))
    assert leaving(switch_s, beside=beside, leaving_since=NOW - LAST_S / 2).run == "a"
    assert leaving(switch_s, beside=beside, leaving_since=NOW - LAST_S).run == "b"


@given(st.floats(0, 1e9), st.floats(1e-6, 1.0), st.integers(1, 256))
def test_nothing_is_begun_from_the_moment_on_at_which_another_turn_is_worth_more_whatever_rounding_does(
    now: float, step_s: float, rows: int
):
    closes, ends = closing(now, now, WorkCosts(1e-4, step_s, 1e-5), rows, 0.0)
    assert closes == now < ends


def test_a_turn_goes_on_until_the_next_model_has_been_brought_in_beside_it():
    found = leaving(1.0)
    assert (found.run, found.prefetch) == ("a", "b")
    assert found.closes == found.until == pytest.approx(NOW + 1.0 - LAST_S)
    nearly = leaving(0.1, leaving_since=NOW - 0.9)
    assert (nearly.run, nearly.closes) == ("a", pytest.approx(NOW + 0.1 - LAST_S))
    assert leaving(0.001, leaving_since=NOW - 1.0).run == "b"


def test_a_turn_that_is_to_end_does_in_two_seconds_however_far_away_the_next_model_is_and_however_slow_its_steps_are():
    assert leaving(5.0).until == pytest.approx(NOW + 2 - LAST_S)
    assert leaving(5.0, leaving_since=NOW - 2).run == "b"
    slow = replace(AHEAD, work=WorkCosts(1e-4, 1.0, 0.001))
    assert leaving(0.001, a=slow).until == pytest.approx(NOW + 2)


@pytest.mark.parametrize(
    ("a", "of"),
    [
        (replace(AHEAD, running=(), unfinished=0), {}),
        (replace(AHEAD, unfinished_priority=0), {"priority": -1}),
        (AHEAD, {"oldest": NOW - 53.5}),
    ],
    ids=["nothing runs", "a better priority", "the bound on waiting"],
)
def test_a_turn_ends_at_once_where_nothing_runs_or_another_model_must_have_its_turn(a: ModelView, of: dict[str, Any]):
    assert leaving(1.0, a=a, **of).run == "b"


def test_nothing_is_taken_in_the_last_steps_of_a_turn_but_what_is_more_urgent_than_the_other_model():
    of = scheduler()
    for number in range(20):
        of.queues.admit(wish(f"b{number}", "b", arrived=NOW, prompt=10))
    of.queues.admit(wish("waits", arrived=NOW + 6))
    now, contexts = NOW + 6, [Context("a", unfinished=4, running=AHEAD.running), Context("b")]
    found = of.decide(now, contexts)
    assert (found.run, found.until) == ("a", pytest.approx(now + 16 * (0.005 + 4 * 5e-5)))
    assert (of.take("a", 60, now), of.takes_at("a")) == ([], found.until)
    of.queues.admit(wish("urgent", arrived=now, priority=-1))
    of.decide(now, contexts)
    assert ids(of.take("a", 1, now)) == ["urgent"], "whose model's priority is the better one by then"
    of.decide(now, contexts)
    assert of.take("a", 60, now) == [], "it is left from anew"
    assert of.decide(now + 0.08, contexts).run == "a"
    assert of.decide(now + 0.09, contexts).run == "b"


def test_a_model_that_the_operator_switches_to_begins_what_waits_though_the_turn_before_was_about_to_end():
    of = scheduler()
    for number in range(20):
        of.queues.admit(wish(f"b{number}", "b", arrived=NOW, prompt=10))
    now = NOW + 6
    found = of.decide(now, [Context("a", unfinished=4, running=AHEAD.running), Context("b")])
    assert found.closes <= now
    of.entered("b", now)
    of.entered("a", now)
    of.queues.admit(wish("waits", arrived=now))
    assert ids(of.take("a", 60, now)) == ["waits"]


def test_who_has_waited_for_the_bound_has_its_turn_however_little_it_meets():
    starved = model([Goal(NOW - 50, 0.1)], oldest=NOW - 58)
    assert decide(a=model(cheap(50), switch_s=0.0), b=starved) == "b"


def test_models_yaml_gives_a_model_its_objective():
    objective = Objective(ttft_s=2.0, tpot_s=0.1)
    of: Scheduler[str] = Scheduler(
        policy=Policy(PolicySettings()), active="a", now=NOW, models={"b": Scheduling(objective=objective)}
    )
    assert (of.objective("a"), of.objective("b")) == (None, objective)


def scheduler(**settings: float) -> Scheduler[str]:
    return Scheduler(policy=Policy(PolicySettings(**settings)), active="a", now=NOW)  # type: ignore[arg-type]


def wish(
    key: str, alias: str = "a", *, arrived: float = NOW, prompt: int = 100, ttft_s: float = 10.0, **more: Any
) -> Waiting[str]:
    asked = {"first_by": arrived + ttft_s, "ttft_s": ttft_s, "tpot_s": 0.1}
    return Waiting(key, alias, key, arrived, tokens=prompt + 100, prompt=prompt, **asked, **more)


def ids(taken: Sequence[Waiting[str]]) -> list[str]:
    return [item.id for item in taken]


def test_without_objectives_nothing_is_counted():
    of = scheduler()
    of.queues.admit(Waiting("1", "b", "", NOW))
    assert of.view(NOW, [Context("b")]).models["b"].goals == ()
    of.queues.admit(wish("2", "b", ttft_s=5.0))
    assert [goal.by for goal in of.view(NOW, [Context("b")]).models["b"].goals] == [NOW + 60, NOW + 5]
    of.queues.remove("2")
    assert of.view(NOW, [Context("b")]).models["b"].goals == ()


def rush(of: Scheduler[str], count: int = 200, *, at: float = NOW) -> None:
    """More than a device can do: each costs it a second."""
    for number in range(count):
        of.queues.admit(wish(f"rush {at} {number}", "b", arrived=at, prompt=10_000))


def test_in_a_rush_what_is_dear_stands_aside_for_what_is_cheap():
    of = scheduler()
    rush(of)
    of.queues.admit(wish("dear", prompt=20_000))
    of.queues.admit(wish("cheap"))
    contexts = [Context("a"), Context("b")]
    of.decide(NOW + 1, contexts)
    assert ids(of.take("a", 9, NOW + 1)) == ["cheap"]
    of.decide(NOW + 31, contexts)
    assert of.queues.position("dear") == 0, "nothing is forgotten"


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 9)), max_size=7), st.integers(1, 4))
def test_as_many_prompts_as_can_be_are_done_in_time(prompts, apart):
    """No others, of all that could be left out, are fewer, where none waits longer than another takes."""

    def in_time(numbers: Sequence[int]) -> bool:
        at = 0
        for by, seconds in sorted(prompts[number] for number in numbers):
            if at + seconds > by:
                return False
            at += apart * seconds
        return True

    left_out, ends = too_many(prompts, 0, apart)
    kept = [number for number in range(len(prompts)) if number not in left_out]
    assert in_time(kept)
    assert ends == apart * sum(prompts[number][1] for number in kept)
    if apart == 1:
        assert not any(in_time(some) for some in combinations(range(len(prompts)), len(kept) + 1))


def crowd(*prompts: int, priorities: Sequence[int] = ()) -> Scheduler[str]:
    """A model's waiting requests, by the tokens of their prompts, with ten seconds left for their first tokens.

    There is time for all of them, but not at once.
    """
    of = Scheduler[str](policy=Policy(PolicySettings()), active="a", now=NOW, max_running=64)
    for number, (prompt, priority) in enumerate(zip_longest(prompts, priorities, fillvalue=0)):
        of.queues.admit(wish(str(number), prompt=prompt, ttft_s=39.0, priority=priority))
    of.decide(NOW + 29, [Context("a"), Context("b")])
    of.take("a", 64, NOW + 29)
    return of


def standings(of: Scheduler[str], *keys: str) -> list[Standing | None]:
    return [of.queues.standing(key) for key in keys]


def test_of_those_that_cannot_all_be_in_time_the_longest_prompts_stand_aside():
    """A prompt of 100,000 tokens takes two seconds, and keeps others waiting for six."""
    of = crowd(30_000, 100_000, 150_000, 100_000, 50_000)
    assert standings(of, "1", "2", "3", "4") == [Standing.IN_TURN, Standing.DEAR, Standing.DEAR, Standing.IN_TURN]


def test_one_that_would_just_be_in_time_stands_aside_for_nobody():
    of = crowd(30_000, 380_000)
    assert standings(of, "1") == [Standing.IN_TURN]


def test_a_better_priority_stands_aside_for_no_shorter_prompts_of_a_worse_one():
    of = crowd(30_000, 200_000, 10_000, 10_000, 10_000, priorities=[-1, -1])
    assert standings(of, "1", "2", "3", "4") == [Standing.IN_TURN, Standing.DEAR, Standing.DEAR, Standing.DEAR]


def test_what_is_late_stays_so():
    of = crowd(30_000, 10)
    for key in ("late", "later"):
        of.queues.admit(wish(key, arrived=NOW + 20, ttft_s=1.0, priority=-1))
    until = of.takes_at("a")
    of.decide(until, [Context("a"), Context("b")])
    assert ids(of.take("a", 1, until)) == ["late"]
    assert standings(of, "later") == [Standing.LATE]


def test_what_stood_aside_for_shorter_prompts_is_looked_at_again():
    of = crowd(30_000, 100_000, 150_000, 100_000)
    assert standings(of, "2") == [Standing.DEAR]
    for key in ("1", "3"):
        of.queues.remove(key)
    of.decide(NOW + 30, [Context("a"), Context("b")])
    assert standings(of, "2") == [Standing.IN_TURN]


def test_prompts_are_begun_in_portions_that_a_short_answer_before_them_can_make_up_for():
    of = Scheduler[str](policy=Policy(PolicySettings()), active="a", now=NOW, max_running=64)
    for number in range(5):
        of.queues.admit(wish(str(number), prompt=10_000, ttft_s=50.0))
    now = NOW + 10
    of.decide(now, [Context("a"), Context("b")])
    assert ids(of.take("a", 64, now)) == ["0", "1"], "of 0.2 s each, where a token has 0.1 s"
    assert of.take("a", 62, now) == [], "the worker asks until there is no more"
    until = of.takes_at("a")
    assert until == pytest.approx(now + 2 * 0.2 + 16 * (0.005 + 2 * 5e-5))
    assert ids(of.take("a", 62, until)) == ["2", "3"]
    assert ids(of.take("a", 64, until)) == ["4"], "nothing runs any more"


def portioned(**more: Any) -> tuple[Scheduler[str], float]:
    """A scheduler that has begun a portion, of a priority and with a prompt; and when it takes more."""
    of = Scheduler[str](policy=Policy(PolicySettings()), active="a", now=NOW, max_running=64)
    of.queues.admit(wish("begun", **{"prompt": 10_000, "ttft_s": 50.0, **more}))
    of.decide(NOW, [Context("a"), Context("b")])
    assert ids(of.take("a", 64, NOW)) == ["begun"]
    assert of.takes_at("a") == math.inf, "nobody waits"
    of.queues.admit(wish("waits", prompt=10, ttft_s=50.0))
    return of, of.takes_at("a")


def test_who_has_no_objective_waits_no_longer_than_a_portion():
    of, until = portioned()
    of.queues.remove("waits")
    of.queues.admit(Waiting("plain", "a", "", NOW, tokens=20, prompt=10))
    assert of.take("a", 63, NOW) == []
    assert NOW < of.takes_at("a") == until < NOW + 1
    assert ids(of.take("a", 63, until)) == ["plain"]


def test_the_next_portion_comes_the_sooner_the_smaller_one_was():
    _, until = portioned(prompt=1000)
    assert until == pytest.approx(NOW + 0.02 + 16 * (0.02 / 0.4) * (0.005 + 5e-5))


def test_a_prompt_that_is_taken_to_be_endless_holds_nobody_up_for_long():
    of, until = portioned(prompt=100_000_000, ttft_s=1e9)
    assert until < NOW + 1
    assert ids(of.take("a", 63, until)) == ["waits"]


@pytest.mark.parametrize("hurry", [{"priority": -1}, {"ttft_s": 0.1}, {"deadline": NOW + 0.1}])
def test_who_is_next_and_more_urgent_or_would_be_late_does_not_wait_for_the_next_portion(hurry):
    of, until = portioned()
    of.queues.remove("waits")
    of.queues.admit(wish("urgent", **{"prompt": 10, "ttft_s": 50.0, **hurry}))
    of.queues.admit(wish("waits", arrived=NOW + 0.01, prompt=10, ttft_s=50.0))
    assert ids(of.take("a", 63, NOW)) == ["urgent"]
    assert of.take("a", 62, NOW) == [], "and nobody with it"
    assert of.takes_at("a") >= until


def test_what_is_answered_without_a_token_delays_none_and_is_not_begun_in_portions():
    """An embedding: its objective is its first token's alone."""
    of = Scheduler[str](policy=Policy(PolicySettings()), active="a", now=NOW, max_running=64)
    for number in range(5):
        of.queues.admit(Waiting(str(number), "a", "", NOW, tokens=9_000, prompt=9_000, first_by=NOW + 50, ttft_s=50.0))
    of.decide(NOW, [Context("a"), Context("b")])
    assert ids(of.take("a", 64, NOW)) == ["0", "1", "2", "3", "4"]


@pytest.mark.parametrize(
    ("others", "hold", "spare"),
    [({}, None, 44), ({"ttft_s": 10.0}, None, 8), ({"ttft_s": 10.0}, Hold("a"), 64), ({"ttft_s": -10.0}, None, 44)],
    ids=["alone", "another in turn", "held", "another late"],
)
def test_what_stands_aside_will_be_begun_as_far_as_nobody_else_is_to_be_served(others, hold, spare):
    """Twenty of its slots are for what came lately, were it to come again."""
    of = Scheduler[str](policy=Policy(PolicySettings()), active="a", now=NOW, max_running=64)
    of.queues.admit(wish("late", ttft_s=-1.0))
    if others:
        of.queues.admit(wish("other", "b", **others))
    of.decide(NOW, [Context("a"), Context("b")])
    seen = of.view(NOW, [Context("a"), Context("b")], hold)
    assert of.spare(seen, "a", behind=True) == spare


def test_what_is_answered_without_a_token_tells_nothing_of_how_long_a_turn_is():
    of = Scheduler[str](policy=Policy(PolicySettings()), active="a", now=NOW, max_running=64)
    of.queues.admit(wish("chat", ttft_s=10.0))
    of.decide(NOW, [Context("a"), Context("b")])
    steps = of.view(NOW, [Context("a")]).models["a"].steps
    of.queues.admit(Waiting("embedding", "a", "", NOW, tokens=10, prompt=10, first_by=NOW + 50, ttft_s=50.0))
    of.decide(NOW, [Context("a"), Context("b")])
    assert of.view(NOW, [Context("a")]).models["a"].steps == steps == pytest.approx(50.0)


def test_beside_what_is_answered_without_a_token_the_others_are_as_cheap_as_before():
    """Three hundred in half a minute cost 4 s in a full batch, and 150 s one by one."""
    of = Scheduler[str](policy=Policy(PolicySettings()), active="a", now=NOW, max_running=64)
    of.queues.admit(Waiting("embedding", "a", "", NOW, tokens=10, prompt=10, first_by=NOW + 50, ttft_s=50.0))
    for number in range(300):
        of.queues.admit(wish(str(number), arrived=NOW + number / 10, prompt=10 + number, ttft_s=50.0))
    of.decide(NOW + 29.9, [Context("a"), Context("b")])
    assert of.queues.dear(1) == []


def test_without_objectives_all_are_begun_for_whom_there_is_room():
    of = scheduler()
    for number in range(5):
        of.queues.admit(Waiting(str(number), "a", "", NOW, tokens=100_000, prompt=90_000))
    assert len(of.take("a", 4, NOW)) == 4


def test_what_was_read_when_most_of_its_time_was_over_counts_as_a_whole():
    of = scheduler()
    late = replace(wish("late", "b", ttft_s=10.0), first_by=NOW + 1)
    assert of.goal(late).worth(NOW) == 1.0
    assert of.goal(wish("fresh", "b", ttft_s=10.0)).worth(NOW) == EARLY


def test_what_was_too_dear_has_its_turn_again_when_the_rush_is_over():
    of = scheduler()
    rush(of)
    of.queues.admit(wish("dear", prompt=20_000, ttft_s=50.0))
    of.decide(NOW + 1, [Context("a"), Context("b")])
    assert of.take("a", 9, NOW + 1) == []
    of.queues.admit(wish("later", arrived=NOW + 40))
    of.decide(NOW + 40, [Context("a"), Context("b")])
    assert ids(of.queues.in_turn("a", 9)) == ["dear", "later"]
    assert ids(of.take("a", 9, NOW + 40) + of.take("a", 8, NOW + 41)) == ["dear", "later"]


def test_nothing_is_too_dear_when_nothing_has_come_for_a_while():
    of = scheduler()
    rush(of)
    of.queues.admit(wish("dear", prompt=20_000, ttft_s=50.0))
    contexts = [Context("a"), Context("b")]
    of.decide(NOW + 1, contexts)
    assert of.queues.in_turn("a", 9) == []
    of.decide(NOW + 40, contexts)
    assert ids(of.queues.in_turn("a", 9)) == ["dear"]


def test_who_is_late_is_behind_those_that_can_be_in_time_but_for_one_of_eight_after_half_the_bound():
    of = scheduler(max_wait_s=60.0)
    for number in range(4):
        of.queues.admit(wish(f"late {number}", arrived=NOW - 12))
    for number in range(30):
        of.queues.admit(wish(f"new {number}", ttft_s=100.0))
    of.decide(NOW, [Context("a")])
    assert ids(of.take("a", 20, NOW)) == [f"new {number}" for number in range(20)]
    later = ids(of.take("a", 10, NOW + 20))
    assert later == ["late 0", *(f"new {number}" for number in range(20, 27)), "late 1", "new 27"]


def test_who_has_stood_aside_for_longest_is_the_first_whose_time_comes_whatever_its_priority():
    of = scheduler(max_wait_s=60.0)
    of.queues.admit(replace(wish("old", arrived=NOW - 30), priority=1))
    for number in range(9):
        of.queues.admit(wish(f"late {number}", arrived=NOW - 12))
    for number in range(16):
        of.queues.admit(replace(wish(f"new {number}", ttft_s=100.0), priority=1))
    of.decide(NOW, [Context("a")])
    assert ids(of.take("a", 17, NOW))[-1] == "old"


def test_late_ones_take_an_eighth_of_what_is_begun_in_an_overload_that_lasts():
    """Twelve requests a second, where there is time for eight."""
    of = scheduler(max_wait_s=60.0)
    begun = {"in time": 0, "late": 0}
    for tick in range(100 * 8):
        now = NOW + tick / 8
        for number in range(1 + tick % 2):
            of.queues.admit(wish(f"{tick} {number}", arrived=now, ttft_s=5.0))
        if tick % 8 == 0:
            of.decide(now, [Context("a", unfinished=9), Context("b", unfinished=1, running=(Goal(now, now + 9),))])
        for item in of.take("a", 1, now):
            assert item.first_by is not None
            begun["in time" if now <= item.first_by else "late"] += tick >= 400
    assert sum(begun.values()) >= 390
    assert begun["late"] <= 400 / 8 + 1


def test_the_device_is_never_idle_for_those_that_stand_aside():
    of = scheduler()
    of.queues.admit(wish("late", arrived=NOW - 11))
    of.decide(NOW, [Context("a")])
    assert ids(of.take("a", 9, NOW)) == ["late"]


def test_what_stands_aside_has_the_turn_of_a_model_that_the_operator_holds():
    of = scheduler()
    rush(of)
    of.queues.admit(wish("dear", prompt=20_000))
    of.decide(NOW, [Context("a"), Context("b")], Hold("a"))
    assert ids(of.take("a", 9, NOW)) == ["dear"]


def test_those_that_stand_aside_fill_the_device_where_nobody_else_is_there():
    of = scheduler()
    for number in range(300):
        of.queues.admit(wish(f"late {number}", arrived=NOW - 40, prompt=10))
    of.decide(NOW, [Context("a")])
    assert len(of.take("a", 256, NOW)) == 256


def test_only_a_few_of_them_run_where_what_comes_will_need_the_slots():
    of = scheduler()
    for number in range(300):
        of.queues.admit(wish(f"late {number}", arrived=NOW - 11))
    of.decide(NOW, [Context("a")])
    first = of.take("a", 256, NOW)
    assert 0 < len(first) < 200
    assert of.take("a", 256 - len(first), NOW) == [], "those that run have their room"


def test_a_few_that_stand_aside_run_beside_others_turns_while_there_is_time_for_all_that_comes():
    of = scheduler()
    of.queues.admit(wish("late", arrived=NOW - 11))
    others = Context("b", unfinished=1, running=(Goal(NOW, NOW + 9),))
    of.decide(NOW, [Context("a", unfinished=1, running=(Goal(NOW, NOW + 9),)), others])
    assert ids(of.take("a", 255, NOW)) == ["late"]
    rush(of)
    of.queues.admit(wish("late again", arrived=NOW - 11))
    of.decide(NOW + 1, [Context("a", unfinished=1, running=(Goal(NOW, NOW + 9),)), others])
    assert of.take("a", 254, NOW + 1) == []


def test_who_became_late_between_two_decisions_is_begun_all_the_same_and_the_next_one_is_soon():
    of = scheduler()
    of.queues.admit(wish("1", ttft_s=0.3))
    until = of.decide(NOW + 0.29, [Context("a")]).until
    assert until is not None
    assert until <= NOW + 1
    assert ids(of.take("a", 256, NOW + 0.31)) == ["1"]


def test_all_that_are_late_when_they_come_stand_aside_however_many_they_are():
    of = scheduler()
    for number in range(400):
        of.queues.admit(wish(f"late {number}", arrived=NOW - 20))
    of.queues.admit(wish("new"))
    of.decide(NOW, [Context("a")])
    assert ids(of.queues.in_turn("a", 999)) == ["new"]


def test_a_request_that_came_too_late_makes_no_turn_shorter_than_a_step():
    of = scheduler()
    of.queues.admit(wish("late", arrived=NOW, ttft_s=-40.0))
    of.decide(NOW, [Context("a")])
    assert of.view(NOW, [Context("a")]).models["a"].steps == 1


def test_what_came_for_a_model_that_is_paused_makes_nothing_dear():
    of = scheduler()
    of.pauses.say("b", paused=True)
    rush(of)
    of.queues.admit(wish("dear", prompt=20_000))
    of.decide(NOW, [Context("a")])
    assert ids(of.queues.in_turn("a", 9)) == ["dear"]


def test_a_model_that_never_ran_is_tried_before_it_is_found_too_dear():
    of = scheduler()
    for _ in range(20):
        of.costs.did("b", seconds=1.0, prompt=100_000, steps=10, rows=600)
        of.costs.finished("b", seconds=0.1, tokens=20_000, said=1)
    for number in range(300):
        of.queues.admit(wish(f"cheap {number}", "b", prompt=20_000))
    of.queues.admit(wish("unseen", prompt=100))
    of.decide(NOW + 1, [Context("a"), Context("b")])
    assert ids(of.take("a", 9, NOW + 1)) == ["unseen"]


def test_a_better_priority_is_never_too_dear_for_a_worse_one():
    of = scheduler()
    rush(of)
    of.queues.admit(replace(wish("dear", prompt=20_000), priority=-1))
    of.decide(NOW, [Context("a"), Context("b")])
    assert ids(of.take("a", 9, NOW)) == ["dear"]


def test_what_is_late_is_behind_those_of_its_priority_and_before_those_of_a_worse_one_with_an_objective_or_without():
    of = scheduler()
    of.queues.admit(Waiting("worse, without", "a", "", NOW - 20, priority=1))
    of.queues.admit(replace(wish("worse"), priority=1))
    of.queues.admit(wish("late", arrived=NOW - 11))
    of.queues.admit(wish("new"))
    of.decide(NOW, [Context("a"), Context("b", unfinished=1, running=(Goal(NOW, NOW + 9),))])
    assert ids(of.take("a", 9, NOW)) == ["new", "late", "worse, without", "worse"]


def test_what_is_late_and_of_a_better_priority_is_begun_whatever_another_model_has_of_a_worse_one():
    of = scheduler()
    rush(of)
    of.queues.admit(replace(wish("late", arrived=NOW - 11), priority=-1))
    running = Context("a", unfinished=1, running=(Goal(NOW, NOW + 9),))
    assert of.decide(NOW, [running, Context("b")]).run == "a"
    assert ids(of.take("a", 255, NOW)) == ["late"]


def test_a_nearest_deadline_is_found_behind_those_of_many_that_stand_aside():
    of = scheduler()
    for number in range(20):
        of.queues.admit(replace(wish(f"late {number}", arrived=NOW - 11), deadline=NOW + 5, priority=-1))
    for number in range(20):
        of.queues.admit(replace(wish(f"new {number}", ttft_s=1e6), tokens=10_000))
    of.queues.admit(replace(wish("dated", ttft_s=1e6), deadline=NOW + 6))
    of.decide(NOW, [Context("a"), Context("b")])
    assert "dated" in ids(of.take("a", 2, NOW))


def test_what_only_reads_its_prompt_is_not_taken_to_be_answered():
    of = scheduler()
    rush(of)
    of.queues.admit(replace(wish("embed", prompt=9000), tokens=9000))
    of.queues.admit(wish("answer", prompt=9000))
    of.decide(NOW + 1, [Context("a"), Context("b")])
    assert ids(of.queues.in_turn("a", 9)) == ["embed"]


def test_a_forecast_changes_nothing_that_is_decided():
    of = scheduler()
    of.queues.admit(wish("1", ttft_s=2.0))
    before = of.view(NOW, [Context("a")])
    of.forecast(of.view(NOW, [Context("a")]))
    assert of.view(NOW, [Context("a")]) == before


@settings(max_examples=50, deadline=None)
@example(real=(1e-5, 0.0625, 1 / 256), seen=[(0, 1, 1)] * 19 + [(1, 1, 2)])
@example(real=(1e-5, 0.001, 0.0014), seen=[(1, 500, 64), (0, 1, 34)] * 20)
@given(
    real=st.tuples(st.floats(1e-5, 1e-3), st.floats(1e-3, 0.1), st.floats(1e-5, 5e-3)),
    seen=st.lists(st.tuples(st.integers(0, 20_000), st.integers(1, 500), st.integers(1, 64)), min_size=20, max_size=60),
)
def test_what_work_costs_is_learnt_from_what_was_seen(
    real: tuple[float, float, float], seen: list[tuple[int, int, int]]
):
    """Both what was seen many times, and what each of the three parts costs where they were seen apart."""
    costs = WorkCosts(*real)

    for past in ([], seen):
        work = Work()
        for prompt, steps, rows in (*past, *[(20_000, 1, 1), (0, 100, 1), (0, 100, 64)] * 20):
            seconds = prompt * costs.prompt_token_s + costs.steps_s(steps, rows)
            work.seen(seconds=seconds, prompt=prompt, steps=steps, rows=steps * rows)
        found = work.costs
        prompt_s = 20_000 * costs.prompt_token_s + costs.steps_s(1, 1)
        assert 20_000 * found.prompt_token_s + found.steps_s(1, 1) == pytest.approx(prompt_s, rel=0.05)
        for rows in (1, 64):
            assert found.steps_s(100, rows) == pytest.approx(costs.steps_s(100, rows), rel=0.05)
        assert min(found.prompt_token_s, found.step_s, found.row_s) >= 0


def test_one_odd_observation_spoils_nothing_that_was_learnt():
    work, costs = Work(), WorkCosts(1e-4, 0.02, 1e-3)
    for rows in (1, 8, 64) * 20:
        work.seen(seconds=1000 * costs.prompt_token_s + costs.steps_s(50, rows), prompt=1000, steps=50, rows=50 * rows)
    work.seen(seconds=1e-3, prompt=50_000, steps=500, rows=5000)
    work.seen(seconds=1e3, prompt=1, steps=0, rows=0)
    assert work.costs.request_s(1000, 100, 8) == pytest.approx(costs.request_s(1000, 100, 8), rel=0.25)
    work.seen(seconds=1e-300, prompt=1, steps=1, rows=1)
    assert work.costs.request_s(1000, 100, 8) == pytest.approx(costs.request_s(1000, 100, 8), rel=0.5)


@pytest.mark.parametrize("times", [0.01, 0.1, 10, 100])
def test_a_device_that_became_faster_or_slower_is_soon_known_to_be(times: float):
    work = Work()
    for seconds in (*[1.0] * 60, *[times] * 25):
        work.seen(seconds=seconds, prompt=1000, steps=50, rows=400)
    assert 1000 * work.costs.prompt_token_s + work.costs.steps_s(50, 8) == pytest.approx(times, rel=0.1)


def test_a_clock_that_stands_still_leaves_no_costs_that_cannot_be_learnt_again():
    work = Work()
    for seconds in (*[1e-300] * 1000, *[1e-9] * 1000, *[1.0] * 80):
        work.seen(seconds=seconds, prompt=1000, steps=50, rows=400)
    assert 1000 * work.costs.prompt_token_s + work.costs.steps_s(50, 8) == pytest.approx(1.0, rel=0.1)


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
    outcome = contest(made, "gearshift", bound_s=bound_s)
    assert outcome.wait_max_s <= bound_s + longest
    assert outcome.idle_s <= 1e-3, "the device had nothing to do although something waited"
