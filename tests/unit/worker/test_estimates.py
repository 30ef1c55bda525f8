"""What is known of a request that waits: its place, an estimate, and whether it is worth waiting for at all."""

from schemas.control import Pause, Query
from schemas.results import Outcome
from schemas.status import StatusState
from tests.support.fake_engine import FakeEngine


def chat(model: str = "llama", **more: object) -> dict:
    return {"model": model, "messages": [{"role": "user", "content": "hello"}], **more}


async def test_a_waiting_request_can_be_asked_for_its_place_and_an_estimate(serve):
    async with serve(engine=FakeEngine(step_s=0.002), max_running=1) as serving:
        bus = serving.bus
        first = bus.produce(chat(max_tokens=50))
        await bus.result(first)
        running = bus.produce(chat(max_tokens=100_000))
        waiting = [bus.produce(chat(), {"ce_id": f"w{n}"}) for n in range(3)]
        await bus.until(lambda: running in bus.marks)
        bus.command(asked := Query(request="w2"))
        answer = (await bus.said(asked.id, StatusState.COMPLETED)).answer
        (place,) = answer["found"]
        assert (place["phase"], place["position"]) == ("waiting", 2)
        assert place["expected_s"] > 0
        assert not any(origin in bus.settled for origin in waiting)


async def test_a_deadline_that_can_not_be_met_is_refused_at_once(serve):
    async with serve(engine=FakeEngine(step_s=0.005), max_running=1) as serving:
        bus = serving.bus
        await bus.result(bus.produce(chat(max_tokens=100)))
        bus.command(pause := Pause())
        await bus.said(pause.id, StatusState.COMPLETED)
        for _ in range(200):
            bus.produce(chat(max_tokens=100))
        hopeless = bus.produce(chat(max_tokens=100), {"ttl": "20"})
        result = await bus.result(hopeless)
        assert result.outcome is Outcome.EXPIRED
        assert "can't be met" in result.error.message
        assert result.timing.latency_s < 10
