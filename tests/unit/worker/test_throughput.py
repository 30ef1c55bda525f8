"""A model's pace, as it is learnt from turns of any length."""

import math
import time

import pytest

from schemas.base import Origin, Record
from schemas.requests import Attempt, Endpoint, Request
from service.ports import Answer
from service.scheduling.costs import Costs
from service.worker.jobs import Job
from service.worker.throughput import Throughput


class Served:
    """Models of whose requests one is done in each second of serving, 300 tokens as far as was known beforehand."""

    def __init__(self) -> None:
        self.now = 100.0
        self.costs = Costs()
        self.pace = Throughput(self.costs, clock=lambda: self.now)
        self._served: dict[str, float] = {}

    def turn(self, alias: str, seconds: float, *, busy_after: bool = True, waiting: bool = True) -> None:
        self.pace.look(alias, self.now, rows=1, waiting=waiting)
        before = self._served.get(alias, 0.0)
        self._served[alias] = before + seconds
        for n in range(int(before), int(before + seconds)):
            self.now += n + 1 - before
            self.pace.finished(done(alias), Answer(status=200, body={"usage": {"total_tokens": 70}}))
            seconds, before = seconds - (n + 1 - before), n + 1.0
        self.now += seconds
        self.pace.look(alias, self.now, rows=int(busy_after), waiting=waiting)
        self.pace.stop(self.now)


def done(alias: str) -> Job:
    origin = Origin(topic="requests", partition=0, offset=0)
    request = Request(id="r", origin=origin, model=alias, endpoint=Endpoint.CHAT, body={}, received=0.0, size=0)
    record = Record("requests", 0, 0, 0.0, None, b"")
    job = Job(request=request, record=record, alias=alias, attempt=Attempt(), taken=0.0, tokens=300)
    job.started = time.time() - 1.0
    return job


def test_turns_in_which_nothing_ends_count_for_the_one_in_which_it_does() -> None:
    served = Served()
    for _ in range(200):
        served.turn("llama", 0.0625)
        served.turn("qwen", 0.0625)
    for alias in ("llama", "qwen"):
        assert served.costs.pace(alias).tokens_s == pytest.approx(300, rel=0.1)


def test_a_model_that_is_never_left_and_never_idle_is_learnt_too() -> None:
    served = Served()
    served.turn("llama", 20.5)
    assert served.costs.pace("llama").most_tokens_s < math.inf
    assert served.costs.pace("llama").tokens_s == pytest.approx(300, rel=0.1)


def test_the_time_in_which_there_is_nothing_to_do_says_nothing() -> None:
    served = Served()
    for _ in range(5):
        served.turn("llama", 2.0, busy_after=False)
        served.now += 1000.0
    assert served.costs.pace("llama").tokens_s == pytest.approx(300)


@pytest.mark.parametrize(("waiting", "slow"), [(True, True), (False, False)])
def test_a_slower_time_counts_in_full_only_if_there_was_always_more_to_do(waiting: bool, slow: bool) -> None:
    served = Served()
    served.turn("llama", 10.0)
    for _ in range(10):
        served.pace.look("llama", served.now, rows=1, waiting=waiting)
        served.now += 3.0
        served.pace.finished(done("llama"), Answer(status=200, body={}))
    assert (served.costs.pace("llama").tokens_s < 150) is slow


def test_requests_that_end_one_after_the_other_do_not_look_as_if_the_last_had_taken_no_time() -> None:
    served = Served()
    for _ in range(5):
        served.pace.look("llama", served.now, rows=1, waiting=False)
        served.now += 2.0
        for _ in range(2):
            served.pace.finished(done("llama"), Answer(status=200, body={}))
            served.now += 0.005
        served.pace.look("llama", served.now, rows=0, waiting=False)
    assert served.costs.pace("llama").tokens_s == pytest.approx(300, rel=0.2)


def test_what_each_request_of_a_batch_adds_to_a_step_is_learnt_from_those_that_ran_beside_it() -> None:
    served = Served()
    answer = Answer(status=200, body={"usage": {"prompt_tokens": 5, "completion_tokens": 11}}, first_token_s=0.5)
    for rows in (1, 4) * 20:
        served.pace.look("llama", served.now, rows=rows, waiting=True)
        job = done("llama")
        served.pace.begun(job)
        seconds = 0.5 + 10 * (0.1 + 0.05 * rows)
        job.started = time.time() - seconds
        served.now += seconds
        served.pace.finished(job, answer)
        served.pace.stop(served.now)
    steps = served.pace.steps("llama")
    assert [steps.step_s(1), steps.step_s(4)] == pytest.approx([0.15, 0.3], rel=0.02)
    assert steps.first_s(0) == pytest.approx(0.5, rel=0.02)


def test_an_answer_that_went_on_with_what_was_said_before_tells_nothing_of_a_step() -> None:
    served = Served()
    body = {"usage": {"prompt_tokens": 5, "completion_tokens": 11}}
    before = served.pace.steps("llama").step_s(1)
    served.pace.finished(done("llama"), Answer(status=200, body=body, first_token_s=0.1, continued=(5,)))
    assert served.pace.steps("llama").step_s(1) == before


def answered_briefly(served: Served) -> None:
    """A request of 20 tokens, which takes a tenth of a second."""
    job = done("llama")
    job.tokens = 20
    served.pace.begun(job)
    served.now += 0.1
    served.pace.ended(job)
    served.pace.finished(job, Answer(status=200, body={}))


def test_short_answers_among_long_ones_do_not_say_that_the_batch_is_slow() -> None:
    """Nine rows of long answers that began together, and one row of short ones: 200 tokens a second in each."""
    served = Served()
    served.pace.look("llama", served.now, rows=10, waiting=True)
    for _ in range(3):
        long = [done("llama") for _ in range(9)]
        for job in long:
            job.tokens = 4000
            served.pace.begun(job)
        for _ in range(200):  # twenty seconds
            answered_briefly(served)
            pace = served.costs.pace("llama")
            assert pace.tokens_s == Costs().pace("llama").tokens_s or pace.tokens_s > 1500
        for job in long:
            served.pace.ended(job)
            served.pace.finished(job, Answer(status=200, body={}))
    assert served.costs.pace("llama").most_tokens_s < math.inf
    assert served.costs.pace("llama").tokens_s == pytest.approx(2000, rel=0.15)


def test_one_that_never_ends_keeps_nothing_from_being_learnt() -> None:
    served = Served()
    served.pace.look("llama", served.now, rows=2, waiting=True)
    served.pace.begun(done("llama"))
    for _ in range(1300):
        answered_briefly(served)
    assert served.costs.pace("llama").tokens_s == pytest.approx(200, rel=0.05)


def test_what_a_batch_did_is_told_by_the_steps_that_it_made() -> None:
    """Ten at a time, each of 100 tokens a second of which no prompt had a part: a step takes ten milliseconds."""
    served = Served()
    for _ in range(30):
        served.pace.look("llama", served.now, rows=10, waiting=True)
        served.now += 1.0
        for _ in range(10):
            body = {"usage": {"prompt_tokens": 0, "completion_tokens": 100}}
            served.pace.finished(done("llama"), Answer(status=200, body=body))
    assert served.costs.said("llama") == pytest.approx(100)
    assert served.costs.work("llama").steps_s(100, 10) == pytest.approx(1.0, rel=0.2)


def test_what_an_aborted_run_and_one_that_went_on_did_counts_as_work_and_no_more() -> None:
    """Ten seconds of ten steps each: half of them of a run that is aborted, or that others began."""
    learnt = []
    for answers in (
        [Answer(status=200, body={"usage": {"completion_tokens": 50}}, aborted=True), 50],
        [Answer(status=200, body={"usage": {"completion_tokens": 950}}, continued=(500, 900)), 50],
        [Answer(status=200, body={"usage": {"completion_tokens": 50}}), 50],
    ):
        served = Served()
        for answer in answers:
            served.pace.look("llama", served.now, rows=1, waiting=True)
            served.now += 5.0
            ended = Answer(status=200, body={"usage": {"completion_tokens": answer}}) if answer == 50 else answer
            served.pace.finished(done("llama"), ended)
        learnt.append(served.costs.work("llama").steps_s(100, 1))
    assert learnt == pytest.approx([10.0] * 3, rel=0.25)


def test_what_says_nothing_of_its_answer_is_not_taken_for_silent_but_what_only_reads_its_prompt_is() -> None:
    served = Served()
    served.pace.finished(done("llama"), Answer(status=200, body={}))
    assert served.costs.said("llama") == 256
    job = done("llama")
    job.prompt_tokens = job.tokens
    served.pace.finished(job, Answer(status=200, body={}))
    assert served.costs.said("llama") == 0


def test_an_answer_that_went_on_and_does_not_say_what_it_cost_takes_nothing_from_what_others_did() -> None:
    served = Served()
    for answer in (
        Answer(status=200, body={}, continued=(900,)),
        *[Answer(status=200, body={"usage": {"completion_tokens": 50}})] * 2,
    ):
        served.pace.look("llama", served.now, rows=1, waiting=True)
        served.now += 5.0
        served.pace.finished(done("llama"), answer)
    assert served.costs.work("llama").steps_s(100, 1) == pytest.approx(10.0, rel=0.6)


def test_one_that_was_aborted_before_it_was_read_does_not_make_prompts_look_cheap() -> None:
    served = Served()
    for n in range(40):
        served.pace.look("llama", served.now, rows=1, waiting=True)
        job, dropped = done("llama"), done("llama")
        job.prompt_tokens, dropped.prompt_tokens = 1000 * (n % 3), 50_000
        served.now += 2.0 + 1e-3 * job.prompt_tokens
        served.pace.finished(dropped, Answer(status=200, body={"usage": {"completion_tokens": 0}}, aborted=True))
        served.pace.finished(job, Answer(status=200, body={"usage": {"completion_tokens": 100}}))
    assert served.costs.work("llama").prompt_token_s == pytest.approx(1e-3, rel=0.05)


def test_the_stall_of_an_operators_switch_is_no_time_of_the_model_that_is_left() -> None:
    served = Served()
    for _ in range(30):
        served.pace.look("llama", served.now, rows=1, waiting=True)
        served.now += 1.0
        served.pace.finished(done("llama"), Answer(status=200, body={"usage": {"completion_tokens": 100}}))
        served.pace.look("llama", served.now, rows=1, waiting=True)
        stalled_at, served.now = served.now, served.now + 10.0
        served.pace.stalled(stalled_at)
    assert served.costs.work("llama").steps_s(100, 1) == pytest.approx(1.0, rel=0.05)
