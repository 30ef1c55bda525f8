"""What can't be read, or what the worker stumbles over, is answered, kept and told; the loop goes on."""

import json
from dataclasses import replace

from schemas.base import Record
from schemas.errors import FailureClass
from schemas.results import Outcome
from schemas.status import StatusState
from service.kafka.dead_letters import read_dead_letter
from service.ports import Unreadable
from service.scheduling.quotas import Quotas
from service.settings import load
from service.worker.admission import Admission
from service.worker.cancellations import Cancellations
from tests.support.fake_engine import FakeEngine

GOOD = {"model": "llama", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
RECORD = Record("requests", 0, 0, 1.79e9, b"k", json.dumps({**GOOD, "model": "tripping"}).encode(), [("x", None)])


class Tripping(FakeEngine):
    """Trips over the name of one model, which no engine should."""

    def loras(self, alias: str) -> tuple[str, ...]:
        raise RuntimeError(f"the adapters of {alias} are nowhere")


def letter_of(bus, origin):
    (kept,) = [record for record in bus.settled[origin] if record.topic == "dead-letters"]
    return read_dead_letter(Record(kept.topic, 0, 0, 0.0, kept.key, kept.value, kept.headers))


async def test_a_record_that_the_worker_stumbles_over_is_malformed_and_kept_and_reading_goes_on(serve):
    async with serve(engine=Tripping()) as serving:
        bus = serving.bus
        origins = [bus.write(RECORD) for _ in range(3)]
        good = bus.produce(GOOD)
        assert (await bus.result(good)).outcome is Outcome.COMPLETED
        for origin in origins:
            result = await bus.result(origin)
            assert (result.id, result.status, result.failure) == (str(origin), 500, FailureClass.MALFORMED)
            letter = letter_of(bus, origin)
            assert (letter.value, list(letter.headers)) == (RECORD.value, [("x", None)])
        assert len(serving.worker.jobs) == 0


class TrippingCancellations(Cancellations):
    """Trips over every request, which it should not."""

    def wanted(self, request) -> bool:
        raise RuntimeError(f"{request.id} is nowhere")


async def test_one_that_the_worker_stumbles_over_while_it_is_parked_is_handed_over_at_once(serve):
    async with serve() as serving:
        worker = serving.worker
        admission = Admission(
            engine=serving.engine,
            scheduler=worker.scheduler,
            states=worker.states,
            cancellations=TrippingCancellations(),
            quotas=Quotas(),
            settings=load(),
        )
        assert admission.due(RECORD) == 0.0


async def test_one_that_can_not_be_read_waits_for_its_turn_where_it_is_parked(serve):
    async with serve(engine=Tripping(), ttl_s=60) as serving:
        await serving.bus.until(lambda: serving.bus.sifted)
        assert serving.bus.due(replace(RECORD, damage="cut")) == float("inf")


async def test_what_can_not_be_decoded_is_told_and_its_record_answered(serve):
    async with serve() as serving:
        bus = serving.bus
        bus.skip(Unreadable("requests", 3, 7, 9, "unknown codec 7"))
        origin = bus.write(replace(RECORD, damage="unknown codec 7", value=None))
        result = await bus.result(origin)
        assert (result.failure, result.outcome) == (FailureClass.MALFORMED, Outcome.FAILED)
        assert "unknown codec 7" in result.error.message
        told = await bus.until(lambda: [one for one in bus.statuses if one.kind == "record"])
        assert (told[0].state, told[0].control_id) == (StatusState.REJECTED, None)
        assert told[0].reason == "can't be decoded: requests/3/7 to 9: unknown codec 7"
