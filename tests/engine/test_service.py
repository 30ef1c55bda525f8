"""The real engine through the worker's port: what every engine does, and what only a real one can show."""

import logging
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from service.errors import EngineRefused
from tests.support.engine_spec import *  # noqa: F403
from tests.support.engine_spec import chat, completion, part_of, running
from tests.support.profiles import traces
from tests.support.waiting import PATIENCE_S

pytestmark = pytest.mark.engine


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """What vLLM says in this process, as its operators have it by default."""
    logger = logging.getLogger("vllm")
    level = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(caplog.handler)
    yield caplog
    logger.removeHandler(caplog.handler)
    logger.setLevel(level)


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


async def test_what_the_engine_does_not_do_is_refused_with_its_reason_and_it_goes_on(engine: Any) -> None:
    for start in (True, False):
        with pytest.raises(EngineRefused, match="Profiling is not enabled"):
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
