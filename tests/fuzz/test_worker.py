"""Malformed records through a whole worker: each ends in exactly one result, refused ones in one dead letter too."""

import json
from collections import Counter

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings

from schemas.base import Record
from schemas.control import Resume, Switch
from schemas.results import Outcome
from schemas.status import StatusState
from service.kafka.control import read_event
from tests.fuzz.records import records

counts = pytest.mark.parametrize("count", [300, pytest.param(5_000, marks=pytest.mark.long)])
GOOD = {"model": "qwen", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}


def drawn(count: int, *topics: str) -> list[Record]:
    """So many records, the same ones each time; drawn first, as a worker can't be run inside of hypothesis."""
    found: list[Record] = []

    @seed(5)
    @settings(
        max_examples=count,
        phases=[Phase.generate],
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(records(topics))
    def draw(record: Record) -> None:
        found.append(record)

    draw()
    return found


@counts
async def test_each_record_ends_in_one_result_and_the_worker_goes_on(serve, count):
    async with serve(max_request_bytes=2000, retry_backoff_s=0.001) as serving:
        bus = serving.bus
        origins = [bus.write(record) for record in drawn(count, "requests", "requests.qwen")]
        good = bus.produce(GOOD)
        assert (await bus.result(good)).outcome is Outcome.COMPLETED
        outcomes: Counter[str] = Counter()
        for origin in origins:
            result = await bus.result(origin)
            outcomes[result.outcome] += 1
            written = Counter(record.topic for record in bus.settled[origin])
            letters = int(result.failure is not None)
            assert written == Counter({"results": 1, "usage": 1, "dead-letters": letters})
            assert (result.error is not None) == (result.outcome is not Outcome.COMPLETED)
        assert outcomes["failed"] > count / 2
        assert len(serving.worker.jobs) == 0
        assert not serving.done.done()


@counts
async def test_each_control_record_is_answered_and_the_worker_goes_on(serve, count):
    async with serve() as serving:
        bus = serving.bus
        malformed = 0
        for record in drawn(count, "control", "control.commands"):
            found = read_event(record, ())
            malformed += found.problem is not None
            if not found.takes_back:
                bus.read(found)
        bus.command(Resume())
        bus.command(Switch(model="qwen"))
        good = bus.produce(GOOD)
        assert (await bus.result(good)).outcome is Outcome.COMPLETED
        rejected = await bus.until(lambda: _rejected(bus.statuses, malformed))
        assert len(rejected) >= malformed > count / 2
        assert all(status.reason for status in rejected)
        json.dumps([status.model_dump(mode="json") for status in bus.statuses])


def _rejected(statuses, least):
    found = [status for status in statuses if status.state is StatusState.REJECTED]
    return found if len(found) >= least else None
