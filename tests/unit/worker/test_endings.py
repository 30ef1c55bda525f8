"""A job ends in one way, whatever asks for it and whatever is being done with it; the first reason counts."""

import asyncio
import contextlib

import pytest

from schemas.control import Cancel, Pause, Switch
from schemas.results import Outcome
from schemas.status import StatusState
from service.ports import Settled
from service.worker.jobs import Phase, Why
from service.worker.tasks import LEAVE_WITHIN_S
from tests.support.bus import until
from tests.support.fake_bus import FakeBus, SlowMarks
from tests.support.fake_engine import BROKEN, FakeEngine
from tests.support.virtual_time import virtual_time


def chat(model: str = "llama", text: str = "hello", **more: object) -> dict:
    return {"model": model, "messages": [{"role": "user", "content": text}], **more}


class StuckSettlements(FakeBus):
    """The broker does not answer a commit."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = asyncio.Event()

    async def settle(self, origin, settlement: Settled) -> Settled | None:
        self.asked.set()
        await asyncio.Event().wait()
        return await super().settle(origin, settlement)


@pytest.mark.parametrize("why", ["cancel", "deadline", "loss"])
def test_a_suspect_that_ends_while_its_mark_is_committed_is_not_run(serve, why):
    async def end() -> None:
        bus = SlowMarks()
        async with serve(bus=bus, engine=FakeEngine(step_s=0.001)) as serving:
            headers = {"ce_id": "s", "ttl": "0.2"} if why == "deadline" else {"ce_id": "s"}
            suspect = bus.produce(chat(max_tokens=5), headers, deaths=2)
            await bus.until(lambda: suspect in bus.marks)
            (job,) = serving.worker.jobs.find(id_="s")
            assert job.phase is Phase.STARTING
            if why == "cancel":
                bus.command(cancel := Cancel(request="s"))
                assert (await bus.said(cancel.id, StatusState.COMPLETED)).answer == {"cancelled": 1}
            elif why == "loss":
                bus.lose(suspect)
            await until(lambda: job.ending is not None)
            bus.committed.set()
            other = bus.produce(chat(max_tokens=2))
            assert (await bus.result(other)).outcome is Outcome.COMPLETED
            if why == "loss":
                assert suspect not in bus.settled
                assert bus.withdrawn == [], "the mark is its new owner's"
            else:
                result = await bus.result(suspect)
                assert (result.outcome, result.body) == (
                    Outcome.CANCELLED if why == "cancel" else Outcome.EXPIRED, None
                )  # fmt: skip
                assert bus.withdrawn == [suspect], "it never ran"

    with virtual_time() as loop:
        loop.run_until_complete(end())


def test_a_job_that_backs_off_can_be_cancelled_and_expires(serve):
    async def end() -> None:
        async with serve(retry_backoff_s=1000, retry_backoff_max_s=1000, max_attempts=5) as serving:
            bus = serving.bus
            cancelled = bus.produce(chat(text=BROKEN), {"ce_id": "c"})
            expired = bus.produce(chat(text=BROKEN), {"ttl": "0.3"})
            await bus.until(lambda: len(bus.marks) == 2)
            await until(lambda: all(job.phase is Phase.BACKING_OFF for job in serving.worker.jobs))
            bus.command(Cancel(request="c"))
            assert (await bus.result(cancelled)).outcome is Outcome.CANCELLED
            assert (await bus.result(expired)).outcome is Outcome.EXPIRED
            assert len(serving.worker.jobs) == 0

    with virtual_time() as loop:
        loop.run_until_complete(end())


async def test_a_held_suspect_can_be_cancelled(serve):
    async with serve(engine=FakeEngine(step_s=0.001)) as serving:
        bus = serving.bus
        bus.produce(chat(max_tokens=100_000), {"ce_id": "long"})
        await bus.until(lambda: bus.marks)
        suspect = bus.produce(chat(), {"ce_id": "s"}, deaths=2)
        await until(lambda: any(job.phase is Phase.HELD for job in serving.worker.jobs), within_s=5)
        bus.command(Cancel(request="s"))
        assert (await bus.result(suspect)).outcome is Outcome.CANCELLED
        assert suspect not in bus.marks
        fresh = bus.produce(chat(max_tokens=2))
        assert (await bus.result(fresh)).outcome is Outcome.COMPLETED, "its model is open again"


async def test_the_first_reason_counts_and_a_second_end_does_nothing(serve):
    async with serve(engine=FakeEngine(step_s=0.001)) as serving:
        bus, lifecycle = serving.bus, serving.worker.lifecycle
        origin = bus.produce(chat(max_tokens=100_000))
        await bus.until(lambda: bus.marks)
        (job,) = serving.worker.jobs
        await until(lambda: job.phase is Phase.RUNNING, within_s=5)
        assert lifecycle.end(job, Why.EXPIRED)
        assert not lifecycle.end(job, Why.CANCELLED)
        assert (await bus.result(origin)).outcome is Outcome.EXPIRED
        assert not lifecycle.end(job, Why.CANCELLED)


async def test_a_lost_request_that_is_read_again_is_begun_anew_and_answered_once(serve):
    async with serve(engine=FakeEngine(step_s=0.001)) as serving:
        bus = serving.bus
        origin = bus.produce(chat(max_tokens=50), {"ce_id": "r"})
        await bus.until(lambda: bus.marks)
        (first,) = serving.worker.jobs
        bus.rebalance()
        result = await bus.result(origin)
        assert result.outcome is Outcome.COMPLETED
        assert first.ending is Why.LOST
        await until(lambda: not len(serving.worker.jobs), within_s=5)


# --- cancels ---


async def test_a_cancel_means_what_came_before_it_and_its_id_may_be_used_again(serve):
    async with serve() as serving:
        bus = serving.bus
        bus.command(cancel := Cancel(request="r"))
        assert (await bus.said(cancel.id, StatusState.COMPLETED)).answer == {"cancelled": 0}
        late = bus.produce(chat(), {"ce_id": "r"}, at=cancel.issued - 1)
        again = bus.produce(chat(), {"ce_id": "r"}, at=cancel.issued + 0.002)  # a broker counts in milliseconds
        assert (await bus.result(late)).outcome is Outcome.CANCELLED
        assert (await bus.result(again)).outcome is Outcome.COMPLETED


async def test_cancels_from_before_a_start_cancel_and_are_not_answered_again(serve):
    old = tuple(Cancel(request=f"r{n}") for n in range(50))
    async with serve(desired=old) as serving:
        bus = serving.bus
        origin = bus.produce(chat(), {"ce_id": "r7"}, at=old[7].issued - 1)
        assert (await bus.result(origin)).outcome is Outcome.CANCELLED
        bus.command(pause := Pause())
        await bus.said(pause.id, StatusState.COMPLETED)
        assert [status for status in bus.statuses if status.kind == "cancel"] == []


async def test_many_cancels_look_through_what_is_parked_once(serve):
    async with serve() as serving:
        bus = serving.bus
        cancels = [Cancel(request=f"r{n}") for n in range(200)]
        for cancel in cancels:
            bus.command(cancel)
        for cancel in cancels:
            await bus.said(cancel.id, StatusState.COMPLETED)
        await bus.until(lambda: bus.sifted >= 2)
        assert bus.sifted <= 3


# --- streams and retries ---


async def test_a_stream_whose_run_is_repeated_has_one_end(serve):
    engine = FakeEngine(step_s=0.001)
    async with serve(engine=engine, retry_backoff_s=0.001, max_attempts=3) as serving:
        bus = serving.bus
        result = await bus.result(bus.produce(chat(text=BROKEN, stream=True)))
        assert result.attempt.n == 3
        assert [(chunk.attempt.n, chunk.final) for chunk in bus.chunks] == [(3, True)]


# --- the end of a worker ---


async def ended_within(serving, seconds: float) -> None:
    async with asyncio.timeout(seconds):
        await serving.finish()


async def test_a_worker_ends_though_a_settlement_is_stuck(serve):
    bus = StuckSettlements()
    async with serve(bus=bus, shutdown_timeout_s=0.2) as serving:
        bus.produce(chat())
        bus.produce(b"{")
        await bus.asked.wait()
        await ended_within(serving, 5)
        assert bus.settled == {}
        assert bus.flushed


async def test_a_worker_ends_though_a_model_is_being_loaded(serve):
    engine = FakeEngine(switch_s=1000)
    async with serve(engine=engine, shutdown_timeout_s=0.2) as serving:
        bus = serving.bus
        bus.command(switch := Switch(model="qwen"))
        await bus.said(switch.id, StatusState.SWITCHING)
        await ended_within(serving, 5)


async def test_a_worker_ends_though_what_it_is_to_boot_into_is_being_loaded(serve):
    switch = Switch(model="qwen")
    async with serve(engine=FakeEngine(switch_s=1000), desired=(switch,), shutdown_timeout_s=0.2) as serving:
        await until(lambda: serving.engine.active == "qwen", within_s=5)
        await ended_within(serving, 5)


class DeafEngine(FakeEngine):
    """Its calls do not end when they are cancelled, but when it is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.closed = asyncio.Event()

    async def answer(self, call, on_chunk=None, progress=None):
        while not self.closed.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await self.closed.wait()
        return await super().answer(call, on_chunk, progress)


async def test_a_worker_ends_though_its_engine_does_not_let_go_of_a_call(serve):
    engine = DeafEngine()
    async with serve(engine=engine, shutdown_timeout_s=0.2) as serving:
        origin = serving.bus.produce(chat())
        await serving.bus.until(lambda: serving.bus.marks)
        await ended_within(serving, 0.2 + LEAVE_WITHIN_S + 2)
        assert serving.bus.withdrawn == [origin], "the run is not to blame"
        engine.closed.set()


async def test_what_has_not_begun_is_left_alone_by_a_worker_that_ends(serve):
    async with serve(engine=FakeEngine(step_s=0.001), max_running=1, shutdown_timeout_s=5) as serving:
        bus = serving.bus
        running = bus.produce(chat(max_tokens=50))
        await bus.until(lambda: bus.marks)
        waiting = [bus.produce(chat()) for _ in range(3)]
        backing_off = bus.produce(chat(text=BROKEN), deaths=2)
        await serving.finish()
        assert list(bus.settled) == [running]
        assert not {*waiting, backing_off} & bus.marks.keys()
