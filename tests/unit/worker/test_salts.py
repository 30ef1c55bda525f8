"""What one tenant has asked can't be found out by another from how soon an answer begins."""

import time
from pathlib import Path
from typing import Any

import pytest

from schemas.base import Origin, Record
from schemas.progress import Progress
from schemas.requests import Endpoint, Request
from schemas.results import Outcome
from service.ports import Answer, Call, ChunkSink, Turn
from service.worker.salts import CACHE_SALT, CacheSalts
from tests.support.fake_engine import FakeEngine


def request(tenant: str = "", endpoint: Endpoint = Endpoint.CHAT, **body: Any) -> Request:
    origin = Origin(topic="requests", partition=0, offset=0)
    given = {"endpoint": endpoint, "tenant": tenant, "body": {"n": 1, **body}}
    return Request(id="a", origin=origin, model="llama", received=0.0, size=1, **given)


def salt(salts: CacheSalts, *given: Any, **more: Any) -> Any:
    return salts.body(request(*given, **more)).get(CACHE_SALT)


def test_each_tenant_has_a_salt_of_its_own_and_keeps_it() -> None:
    salts = CacheSalts()
    one, other, again = salt(salts, "one"), salt(salts, "other"), salt(salts, "one")
    assert one == again
    assert len({one, other, None}) == 3
    assert salt(CacheSalts(), "one") != one, "nobody can compute it"


def test_workers_with_a_pool_key_have_the_same_salts() -> None:
    assert salt(CacheSalts([b"key", b"old"]), "one") == salt(CacheSalts([b"key"]), "one")
    assert salt(CacheSalts([b"key"]), "one") != salt(CacheSalts([b"another"]), "one")


def test_a_salt_that_a_request_brings_stays_within_its_tenant() -> None:
    salts = CacheSalts()
    found = {salt(salts, tenant, cache_salt=own) for tenant in ("one", "other") for own in ("x", "y")}
    assert len(found | {salt(salts, "one"), salt(salts, "other")}) == 6
    assert salt(salts, "", cache_salt="x") == "x"
    assert salt(salts, "one\0two", cache_salt="x") != salt(salts, "one", cache_salt="two\0x")
    assert salt(salts, "one", cache_salt="\ud800") != salt(salts, "one")


@pytest.mark.parametrize("wrong", ["", 7, ["x"]])
def test_a_salt_that_vllm_refuses_is_left_for_it_to_refuse(wrong: Any) -> None:
    assert salt(CacheSalts(), "one", cache_salt=wrong) == wrong


@pytest.mark.parametrize("endpoint", [Endpoint.CHAT, Endpoint.COMPLETIONS, Endpoint.RESPONSES, Endpoint.MESSAGES])
def test_what_generates_has_its_tenant_s_salt_at_each_endpoint(endpoint: Endpoint) -> None:
    assert salt(CacheSalts(), "one", endpoint=endpoint) is not None


@pytest.mark.parametrize(
    "endpoint", [Endpoint.EMBEDDINGS, Endpoint.COUNT_TOKENS, Endpoint.TOKENIZE, Endpoint.TRANSCRIPTIONS]
)
def test_what_generates_no_text_from_a_prompt_is_sent_as_it_came(endpoint: Endpoint) -> None:
    assert salt(CacheSalts(), "one", endpoint=endpoint) is None


class Listening(FakeEngine):
    """Keeps what it was asked."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[Call] = []

    async def answer(self, call: Call, on_chunk: ChunkSink | None = None, progress: Progress | None = None) -> Answer:
        self.heard.append(call)
        return await super().answer(call, on_chunk, progress)


async def test_the_engine_is_asked_with_the_tenants_salt(serve: Any, tmp_path: Path) -> None:
    (key := tmp_path / "key").write_text("k" * 32)
    async with serve(engine=Listening(), pool_key_file=key) as serving:
        body = {"model": "llama", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 1}
        asked = serving.bus.produce(body, headers={"tenant": "one"})
        assert (await serving.bus.result(asked)).outcome is Outcome.COMPLETED
        (call,) = serving.engine.heard
        assert call.body == {**body, CACHE_SALT: salt(CacheSalts([b"k" * 32]), "one")}
        assert call.tenant == "one", "by which trials of constraints have their turns"


async def test_the_engine_is_told_whose_session_a_part_is_of(serve: Any) -> None:
    async with serve(engine=Listening()) as serving:
        headers = [("tenant", b"one"), ("session", b"story"), ("part", b"0"), ("final", b"false")]
        value = b'{"model": "llama", "prompt": "hello", "max_tokens": 1}'
        now = time.time()
        record = Record("requests", 0, 0, timestamp=now, key=b"mine", value=value, headers=headers)
        await serving.bus.result(serving.bus.write(record))
        (call,) = serving.engine.heard
        assert call.turn == Turn("story", 0, final=False, owner=("one", b"mine"), origin=call.turn.origin)
        assert call.turn.origin == Origin("requests", 0, 0)
