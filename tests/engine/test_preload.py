"""Bringing a model in beside the active one: what runs goes on, and whatever is asked meanwhile is right."""

import asyncio
import errno
import json
import shutil
import threading
from collections.abc import AsyncIterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from schemas.contexts import KvKept, Tier
from service.errors import SwitchFailed
from tests.support.greedy import PROMPT, Greedy, greedy, usual
from tests.support.one_allocation import ONE_ALLOCATION
from tests.support.volume import shown
from tests.support.waiting import PATIENCE_S

pytestmark = pytest.mark.engine
TOKENS = 200


@pytest.fixture(params=["park", "drop"])
async def away(multi: Any, request: pytest.FixtureRequest) -> tuple[int, ...]:
    """``qwen`` is parked, or not loaded; ``llama`` active; what qwen says when it is asked."""
    said = await usual(multi, "qwen")
    await multi.switch("llama")
    await getattr(multi, request.param)("qwen")
    return said


@pytest.fixture
async def dropped(multi: Any) -> tuple[int, ...]:
    """``qwen`` is not loaded."""
    said = await usual(multi, "qwen")
    await multi.switch("llama")
    await multi.drop("qwen")
    return said


async def begun(multi: Any, alias: str) -> asyncio.Task[Any]:
    """A model's preloading, which the core has begun."""
    preloading = asyncio.create_task(multi.preload(alias, stall=False))
    async with asyncio.timeout(PATIENCE_S):
        while not multi._residency.returns(alias):  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0)
    return preloading


async def loaded(multi: Any) -> list[int]:
    """The keys of what the core has loaded."""
    return [context["key"] for context in (await multi.describe())["contexts"] if context["loaded"]]


@pytest.mark.long
async def test_every_model_is_loaded_beside_the_active_one(engine: Any) -> None:
    """Also one whose layers draw their first values, as a classifier's do."""
    for alias in engine.aliases:
        if alias == engine.active:
            continue
        await engine.drop(alias)
        assert (await engine.preload(alias, stall=False)).tier is not Tier.DROPPED, alias


async def test_what_can_be_done_beside_the_active_models_steps_is_enough(multi: Any, away: tuple[int, ...]) -> None:
    running = Greedy(multi, "llama", PROMPT, TOKENS)
    await running.has(5)
    assert (await multi.preload("qwen", stall=False)).tier is Tier.RESIDENT
    assert await running.tokens() == await usual(multi, "llama", tokens=TOKENS)
    assert (await multi.switch("qwen")).tier_found is Tier.RESIDENT
    assert await greedy(multi, "qwen") == away


async def test_the_active_model_generates_while_another_one_is_loaded(multi: Any, dropped: tuple[int, ...]) -> None:
    running = Greedy(multi, "llama", PROMPT, 3500)
    await running.has(5)
    preloading = await begun(multi, "qwen")
    await running.has(running.seen + 3)
    assert not preloading.done()
    assert (await preloading).tier is Tier.RESIDENT
    assert not running.task.done()
    await multi.abort(running.id, model="llama")
    said = await running.tokens()
    assert said == await greedy(multi, "llama", tokens=len(said))
    await multi.switch("qwen")
    assert await greedy(multi, "qwen") == dropped


@pytest.mark.parametrize("error", [OSError(errno.EIO, "broken"), OSError(errno.ETIMEDOUT, "no answer")], ids=str)
async def test_weights_that_can_not_be_read_ahead_are_the_loads_to_tell_of(
    multi: Any, dropped: tuple[int, ...], monkeypatch: pytest.MonkeyPatch, error: OSError
) -> None:
    def broken(_model: str, _revision: str | None) -> None:
        raise error

    monkeypatch.setattr("service.engine.frontend.multi_model.read_ahead", broken)
    with capture_logs() as logs:
        assert (await multi.preload("qwen", stall=False)).tier is Tier.RESIDENT
    said = {"event": "engine.not_read_ahead", "alias": "qwen", "reason": str(error)}
    assert [{name: each[name] for name in said} for each in logs if each["event"] == said["event"]] == [said]
    await multi.switch("qwen")
    assert await greedy(multi, "qwen") == dropped


async def test_weights_that_are_not_read_in_time_are_not_waited_for(
    multi: Any, dropped: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    read = threading.Event()
    with monkeypatch.context() as patched:
        patched.setattr("service.engine.frontend.multi_model.read_ahead", lambda _model, _revision: read.wait())
        patched.setattr(multi._performer, "timeout_s", 0.01)
        try:
            with pytest.raises(SwitchFailed, match=r"qwen: its weights were not read within 0\.01 s"):
                await multi.preload("qwen")
        finally:
            read.set()  # or its thread would keep the process from ending
    assert multi.info("qwen").tier is Tier.DROPPED
    await multi.switch("qwen")
    assert await greedy(multi, "qwen") == dropped


async def test_what_a_load_makes_others_wait_for_is_told_by_phase(multi: Any, dropped: tuple[int, ...]) -> None:
    running = Greedy(multi, "llama", PROMPT, 3500)
    await running.has(5)
    began = asyncio.get_running_loop().time()
    told = (await multi.preload("qwen", stall=False)).stall_s
    took = asyncio.get_running_loop().time() - began
    await multi.abort(running.id, model="llama")
    await running.tokens()
    assert told  # some of it can't be cut
    assert all(0 < seconds < took for seconds in told.values())
    assert (await multi.switch("qwen")).stall_s == told
    assert (await multi.switch("llama")).stall_s == {}
    assert (await multi.switch("qwen")).stall_s == {}  # it is told once, and of its context it is known on
    assert multi.info("qwen").stall_s == told
    await multi.switch("llama")
    assert (await multi.drop("qwen")).stall_s.keys() <= {"drop"}
    assert (await multi.switch("qwen")).stall_s == {}
    assert await greedy(multi, "qwen") == dropped


@pytest.mark.parametrize("asked", shown(["qwen", "lynx"], "lynx"))
async def test_a_switch_that_comes_meanwhile_is_done(multi: Any, away: tuple[int, ...], asked: str) -> None:
    preloading = asyncio.create_task(multi.preload("qwen"))
    expected = away if asked == "qwen" else await usual(multi, "lynx")
    await multi.switch(asked)
    assert await greedy(multi, asked) == expected
    assert (await preloading).tier is Tier.RESIDENT
    await multi.switch("qwen")
    assert await greedy(multi, "qwen") == away


async def test_a_switch_away_and_back_leaves_a_stream_and_a_load_what_they_are(
    multi: Any, dropped: tuple[int, ...]
) -> None:
    expected = await usual(multi, "llama", tokens=TOKENS)
    running = Greedy(multi, "llama", PROMPT, TOKENS)
    await running.has(5)
    preloading = asyncio.create_task(multi.preload("qwen", stall=False))
    for alias in ("lynx", "llama", "lynx", "llama"):
        await multi.switch(alias)
    assert await running.tokens() == expected
    assert (await preloading).tier is Tier.RESIDENT
    await multi.switch("qwen")
    assert await greedy(multi, "qwen") == dropped


@ONE_ALLOCATION
async def test_a_model_that_is_parked_in_its_answer_while_another_one_is_loaded_has_its_cache_when_it_comes_back(
    multi: Any, dropped: tuple[int, ...]
) -> None:
    expected = {alias: await usual(multi, alias, tokens=TOKENS) for alias in ("lynx", "llama")}
    half = Greedy(multi, "lynx", PROMPT, TOKENS)
    await multi.switch("lynx")
    await half.has(5)
    await multi.switch("llama")
    running = Greedy(multi, "llama", PROMPT, TOKENS)
    await running.has(5)
    preloading = await begun(multi, "qwen")
    await multi.park("lynx")
    assert multi.info("lynx").kv_kept is KvKept.IN_USE
    back = asyncio.create_task(multi.preload("lynx", stall=False))
    assert [(await each).tier for each in (preloading, back)] == [Tier.RESIDENT] * 2
    assert await running.tokens() == expected["llama"]
    await multi.switch("lynx")
    assert await half.tokens() == expected["lynx"]
    await multi.switch("qwen")
    assert await greedy(multi, "qwen") == dropped


@pytest.mark.long
async def test_a_load_whose_caller_does_not_wait_any_more_is_there_for_the_next_one(
    multi: Any, dropped: tuple[int, ...]
) -> None:
    for way_on in (multi.drop, multi.preload, multi.switch):
        preloading = await begun(multi, "qwen")
        preloading.cancel()
        await asyncio.wait((preloading,))
        await way_on("qwen")
        assert not multi._residency.returns("qwen")
        if way_on == multi.preload:
            await multi.drop("qwen")
    assert await greedy(multi, "qwen") == dropped


@pytest.mark.parametrize("lower", shown(["park", "drop"], "drop"))
async def test_a_model_that_is_put_away_meanwhile_is_put_away_whole(
    multi: Any, away: tuple[int, ...], lower: str
) -> None:
    preloading = asyncio.create_task(multi.preload("qwen", stall=False))
    await asyncio.gather(preloading, getattr(multi, lower)("qwen"), return_exceptions=True)
    await multi.switch("qwen")
    assert await greedy(multi, "qwen") == away


@pytest.mark.long
@pytest.mark.parametrize("level", [0, 1, 2])
async def test_a_model_that_is_told_to_sleep_on_its_way_says_what_it_says_once_it_is_awake(
    multi: Any, away: tuple[int, ...], level: int
) -> None:
    running = Greedy(multi, "llama", PROMPT, TOKENS)
    await running.has(5)
    there = multi.info("qwen").tier is not Tier.DROPPED
    preloading = await begun(multi, "qwen")
    with nullcontext() if there else pytest.raises(Exception, match="the model is not loaded"):
        await multi.sleep(level, model="qwen")
    assert (await preloading).tier is Tier.RESIDENT
    assert await multi.is_sleeping(model="qwen") == there
    assert await multi.wake_up(model="qwen")
    assert await running.tokens() == await usual(multi, "llama", tokens=TOKENS)
    for _ in range(2):
        await multi.switch("qwen")
        assert await greedy(multi, "qwen") == away
        await multi.switch("llama")
        await multi.park("qwen")


async def test_a_load_that_is_given_up_leaves_nothing_and_what_waits_for_it_waits(
    multi: Any, dropped: tuple[int, ...]
) -> None:
    running, waiting = Greedy(multi, "llama", PROMPT, TOKENS), Greedy(multi, "qwen", PROMPT, 24)
    await running.has(5)
    preloading = await begun(multi, "qwen")
    await multi.drop("qwen")
    await preloading
    assert multi.info("qwen").tier is Tier.DROPPED
    assert len(await loaded(multi)) == len([info for info in multi.contexts() if info.tier is not Tier.DROPPED])
    assert await running.tokens() == await usual(multi, "llama", tokens=TOKENS)
    await multi.switch("qwen")
    assert await waiting.tokens() == dropped


@pytest.mark.long
async def test_requests_come_and_are_aborted_while_their_model_and_another_one_are_there_or_on_their_way(
    multi: Any, dropped: tuple[int, ...]
) -> None:
    running = [Greedy(multi, "llama", PROMPT, TOKENS) for _ in range(2)]
    waiting = [Greedy(multi, "qwen", PROMPT, 24) for _ in range(2)]
    await running[0].has(5)
    preloading = asyncio.create_task(multi.preload("qwen", stall=False))
    for request in (running[1], waiting[1]):
        await multi.abort(request.id, model="llama" if request is running[1] else "qwen")
    await preloading
    await multi.switch("qwen")
    assert await waiting[0].tokens() == dropped
    await multi.switch("llama")
    assert await running[0].tokens() == await usual(multi, "llama", tokens=TOKENS)
    for request in (running[1], waiting[1]):
        await request.tokens()
        assert request.finish_reason == "abort"


@pytest.mark.long
async def test_two_models_that_are_loaded_beside_the_active_one_both_come(multi: Any, dropped: tuple[int, ...]) -> None:
    lynx = await usual(multi, "lynx")
    await multi.switch("llama")
    await multi.drop("lynx")
    running = Greedy(multi, "llama", PROMPT, TOKENS)
    await running.has(5)
    both = await asyncio.gather(*(multi.preload(alias, stall=False) for alias in ("qwen", "lynx")))
    assert [info.tier for info in both] == [Tier.RESIDENT] * 2
    assert await running.tokens() == await usual(multi, "llama", tokens=TOKENS)
    for alias, said in (("qwen", dropped), ("lynx", lynx)):
        await multi.switch(alias)
        assert await greedy(multi, alias) == said


@pytest.fixture
async def half(multi: Any, models: dict[str, Path], tmp_path: Path) -> AsyncIterator[str]:
    """A model whose weights end in the middle of a load: one of its last tensors has another shape."""
    import torch
    from safetensors.torch import load_file, save_file

    path = tmp_path / "half"
    shutil.copytree(models["qwen"], path)
    (weights,) = path.glob("*.safetensors")
    tensors = load_file(weights)
    last = json.loads((path / "config.json").read_text())["num_hidden_layers"] - 1
    tensors[f"model.layers.{last}.mlp.down_proj.weight"] = torch.zeros(3, 3)
    save_file(tensors, weights, metadata={"format": "pt"})
    arguments = multi._catalog.arguments["qwen"]
    await multi.add_model("half", type(arguments)(**{**vars(arguments), "model": str(path), "tokenizer": None}))
    yield "half"
    await multi.remove_model("half")


async def test_a_load_that_fails_in_the_middle_leaves_every_thing_as_it_was(multi: Any, half: str) -> None:
    expected = {alias: await usual(multi, alias, tokens=TOKENS) for alias in ("qwen", "llama")}
    there = await loaded(multi)
    running = Greedy(multi, "llama", PROMPT, TOKENS)
    await running.has(5)
    for _ in range(2):
        with pytest.raises(SwitchFailed, match="Failed to preload half"):
            await multi.preload(half, stall=False)
        assert multi.info(half).tier is Tier.DROPPED
        assert not multi._residency.returns(half)
        assert await loaded(multi) == there
    assert await running.tokens() == expected["llama"]
    await multi.switch("qwen")
    assert await greedy(multi, "qwen", tokens=TOKENS) == expected["qwen"]


def never_loads(*, asks: bool) -> Any:
    """A fault for the workers: reading weights does not end; ``asks``: it asks something of torch all the time."""

    def fault(_worker: Any) -> None:
        import torch
        from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

        def spin(*_: Any, **__: Any) -> None:
            while True:
                if asks:
                    torch.empty(1)

        DefaultModelLoader.whole = DefaultModelLoader.load_weights
        DefaultModelLoader.load_weights = spin

    return fault


def loads_again(_worker: Any) -> None:
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    DefaultModelLoader.load_weights = DefaultModelLoader.whole
    del DefaultModelLoader.whole


@pytest.mark.parametrize("asks", shown([True, False], True), ids=["in slices", "that gives nothing back"])
async def test_a_load_that_does_not_end_is_given_up(
    multi: Any, dropped: tuple[int, ...], monkeypatch: pytest.MonkeyPatch, asks: bool
) -> None:
    expected = await usual(multi, "llama", tokens=TOKENS)
    await multi.collective_rpc(never_loads(asks=asks), model="llama")
    running = Greedy(multi, "llama", PROMPT, TOKENS)
    await running.has(5)
    with monkeypatch.context() as patch:
        patch.setattr(multi._performer, "timeout_s", 2.0)
        with pytest.raises(SwitchFailed, match=r"Failed to preload qwen: .*did not load in time"):
            await multi.preload("qwen", stall=False)
    assert multi.info("qwen").tier is Tier.DROPPED
    assert await running.tokens() == expected
    await multi.collective_rpc(loads_again, model="llama")
    await multi.switch("qwen")
    assert await greedy(multi, "qwen") == dropped
