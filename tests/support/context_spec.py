"""What contexts do on every platform, as tests over a ``multi`` fixture: run on the CPU's workers and on vllm-gaudi's.

The fixture gives a MultiModelEngine with ``llama``, ``qwen`` and ``lynx`` loaded, contexts of at least 1024 tokens,
``llama`` active and nothing running; ``frees`` how many bytes its worker gives back, at the least, for a model that
sleeps. Use it with ``from tests.support.context_spec import *``.
"""

import asyncio
from typing import Any

import pytest

from schemas.contexts import Leftover, SwitchMode, SwitchPhase, Tier
from service.platforms.cpu import resident_bytes
from tests.support.greedy import PROMPT, Greedy, alone, greedy, in_core, usual
from tests.support.judge import judge
from tests.support.volume import shown
from tests.support.waiting import LOOKS, PATIENCE_S

ALIASES = ("llama", "qwen", "lynx")
LONG = 900
"""Tokens of a request that does not end by itself while it is looked at."""


def worker_rss(multi: Any) -> int:
    """Resident bytes of the workers."""
    return sum(map(resident_bytes, multi.worker_pids))


def _fill_kv_cache(worker: Any) -> None:
    from service.platforms.base import kv_tensors, storages
    from service.platforms.kv_blocks import content

    for storage in storages(kv_tensors(worker)):
        content(storage).fill_(1)


async def use_all_kv_cache(multi: Any, alias: str) -> None:
    """Have all of a model's KV cache in memory: a system gives pages when they are written to first."""
    await multi.collective_rpc(_fill_kv_cache, model=alias)
    await multi.reset_prefix_cache(model=alias)


# --- switching ---


async def test_each_model_says_the_same_after_any_switch(multi: Any) -> None:
    said = {alias: await usual(multi, alias) for alias in ALIASES}
    assert len(set(said.values())) == len(ALIASES)
    for alias in (*ALIASES, *reversed(ALIASES)):
        assert await alone(multi, alias) == said[alias]


async def test_a_request_behind_a_switch_is_answered_by_its_own_model(multi: Any) -> None:
    expected = await usual(multi, "llama", tokens=200)
    switching = asyncio.create_task(multi.switch("qwen"))
    behind = Greedy(multi, "llama", PROMPT, 200)
    await switching
    assert behind.seen < len(expected)  # it waits for its own model, perhaps with some tokens from before
    await multi.switch("llama")
    assert await behind.tokens() == expected


async def test_a_request_frozen_five_times_goes_on_with_the_same_tokens(multi: Any) -> None:
    expected = await usual(multi, "llama", tokens=LONG)
    request = Greedy(multi, "llama", PROMPT, LONG)
    for number in range(1, 6):
        await request.has(20 * number)
        report = await multi.switch("qwen")
        assert report.kept == 1
        frozen_at = request.seen
        await greedy(multi, "qwen")
        assert 0 < frozen_at <= request.seen < LONG
        assert multi.tokens(request.id) >= frozen_at
        await multi.switch("llama")
    assert await request.tokens() == expected


async def test_a_request_of_a_frozen_model_waits_for_it(multi: Any) -> None:
    expected = await usual(multi, "qwen")
    await multi.switch("llama")
    waiting = Greedy(multi, "qwen", PROMPT, 24)
    await greedy(multi, "llama", tokens=40)
    assert waiting.seen == 0
    assert multi.info("qwen").unfinished == 1
    await multi.switch("qwen")
    assert await waiting.tokens() == expected


async def test_a_frozen_request_can_be_aborted(multi: Any) -> None:
    request = Greedy(multi, "llama", PROMPT, LONG)
    await request.has(5)
    await multi.switch("qwen")
    await multi.abort(request.id)
    await request.tokens()
    assert request.finish_reason == "abort"
    async with asyncio.timeout(PATIENCE_S):  # the core may hear of it after the first questions, which come another way
        while (await in_core(multi, "llama"))["unfinished"]:
            pass


@judge("vllm-gaudi", "test_initialize_and_switch_reconfigures_engine")
async def test_a_switch_tells_each_of_its_phases(multi: Any) -> None:
    for _ in range(LOOKS):
        await multi.switch("llama")
        request = Greedy(multi, "llama", PROMPT, 60)
        await request.has(1)
        seen: list[tuple[SwitchPhase, int]] = []
        report = await multi.switch(
            "qwen",
            mode=SwitchMode.DRAIN,
            observe=lambda to, seen=seen: seen.append((to.phase, multi.info("llama").unfinished)),
        )
        assert len(await request.tokens()) == 60
        if seen[0][1]:  # it had not ended when the switch was accepted
            break
    phases = [phase for phase, _ in seen]
    assert phases == [SwitchPhase.ACCEPTED, SwitchPhase.DRAINING, SwitchPhase.SWITCHING, SwitchPhase.COMPLETED]
    assert report.drain_s > 0
    assert (report.kept, report.aborted, report.tier_found) == (0, 0, Tier.RESIDENT)


async def test_draining_aborts_what_its_deadline_leaves(multi: Any) -> None:
    request = Greedy(multi, "llama", PROMPT, LONG)
    await request.has(1)
    report = await multi.switch("qwen", mode=SwitchMode.DRAIN, drain_timeout=0.05)
    await request.tokens()
    assert (report.aborted, request.finish_reason) == (1, "abort")


async def test_draining_keeps_what_its_deadline_leaves_where_that_is_asked(multi: Any) -> None:
    expected = await usual(multi, "llama", tokens=LONG)
    request = Greedy(multi, "llama", PROMPT, LONG)
    await request.has(1)
    report = await multi.switch("qwen", mode=SwitchMode.DRAIN, drain_timeout=0.0, leftover=Leftover.KEEP)
    assert (report.kept, report.aborted) == (1, 0)
    await multi.switch("llama")
    assert await request.tokens() == expected


async def test_mode_abort_ends_what_runs_and_what_waits(multi: Any) -> None:
    requests = [Greedy(multi, "llama", f"{PROMPT} {n}", LONG) for n in range(3)]
    for request in requests:
        await request.has(1)
    report = await multi.switch("qwen", mode=SwitchMode.ABORT)
    for request in requests:
        await request.tokens()
    assert report.aborted == 3
    assert {request.finish_reason for request in requests} == {"abort"}


async def test_many_models_under_load_and_switched_again_and_again_lose_and_change_nothing(multi: Any) -> None:
    prompts = [f"{PROMPT} {number}" for number in range(3)]
    expected = {(a, p): await usual(multi, a, p, 48) for a in ALIASES for p in prompts}
    running = {key: Greedy(multi, *key, 48) for key in expected}
    switches = 0
    while not all(request.task.done() for request in running.values()):
        switches += 1
        await multi.switch(ALIASES[switches % 3])
        await greedy(multi, tokens=2)
    assert switches > 3
    assert {key: await request.tokens() for key, request in running.items()} == expected


async def test_aborts_and_switches_asked_in_one_breath_reach_the_right_models(multi: Any) -> None:
    """Both requests have the same text; only the model that they are of tells them apart."""
    expected = await usual(multi, "qwen", tokens=100)
    await multi.switch("llama")
    for _ in range(4):
        doomed, kept = Greedy(multi, "llama", PROMPT, LONG), Greedy(multi, "qwen", PROMPT, 100)
        await doomed.has(3)
        _, _, tokens = await asyncio.gather(multi.switch("qwen"), multi.abort(doomed.id), kept.tokens())
        await doomed.tokens()
        assert doomed.finish_reason == "abort"
        assert tokens == expected
        await multi.switch("llama")


# --- tiers ---


async def test_parking_gives_the_kv_cache_back_and_a_running_request_survives_it(multi: Any, frees: int) -> None:
    expected = await usual(multi, "llama", tokens=150)
    await use_all_kv_cache(multi, "llama")
    request = Greedy(multi, "llama", PROMPT, 150)
    await request.has(20)
    await multi.switch("qwen")
    before = worker_rss(multi)
    assert (await multi.park("llama")).tier is Tier.PARKED
    assert (await in_core(multi, "llama"))["kv"] == 0
    assert before - worker_rss(multi) > frees
    report = await multi.switch("llama")
    assert report.tier_found is Tier.PARKED
    assert await request.tokens() == expected


async def test_a_dropped_model_is_loaded_again_and_says_the_same(multi: Any) -> None:
    expected = await usual(multi, "lynx")
    await multi.switch("llama")
    assert (await multi.drop("lynx")).tier is Tier.DROPPED
    waiting = Greedy(multi, "lynx", PROMPT, 24)
    report = await multi.switch("lynx")
    assert report.tier_found is Tier.DROPPED
    assert await waiting.tokens() == expected


async def test_preloading_brings_a_model_back_while_another_one_serves(multi: Any) -> None:
    expected = await usual(multi, "qwen")
    await multi.switch("llama")
    for lower in (multi.park, multi.drop):
        await lower("qwen")
        assert (await multi.preload("qwen")).tier is Tier.RESIDENT
        assert multi.active == "llama"
    assert (await multi.switch("qwen")).tier_found is Tier.RESIDENT
    assert await greedy(multi, "qwen") == expected


@pytest.mark.parametrize("level", shown([1, 2], 2))
async def test_sleep_gives_memory_back_and_waking_the_weights_alone_schedules_nothing(
    multi: Any, level: int, frees: int
) -> None:
    expected = await usual(multi, "llama")
    await use_all_kv_cache(multi, "llama")
    before = worker_rss(multi)
    await multi.sleep(level, model="llama")
    assert before - worker_rss(multi) > frees
    asleep_on = Tier.PARKED if level == 1 else Tier.DROPPED
    assert multi.info("llama").tier is asleep_on
    asleep = Greedy(multi, "llama", PROMPT, 24)
    assert not await multi.wake_up(["weights"], model="llama")
    assert multi.info("llama").tier is asleep_on
    await multi.switch("qwen")
    await greedy(multi, "qwen")
    await multi.switch("llama")
    assert asleep.seen == 0
    assert await multi.is_sleeping(model="llama")
    assert await multi.wake_up(["kv_cache"], model="llama")
    assert multi.info("llama").tier is Tier.RESIDENT
    assert await asleep.tokens() == expected


# --- failure ---


async def refuses(multi: Any, alias: str, says: str, *, core_tried: bool = True) -> None:
    """A switch to ``alias`` fails with what it ``says``, and leaves everything as it was: a running request, too.

    Where the core is not even asked, that holds for a switch that would abort it.
    """
    expected = await usual(multi, "llama", tokens=200)
    request = Greedy(multi, "llama", PROMPT, 200)
    await request.has(10)
    phases: list[SwitchPhase] = []
    with pytest.raises(RuntimeError, match=f"Failed to switch model from llama to {alias}: .*{says}") as failure:
        await multi.switch(
            alias,
            mode=SwitchMode.KEEP if core_tried else SwitchMode.ABORT,
            observe=lambda transition: phases.append(transition.phase),
        )
    assert failure.value.__cause__ is not None
    assert phases[-1] is (SwitchPhase.ROLLED_BACK if core_tried else SwitchPhase.FAILED)
    assert multi.active == "llama"
    assert await request.tokens() == expected
    if core_tried:
        assert multi.info(alias).tier is Tier.DROPPED
        assert not (await in_core(multi, alias))["loaded"]
