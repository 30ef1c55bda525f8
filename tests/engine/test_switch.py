"""Switching between contexts on the real engine: whose tokens, which order, what is reported."""

import asyncio
from typing import Any

import pytest

from schemas.contexts import SwitchMode, SwitchPhase
from tests.support.greedy import PROMPT, Greedy, greedy, usual
from tests.support.judge import judge

pytestmark = [pytest.mark.engine, pytest.mark.parity]
ALIASES = ("llama", "qwen", "lynx")


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


@judge("vllm-gaudi", "test_switch_same_model_is_noop")
async def test_a_switch_to_the_active_model_does_nothing(multi: Any) -> None:
    phases: list[SwitchPhase] = []
    report = await multi.switch("llama", observe=lambda transition: phases.append(transition.phase))
    assert not report.switched
    assert phases == [SwitchPhase.ACCEPTED, SwitchPhase.NO_OP]


async def test_a_switch_is_answered_past_vllms_outputs_unless_it_fails(
    multi: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.engine import core_client

    by_vllm: list[int] = []
    taken = core_client._process_utility_output

    def process(output: Any, waiting: Any) -> None:
        by_vllm.append(output.call_id)
        taken(output, waiting)

    monkeypatch.setattr(core_client, "_process_utility_output", process)
    for alias in (*ALIASES[1:], *ALIASES):
        assert (await multi.switch(alias)).switched
    assert by_vllm == []
    await multi.switch("llama")
    request = Greedy(multi, "llama", PROMPT, 2000)
    await request.has(1)
    qwen = multi._frontend("qwen")
    with pytest.raises(Exception, match="requests are unfinished"):
        await qwen.ask("activate", qwen.key, None, 2)
    assert len(by_vllm) == 1
    await multi.abort(request.id)
    await request.tokens()


async def test_switches_asked_at_once_are_done_one_after_another(multi: Any) -> None:
    reports = await asyncio.gather(multi.switch("qwen"), multi.switch("lynx"), multi.switch("llama"))
    assert [(report.from_model, report.to_model) for report in reports] == [
        ("llama", "qwen"),
        ("qwen", "lynx"),
        ("lynx", "llama"),
    ]
    assert multi.active == "llama"


async def test_a_call_without_a_model_binds_when_it_is_made(multi: Any) -> None:
    expected = await usual(multi, "qwen")
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


async def test_a_call_without_a_model_while_a_switch_runs_is_for_the_model_that_it_goes_to(multi: Any) -> None:
    expected = await usual(multi, "qwen")
    await multi.switch("llama")
    running = Greedy(multi, "llama", PROMPT, 3500)  # more than a machine that stands still for seconds lets end
    await running.has(1)
    draining = asyncio.Event()
    switching = asyncio.create_task(
        multi.switch(
            "qwen", mode=SwitchMode.DRAIN, observe=lambda to: to.phase is SwitchPhase.DRAINING and draining.set()
        )
    )
    await draining.wait()
    asked = Greedy(multi, None, PROMPT, 24)
    assert not switching.done()
    await multi.abort(running.id)
    await switching
    assert await asked.tokens() == expected
    await running.tokens()
    assert running.finish_reason == "abort"


async def test_a_request_asked_about_while_it_is_frozen_answers_as_if_nothing_had_happened(multi: Any) -> None:
    request = Greedy(multi, "llama", PROMPT, 3500)  # more than a machine that stands still for seconds lets end
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
    await request.has(asked[0] + 20)
    await multi.abort(request.id)
    await request.tokens()
    assert request.finish_reason == "abort"


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


async def test_coming_back_takes_a_small_part_of_a_load_and_the_core_less(multi: Any) -> None:
    await multi.drop("qwen")
    load_ms = (await multi.switch("qwen")).ms
    reports = [await multi.switch(ALIASES[number % 3]) for number in range(2, 62)]
    took = sorted(report.ms for report in reports)
    assert took[len(took) // 2] < load_ms / 10
    assert all(report.stall_ms <= report.ms for report in reports)


@judge("vllm-gaudi", "test_online_model_swap")
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
