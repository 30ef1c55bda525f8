"""The offline bound: never below what the best of all schedules does, found by trying all, and not far above it."""

from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.objectives import Objective
from service.scheduling.machines import Machine, ModelCosts
from service.scheduling.simulator import Arrival, Trace
from tests.bench.offline import goodput_bound

_STEP_S, _ROW_S, _PREFILL_TOKENS_S = 1.0, 0.25, 100.0


def machine(*aliases: str) -> Machine:
    models = {
        alias: ModelCosts(
            alias=alias,
            device_bytes=1.0,
            resident_s=0.0,
            parked_s=0.0,
            dropped_s=0.0,
            step_s=_STEP_S,
            row_s=_ROW_S,
            prefill_tokens_s=_PREFILL_TOKENS_S,
            max_running=2,
        )
        for alias in aliases
    }
    return Machine("small", 2.0, models)


def best_of_all(trace: Trace) -> int:
    """The most requests that any schedule meets: every order of prompts and steps, each step with every set of rows.

    Prompts are done one at a time and whole, switches are free. A request that is late is as good as gone.
    """
    requests = trace.arrivals

    @cache
    def met(now: float, told: tuple[tuple[float, int] | None, ...]) -> int:
        """The most that can still be met. Of each request: when its first token came, and how many it has."""
        best = 0
        for number, (request, said) in enumerate(zip(requests, told, strict=True)):
            if said is None and now >= request.at and request.objective:
                then = now + request.prompt / _PREFILL_TOKENS_S
                if then <= request.at + request.objective.ttft_s + 1e-9:
                    best = max(best, met(then, (*told[:number], (-1.0, 0), *told[number + 1 :])))
        for alias in trace.machine.models:
            for rows in _sets([n for n, r in enumerate(requests) if r.alias == alias and _runs(r, told[n])]):
                then, after, ended = now + _STEP_S + len(rows) * _ROW_S, list(told), 0
                for number in rows:
                    request, said = requests[number], told[number]
                    assert said is not None
                    assert request.objective is not None
                    first, tokens = (then if said[1] == 0 else said[0]), said[1] + 1
                    last = first + (request.output - 1) * request.objective.tpot_s
                    in_time = first <= request.at + request.objective.ttft_s + 1e-9 and then <= last + 1e-9
                    ended += tokens == request.output and in_time
                    after[number] = (first, tokens)
                best = max(best, ended + met(then, tuple(after)))
        coming = min((request.at for request in requests if request.at > now), default=None)
        return best if coming is None else max(best, met(coming, told))

    return met(0.0, (None,) * len(requests))


def _runs(request: Arrival, said: tuple[float, int] | None) -> bool:
    return said is not None and said[1] < request.output


def _sets(numbers: list[int]) -> list[tuple[int, ...]]:
    """One row or two: more a step does not have."""
    return [(n,) for n in numbers] + [(n, m) for n in numbers for m in numbers if n < m]


@st.composite
def small(draw: st.DrawFn) -> Trace:
    on = machine("a", "b")
    arrivals = [
        Arrival(
            at=draw(st.sampled_from((0.0, 1.0, 2.5))),
            alias=draw(st.sampled_from("ab")),
            prompt=draw(st.sampled_from((50, 100, 200))),
            output=draw(st.integers(1, 3)),
            objective=Objective(ttft_s=draw(st.sampled_from((3.0, 5.0))), tpot_s=draw(st.sampled_from((1.5, 3.0)))),
        )
        for _ in range(draw(st.integers(1, 3)))
    ]
    return Trace("small", on, tuple(sorted(arrivals, key=lambda arrival: arrival.at)))


@given(small())
@settings(deadline=None, max_examples=25)
def test_no_schedule_of_all_there_are_meets_more_than_the_bound(trace: Trace):
    assert best_of_all(trace) <= goodput_bound(trace, slots=64, rounds=100) * len(trace.arrivals) + 1e-9


def crowd(count: int, *, rows: int) -> Trace:
    """So many requests at once, of which one needs 1 s for its prompt, and 4 s are given for it."""
    of = Objective(ttft_s=4.0, tpot_s=1.0)
    on = machine("a")
    arrivals = tuple(Arrival(0.0, "a", int(_PREFILL_TOKENS_S), rows, objective=of) for _ in range(count))
    return Trace("crowd", on, arrivals)


def test_a_crowd_that_can_not_be_served_is_bounded_near_what_fits():
    trace = crowd(20, rows=1)
    room_s, cost_s = 4.0, 1.0 + _STEP_S / 2 + _ROW_S
    assert goodput_bound(trace) * 20 == pytest.approx(room_s / cost_s, rel=0.15)


def test_prompts_that_are_due_at_once_are_bounded_by_their_own_time_however_long_the_answers_may_take():
    of = Objective(ttft_s=40.0, tpot_s=1000.0)
    trace = Trace("rush", machine("a"), (Arrival(0.0, "a", int(_PREFILL_TOKENS_S), 2, objective=of),) * 200)
    assert 40 <= goodput_bound(trace) * 200 <= 50, "of 1 s each, 40 s are given for them"


def test_who_is_not_worth_serving_takes_no_part_of_a_step_off_the_others():
    of = Objective(ttft_s=4.0, tpot_s=1.0)
    costs = replace(machine("a").models["a"], max_running=64)
    arrivals = (Arrival(0.0, "a", 1, 1, objective=of),) * 4 + (Arrival(0.0, "a", 250, 1, objective=of),) * 20
    bound = goodput_bound(Trace("dear", Machine("roomy", 2.0, {"a": costs}), arrivals)) * len(arrivals)
    step_s, dear_s = _STEP_S + 4 * _ROW_S + 4 / _PREFILL_TOKENS_S, 250 / _PREFILL_TOKENS_S + _ROW_S
    assert bound == pytest.approx(4 + (4.0 - step_s) / dear_s, rel=0.01), "with steps of 24 rows it would be 4.97"


def test_what_can_be_met_by_all_is_bounded_by_all():
    assert goodput_bound(crowd(1, rows=1)) == 1.0


def test_a_request_that_can_not_be_met_alone_counts_for_nothing():
    late = Arrival(0.0, "a", 500, 1, objective=Objective(ttft_s=4.0, tpot_s=1.0))
    assert goodput_bound(Trace("late", machine("a"), (late,))) == 0.0


def test_a_request_without_an_objective_has_no_bound():
    with pytest.raises(ValueError, match="objective"):
        goodput_bound(Trace("any", machine("a"), (Arrival(0.0, "a", 1, 1),)))
