"""What waits for a model without a turn goes back to the bus, and costs nothing there."""

import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from schemas.base import Record
from schemas.codec import decode_request
from schemas.control import Cancel, Switch
from schemas.requests import Request
from schemas.results import Outcome
from schemas.status import StatusState
from service.client.inbox import answers
from tests.support.bus import until
from tests.support.fake_bus import FakeBus


def chat(model: str, **more: object) -> dict:
    return {"model": model, "messages": [{"role": "user", "content": "hello"}], **more}


async def test_a_request_for_another_model_moves_to_its_own_topic_while_an_operator_holds_one(serve):
    async with serve(park_after_s=0.05) as serving:
        bus = serving.bus
        bus.command(hold := Switch(model="llama", hold="forever"))
        await bus.said(hold.id, StatusState.NO_OP)
        parked = bus.produce(chat("qwen"), {"ce_id": "r1", "ttl": "500", "tenant": "blue"})
        served = bus.produce(chat("llama"))
        assert (await bus.result(served)).outcome is Outcome.COMPLETED
        (moved,) = await bus.until(lambda: bus.settled.get(parked))
        assert moved.topic == "requests.qwen"
        assert bus.only == {"llama"}
        again = Record(moved.topic, 0, 0, 1.0, moved.key, moved.value, moved.headers)
        request = decode_request(again, max_bytes=10_000, alias="qwen")
        assert isinstance(request, Request)
        assert (request.id, request.tenant, request.moved_from) == ("r1", "blue", None)
        assert request.deadline is not None


@asynccontextmanager
async def holding_llama(serve: Any, tmp_path: Path, keyed: bool) -> AsyncIterator[FakeBus]:
    """A worker that is held on llama, and soon moves what is for qwen; its pool has a key if it is ``keyed``."""
    (tmp_path / "key").write_text("secret")
    async with serve(park_after_s=0.05, **({"pool_key_file": tmp_path / "key"} if keyed else {})) as serving:
        serving.bus.command(hold := Switch(model="llama", hold="forever"))
        await serving.bus.said(hold.id, StatusState.NO_OP)
        yield serving.bus


async def bring_qwen_back(bus: FakeBus) -> None:
    bus.command(back := Switch(model="qwen", hold=0))
    await bus.said(back.id, StatusState.COMPLETED)


@pytest.mark.parametrize("keyed", [True, False])
async def test_a_parked_request_is_answered_under_its_id_and_with_the_pools_key_for_its_producers_record(
    serve, tmp_path, keyed
):
    async with holding_llama(serve, tmp_path, keyed) as bus:
        origin = bus.produce(chat("qwen"))
        (moved,) = await bus.until(lambda: bus.settled.get(origin))
        await bring_qwen_back(bus)
        again = bus.write(Record(moved.topic, 0, 0, 1.0, moved.key, moved.value, moved.headers))
        result = await bus.result(again)
        assert result.outcome is Outcome.COMPLETED
        assert result.id == str(origin)
        assert result.origin == (origin if keyed else again)
        assert ("park" in result.timing.waited_for) is keyed, "a move is believed only where a key vouches for it"
        assert ("read" in result.timing.waited_for) is not keyed


@pytest.mark.parametrize("keyed", [True, False])
async def test_a_durable_call_that_was_moved_is_answered_where_such_calls_are(serve, tmp_path, keyed):
    async with holding_llama(serve, tmp_path, keyed) as bus:
        await bus.until(lambda: bus.only == {"llama"})
        call = bus.produce(chat("qwen"), {"ce_id": "c1", "reply-to": "answers"}, topic="calls")
        (moved,) = await bus.until(lambda: bus.settled.get(call))
        await bring_qwen_back(bus)
        again = bus.write(Record(moved.topic, 0, 0, 1.0, moved.key, moved.value, moved.headers))
        result = await bus.result(again)
        assert (result.id, result.outcome, bus.settled[again][0].topic) == ("c1", Outcome.COMPLETED, "answers")
        assert result.origin == (call if keyed else again)


@pytest.mark.parametrize("keyed", [True, False])
async def test_a_request_that_was_written_to_its_models_own_topic_and_moved_to_its_end_is_the_clients_own(
    serve, tmp_path, keyed
):
    async with holding_llama(serve, tmp_path, keyed) as bus:
        sent = bus.produce(chat("qwen", stream=True), {"ce_id": "r1"}, topic="requests.qwen")
        (moved,) = await bus.until(lambda: bus.settled.get(sent))
        assert moved.topic == sent.topic
        forged = Record(sent.topic, 0, 90, 1.0, moved.key, moved.value, [("ce_id", b"r1"), ("moved-from", b"a/0/1")])
        await bring_qwen_back(bus)
        again = bus.write(Record(moved.topic, 0, 80, 1.0, moved.key, moved.value, moved.headers))
        strangers = await bus.result(bus.write(forged))
        result = await bus.result(again)
        chunks = [chunk for chunk in bus.chunks if answers(chunk, sent)]
        assert (answers(result, sent), answers(strangers, sent), bool(chunks)) == (True, False, True)
        assert (result.origin, result.says_moved_from) == ((sent, None) if keyed else (again, sent))


async def test_in_manual_mode_only_the_operator_switches(serve):
    async with serve(inactive="park", park_after_s=0.05) as serving:
        bus = serving.bus
        origin = bus.produce(chat("qwen"))
        (moved,) = await bus.until(lambda: bus.settled.get(origin))
        assert moved.topic == "requests.qwen"
        assert serving.engine.active == "llama"


async def test_where_the_scheduler_may_switch_nothing_is_parked(serve):
    async with serve(park_after_s=0.0) as serving:
        result = await serving.bus.result(serving.bus.produce(chat("qwen")))
        assert result.outcome is Outcome.COMPLETED
        assert serving.bus.only is None


async def test_where_inactive_models_are_refused_a_request_gets_the_404_of_the_gaudi_server(serve):
    async with serve(inactive="refuse") as serving:
        result = await serving.bus.result(serving.bus.produce(chat("qwen")))
        assert (result.outcome, result.status) == (Outcome.FAILED, 404)
        assert "qwen" in result.error.message


async def test_what_is_parked_is_due_at_its_deadline_and_at_once_when_it_is_cancelled(serve):
    async with serve(ttl_s=1000) as serving:
        bus = serving.bus

        def parked(id_: str, **headers: str) -> Record:
            named = {"ce_id": id_, **headers}
            pairs = [(name, value.encode()) for name, value in named.items()]
            return Record("requests.qwen", 0, 7, 100.0, None, b'{"prompt": "hello"}', pairs)

        await bus.until(lambda: bus.sifted)
        assert bus.due(parked("a", ttl="20")) == 120.0
        assert bus.due(parked("b")) == 1100.0
        assert bus.due(Record("requests.qwen", 0, 7, 100.0, None, b"{", ())) == math.inf
        bus.command(cancel := Cancel(request="a"))
        await bus.said(cancel.id, StatusState.COMPLETED)
        assert bus.due(parked("a", ttl="20")) == 0.0
        assert bus.sifted == 2, "what is parked is looked at again"


async def test_a_worker_that_starts_into_a_hold_joins_its_group_saying_what_it_serves(serve):
    bus = FakeBus()
    async with serve(bus=bus, desired=(Switch(model="llama", hold="forever"),)):
        await until(lambda: bool(bus.served_when_it_joined))
    assert bus.served_when_it_joined == [{"llama"}]
