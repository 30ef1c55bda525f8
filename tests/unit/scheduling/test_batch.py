"""When the requests of one model are done: what was learnt of its steps, and the batch worked off by it."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.scheduling.batch import Line, Row, Steps, work_off
from service.scheduling.work import WorkCosts


def learnt(*, first_s: float = 0.5, step_s: float = 0.1, row_s: float = 0.01, said: float = 1.0) -> Steps:
    """Of a model whose steps take so long, from batches of 1 to 16 requests."""
    steps = Steps()
    for number in range(60):
        beside = 1 + number % 16
        steps.finished(
            prompt=50,
            asked=100,
            said=int(100 * said),
            first_s=first_s,
            rest_s=(int(100 * said) - 1) * (step_s + beside * row_s),
            beside=beside,
        )
    return steps


def test_a_step_is_learnt_with_what_each_request_of_the_batch_adds() -> None:
    steps = learnt()
    assert [steps.step_s(rows) for rows in (1, 8, 16)] == pytest.approx([0.11, 0.18, 0.26])


def test_a_first_token_is_learnt_by_the_prompt() -> None:
    steps = Steps()
    for prompt in (100, 1000, 4000) * 10:
        steps.finished(prompt=prompt, asked=10, said=10, first_s=0.05 + prompt / 1000, rest_s=1.0, beside=1)
    assert steps.first_s(2000) == pytest.approx(2.05)


def test_answers_that_end_before_they_must_are_expected_to() -> None:
    assert learnt(said=0.25).said == pytest.approx(0.25)
    assert Steps().said == 1.0


def test_batches_that_were_all_alike_tell_no_slope() -> None:
    line = Line()
    for n in range(30):
        line.seen(16 + n % 2 / 10, 1.0 + n % 2)
    assert line.at(1) == pytest.approx(line.at(30), rel=0.01)


def test_the_cost_of_a_model_that_changes_is_learnt_anew() -> None:
    steps = learnt(step_s=0.1)
    for _ in range(100):
        steps.finished(prompt=50, asked=100, said=100, first_s=1.0, rest_s=99 * 0.4, beside=8)
    assert steps.step_s(8) == pytest.approx(0.4, rel=0.1)


def test_what_runs_ends_by_its_tokens_and_goes_faster_the_fewer_run() -> None:
    steps = learnt()
    alone, long = work_off([Row(10), Row(20)], [], 8, steps)
    assert alone.end == pytest.approx(10 * 0.12)
    assert long.end == pytest.approx(10 * 0.12 + 10 * 0.11)
    assert (alone.start, alone.first) == (0.0, 0.0)


def test_what_waits_starts_when_one_before_it_has_left_it_a_slot() -> None:
    first, second, third = work_off([Row(10), Row(30)], [Row(10, first_s=0.24)], 2, learnt())
    assert third.start == first.end == pytest.approx(1.2)
    assert third.first == pytest.approx(1.2 + 0.24)
    assert third.end == pytest.approx(1.2 + 0.24 + 9 * 0.12)
    assert second.end > third.end


def test_with_objectives_prompts_are_begun_in_portions_and_a_portion_waits_for_the_one_before() -> None:
    hurried = Row(100, first_s=0.2, prompt_s=0.25, tpot_s=0.1)
    work = WorkCosts(prompt_token_s=1.0, step_s=0.02, row_s=0.01)
    running, *waiting = work_off([Row(1000)], [hurried] * 5, 8, learnt(), work=work, opens_s=0.5)
    second = 0.5 + 2 * 0.25 + 16 * (0.02 + 3 * 0.01)  # two of them take at least four times what a token may
    third = second + 2 * 0.25 + 16 * (0.02 + 5 * 0.01)
    assert [each.start for each in waiting] == pytest.approx([0.5, 0.5, second, second, third])
    assert [each.first for each in waiting[:2]] == pytest.approx([0.7, 0.7])
    assert running.end > max(each.end for each in waiting)


def test_who_would_be_late_by_the_next_portion_begins_alone_and_does_not_bring_it_forward() -> None:
    patient, hurried = Row(100, prompt_s=0.1, tpot_s=0.1), Row(100, prompt_s=0.1, tpot_s=0.1, start_by_s=1.0)
    found = work_off([Row(1000)], [hurried, hurried, patient, hurried], 8, learnt(), opens_s=2.0)
    assert [each.start for each in found[1:]] == pytest.approx([0.0, 0.0, 2.0, 2.0])
    late = Row(100, tpot_s=0.1, start_by_s=-9.0, aside=True)
    assert work_off([Row(1000)], [late], 8, learnt(), opens_s=2.0)[1].start == pytest.approx(2.0)


def test_those_that_stand_aside_share_a_portion_with_those_that_do_not() -> None:
    rows = [Row(100, prompt_s=0.1, tpot_s=0.1), *[Row(100, prompt_s=0.1, tpot_s=0.1, aside=True, start_by_s=-9.0)] * 7]
    starts = [each.start for each in work_off([], rows, 8, learnt(), spare=4)]
    assert starts[:4] == [0.0] * 4
    assert min(starts[4:]) > 1.0


def test_a_portion_is_not_waited_for_where_nothing_runs() -> None:
    hurried = Row(1, prompt_s=100.0, tpot_s=0.1)
    first, second = work_off([], [hurried] * 2, 8, learnt(), opens_s=50.0)
    assert (first.start, second.start) == (0.0, pytest.approx(first.end))


def test_what_stands_aside_begins_behind_all_others_and_beside_a_few() -> None:
    waiting = [Row(10), Row(10), *[Row(10, aside=True)] * 4]
    found = work_off([Row(30)], waiting, 4, learnt(), spare=2)
    one, two, *aside = (each.start for each in found[1:])
    assert (one, two) == (0.0, 0.0)
    assert aside[0] == found[1].end, "when one of the three that ran is left"
    assert aside[1:3] == [each.end for each in found[3:5]]


rows = st.builds(
    Row,
    tokens=st.floats(1, 500),
    first_s=st.floats(0, 2),
    prompt_s=st.floats(0, 2),
    tpot_s=st.floats(0.001, 1) | st.just(math.inf),
    start_by_s=st.floats(-1, 5) | st.just(math.inf),
)


@given(
    running=st.lists(rows, max_size=6),
    waiting=st.lists(rows, max_size=12),
    slots=st.integers(1, 8),
    opens_s=st.floats(0, 5),
)
def test_each_is_done_once_and_in_its_order(running: list[Row], waiting: list[Row], slots: int, opens_s: float) -> None:
    found = work_off(running, waiting, slots, learnt(), opens_s=opens_s)
    assert len(found) == len(running) + len(waiting)
    assert all(each.start <= each.first <= each.end for each in found)
    started = [each.start for each in found[len(running) :]]
    assert started == sorted(started)
    for moment in [each.start for each in found]:
        beside = sum(each.start <= moment < each.end for each in found)
        assert beside <= max(slots, len(running))
