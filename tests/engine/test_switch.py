"""Switching between contexts on the real engine: whose tokens, which order, what is reported."""

import asyncio
from typing import Any

import pytest

from schemas.contexts import Leftover, SwitchMode, SwitchPhase, Tier
from tests.support.greedy import PROMPT, Greedy, alone, greedy

pytestmark = [pytest.mark.engine, pytest.mark.parity]
ALIASES = ("llama", "qwen", "lynx")


async def test_each_model_says_the_same_after_any_switch(multi: Any) -> None:
    said = {alias: await alone(multi, alias) for alias in ALIASES}
    assert len(set(said.values())) == len(ALIASES)
    for alias in (*ALIASES, *reversed(ALIASES)):
        assert await alone(multi, alias) == said[alias]


async def test_a_request_behind_a_switch_is_answered_by_its_own_model(multi: Any) -> None:
    expected = await alone(multi, "llama")
    switching = asyncio.create_task(multi.switch("qwen"))
    behind = Greedy(multi, "llama", PROMPT, 24)
    await switching
    assert behind.seen < len(expected)  # it waits for its own model, perhaps with a token from before
    await multi.switch("llama")
    assert await behind.tokens() == expected


async def test_a_frozen_request_goes_on_with_the_same_tokens(multi: Any) -> None:
    expected = await alone(multi, "llama", tokens=200)
    request = Greedy(multi, "llama", PROMPT, 200)
    await request.has(20)
    report = await multi.switch("qwen")
    frozen_at = request.seen
    assert report.kept == 1
    await greedy(multi, "qwen")
    assert 0 < frozen_at <= request.seen < 200
    assert multi.tokens(request.id) >= frozen_at
    await multi.switch("llama")
    assert await request.tokens() == expected


async def test_a_request_of_a_frozen_model_waits_for_it(multi: Any) -> None:
    expected = await alone(multi, "qwen")
    await multi.switch("llama")
    waiting = Greedy(multi, "qwen", PROMPT, 24)
    await greedy(multi, "llama", tokens=40)
    assert waiting.seen == 0
    assert multi.info("qwen").unfinished == 1
    await multi.switch("qwen")
    assert await waiting.tokens() == expected


async def test_a_frozen_request_can_be_aborted(multi: Any) -> None:
    request = Greedy(multi, "llama", PROMPT, 2000)
    await request.has(5)
    await multi.switch("qwen")
    await multi.abort(request.id)
    await request.tokens()
    assert request.finish_reason == "abort"
    described = await multi.describe()
    assert [context["unfinished"] for context in described["contexts"]] == [0] * len(described["contexts"])


async def test_dropping_a_generator_of_a_frozen_model_aborts_its_request(multi: Any) -> None:
    request = Greedy(multi, "llama", PROMPT, 2000)
    await request.has(5)
    await multi.switch("qwen")
    request.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await request.task
    assert multi.info("llama").unfinished == 0


async def test_the_core_and_its_workers_stay_the_same_processes(multi: Any) -> None:
    reports = [await multi.switch(alias) for alias in (*ALIASES, *ALIASES)]
    assert {report.core_pid for report in reports} == {multi.core_pid}
    assert {report.worker_pids for report in reports} == {multi.worker_pids}


async def test_a_switch_to_the_active_model_does_nothing(multi: Any) -> None:
    phases: list[SwitchPhase] = []
    report = await multi.switch("llama", observe=lambda transition: phases.append(transition.phase))
    assert not report.switched
    assert phases == [SwitchPhase.ACCEPTED, SwitchPhase.NO_OP]


async def test_a_switch_tells_each_of_its_phases(multi: Any) -> None:
    request = Greedy(multi, "llama", PROMPT, 60)
    await request.has(1)
    phases: list[SwitchPhase] = []
    report = await multi.switch(
        "qwen", mode=SwitchMode.DRAIN, observe=lambda transition: phases.append(transition.phase)
    )
    assert phases == [SwitchPhase.ACCEPTED, SwitchPhase.DRAINING, SwitchPhase.SWITCHING, SwitchPhase.COMPLETED]
    assert len(await request.tokens()) == 60
    assert report.drain_s > 0
    assert (report.kept, report.aborted, report.tier_found) == (0, 0, Tier.RESIDENT)


async def test_draining_aborts_what_its_deadline_leaves(multi: Any) -> None:
    request = Greedy(multi, "llama", PROMPT, 3000)
    await request.has(1)
    report = await multi.switch("qwen", mode=SwitchMode.DRAIN, drain_timeout=0.05)
    await request.tokens()
    assert (report.aborted, request.finish_reason) == (1, "abort")


async def test_draining_keeps_what_its_deadline_leaves_where_that_is_asked(multi: Any) -> None:
    expected = await alone(multi, "llama", tokens=300)
    request = Greedy(multi, "llama", PROMPT, 300)
    await request.has(1)
    report = await multi.switch("qwen", mode=SwitchMode.DRAIN, drain_timeout=0.0, leftover=Leftover.KEEP)
    assert (report.kept, report.aborted) == (1, 0)
    await multi.switch("llama")
    assert await request.tokens() == expected


async def test_mode_abort_ends_what_runs_and_what_waits(multi: Any) -> None:
    requests = [Greedy(multi, "llama", f"{PROMPT} {n}", 3000) for n in range(3)]
    for request in requests:
        await request.has(1)
    report = await multi.switch("qwen", mode=SwitchMode.ABORT)
    for request in requests:
        await request.tokens()
    assert report.aborted == 3
    assert {request.finish_reason for request in requests} == {"abort"}


async def test_switches_asked_at_once_are_done_one_after_another(multi: Any) -> None:
    reports = await asyncio.gather(multi.switch("qwen"), multi.switch("lynx"), multi.switch("llama"))
    assert [(report.from_model, report.to_model) for report in reports] == [
        ("llama", "qwen"),
        ("qwen", "lynx"),
        ("lynx", "llama"),
    ]
    assert multi.active == "llama"


async def test_a_call_without_a_model_binds_when_it_is_made(multi: Any) -> None:
    expected = await alone(multi, "qwen")
    await multi.switch("llama")
    generator = multi.generate(PROMPT, _params(24), "bound")
    await multi.switch("qwen")
    assert generator.ag_frame is not None
    first = asyncio.create_task(anext(generator))
    assert await greedy(multi) == expected
    assert not first.done()
    await multi.switch("llama")
    assert (await first).request_id == "bound"
    await generator.aclose()


async def test_many_models_under_load_and_switched_at_random_lose_and_change_nothing(multi: Any) -> None:
    prompts = [f"{PROMPT} {number}" for number in range(12)]
    expected = {(a, p): await alone(multi, a, p, 48) for a in ALIASES for p in prompts}
    running = {key: Greedy(multi, *key, 48) for key in expected}
    switches = 0
    while not all(request.task.done() for request in running.values()):
        switches += 1
        await multi.switch(ALIASES[switches % 3])
        await asyncio.sleep(0.02)
    assert switches > 3
    assert {key: await request.tokens() for key, request in running.items()} == expected


async def test_a_request_asked_about_while_it_is_frozen_answers_as_if_nothing_had_happened(multi: Any) -> None:
    request = Greedy(multi, "llama", PROMPT, 200)
    await request.has(10)
    switching = asyncio.create_task(multi.switch("qwen"))
    asked = [multi.tokens(request.id), multi.get_num_unfinished_requests(model="llama")]
    await switching
    assert asked[0] >= 10
    assert asked[1] == 1
    assert multi.tokens(request.id) >= asked[0]
    assert await multi.get_supported_tasks(model="llama")
    assert multi.info("llama").unfinished == 1
    await multi.check_health()
    await multi.switch("llama")
    assert len(await request.tokens()) == 200


async def test_aborts_and_switches_asked_in_one_breath_reach_the_right_models(multi: Any) -> None:
    """Both requests have the same text; only the model that they are of tells them apart."""
    expected = await alone(multi, "qwen", tokens=100)
    await multi.switch("llama")
    for _ in range(10):
        doomed, kept = Greedy(multi, "llama", PROMPT, 2000), Greedy(multi, "qwen", PROMPT, 100)
        await doomed.has(3)
        _, _, tokens = await asyncio.gather(multi.switch("qwen"), multi.abort(doomed.id), kept.tokens())
        await doomed.tokens()
        assert doomed.finish_reason == "abort"
        assert tokens == expected
        await multi.switch("llama")


async def test_a_prefix_is_found_again_after_another_model_was_loaded(multi: Any) -> None:
    """vLLM seeds its block hashes anew for each engine that it starts; here there is one seed for all of them."""
    prompt = " ".join([PROMPT] * 60)

    async def cached() -> int:
        outputs = [output async for output in multi.generate(prompt, _params(4), "prefix", model="llama")]
        return int(outputs[-1].num_cached_tokens)

    await multi.reset_prefix_cache(model="llama")
    assert await cached() == 0
    await multi.switch("qwen")
    await multi.drop("lynx")
    await multi.switch("lynx")
    await multi.switch("llama")
    assert await cached() > 0


async def test_coming_back_takes_milliseconds_and_the_core_less(multi: Any) -> None:
    reports = [await multi.switch(ALIASES[number % 3]) for number in range(1, 61)]
    took = sorted(report.ms for report in reports)
    assert took[len(took) // 2] < 10
    assert all(report.stall_ms <= report.ms for report in reports)


async def test_the_answer_of_switch_model_has_the_gaudi_servers_fields(multi: Any) -> None:
    answer = await multi.switch_model("qwen", drain_timeout=60)
    assert answer["switched"] is True
    assert answer["switch_s"] >= answer["reconfigure_s"] > 0
    assert set(answer) == {
        "switched",
        "drain_s",
        "reconfigure_s",
        "switch_s",
        "memory_before_mb",
        "memory_after_unload_mb",
        "freed_memory_mb",
        "stash_memory_after_mb",
    }
    again = await multi.switch_model("qwen")
    assert again == {"switched": False, "drain_s": 0.0, "reconfigure_s": 0.0, "switch_s": 0.0}


def _params(tokens: int) -> Any:
    from vllm import SamplingParams

    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
