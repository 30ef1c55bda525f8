"""The worker's policy in the simulator: its guarantees on any traffic, and what issue 6 asks it to show."""

from collections import Counter
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.contexts import Tier
from schemas.objectives import Objective
from service.scheduling.costs import PRIOR_S
from service.scheduling.goodput import Goal
from service.scheduling.machines import Machine, gaudi3, gaudi_model, tiny_cpu
from service.scheduling.policy import PolicySettings
from service.scheduling.simulator import Arrival, Missed, Outcome, Trace, _Row
from tests.bench.baselines import BASELINES, contest
from tests.bench.traces import NAMES, trace

BOUND_S = 60.0
_REQUESTS = {"interleaved": 5000, "diurnal": 1000}
"""Enough for a few minutes of each trace."""


@st.composite
def traffic(draw: st.DrawFn) -> Trace:
    machine = draw(st.sampled_from((gaudi3(), tiny_cpu())))
    now, arrivals = 0.0, []
    for _ in range(draw(st.integers(1, 60))):
        now += draw(st.floats(0, 20))
        alias = draw(st.sampled_from(tuple(machine.models)))
        prompt, output = draw(st.integers(1, 2000)), draw(st.integers(1, 3000))
        arrivals.append(Arrival(now, alias, prompt, output, now + draw(st.floats(1, 400))))
    return Trace("any", machine, tuple(arrivals))


@given(traffic())
@settings(deadline=None, max_examples=60)
def test_no_request_waits_for_its_turn_beyond_the_bound_plus_one_switch(made: Trace):
    longest = max(model.parked_s for model in made.machine.models.values())
    outcome = contest(made, "gearshift", bound_s=30.0)
    assert outcome.wait_max_s <= 30.0 + longest


@given(traffic())
@settings(deadline=None, max_examples=40)
def test_the_device_never_idles_longer_than_it_waits_and_sees(made: Trace):
    outcome = contest(made, "gearshift")
    moment = PolicySettings().wait_and_see * 2 * PRIOR_S[Tier.PARKED]
    assert outcome.idle_s <= moment * (outcome.switches + 1)


@given(st.integers(0, 2**32), st.floats(0.1, 1.0))
@settings(deadline=None, max_examples=10)
def test_switches_away_from_unfinished_work_take_no_more_than_their_share(seed: int, switch_s: float):
    """Two models that are hardly ever dry, and somebody in a hurry for the other one all the time."""
    dice = Random(seed)
    like = gaudi_model("a", billions=8, byte_per_weight=2, kv_bytes_per_token=131e3)
    models = {alias: replace(like, alias=alias, resident_s=switch_s, parked_s=switch_s) for alias in "ab"}
    patience = [3.0 + 3 * switch_s, 300.0]
    arrivals = [Arrival(n / 5, dice.choice("ab"), 50, 400, n / 5 + dice.choice(patience)) for n in range(1500)]
    outcome = contest(Trace("hurry", Machine("two", 1e12, models), tuple(arrivals)), "gearshift", bound_s=60.0)
    share, dry = PolicySettings().switching_share, 3
    assert outcome.switches > dry
    assert outcome.switching_s <= share * (outcome.end + 60.0) + dry * switch_s


def test_where_the_bound_can_not_be_kept_half_of_the_time_is_still_served():
    """Forty models, each two seconds away: eighty seconds of switching within a bound of sixty."""
    dice = Random(1)
    like = gaudi_model("m", billions=8, byte_per_weight=2, kv_bytes_per_token=131e3)
    models = {f"m{n}": replace(like, alias=f"m{n}", resident_s=2.0, parked_s=2.0) for n in range(40)}
    arrivals = [Arrival(n / 5, f"m{dice.randrange(40)}", 50, 400, n / 5 + 300) for n in range(1500)]
    outcome = contest(Trace("too many", Machine("forty", 1e12, models), tuple(arrivals)), "gearshift", bound_s=60.0)
    assert outcome.serving_share > 0.4
    assert outcome.within_deadline > 0.9


@pytest.mark.parametrize(("tpot_s", "met", "why"), [(0.018, True, None), (0.015, False, Missed.PACE)])
def test_a_first_token_that_is_early_leaves_time_for_the_others(tpot_s: float, met: bool, why: Missed | None):
    """A step takes 12 ms; after ten seconds the other model has its turn for ten more."""
    like = replace(gaudi3().models["8b"], step_s=0.012, row_s=0.0, resident_s=0.0, parked_s=0.0)
    models = {alias: replace(like, alias=alias) for alias in "ab"}
    asked = Objective(ttft_s=6.0, tpot_s=tpot_s)
    arrivals = (Arrival(0.0, "a", 10, 1000, objective=asked), Arrival(0.1, "b", 10, 2000, objective=asked))
    outcome = contest(Trace("early", Machine("two", 1e12, models), arrivals), "round robin", refuses=False)
    assert (outcome.met, outcome.met_since_first) == (int(met), 0), "22 seconds since its first token"
    assert outcome.missed == Counter(filter(None, (Missed.FIRST, why)))


def test_a_schedule_is_told_when_a_rows_next_token_is_due_and_that_it_is_lost_where_the_first_one_was_late():
    asked = Arrival(10.0, "a", 5, 100, objective=Objective(ttft_s=2.0, tpot_s=0.1), claim=50)
    assert _Row(asked, 0.0, first_at=11.0).goal(60.0) == Goal(12.0 + 40 * 0.1, 12.0 + 50 * 0.1, ttft_s=2.0)
    assert _Row(asked, 0.0, first_at=12.1).goal(60.0) == Goal(12.0, 12.0, ttft_s=2.0)


@given(traffic())
@settings(deadline=None, max_examples=20)
def test_the_same_traffic_gives_the_same_schedule(made: Trace):
    assert contest(made, "gearshift") == contest(made, "gearshift")


@given(traffic())
@settings(deadline=None, max_examples=20)
@pytest.mark.parametrize("who", ["gearshift", *BASELINES])
def test_every_schedule_accounts_for_all_the_time_and_every_request(who: str, made: Trace):
    outcome = contest(made, who)
    assert len(outcome.waits) == len(made.arrivals)
    assert outcome.met <= len(made.arrivals)
    assert outcome.serving_s + outcome.switching_s + outcome.idle_s <= outcome.end + 1e-6
    assert all(early.end <= late.start + 1e-9 for early, late in zip(outcome.stays, outcome.stays[1:], strict=False))


def test_one_request_alone_takes_its_prefill_its_steps_and_its_switch():
    model = gaudi_model("m", billions=8, byte_per_weight=2, kv_bytes_per_token=131e3)
    other = gaudi_model("n", billions=8, byte_per_weight=2, kv_bytes_per_token=131e3)
    machine = Machine("two", 120e9, {"n": other, "m": model})
    made = Trace("one", machine, (Arrival(5.0, "m", 1000, 200, 100.0),))
    outcome = contest(made, "gearshift")
    assert outcome.switching_s == pytest.approx(model.parked_s)
    assert outcome.serving_s == pytest.approx(model.alone_s(1000, 200))
    assert outcome.end == pytest.approx(5.0 + model.parked_s + model.alone_s(1000, 200))


def test_what_was_said_is_prefilled_again_with_its_prompt_where_parking_keeps_no_blocks():
    kept = gaudi_model("a", billions=8, byte_per_weight=2, kv_bytes_per_token=131e3)
    a = replace(kept, row_back_s=None)
    b = replace(a, alias="b")
    made = Trace(
        "long",
        Machine("one", a.device_bytes, {"a": a, "b": b}),
        (Arrival(0.0, "a", 100, 5000), Arrival(1.0, "b", 10, 10)),
    )
    outcome = contest(made, "gearshift", bound_s=20.0)
    assert outcome.switches == 2
    first = outcome.stays[0]
    said = (first.end - first.start - 100 / a.prefill_tokens_s) / (a.step_s + a.row_s)
    assert said > 200
    again_s = outcome.serving_s - a.alone_s(100, 5000) - b.alone_s(10, 10)
    assert again_s == pytest.approx((100 + said) / a.prefill_tokens_s, rel=0.02)


@pytest.fixture(scope="module")
def outcomes() -> dict[str, dict[str, Outcome]]:
    return {
        name: {who: contest(made, who, bound_s=BOUND_S) for who in (*BASELINES, "gearshift")}
        for name in NAMES
        for made in [trace(name, _REQUESTS.get(name, 1500))]
    }


@pytest.mark.parametrize("name", NAMES)
def test_as_many_meet_their_deadline_as_under_the_best_baseline(name: str, outcomes: dict[str, dict[str, Outcome]]):
    best = max(outcomes[name][who].within_deadline for who in BASELINES)
    assert outcomes[name]["gearshift"].within_deadline >= best - 0.01


@pytest.mark.parametrize("who", BASELINES)
def test_more_meet_their_deadline_than_under_any_baseline(who: str, outcomes: dict[str, dict[str, Outcome]]):
    ours = sum(of["gearshift"].within_deadline for of in outcomes.values())
    assert ours > sum(of[who].within_deadline for of in outcomes.values())


@pytest.mark.parametrize("name", NAMES)
def test_no_baseline_that_keeps_the_bound_serves_more_of_the_time(name: str, outcomes: dict[str, dict[str, Outcome]]):
    bounded = [outcomes[name][who] for who in BASELINES if outcomes[name][who].wait_max_s < BOUND_S]
    assert all(outcomes[name]["gearshift"].serving_share >= rival.serving_share for rival in bounded)
    assert outcomes[name]["gearshift"].wait_max_s < BOUND_S


def test_interleaved_requests_are_served_where_fifo_does_nothing_but_switch(outcomes: dict[str, dict[str, Outcome]]):
    assert outcomes["interleaved"]["gearshift"].serving_share >= 0.9
    assert outcomes["interleaved"]["fifo"].serving_share < 0.2


def test_a_trace_is_the_same_for_the_same_seed_and_another_for_another():
    assert trace("bursty", 200, seed=1) == trace("bursty", 200, seed=1)
    assert trace("bursty", 200, seed=1).arrivals != trace("bursty", 200, seed=2).arrivals
