"""What a request is to get, and what its result says of that."""

import math
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.base import Origin, Record
from schemas.control import Cancel, Pause, Query, Resume, SetObjective
from schemas.objectives import Miss, Objective
from schemas.requests import Attempt, Endpoint, Request
from schemas.results import Freeze, Outcome, Timing
from schemas.status import StatusState
from service.models_file import Scheduling
from service.ports import Answer
from service.worker.attainment import attainment
from service.worker.jobs import Answered, Job
from service.worker.settlements import settlement
from tests.support.bus import until
from tests.support.fake_engine import FakeEngine

OBJECTIVE = Objective(ttft_s=2.0, tpot_s=0.1)
STRICT = Objective(ttft_s=60.0, tpot_s=60.0)
CLASSES = {"batch": Objective(ttft_s=600.0, tpot_s=600.0), "chat": Objective(ttft_s=30.0, tpot_s=30.0)}
MODELS = {"llama": Scheduling(objective=STRICT, classes=CLASSES)}


def chat(model: str = "llama", **more: object) -> dict:
    return {"model": model, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 3, **more}


def timing(waited_s: float, first_token_s: float | None, latency_s: float, **more: object) -> Timing:
    return Timing(
        received=0, finished=latency_s, waited_s=waited_s, first_token_s=first_token_s, latency_s=latency_s, **more
    )


# --- met or not, and why not: by its result alone ---


@pytest.mark.parametrize(
    ("waited_s", "first_token_s", "latency_s", "tokens", "met"),
    [
        (1.0, 1.0, 3.0, 11, True),
        (1.0, 1.1, 3.0, 11, False),
        (1.0, 1.0, 3.1, 11, False),
        (0.0, 0.5, 3.0, 11, True),
        (0.0, 0.5, 3.1, 11, False),
        (0.0, 2.0, 2.0, 1, True),
        (0.0, 1.9, 2.2, 1, True),
        (0.0, 2.1, 2.2, 1, False),
        (0.5, None, 2.0, 0, True),
        (0.5, None, 2.1, 0, False),
    ],
)
def test_an_answer_meets_its_objective_by_its_first_token_and_its_pace(
    waited_s: float, first_token_s: float | None, latency_s: float, tokens: int, met: bool
) -> None:
    found = attainment(OBJECTIVE, "", Outcome.COMPLETED, timing(waited_s, first_token_s, latency_s), tokens)
    assert found.met is met
    assert (found.missed_by is None) is met
    late = attainment(OBJECTIVE, "", Outcome.EXPIRED, timing(waited_s, first_token_s, latency_s), tokens)
    assert not late.met


@pytest.mark.parametrize(
    ("waited_for", "first_token_s", "why"),
    [
        ({"read": 0.1, "turn": 1.5, "switch": 0.2, "queue": 0.2}, 0.9, Miss.TURN),
        ({"read": 0.1, "turn": 0.2, "switch": 1.5, "queue": 0.2}, 0.9, Miss.SWITCH),
        ({"read": 0.1, "turn": 0.2, "switch": 0.2, "queue": 1.5}, 0.9, Miss.QUEUE),
        ({"read": 1.5, "turn": 0.2, "switch": 0.2, "queue": 0.1}, 0.9, Miss.READ),
        ({"quota": 1.5, "turn": 0.2, "switch": 0.2, "queue": 0.1}, 0.9, Miss.QUOTA),
        ({"read": 0.1, "turn": 0.7, "switch": 0.6, "queue": 0.6}, 1.5, Miss.PREFILL),
    ],
)
def test_a_late_first_token_is_missed_by_what_took_longest(
    waited_for: dict[str, float], first_token_s: float, why: Miss
) -> None:
    spent = timing(2.0, first_token_s, 5.0, waited_for=waited_for)
    assert attainment(OBJECTIVE, "", Outcome.COMPLETED, spent, 50).missed_by is why


def test_a_request_frozen_before_its_first_token_has_waited_for_its_turn() -> None:
    freezes = (Freeze(tokens=0, seconds=1.5, model="qwen", began=0.6),)
    spent = timing(0.5, 2.0, 3.0, waited_for={"queue": 0.5}, freezes=freezes)
    assert attainment(OBJECTIVE, "", Outcome.COMPLETED, spent, 50).missed_by is Miss.TURN


@pytest.mark.parametrize(("frozen_s", "why"), [(2.5, Miss.FROZEN), (1.0, Miss.DECODE)])
def test_a_slow_answer_is_missed_by_its_freezes_only_where_it_was_fast_enough_without(
    frozen_s: float, why: Miss
) -> None:
    freezes = (Freeze(tokens=3, seconds=frozen_s, model="qwen", began=1.5),)
    spent = timing(0.5, 0.5, 4.5, waited_for={"turn": 0.5}, freezes=freezes)
    assert attainment(OBJECTIVE, "", Outcome.COMPLETED, spent, 11).missed_by is why


@given(
    waited_s=st.floats(0.0, 3.0),
    first_s=st.floats(0.0, 3.0),
    rest_s=st.floats(0.0, 5.0),
    tokens=st.integers(1, 60),
    sooner_s=st.floats(0.0, 3.0),
)
def test_no_token_that_comes_sooner_makes_a_miss_of_a_request_that_is_met(
    waited_s: float, first_s: float, rest_s: float, tokens: int, sooner_s: float
) -> None:
    latency_s = waited_s + first_s + rest_s
    late = attainment(OBJECTIVE, "", Outcome.COMPLETED, timing(waited_s, first_s, latency_s), tokens)
    early = timing(waited_s, max(0.0, first_s - sooner_s), latency_s)
    assert not late.met or attainment(OBJECTIVE, "", Outcome.COMPLETED, early, tokens).met


@pytest.mark.parametrize(("frozen_s", "why"), [(0.02, Miss.DECODE), (4.0, Miss.FROZEN)])
def test_what_was_ended_before_it_could_be_late_is_missed_by_what_kept_it_behind_its_pace(
    frozen_s: float, why: Miss
) -> None:
    slack = Objective(ttft_s=10.0, tpot_s=0.1)
    freezes = (Freeze(tokens=3, seconds=frozen_s, model="qwen", began=2.0),)
    spent = timing(0.5, 0.5, 5.0, freezes=freezes)
    assert attainment(slack, "", Outcome.EXPIRED, spent, 20).missed_by is why


@pytest.mark.parametrize(("longest", "missed_by"), [(None, Miss.DECODE), (40, None)])
def test_where_no_sample_is_known_to_be_the_longest_all_are_as_long(
    longest: int | None, missed_by: Miss | None
) -> None:
    """Of forty tokens; ten take a second longer than they may."""
    request = Request(
        id="r",
        origin=Origin(topic="requests", partition=0, offset=0),
        model="llama",
        endpoint=Endpoint.CHAT,
        body={"n": 4},
        received=time.time() - OBJECTIVE.ttft_s - 1.9,
        size=0,
    )
    record = Record("requests", 0, 0, 0.0, None, b"")
    job = Job(request=request, record=record, alias="llama", attempt=Attempt(), taken=0.0, objective=OBJECTIVE)
    job.started = request.received
    body = {"usage": {"prompt_tokens": 5, "completion_tokens": 40}}
    job.ending = Answered(Answer(200, body, first_token_s=0.1, longest=longest))
    assert settlement(job, worker="w").result.objective.missed_by is missed_by


def test_a_request_that_fails_has_missed_its_objective_however_fast_it_did() -> None:
    assert attainment(OBJECTIVE, "", Outcome.FAILED, timing(0.0, None, 0.1), 0).missed_by is Miss.FAILED


# --- which objective counts ---


async def test_a_result_says_what_its_request_was_to_get_and_that_it_did(serve):
    async with serve(models=MODELS) as serving:
        bus = serving.bus
        result = await bus.result(bus.produce(chat()))
        assert (result.objective.ttft_s, result.objective.tpot_s) == (60.0, 60.0)
        assert (result.objective.met, result.objective.missed_by) == (True, None)
        assert (await bus.result(bus.produce(chat("qwen")))).objective is None


async def test_a_header_asks_for_a_class_or_for_less_and_never_for_more(serve, tmp_path):
    async with serve(models=MODELS) as serving:
        bus = serving.bus

        async def given(headers: dict[str, str]) -> tuple[str, float, float]:
            found = (await bus.result(bus.produce(chat(), headers))).objective
            return found.request_class, found.ttft_s, found.tpot_s

        assert await given({"ce_requestclass": "batch"}) == ("batch", 600.0, 600.0)
        assert await given({"request-class": "chat"}) == ("chat", 30.0, 30.0)
        assert await given({"ttft": "90"}) == ("", 90.0, 60.0)
        assert await given({"ttft": "1", "tpot": "0.01"}) == ("", 60.0, 60.0)
        assert await given({"request-class": "chat", "tpot": "45"}) == ("chat", 30.0, 45.0)


async def test_a_tenant_gets_no_more_than_it_may_whatever_class_it_names(serve, tmp_path):
    file = tmp_path / "quotas.yaml"
    file.write_text("tenants: {blue: {ttft_s: 50, tpot_s: 1}}\n")
    async with serve(models=MODELS, quotas_file=file) as serving:
        bus = serving.bus
        blue = await bus.result(bus.produce(chat(), {"tenant": "blue", "request-class": "chat", "ttft": "2"}))
        assert (blue.objective.ttft_s, blue.objective.tpot_s) == (50.0, 30.0)
        red = await bus.result(bus.produce(chat(), {"tenant": "red", "request-class": "chat", "ttft": "2"}))
        assert red.objective.ttft_s == 30.0


async def test_a_class_that_there_is_not_is_refused_with_the_nearest(serve):
    async with serve(models=MODELS) as serving:
        bus = serving.bus
        result = await bus.result(bus.produce(chat(), {"request-class": "batsch"}))
        assert (result.outcome, result.status, result.error.param) == (Outcome.FAILED, 400, "request-class")
        assert "'batsch' (did you mean 'batch'?); it has batch, chat" in result.error.message
        none = await bus.result(bus.produce(chat("qwen"), {"request-class": "batch"}))
        assert "it has none" in none.error.message


@pytest.mark.parametrize("header", ["ttft", "tpot"])
@pytest.mark.parametrize("value", ["0", "-1", "soon", "nan"])
async def test_a_time_that_is_none_is_refused_by_name(serve, header, value):
    async with serve(models=MODELS) as serving:
        bus = serving.bus
        result = await bus.result(bus.produce(chat(), {header: value}))
        assert (result.status, result.error.param) == (400, header)
        assert header in result.error.message


async def test_an_operator_sets_an_objective_until_it_is_taken_back(serve):
    async with serve(models=MODELS) as serving:
        bus = serving.bus

        async def said(event: SetObjective) -> None:
            bus.command(event)
            await bus.said(event.id, StatusState.COMPLETED)

        await said(SetObjective(model="llama", ttft_s=7, tpot_s=8))
        await said(SetObjective(model="qwen", request_class="slow", ttft_s=9, tpot_s=9))
        assert (await bus.result(bus.produce(chat()))).objective.ttft_s == 7.0
        assert (await bus.result(bus.produce(chat("qwen"), {"request-class": "slow"}))).objective.ttft_s == 9.0
        shares = serving.worker.standing().objectives
        assert (set(shares["llama"]), set(shares["qwen"])) == ({"", "batch", "chat"}, {"slow"})
        await said(SetObjective(model="llama"))
        assert (await bus.result(bus.produce(chat()))).objective.ttft_s == 60.0
        bus.command(wrong := SetObjective(model="lama", ttft_s=1, tpot_s=1))
        assert "did you mean 'llama'?" in (await bus.said(wrong.id, StatusState.REJECTED)).reason


def test_half_an_objective_is_none() -> None:
    with pytest.raises(ValueError, match="give both ttft_s and tpot_s"):
        SetObjective(model="llama", ttft_s=1)


async def test_what_expires_while_it_waits_says_what_for(serve):
    models = {"llama": Scheduling(objective=OBJECTIVE), "qwen": Scheduling(objective=OBJECTIVE)}
    async with serve(engine=FakeEngine(), models=models, inactive="park", park_after_s=60) as serving:
        bus = serving.bus
        elsewhere = await bus.result(bus.produce(chat("qwen"), {"ttl": "1"}))
        assert (elsewhere.outcome, elsewhere.objective.missed_by) == (Outcome.EXPIRED, Miss.TURN)
        bus.command(pause := Pause())
        await bus.said(pause.id, StatusState.COMPLETED)
        held = await bus.result(bus.produce(chat(), {"ttl": "1"}))
        assert held.objective.missed_by is Miss.QUEUE
        assert held.timing.waited_for["queue"] > 0.05
        bus.command(Resume())


async def test_nothing_is_said_of_a_cancelled_one(serve):
    async with serve(models=MODELS, inactive="park") as serving:
        bus = serving.bus
        bus.command(pause := Pause())
        await bus.said(pause.id, StatusState.COMPLETED)
        origin = bus.produce(chat(), {"ce_id": "x"})
        await bus.until(lambda: serving.worker.scheduler.queues.view("llama").requests)
        bus.command(Cancel(request="x"))
        result = await bus.result(origin)
        assert (result.outcome, result.objective) == (Outcome.CANCELLED, None)


async def test_what_runs_is_due_by_the_clock_of_the_schedule(serve):
    """Objectives are counted from when the broker took a request, which is another clock's time."""
    async with serve(engine=FakeEngine(step_s=0.01), models=MODELS) as serving:
        serving.bus.produce(chat(max_tokens=100_000))
        await until(lambda: any(state.running for state in serving.worker.states.contexts(time.monotonic())))
        now = time.monotonic()
        (goal,) = next(state.running for state in serving.worker.states.contexts(now) if state.running)
        assert now - 1 < goal.next_by < now + STRICT.ttft_s + 60 * STRICT.tpot_s
        assert goal.by >= goal.next_by
        assert goal.ttft_s == STRICT.ttft_s


async def test_what_runs_and_has_no_token_yet_is_lost_once_that_is_late(serve):
    async with serve(engine=FakeEngine(step_s=0.01, prompt_steps=100_000), models=MODELS) as serving:
        serving.bus.produce(chat())
        await until(lambda: any(state.running for state in serving.worker.states.contexts(time.monotonic())))
        (goal,) = next(s.running for s in serving.worker.states.contexts(time.monotonic()) if s.running)
        assert goal.by == goal.next_by < time.monotonic() + STRICT.ttft_s


async def test_what_was_begun_late_is_lost_however_much_of_it_is_there(serve):
    hurried = Scheduling(objective=Objective(ttft_s=0.01, tpot_s=60.0))
    async with serve(engine=FakeEngine(step_s=0.01), models={"llama": hurried}) as serving:
        bus = serving.bus
        bus.command(pause := Pause())
        await bus.said(pause.id, StatusState.COMPLETED)
        bus.produce(chat(max_tokens=100_000))
        queues = serving.worker.scheduler.queues
        await bus.until(lambda: queues.view("llama").requests)
        came = time.monotonic()
        await until(lambda: time.monotonic() > came + 2 * hurried.objective.ttft_s)
        bus.command(Resume())
        await until(lambda: any(serving.engine.tokens(job.call_id) >= 10 for job in serving.worker.jobs))
        (goal,) = next(s.running for s in serving.worker.states.contexts(time.monotonic()) if s.running)
        assert goal.by == goal.next_by < time.monotonic()


async def test_samples_that_are_asked_for_together_are_ahead_by_what_each_has_said(serve):
    async with serve(engine=FakeEngine(step_s=0.01), models=MODELS) as serving:
        serving.bus.produce(chat(max_tokens=100_000, n=4))
        await until(lambda: any(serving.engine.tokens(job.call_id) >= 40 for job in serving.worker.jobs))
        (job,) = serving.worker.jobs
        (goal,) = next(s.running for s in serving.worker.states.contexts(time.monotonic()) if s.running)
        each = serving.engine.tokens(job.call_id) / 4
        assert goal.next_by <= time.monotonic() + STRICT.ttft_s + each * STRICT.tpot_s


@pytest.mark.parametrize(("samples", "missed_by"), [(1, None), (20, Miss.DECODE)])
async def test_samples_that_are_said_beside_one_another_have_no_more_time_than_one(serve, samples, missed_by):
    """Fifteen tokens each, which may take 1.3 s, in the time that 300 take, which may be 7."""
    models = {"llama": Scheduling(objective=Objective(ttft_s=1.0, tpot_s=0.02))}
    async with serve(engine=FakeEngine(step_s=0.005), models=models) as serving:
        result = await serving.bus.result(serving.bus.produce(chat(max_tokens=300, n=samples)))
        assert result.objective.missed_by is missed_by


async def test_who_asks_is_told_that_a_request_stands_aside_and_why(serve):
    hurried = {"llama": Scheduling(objective=Objective(ttft_s=0.2, tpot_s=1.0))}
    async with serve(engine=FakeEngine(step_s=0.01), models=hurried, max_running=1) as serving:
        bus = serving.bus
        running = bus.produce(chat(max_tokens=100_000))
        await bus.until(lambda: running in bus.marks)
        bus.produce(chat(), {"ce_id": "late"})
        place: dict = {}
        while "stands_aside" not in place:
            bus.command(query := Query(request="late"))
            found = (await bus.said(query.id, StatusState.COMPLETED)).answer["found"]
            place = found[0] if found else {}
        assert place["stands_aside"] == "late"


# --- prompts are begun in portions ---


async def test_what_is_answered_without_a_token_has_no_time_for_each(serve):
    async with serve(models=MODELS) as serving:
        bus, queues = serving.bus, serving.worker.scheduler.queues
        bus.command(pause := Pause())
        await bus.said(pause.id, StatusState.COMPLETED)
        bus.produce({"model": "llama", "input": "hello"}, {"endpoint": "/v1/embeddings"})
        bus.produce(chat())
        await bus.until(lambda: queues.view("llama").requests == 2)
        assert [item.tpot_s for item in queues.waiting("llama")] == [math.inf, STRICT.tpot_s]
        bus.command(Resume())


async def test_a_request_without_an_objective_does_not_wait_for_an_answer_that_has_one(serve):
    """A portion that has just been begun holds it up for a moment; nothing comes or ends then that would wake us."""
    hurried = {"llama": Scheduling(classes={"chat": Objective(ttft_s=600.0, tpot_s=1.0)})}
    async with serve(engine=FakeEngine(step_s=0.005), models=hurried) as serving:
        bus = serving.bus
        long = chat(messages=[{"role": "user", "content": "x" * 200_000}], max_tokens=100_000)
        bus.produce(long, {"id": "long", "request-class": "chat"})
        await until(lambda: any(serving.engine.tokens(job.call_id) for job in serving.worker.jobs))
        assert serving.worker.scheduler.takes_at("llama") == math.inf
        plain = bus.produce(chat())
        assert (await bus.result(plain)).outcome is Outcome.COMPLETED
        assert [job.request.id for job in serving.worker.jobs] == ["long"], "which goes on"
        bus.command(Cancel(request="long"))
