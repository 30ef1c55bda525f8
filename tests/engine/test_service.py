"""The real engine through the worker's port: what every engine does, and what only a real one can show."""

import asyncio
import uuid
from pathlib import Path
from typing import Any

import pytest

from schemas.requests import Endpoint
from service.errors import EngineRefused
from service.ports import Call
from tests.support import bus
from tests.support.engine_spec import *  # noqa: F403
from tests.support.engine_spec import chat, completion, part_of, references, running
from tests.support.profiles import traces
from tests.support.waiting import PATIENCE_S

pytestmark = pytest.mark.engine


async def test_each_alias_says_whether_its_requests_are_logged_and_its_statistics_kept(
    engine: Any, logged: pytest.LogCaptureFixture
) -> None:
    for alias in ("llama", "caller"):
        await engine.switch(alias)
        await engine.answer(chat(alias, "A secret", max_tokens=9))
    assert engine.multi.context("caller").log_requests
    assert engine.registries().keys() == set(engine.aliases) - {"minilm"}
    for said in ("Received request", "Added request", "Generated response"):
        assert len([line for line in logged.messages if line.startswith(said)]) == 1, logged.messages


async def test_what_models_of_several_kinds_can_be_asked_is_described_together(engine: Any) -> None:
    """Each endpoint as vLLM's server of a model that has it describes it, with all that it refers to."""
    for alias in ("llama", "minilm", "qwen"):
        await engine.preload(alias)
    wanted = {Endpoint.CHAT.value, Endpoint.MESSAGES.value, Endpoint.EMBEDDINGS.value}

    async def described() -> bool:
        return wanted <= (await engine.openapi())["paths"].keys()

    await bus.until(described)  # what answers for a model is made a moment after it was loaded
    found = await engine.openapi()
    for name, document in ((Endpoint.CHAT.value, "ChatCompletionRequest"), (Endpoint.EMBEDDINGS.value, "Embedding")):
        body = found["paths"][name]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert document in str(body)
    assert references(found) <= {f"#/components/schemas/{name}" for name in found["components"]["schemas"]}
    again = await engine.openapi()
    assert again is found, "made once"


async def test_a_models_own_template_is_used_with_what_the_request_says_for_it(engine: Any) -> None:
    """``tuned`` has the weights of ``llama``, and a template with a name for who speaks."""

    async def rendered(alias: str, **given: str) -> list[int]:
        await engine.switch(alias)
        answer = await engine.answer(chat(alias, return_token_ids=True, chat_template_kwargs=given))
        assert answer.status == 200, answer.body
        return list(answer.body["prompt_token_ids"])

    usual = await rendered("llama")
    assert await rendered("tuned") == usual
    other = await rendered("tuned", speaker="user")
    assert other != usual
    assert engine.multi.get_tokenizer(model="tuned").decode(other).rstrip().endswith("user")
    assert await rendered("llama", speaker="user") == usual


async def test_what_the_engine_does_not_do_is_refused_with_its_reason_and_it_goes_on(engine: Any) -> None:
    for start in (True, False):
        with pytest.raises(EngineRefused, match=r"Profil\w+ is not enabled"):
            await engine.profile("llama", start=start)
    assert (await engine.answer(chat("llama"))).status == 200


async def test_a_profile_ends_where_it_began_whichever_model_is_active_then(engine: Any, profiles: Path) -> None:
    before = traces(profiles)
    await engine.switch("lynx")
    await engine.profile(start=True)
    await engine.switch("llama")
    await engine.answer(chat("llama", max_tokens=2))
    assert traces(profiles).keys() == before.keys()
    await engine.profile(start=False)
    assert [b"aten::" in trace for name, trace in traces(profiles).items() if name not in before] == [True]


async def test_a_session_that_waits_holds_its_models_prefix_cache_whatever_is_preempted(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine._sessions, "idle_s", PATIENCE_S)
    name = uuid.uuid4().hex
    first = await engine.answer(part_of(name, 0))
    task = await running(engine, completion(max_tokens=400))
    assert not await engine.reset_caches("llama", "prefix", running=True)
    assert (await task).status == 200
    last = await engine.answer(part_of(name, 1, final=True))
    assert (first.status, last.status) == (200, 200)


async def test_an_embedding_model_wakes_up_from_a_deep_sleep_and_says_what_it_said(engine: Any) -> None:
    async def embedded() -> Any:
        body = {"model": "minilm", "input": "a llama"}
        answer = await engine.answer(Call(uuid.uuid4().hex, "minilm", Endpoint.EMBEDDINGS, body))
        return answer.body["data"][0]["embedding"]

    await engine.switch("minilm")
    before = await embedded()
    for _ in range(2):
        await engine.sleep(2, "minilm")
        await engine.wake("minilm")
    assert await embedded() == before


async def test_the_tokens_of_several_answers_are_counted_to_the_end_though_some_end_before(engine: Any) -> None:
    """Some end with a letter that others say later, or never."""
    await engine.switch("llama")
    call = completion("llama", "Once", n=8, max_tokens=120, temperature=1.0, seed=7, stop=["e"])
    answering = asyncio.create_task(engine.answer(call))
    seen = [0]
    while not answering.done():
        seen.append(engine.tokens(call.id) or seen[-1])  # none, once it has ended
        await asyncio.sleep(0.001)
    answer = answering.result()
    said = answer.body["usage"]["completion_tokens"]
    assert seen == sorted(seen)
    assert len({len(choice["text"]) for choice in answer.body["choices"]}) > 1, "none ended before another"
    assert said * 0.9 <= seen[-1] <= said
