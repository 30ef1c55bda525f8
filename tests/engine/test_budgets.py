"""Budgets on the real engine: models that don't fit together take turns, and nothing grows beyond what was allowed."""

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from schemas.contexts import SwitchMode, Tier
from schemas.control import Switch
from schemas.results import Outcome
from schemas.status import StatusState
from service.app import Parts, serve
from service.client import Client
from service.errors import EngineDied, HandedBack, SwitchFailed
from service.platforms.cpu import resident_bytes
from service.settings import EngineSettings
from tests.support.doors import Lent, open_doors
from tests.support.engine_spec import chat, running, text, until
from tests.support.engines import open_engine
from tests.support.greedy import PROMPT, Greedy, alone, usual
from tests.support.pool import delete_topics, settings_for
from tests.support.waiting import PATIENCE_S

pytestmark = pytest.mark.engine
MIB = 1 << 20
DEVICE = 90 * MIB

MEMORY = {"llama": 40 * MIB, "qwen": 40 * MIB, "lynx": 80 * MIB, "hog": DEVICE - MIB // 2}
"""Of the aliases that say how much they want: any two of the small ones fit; ``lynx`` beside parked ones only, whose
weights stay where they are on a CPU; ``hog`` beside nothing. ``silent`` says nothing at all, and gets a share."""
BUFFERS = MIB
"""What a small model has beside the weights of its checkpoint, which is what its size is guessed by."""


ENDLESS = {"ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
async def tight(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Any]:
    common = {"dtype": "float32", "max_model_len": 4096, "enforce_eager": True}
    checkpoints = {**models, "hog": models["lynx"], "silent": models["llama"]}
    entries = {
        alias: {"model": str(path), **common, **({"memory": MEMORY[alias]} if alias in MEMORY else {})}
        for alias, path in checkpoints.items()
    }
    settings = EngineSettings(device_memory_bytes=DEVICE)
    async with await open_engine(tmp_path_factory.mktemp("tight"), entries, settings, default="llama") as engine:
        yield engine


@pytest.fixture
async def multi(tight: Any) -> Any:
    """With ``llama`` active, nothing pinned, and nothing else loaded."""
    for alias in tight.aliases:
        await tight.pin(alias, False)
    await tight.switch("llama")
    for alias in set(tight.aliases) - {"llama"}:
        await tight.drop(alias)
    return tight.multi


def taken(multi: Any) -> int:
    """Bytes of the device that contexts take; on a CPU the weights of parked ones too."""
    return sum(
        info.weights_bytes + (info.kv_bytes if info.tier is Tier.RESIDENT else 0)
        for info in multi.contexts()
        if info.tier is not Tier.DROPPED
    )


async def test_each_gets_what_it_asks_for_and_the_silent_one_a_share(multi: Any) -> None:
    said = {}
    for alias in ("llama", "qwen", "lynx", "silent", "hog"):
        said[alias] = await alone(multi, alias)
        info = multi.info(alias)
        allowed = MEMORY.get(alias, DEVICE // 2)
        assert 0.9 * allowed < info.weights_bytes + info.kv_bytes < allowed + BUFFERS
        assert taken(multi) <= DEVICE
    assert said["silent"] == said["llama"]
    assert said["hog"] == said["lynx"]


@pytest.mark.delicate
async def test_two_that_do_not_fit_together_take_turns_and_keep_their_requests(multi: Any) -> None:
    expected = {alias: await usual(multi, alias, tokens=150) for alias in ("llama", "lynx")}
    await multi.switch("llama")
    requests = {"llama": Greedy(multi, "llama", PROMPT, 150)}
    await requests["llama"].has(5)
    requests["lynx"] = Greedy(multi, "lynx", PROMPT, 150)
    sizes = []
    for turn in range(6):
        alias = ("lynx", "llama")[turn % 2]
        report = await multi.switch(alias)
        assert (report.tier_left, report.tier_found) == (Tier.PARKED, Tier.PARKED)
        assert taken(multi) <= DEVICE
        sizes.append(sum(map(resident_bytes, multi.worker_pids)))
    assert {alias: await _in_turn(multi, alias, requests[alias]) for alias in requests} == expected
    assert max(sizes[2:]) - max(sizes[:2]) < 10 * MIB


async def _in_turn(multi: Any, alias: str, request: Greedy) -> tuple[int, ...]:
    await multi.switch(alias)
    return await request.tokens()


async def test_what_a_switch_says_of_memory_is_what_was_given_back_and_what_is_there(multi: Any) -> None:
    await multi.switch("lynx")
    back = await multi.switch("llama")
    cache = multi.info("llama").kv_bytes
    report = await multi.switch("lynx")
    assert (report.tier_left, report.freed_memory_mb) == (Tier.PARKED, pytest.approx(cache / MIB))
    assert report.memory_before_mb == back.memory_after_mb
    workers = sum(map(resident_bytes, multi.worker_pids)) / MIB
    assert report.memory_after_unload_mb == report.memory_after_mb == pytest.approx(workers, abs=10)
    assert report.stash_memory_after_mb == sum(info.host_bytes for info in multi.contexts()) / MIB
    answer = await multi.switch_model("llama")
    assert answer["memory_before_mb"] == report.memory_after_mb
    assert answer["freed_memory_mb"] == pytest.approx(multi.info("lynx").kv_bytes / MIB)


async def test_the_one_that_was_not_used_for_longest_gives_way(multi: Any) -> None:
    for alias in ("qwen", "llama"):
        await multi.switch(alias)
    assert multi.info("qwen").tier is Tier.RESIDENT
    await multi.switch("silent")
    assert multi.info("qwen").tier is Tier.PARKED
    assert multi.info("llama").tier is Tier.RESIDENT


@pytest.mark.parametrize("mode", list(SwitchMode))
async def test_a_pinned_model_stays_and_who_does_not_fit_beside_it_is_refused(multi: Any, mode: SwitchMode) -> None:
    request = Greedy(multi, "llama", PROMPT, 150)
    await request.has(5)
    await multi.pin("llama")
    for alias in ("lynx", "hog"):
        with pytest.raises(SwitchFailed, match=f"{alias} needs .* MiB of the device's 90 MiB"):
            await multi.switch(alias, mode=mode, drain_timeout=0)
    assert multi.active == "llama"
    assert multi.info("llama").tier is Tier.RESIDENT
    assert len(await request.tokens()) == 150


@pytest.mark.broker
async def test_by_bus_and_http_too_a_model_that_has_no_room_is_refused_before_a_request_is_ended(
    tight: Any, multi: Any, broker: Any
) -> None:
    await multi.pin("llama")
    async with open_doors(tight, broker.bootstrap) as doors:
        asked = asyncio.create_task(
            doors.openai.completions.create(model="llama", prompt=PROMPT, max_tokens=1000, extra_body=ENDLESS)
        )
        await until(lambda: multi.get_num_unfinished_requests(model="llama") == 1)
        (told,) = await doors.bus.control(Switch(model="hog", mode=SwitchMode.ABORT), timeout_s=60)
        assert told.state is StatusState.FAILED
        assert "hog needs" in str(told.reason)
        refused = await doors.http.post("/v1/models/switch", json={"model": "hog", "drain_timeout": 0})
        assert (refused.status_code, "hog needs" in refused.text) == (500, True)
        answer = await asked
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 1000


async def test_a_preload_makes_room_but_not_at_the_active_models_cost(multi: Any) -> None:
    await multi.preload("qwen")
    assert multi.info("llama").tier is Tier.RESIDENT
    with pytest.raises(SwitchFailed, match="lynx needs"):
        await multi.preload("lynx")
    assert multi.active == "llama"


async def test_waking_makes_room_as_loading_does(multi: Any) -> None:
    await multi.switch("qwen")
    await multi.switch("llama")
    await multi.sleep(1, "keep", model="qwen")
    assert multi.info("qwen").tier is Tier.PARKED
    await multi.preload("silent")
    assert await multi.wake_up(model="qwen")
    assert multi.info("qwen").tier is Tier.RESIDENT
    assert multi.info("silent").tier is Tier.PARKED
    assert taken(multi) <= DEVICE


async def test_a_request_whose_model_must_be_dropped_goes_back_as_not_started(tight: Any, multi: Any) -> None:
    from vllm.v1.engine.exceptions import EngineGenerateError

    expected = text(await tight.answer(chat(max_tokens=400)))
    call = chat(max_tokens=400)
    task, direct = await running(tight, call), Greedy(multi, "llama", PROMPT, 400)
    await tight.switch("hog")
    assert multi.info("llama").tier is Tier.DROPPED
    with pytest.raises(HandedBack, match="llama was dropped to make room for hog") as back:
        await task
    assert back.value.progress.tokens >= 8
    with pytest.raises(EngineGenerateError) as failure:
        await direct.tokens()
    assert isinstance(failure.value.__cause__, HandedBack)
    assert multi.get_num_unfinished_requests() == 0
    await tight.switch("llama")
    answer = await tight.answer(call, progress=back.value.progress)
    assert text(answer) == expected
    assert answer.continued == (back.value.progress.tokens,)


@pytest.mark.broker
async def test_a_worker_runs_a_request_again_that_was_handed_back(tight: Any, multi: Any, broker: Any) -> None:
    settings = settings_for(broker.bootstrap, hold_s=0.5)

    async def open_engine(*_: object) -> Any:
        return Lent(tight)

    stop = asyncio.Event()
    body = {
        "model": "llama",
        "messages": [{"role": "user", "content": PROMPT}],
        "max_tokens": 1000,
        "temperature": 0.0,
        "ignore_eos": True,
    }
    async with asyncio.TaskGroup() as tasks:
        parts = Parts(read_models=lambda: tight._models, open_engine=open_engine)
        tasks.create_task(serve(settings, parts, stop), name="worker")
        async with Client(settings=settings, timeout_s=120) as client:
            await client.switch("llama", hold="forever")
            stream = client.stream(**body)
            pieces = aiter(stream)
            await anext(pieces)  # it has said something
            await client.switch("hog", hold=0)
            async for _ in pieces:
                pass
        stop.set()
    await delete_topics(settings)
    result = stream.result
    assert result is not None
    assert result.outcome is Outcome.COMPLETED
    assert result.attempt.n == 2
    assert result.body["usage"]["completion_tokens"] == 1000
    (had,) = result.continued
    assert 0 < had < 1000


async def test_a_core_that_says_nothing_is_declared_dead_and_everyone_is_told_at_once(tight: Any, multi: Any) -> None:
    """The last test of this engine."""
    from vllm.v1.engine.exceptions import EngineDeadError

    processes = [psutil.Process(pid) for pid in (multi.core_pid, *multi.worker_pids)]
    await multi.preload("qwen")
    task, direct, frozen = (
        await running(tight, chat(max_tokens=2000)),
        *(Greedy(multi, alias, PROMPT, 2000) for alias in ("llama", "qwen")),
    )
    processes[0].suspend()
    multi._performer.timeout_s = multi._performer.stuck_s = 0.5
    asked = asyncio.gather(multi.switch("qwen"), multi.switch("silent"), return_exceptions=True)
    cause = await tight.died()
    assert re.search(r"stuck: it neither loaded a model nor gave it up in \d s", str(cause))
    assert all(isinstance(error, EngineDeadError) for error in await asked)
    with pytest.raises(EngineDied):
        await task
    for request in (direct, frozen):
        with pytest.raises(EngineDeadError):
            await request.tokens()
    with pytest.raises(EngineDied):
        await tight.switch("llama")
    _, alive = psutil.wait_procs(processes, timeout=PATIENCE_S)
    assert alive == []
