"""From a record to its one result, whatever happens on the way."""

import asyncio
import gc
import time

import pytest

from schemas.contexts import SwitchMode
from schemas.control import Cancel, Pause, Query, Resume, Switch
from schemas.errors import FailureClass
from schemas.progress import Begun, Progress
from schemas.results import Outcome
from schemas.status import TERMINAL, StatusState
from service.errors import EngineDied
from service.ports import Turn
from service.worker.jobs import Job, Why
from tests.support.bus import until
from tests.support.fake_bus import FakeBus
from tests.support.fake_engine import BROKEN, POISON, FakeEngine
from tests.support.virtual_time import virtual_time


def chat(model: str = "llama", text: str = "hello", **more: object) -> dict:
    return {"model": model, "messages": [{"role": "user", "content": text}], **more}


async def test_each_model_answers_its_own_requests(serve):
    async with serve() as serving:
        origins = {model: serving.bus.produce(chat(model, max_tokens=3)) for model in ("llama", "qwen")}
        for model, origin in origins.items():
            result = await serving.bus.result(origin)
            assert result.outcome is Outcome.COMPLETED
            assert result.origin == origin
            assert result.body["choices"][0]["message"]["content"] == f"{model}0 {model}1 {model}2 "


@pytest.mark.parametrize(
    ("body", "failure", "status"),
    [
        (b"{", FailureClass.UNDECODABLE, 400),
        ({"messages": []}, FailureClass.INVALID, 400),
        (chat("lama"), FailureClass.UNKNOWN_MODEL, 404),
        (chat(max_tokens="many"), FailureClass.INVALID, 400),
        (chat(text="word " * 5000), FailureClass.INVALID, 400),
        (chat(text="x" * 60_000), FailureClass.TOO_LARGE, 413),
    ],
)
async def test_bad_input_gets_a_failed_result_and_a_dead_letter_and_the_worker_goes_on(serve, body, failure, status):
    async with serve(max_request_bytes=50_000) as serving:
        bad, good = serving.bus.produce(body), serving.bus.produce(chat())
        result = await serving.bus.result(bad)
        assert (result.outcome, result.failure, result.status) == (Outcome.FAILED, failure, status)
        assert result.error.message
        assert [record.topic for record in serving.bus.settled[bad]] == ["results", "usage", "dead-letters"]
        assert (await serving.bus.result(good)).outcome is Outcome.COMPLETED


async def test_an_unknown_model_is_answered_with_the_nearest_known_one(serve):
    async with serve() as serving:
        result = await serving.bus.result(serving.bus.produce(chat("qwem")))
        assert "'qwen'" in result.error.message


async def test_a_model_that_can_not_be_loaded_fails_its_requests_and_no_others(serve):
    engine = FakeEngine(broken_loads=frozenset({"qwen"}))
    await engine.preload("qwen")
    async with serve(engine=engine, retry_backoff_s=0.01) as serving:
        bus = serving.bus
        stuck, other = bus.produce(chat("qwen")), bus.produce(chat("llama"))
        assert (await bus.result(other)).outcome is Outcome.COMPLETED
        result = await bus.result(stuck)
        assert result.failure is FailureClass.LOAD_FAILED
        assert "no weights" in result.error.message
        ends = [status for status in bus.statuses if status.state in TERMINAL and status.model == "qwen"]
        assert {(status.state, "no weights" in status.reason) for status in ends} == {("rolled_back", True)}
        assert [record.topic for record in bus.settled[stuck]] == ["results", "usage", "dead-letters"]


async def test_a_stream_comes_in_numbered_chunks_with_a_final_marker_and_a_whole_result(serve):
    async with serve() as serving:
        result = await serving.bus.result(serving.bus.produce(chat(stream=True, max_tokens=4), {"ce_id": "s1"}))
        chunks = serving.bus.chunks
        assert [chunk.seq for chunk in chunks] == list(range(len(chunks)))
        assert [chunk.final for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
        streamed = "".join(c.data["choices"][0]["delta"]["content"] for c in chunks if c.data)
        assert streamed == result.body["choices"][0]["message"]["content"]


async def test_a_reply_goes_only_where_replies_are_allowed(serve):
    async with serve(reply_topics="answers-*") as serving:
        allowed = serving.bus.produce(chat(), {"reply-to": "answers-1"})
        forbidden = serving.bus.produce(chat(), {"reply-to": "control"})
        await serving.bus.result(allowed)
        assert serving.bus.settled[allowed][0].topic == "answers-1"
        result = await serving.bus.result(forbidden)
        assert serving.bus.settled[forbidden][0].topic == "results"
        assert (result.failure, result.error.param) == (FailureClass.INVALID, "reply-to")


MOVED = {"moved-from": "calls/0/0", "received": "1.0", "deaths": "0", "pool-signature": "0" * 64}


@pytest.mark.parametrize(
    ("body", "topic", "headers"),
    [
        (chat(), "requests", {}),
        (chat(), "requests.llama", {}),
        (chat(), "requests.llama", MOVED),
        (b"no JSON", "requests", {}),
        (b"no JSON", "requests.llama", MOVED),
    ],
)
async def test_nobody_but_a_durable_call_is_answered_where_such_calls_are(serve, tmp_path, body, topic, headers):
    (tmp_path / "key").write_text("secret")
    async with serve(pool_key_file=tmp_path / "key") as serving:
        forged = serving.bus.produce(body, {"ce_id": "c1", "reply-to": "answers", **headers}, topic=topic)
        call = serving.bus.produce(chat(), {"ce_id": "c1", "reply-to": "answers"}, topic="calls")
        assert (await serving.bus.result(forged)).outcome is Outcome.FAILED
        assert serving.bus.settled[forged][0].topic == "results"
        assert (await serving.bus.result(call)).outcome is Outcome.COMPLETED
        assert serving.bus.settled[call][0].topic == "answers"


async def test_an_expired_request_is_answered_without_running(serve):
    async with serve() as serving:
        result = await serving.bus.result(serving.bus.produce(chat(), {"ttl": "5"}, at=time.time() - 10))
        assert (result.outcome, result.status) == (Outcome.EXPIRED, 408)
        assert serving.bus.marks == {}


def test_a_request_that_expires_while_it_runs_keeps_what_it_had(serve):
    async def ask() -> None:
        async with serve(engine=FakeEngine(step_s=0.005)) as serving:
            result = await serving.bus.result(serving.bus.produce(chat(max_tokens=100_000), {"ttl": "0.3"}))
            assert result.outcome is Outcome.EXPIRED
            assert result.body["usage"]["completion_tokens"] > 0
            assert result.body["choices"][0]["message"]["content"].startswith("llama0 ")

    with virtual_time() as loop:
        loop.run_until_complete(ask())


async def test_a_running_request_is_cancelled_with_its_partial_answer_and_a_second_cancel_is_too_late(serve):
    async with serve(engine=FakeEngine(step_s=0.001)) as serving:
        bus = serving.bus
        origin = bus.produce(chat(max_tokens=100_000, stream=True), {"ce_id": "r1"})
        await bus.until(lambda: len(bus.chunks) > 3)
        bus.command(cancel := Cancel(request="r1"))
        result = await bus.result(origin)
        assert (result.outcome, result.status) == (Outcome.CANCELLED, 499)
        assert result.body["usage"]["completion_tokens"] > 0
        await bus.said(cancel.id, StatusState.COMPLETED)
        bus.command(again := Cancel(request="r1"))
        await bus.said(again.id, StatusState.TOO_LATE)


async def test_a_request_frozen_in_another_models_context_is_cancelled_with_its_partial_answer(serve):
    async with serve(engine=FakeEngine(step_s=0.001)) as serving:
        bus = serving.bus
        origin = bus.produce(chat(max_tokens=100_000, stream=True), {"ce_id": "r1"})
        await bus.until(lambda: len(bus.chunks) > 3)
        bus.command(away := Switch(model="qwen", hold="forever"))
        await bus.said(away.id, StatusState.COMPLETED)
        bus.command(cancel := Cancel(request="r1"))
        result = await bus.result(origin)
        assert (result.outcome, serving.engine.active) == (Outcome.CANCELLED, "qwen")
        assert result.body["usage"]["completion_tokens"] > 0
        await bus.said(cancel.id, StatusState.COMPLETED)


async def test_a_request_that_the_engine_hands_back_goes_on_under_its_next_attempt(serve):
    async with serve(engine=FakeEngine(step_s=0.001)) as serving:
        bus = serving.bus
        origin = bus.produce(chat(max_tokens=200, stream=True))
        await bus.until(lambda: len(bus.chunks) > 3)
        serving.engine.hand_back("llama")
        result = await bus.result(origin)
        assert (result.outcome, result.attempt.n) == (Outcome.COMPLETED, 2)
        (had,) = result.continued
        assert had >= 3
        assert bus.kept[origin].tokens == had, "should the worker leave before the next run"
        assert serving.engine.steps == 200, "no word was generated twice"
        assert bus.withdrawn == [origin], "nobody died of the first run"
        assert [chunk.seq for chunk in bus.chunks] == list(range(len(bus.chunks))), "one stream, and no piece twice"
        assert [chunk.attempt.n for chunk in bus.chunks] == [1] * had + [2] * (len(bus.chunks) - had)
        streamed = "".join(c.data["choices"][0]["delta"]["content"] for c in bus.chunks if c.data)
        assert streamed == result.body["choices"][0]["message"]["content"]
        assert [chunk.final for chunk in bus.chunks].count(True) == 1, "the first attempt has no end"


async def test_a_request_that_can_not_be_gone_on_with_is_streamed_anew_under_its_next_attempt(serve):
    async with serve(engine=FakeEngine(step_s=0.001)) as serving:
        bus = serving.bus
        origin = bus.produce(chat(max_tokens=200, stream=True))
        await bus.until(lambda: len(bus.chunks) > 3)
        serving.engine.forgets = True
        serving.engine.hand_back("llama")
        result = await bus.result(origin)
        assert (result.outcome, result.attempt.n, result.continued) == (Outcome.COMPLETED, 3, ())
        assert bus.withdrawn == [origin] * 2, "nobody died of the first runs"
        for attempt in (1, 3):
            chunks = [chunk for chunk in bus.chunks if chunk.attempt.n == attempt]
            assert [chunk.seq for chunk in chunks] == list(range(len(chunks)))
        streamed = "".join(c.data["choices"][0]["delta"]["content"] for c in chunks if c.data)
        assert streamed == result.body["choices"][0]["message"]["content"]
        assert [chunk.final for chunk in bus.chunks].count(True) == 1, "the first attempt has no end"


async def test_a_part_of_a_session_that_the_engine_hands_back_begins_anew_where_the_session_was(serve):
    async with serve(engine=FakeEngine(step_s=0.001)) as serving:
        bus = serving.bus
        place = {"session": "s", "final": "false"}
        await bus.result(bus.produce(chat(max_tokens=8), {**place, "part": "0"}))
        second = bus.produce(chat(max_tokens=100, stream=True), {**place, "part": "1"})
        await bus.until(lambda: len(bus.chunks) > 3)
        serving.engine.hand_back("llama")
        result = await bus.result(second)
        assert (result.outcome, result.attempt.n) == (Outcome.COMPLETED, 2)
        assert result.body["choices"][0]["message"]["content"].startswith("llama7 llama8 ")
        ((_, digest),) = bus.broker.sessions
        assert digest == Turn("s", 1, final=False).digest("llama")


async def test_a_cancelled_request_that_the_engine_hands_back_is_not_run_again(serve):
    async with serve(engine=FakeEngine(step_s=0.001)) as serving:
        bus = serving.bus
        origin = bus.produce(chat(max_tokens=100_000, stream=True), {"ce_id": "r1"})
        await bus.until(lambda: len(bus.chunks) > 3)
        (job,) = serving.worker.jobs.find(id_="r1")
        serving.engine.hand_back("llama")
        serving.worker.lifecycle.end(job, Why.CANCELLED)
        assert (await bus.result(origin)).outcome is Outcome.CANCELLED
        assert serving.engine.steps < 10_000


async def test_a_waiting_request_expires_in_its_queue_by_the_workers_own_time_to_live(serve):
    async with serve(ttl_s=0.3) as serving:
        bus = serving.bus
        bus.command(pause := Pause())
        await bus.said(pause.id, StatusState.COMPLETED)
        result = await bus.result(bus.produce(chat()))
        assert (result.outcome, result.status) == (Outcome.EXPIRED, 408)
        old = await bus.result(bus.produce(chat(), at=time.time() - 10))
        assert old.outcome is Outcome.EXPIRED, "it counts from the broker's timestamp"
        assert bus.marks == {}


@pytest.mark.delicate
async def test_an_answered_request_is_not_kept_until_its_deadline(serve):
    async with serve() as serving:
        origins = [serving.bus.produce(chat(), {"ttl": "1000"}) for _ in range(50)]
        for origin in origins:
            await serving.bus.result(origin)
        await serving.finish()
    gc.collect()
    assert not [one for one in gc.get_objects() if type(one) is Job]  # others may not like to be asked


async def test_waiting_and_not_yet_read_requests_are_cancelled_too_by_correlation(serve):
    async with serve() as serving:
        bus = serving.bus
        bus.command(pause := Pause())
        await bus.said(pause.id, StatusState.COMPLETED)
        waiting = bus.produce(chat(), {"correlation-id": "c1"})
        bus.command(cancel := Cancel(correlation_id="c1"))
        await bus.until(lambda: any(status.control_id == cancel.id for status in bus.statuses))
        later = bus.produce(chat(), {"correlation-id": "c1"}, at=cancel.issued - 5)
        for origin in (waiting, later):
            assert (await bus.result(origin)).outcome is Outcome.CANCELLED
        assert bus.marks == {}


async def test_a_paused_worker_starts_nothing_until_it_is_resumed(serve):
    async with serve() as serving:
        bus = serving.bus
        bus.command(pause := Pause())
        await bus.said(pause.id, StatusState.COMPLETED)
        origin = bus.produce(chat())
        bus.command(resume := Resume())
        await bus.said(resume.id, StatusState.COMPLETED)
        assert (await bus.result(origin)).outcome is Outcome.COMPLETED


async def test_of_a_paused_model_what_runs_goes_on_and_what_is_new_waits_while_others_have_their_turns(serve):
    async with serve(engine=FakeEngine(("llama", "qwen"), step_s=0.001)) as serving:
        bus = serving.bus
        running = bus.produce(chat(max_tokens=300))
        await bus.until(lambda: running in bus.marks)
        bus.command(pause := Pause(model="llama"))
        await bus.said(pause.id, StatusState.COMPLETED)
        waiting = bus.produce(chat(), {"ce_id": "w"})
        others = [bus.produce(chat("qwen")) for _ in range(3)]
        for origin in (running, *others):
            assert (await bus.result(origin)).outcome is Outcome.COMPLETED
        bus.command(asked := Query())
        state = (await bus.said(asked.id, StatusState.COMPLETED)).answer
        assert [alias for alias, queue in state["queues"].items() if queue.get("paused")] == ["llama"]
        assert not state["paused"]
        assert state["queues"]["llama"]["waiting"] == 1
        bus.command(place := Query(request="w"))
        (found,) = (await bus.said(place.id, StatusState.COMPLETED)).answer["found"]
        assert found == {"phase": "waiting", "model": "llama", "attempt": 1}
        assert waiting not in bus.marks
        bus.command(Pause())
        bus.command(resume := Resume(model="llama"))
        await bus.said(resume.id, StatusState.COMPLETED)
        assert (await bus.result(waiting)).outcome is Outcome.COMPLETED
        assert serving.worker.dispatcher.is_paused("qwen")


async def test_a_pause_of_a_model_that_there_is_not_is_rejected(serve):
    async with serve() as serving:
        serving.bus.command(pause := Pause(model="lama"))
        status = await serving.bus.said(pause.id, StatusState.REJECTED)
        assert "did you mean 'llama'" in status.reason
        assert not serving.worker.dispatcher.paused


async def test_what_waits_for_a_paused_model_does_not_fill_the_worker(serve):
    async with serve(engine=FakeEngine(("llama", "qwen"), step_s=0.001), park_after_s=0.05) as serving:
        bus = serving.bus
        bus.command(pause := Pause(model="qwen"))
        await bus.said(pause.id, StatusState.COMPLETED)
        waiting = [bus.produce(chat("qwen")) for _ in range(20)]
        await bus.until(lambda: all(origin in bus.settled for origin in waiting))
        assert {record.topic for origin in waiting for record in bus.settled[origin]} == {"requests.qwen"}
        assert (await bus.result(bus.produce(chat()))).outcome is Outcome.COMPLETED


async def test_a_retriable_failure_is_tried_again_and_then_given_up(serve):
    async with serve(retry_backoff_s=0.001, max_attempts=3) as serving:
        result = await serving.bus.result(serving.bus.produce(chat(text=BROKEN)))
        assert (result.failure, result.attempt.n) == (FailureClass.RETRIES_EXHAUSTED, 3)


def test_a_request_may_fail_more_often_than_a_number_can_be_doubled(serve):
    async def ask() -> None:
        async with serve(retry_backoff_s=1e-6, retry_backoff_max_s=1e-6, max_attempts=1100) as serving:
            result = await serving.bus.result(serving.bus.produce(chat(text=BROKEN)))
            assert (result.failure, result.attempt.n) == (FailureClass.RETRIES_EXHAUSTED, 1100)

    with virtual_time() as loop:
        loop.run_until_complete(ask())


async def test_who_killed_an_engine_alone_is_poison_and_who_was_killed_with_its_worker_runs_once_more(serve):
    async with serve(engine=FakeEngine(step_s=0.001)) as serving:
        bus = serving.bus
        poison = bus.produce(chat(), deaths=3, evidence=2)
        innocents = [bus.produce(chat(), deaths=3, evidence=1), bus.produce(chat(), deaths=7)]
        result = await bus.result(poison)
        assert (result.failure, result.attempt.n) == (FailureClass.POISON, 4)
        assert [(await bus.result(innocent)).outcome for innocent in innocents] == [Outcome.COMPLETED] * 2
        assert bus.marks == dict.fromkeys(innocents, True)


async def test_suspects_run_one_at_a_time_and_only_when_nothing_else_does(serve):
    async with serve(engine=FakeEngine(step_s=0.001)) as serving:
        bus = serving.bus
        long = bus.produce(chat(max_tokens=100_000), {"ce_id": "long"})
        await bus.until(lambda: bus.marks)
        suspects = [bus.produce(chat(max_tokens=20), deaths=2) for _ in range(3)]
        fresh = bus.produce(chat(max_tokens=20))
        bus.command(Cancel(request="long"))
        results = [await bus.result(origin) for origin in (*suspects, fresh)]
        assert {result.outcome for result in results} == {Outcome.COMPLETED}
        assert bus.marks == {long: False, **dict.fromkeys(suspects, True), fresh: False}
        order = list(bus.marks)
        assert order.index(fresh) > max(map(order.index, suspects))
        assert list(bus.settled) == [long, *suspects, fresh]


async def test_a_suspect_that_gets_company_by_a_switch_is_no_longer_marked_as_alone(serve):
    async with serve(engine=FakeEngine(step_s=0.001)) as serving:
        bus = serving.bus
        suspect = bus.produce(chat(max_tokens=300), deaths=2)
        await bus.until(lambda: bus.marks.get(suspect))
        bus.command(Switch(model="qwen"))
        other = bus.produce(chat("qwen"))
        await bus.result(other)
        assert bus.marks[suspect] is False
        bus.command(Switch(model="llama"))
        assert (await bus.result(suspect)).outcome is Outcome.COMPLETED


async def test_a_run_that_fails_without_a_death_takes_its_mark_back(serve):
    async with serve(retry_backoff_s=0.001, max_attempts=4) as serving:
        bus = serving.bus
        origin = bus.produce(chat(text=BROKEN), deaths=1)
        result = await bus.result(origin)
        assert (result.failure, result.attempt.n) == (FailureClass.RETRIES_EXHAUSTED, 5)
        assert bus.withdrawn == [origin] * 3


async def test_when_the_engine_dies_marks_are_kept_and_flushed_and_nothing_is_settled(serve):
    async with serve(engine=FakeEngine(step_s=0.001)) as serving:
        bus = serving.bus
        innocent = bus.produce(chat(max_tokens=100_000))
        await bus.until(lambda: bus.marks)
        bus.produce(chat(text=POISON))
        with pytest.raises(BaseExceptionGroup) as caught:
            await serving.done
        assert caught.group_contains(EngineDied)
        assert innocent in bus.marks
        assert (bus.settled, bus.withdrawn, bus.witnessed, bus.flushed) == ({}, [], True, True)


async def test_work_of_a_lost_partition_is_aborted_and_not_settled(serve):
    async with serve(engine=FakeEngine(step_s=0.001)) as serving:
        bus = serving.bus
        origin = bus.produce(chat(max_tokens=100_000))
        await bus.until(lambda: bus.marks)
        bus.lose(origin)
        other = bus.produce(chat(max_tokens=2))
        await bus.result(other)
        await serving.finish()
        assert list(bus.settled) == [other]


async def test_of_a_lost_stream_nothing_more_is_told_here_for_its_new_owner_goes_on_with_it(serve):
    async with serve(engine=FakeEngine(step_s=0.001)) as serving:
        bus = serving.bus
        origin = bus.produce(chat(max_tokens=100_000, stream=True))
        await bus.until(lambda: len(bus.chunks) > 3)
        bus.lose(origin)
        await bus.until(lambda: not serving.worker.jobs)
        told = len(bus.chunks)
        await bus.result(bus.produce(chat(max_tokens=2)))
        await serving.finish()
        assert len(bus.chunks) == told
        assert not any(chunk.final or chunk.data["choices"][0]["finish_reason"] for chunk in bus.chunks)


def test_stopping_finishes_what_runs_and_withdraws_what_is_too_slow(serve):
    async def ask() -> None:
        async with serve(engine=FakeEngine(step_s=0.001), shutdown_timeout_s=0.5) as serving:
            bus = serving.bus
            quick, slow = bus.produce(chat(max_tokens=50)), bus.produce(chat(max_tokens=1_000_000))
            await bus.until(lambda: len(bus.marks) == 2)
            await serving.finish()
            assert list(bus.settled) == [quick]
            assert bus.withdrawn == [slow]
            assert bus.flushed

    with virtual_time() as loop:
        loop.run_until_complete(ask())


@pytest.mark.parametrize("stream", [False, True])
def test_a_worker_that_does_not_wait_hands_over_what_runs_and_the_next_one_goes_on(serve, stream):
    async def ask() -> None:
        async with serve(engine=FakeEngine(step_s=0.001), shutdown_timeout_s=0) as serving:
            bus = serving.bus
            origin = bus.produce(chat(max_tokens=200, stream=stream))
            await bus.until(lambda: bus.marks)
            (job,) = serving.worker.jobs.find(id_=str(origin))
            await until(lambda: serving.engine.tokens(job.call_id) > 20)
            await serving.finish()
            assert (list(bus.settled), bus.withdrawn) == ([], [origin])
            before = serving.engine.steps
        async with serve(bus=bus, engine=FakeEngine(step_s=0.001)) as serving:
            result = await bus.result(origin)
            (had,) = result.continued
            assert 20 <= had <= before
            assert (result.outcome, result.attempt.n, serving.engine.steps) == (Outcome.COMPLETED, 1, 200 - had)
            text = result.body["choices"][0]["message"]["content"]
            assert text == "".join(f"llama{index} " for index in range(200))
            if stream:
                assert [chunk.seq for chunk in bus.chunks] == list(range(len(bus.chunks))), "one stream, no piece twice"
                assert "".join(c.data["choices"][0]["delta"]["content"] for c in bus.chunks if c.data) == text
            assert not bus.broker.progress, "what it had said is gone with its result"

    with virtual_time() as loop:
        loop.run_until_complete(ask())


def test_a_result_says_of_each_worker_that_went_on_with_it_how_much_there_was(serve):
    async def ask() -> None:
        bus = FakeBus()
        origin = bus.produce(chat(max_tokens=2000))

        async def stopped_after(tokens: int) -> int:
            async with serve(bus=bus, engine=FakeEngine(step_s=0.001), shutdown_timeout_s=0) as serving:
                running = serving.worker.jobs.running
                await until(lambda: any(serving.engine.tokens(job.call_id) > tokens for job in running()))
                await serving.finish()
            return bus.broker.progress[origin].tokens

        had = [await stopped_after(tokens) for tokens in (30, 60, 90)]
        async with serve(bus=bus):
            assert (await bus.result(origin)).continued == tuple(had)

    with virtual_time() as loop:
        loop.run_until_complete(ask())


def test_what_a_worker_loses_in_a_rebalance_is_gone_on_with_from_where_it_was(serve):
    async def ask() -> None:
        async with serve(engine=FakeEngine(step_s=0.001)) as serving:
            bus = serving.bus
            origin = bus.produce(chat(max_tokens=300))
            await bus.until(lambda: bus.marks)
            (job,) = serving.worker.jobs.find(id_=str(origin))
            await until(lambda: serving.engine.tokens(job.call_id) > 20)
            there = bus.member.consumer.assignment()
            bus.assign(())
            await until(lambda: serving.engine.tokens(job.call_id) == 0)
            bus.assign(there)
            result = await bus.result(origin)
            (had,) = result.continued
            assert had > 20
            assert (result.outcome, result.attempt.n) == (Outcome.COMPLETED, 1)

    with virtual_time() as loop:
        loop.run_until_complete(ask())


async def test_a_long_answer_is_kept_as_it_goes_and_a_short_one_never(serve):
    async with serve(engine=FakeEngine(step_s=0.001)) as serving:
        bus = serving.bus
        long = bus.produce(chat(max_tokens=100_000), {"ce_id": "long"})
        for _ in range(3):
            short = bus.produce(chat(max_tokens=20))
            assert (await bus.result(short)).continued == ()
        await bus.until(lambda: long in bus.kept)
        assert set(bus.kept) == {long}
        first = bus.kept[long].tokens
        assert first > 20
        await bus.until(lambda: bus.kept[long].tokens > first)
        bus.command(Cancel(request="long"))
        await bus.result(long)


async def test_a_request_of_which_nobody_can_go_on_with_what_was_said_is_begun_anew(serve):
    bus = FakeBus()
    progress = Progress(call="0" * 32, engine="another", requests=(Begun(id="r", prompt="p"),))
    async with serve(bus=bus) as serving:
        origin = bus.produce(chat(max_tokens=20), progress=progress)
        result = await serving.bus.result(origin)
        assert (result.outcome, result.attempt.n, result.continued) == (Outcome.COMPLETED, 2, ())


@pytest.mark.parametrize(("deaths", "evidence"), [(2, 0), (1, 1)])
async def test_who_may_have_killed_an_engine_does_not_go_on_from_where_that_was(serve, deaths, evidence):
    bus = FakeBus()
    progress = Progress(call="0" * 32, engine="another", requests=(Begun(id="r", prompt="p"),))
    async with serve(bus=bus) as serving:
        origin = bus.produce(chat(max_tokens=20), progress=progress, deaths=deaths, evidence=evidence)
        result = await serving.bus.result(origin)
        assert (result.outcome, result.attempt.n) == (Outcome.COMPLETED, deaths + 1), "nothing to refuse"


async def test_a_result_that_the_broker_refuses_is_replaced_by_an_error(serve):
    async with serve(bus=FakeBus(max_bytes=3000)) as serving:
        result = await serving.bus.result(serving.bus.produce(chat(max_tokens=2000)))
        assert (result.outcome, result.failure) == (Outcome.FAILED, FailureClass.TOO_LARGE)


async def test_a_request_frozen_by_a_switch_says_so_and_finishes_with_the_same_text(serve):
    async with serve(engine=FakeEngine(step_s=0.001)) as serving:
        bus = serving.bus
        origin = bus.produce(chat(max_tokens=300, stream=True))
        await bus.until(lambda: len(bus.chunks) > 5)
        bus.command(away := Switch(model="qwen"))
        report = (await bus.said(away.id, StatusState.COMPLETED)).switch
        assert (report.kept, report.aborted) == (1, 0)
        bus.command(Switch(model="llama"))
        result = await bus.result(origin)
        (freeze,) = result.timing.freezes
        assert 0 < freeze.tokens < 300
        assert freeze.model == "qwen"
        assert result.body["choices"][0]["message"]["content"] == "".join(f"llama{i} " for i in range(300))


async def test_an_aborting_switch_ends_what_runs_with_its_partial_answer(serve):
    async with serve(engine=FakeEngine(step_s=0.001)) as serving:
        bus = serving.bus
        origin = bus.produce(chat(max_tokens=100_000, stream=True))
        await bus.until(lambda: len(bus.chunks) > 5)
        bus.command(Switch(model="qwen", mode=SwitchMode.ABORT))
        result = await bus.result(origin)
        assert result.outcome is Outcome.CANCELLED
        assert result.body["usage"]["completion_tokens"] > 0


async def test_many_requests_run_at_once(serve):
    async with serve(engine=FakeEngine(step_s=0.001)) as serving:
        origins = [serving.bus.produce(chat(max_tokens=100)) for _ in range(64)]
        await asyncio.gather(*(serving.bus.result(origin) for origin in origins))
        assert serving.engine.steps < 64 * 100 / 10
