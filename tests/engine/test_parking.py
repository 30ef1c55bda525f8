"""A parked model keeps its KV cache: what was in the middle of an answer goes on, and nothing is prefilled again.

Core and worker are in this process, so that vLLM's scheduler and its block pool can be asked.
"""

import gc
from collections.abc import Iterator
from pathlib import Path
from platform import machine
from typing import Any, ClassVar

import pytest

from schemas.contexts import KvKept, Tier
from service.errors import SwitchFailed
from service.platforms.cpu import resident_bytes
from service.scheduling.memory import Budgets
from tests.engine.test_faults import failing, platform
from tests.support.engines import core_here
from tests.support.one_allocation import ONE_ALLOCATION

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore"), ONE_ALLOCATION]
MIB = 1 << 20
KV = 32 * MIB
LENGTHS = (20, 150, 260, 370, 480)
ANSWER = 120


def has_fp8_cache() -> bool:
    import torch

    return machine() != "x86_64" or torch.cpu._is_avx512_supported()


@pytest.fixture(scope="module")
def started(models: dict[str, Path]) -> Iterator[Any]:
    from vllm.engine.arg_utils import EngineArgs

    from service.engine import MultiModelLLM

    def arguments(name: str, dtype: str = "bfloat16", **more: Any) -> Any:
        common = {"max_model_len": 1024, "max_num_seqs": 8, "enforce_eager": True, "kv_cache_memory_bytes": KV}
        return EngineArgs(model=str(models[name]), dtype=dtype, **common, **more)

    with core_here():
        llm = MultiModelLLM.from_engine_args(
            {
                "other": arguments("llama"),
                "qwen": arguments("qwen"),
                "fp8": arguments("qwen", kv_cache_dtype="fp8" if has_fp8_cache() else "auto"),
                "narrow": arguments("qwen", "float32", num_gpu_blocks_override=24),
            },
            device_memory_bytes=1 << 40,
        )
        yield llm
        llm.shutdown()


@pytest.fixture
def llm(started: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Models that take turns: the device has room for the KV cache of one, and for some of another's blocks."""
    monkeypatch.setattr(started._residency, "budgets", Budgets(device=1 << 40, shared=True))
    for alias in ("qwen", "fp8", "narrow"):
        started.switch(alias)
        started.reset_prefix_cache(model=alias)
    started.switch("other")
    assert not started.has_unfinished_requests()
    for alias in ("qwen", "fp8", "narrow"):
        started.park(alias)
    tighten(started, monkeypatch)
    return started


def tighten(llm: Any, monkeypatch: pytest.MonkeyPatch, *, host: int | None = None, spare: int = KV // 2) -> None:
    weights = sum(llm.info(alias).weights_bytes for alias in ("other", "qwen", "fp8", "narrow"))
    monkeypatch.setattr(llm._residency, "budgets", Budgets(device=weights + KV + spare, host=host, shared=True))


class Counted:
    """What a model's scheduler has asked of its workers: tokens, and requests that were preempted."""

    def __init__(self, llm: Any, alias: str) -> None:
        llm.switch(alias)
        self.scheduler = llm.context(alias).engine_core.engine_core.scheduler
        self.tokens = self.preempted = 0
        schedule = type(self.scheduler).schedule

        def counted(*given: Any, **more: Any) -> Any:
            output = schedule(self.scheduler, *given, **more)
            self.tokens += output.total_num_scheduled_tokens
            self.preempted += len(output.preempted_req_ids or ())
            return output

        self.scheduler.schedule = counted

    @property
    def blocks_in_use(self) -> int:
        pool = self.scheduler.kv_cache_manager.block_pool
        return sum(block.ref_cnt > 0 for block in pool.blocks if not block.is_null)


def preemptions(llm: Any, alias: str) -> int:
    """By vLLM's own counter."""
    return sum(metric.value for metric in llm.get_metrics(model=alias) if metric.name == "vllm:num_preemptions")


def prompt(length: int) -> dict[str, list[int]]:
    """No two of different lengths begin alike."""
    return {"prompt_token_ids": [(length * (number + 1) + number * number) % 400 + 5 for number in range(length)]}


class Answers:
    """Requests of one model, and what each has said so far. Whoever steps hears for all."""

    begun: ClassVar[list["Answers"]] = []

    def __init__(self, llm: Any, alias: str, lengths: tuple[int, ...] = LENGTHS, tokens: int = ANSWER) -> None:
        from vllm import SamplingParams

        self._llm, self._alias = llm, alias
        self.begun[:] = [each for each in self.begun if each.running] + [self]
        self.said: dict[str, tuple[int, ...]] = {}
        self.cached: dict[str, int] = {}
        self.running: set[str] = set()
        for length in lengths:
            params = SamplingParams(temperature=0.8, seed=length, max_tokens=tokens, ignore_eos=True)
            llm.add_request(f"{alias}-{length}", prompt(length), params, model=alias)
            self.running.add(f"{alias}-{length}")

    def step(self) -> None:
        for output in self._llm.step():
            for each in self.begun:
                each.hear(output)

    def hear(self, output: Any) -> None:
        if output.request_id in self.running:
            self.said[output.request_id] = tuple(output.outputs[0].token_ids)
            self.cached[output.request_id] = output.num_cached_tokens
            if output.finished:
                self.running.discard(output.request_id)

    def until(self, tokens: int) -> None:
        """Step until each has said so much."""
        while self.running and (not self.said or min(map(len, self.said.values())) < tokens):
            self.step()

    def whole(self) -> dict[str, tuple[int, ...]]:
        self._llm.switch(self._alias)
        while self.running:
            self.step()
        return self.said


def asked_meanwhile(llm: Any, alias: str = "other") -> None:
    """Another model answers, whose switch parks the one that was active."""
    report = llm.switch(alias)
    assert report.tier_left is Tier.PARKED
    Answers(llm, alias, (30,), 5).whole()


@pytest.mark.parametrize("alias", ["qwen", "fp8"])
def test_a_model_parked_by_switches_in_the_middle_of_its_answers_goes_on_and_prefills_nothing(
    llm: Any, alias: str
) -> None:
    if alias == "fp8" and not has_fp8_cache():
        pytest.skip("vLLM has no KV cache of FP8 on an x86 processor without AVX-512")
    counted = Counted(llm, alias)
    expected = Answers(llm, alias).whole()
    undisturbed, counted.tokens = counted.tokens, 0
    llm.reset_prefix_cache(model=alias)
    before = preemptions(llm, alias)
    answers = Answers(llm, alias)
    for said in (5, 30, 55, 80, 105):
        answers.until(said)
        report = llm.switch("other")
        assert (report.tier_left, report.kv_kept, report.kept) == (Tier.PARKED, KvKept.ALL, len(LENGTHS))
        kept = llm.info(alias).kv_kept_bytes
        assert 0 < kept < KV // 2
        assert report.kv_kept_mb * MIB == kept
        Answers(llm, "other", (30,), 5).whole()
        assert llm.switch(alias).tier_found is Tier.PARKED
        assert llm.info(alias).kv_kept is None
    assert answers.whole() == expected
    assert (counted.tokens, counted.preempted) == (undisturbed, 0)
    assert preemptions(llm, alias) == before


def test_where_the_device_has_no_room_for_it_requests_are_prefilled_again_and_the_report_says_so(
    llm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = Counted(llm, "qwen")
    Answers(llm, "qwen").whole()
    undisturbed, counted.tokens = counted.tokens, 0
    llm.reset_prefix_cache(model="qwen")
    answers = Answers(llm, "qwen")
    answers.until(30)
    tighten(llm, monkeypatch, spare=64 << 10)
    report = llm.switch("other")
    assert (report.kv_kept, report.kv_kept_mb) == (KvKept.NONE, 0)
    assert llm.info("qwen").kv_kept is KvKept.NONE
    assert {len(said) for said in answers.whole().values()} == {ANSWER}
    assert counted.tokens > undisturbed


def test_a_parked_model_lets_its_kv_cache_go_before_it_or_another_one_would_have_to_be_dropped(
    llm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm.switch("qwen")
    answers = Answers(llm, "qwen")
    answers.until(30)
    llm.switch("other")
    assert llm.info("qwen").kv_kept is KvKept.ALL
    tighten(llm, monkeypatch, spare=64 << 10)
    llm.switch("fp8")
    info = llm.info("qwen")
    assert (info.tier, info.kv_kept, info.kv_kept_bytes) == (Tier.PARKED, KvKept.NONE, 0)
    assert {len(said) for said in answers.whole().values()} == {ANSWER}


def test_the_prefix_cache_is_kept_as_far_as_the_hosts_budget_goes_and_what_is_found_there_is_right(
    llm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm.switch("qwen")
    expected = Answers(llm, "qwen").whole()
    found = Answers(llm, "qwen")
    assert found.whole() == expected
    assert sum(found.cached.values()) > 0
    host: int | None = KV
    for what, share in ((KvKept.ALL, 4), (KvKept.IN_USE, 0), (KvKept.IN_USE, 0)):
        tighten(llm, monkeypatch, host=host)
        asked_meanwhile(llm)
        info = llm.info("qwen")
        assert info.kv_kept is what
        assert info.kv_kept_bytes <= (host or 0)
        llm.switch("qwen")
        again = Answers(llm, "qwen")
        assert again.whole() == expected
        cached = sum(again.cached.values())
        if what is KvKept.ALL:
            assert cached == sum(found.cached.values())
        else:
            assert cached < sum(found.cached.values())
            assert (cached > 0) is (host is not None)
        host = info.kv_kept_bytes // share if share else None


def test_a_request_that_is_cancelled_while_its_model_is_parked_frees_its_blocks(llm: Any) -> None:
    counted = Counted(llm, "qwen")
    expected = Answers(llm, "qwen").whole()
    llm.reset_prefix_cache(model="qwen")
    answers = Answers(llm, "qwen")
    answers.until(30)
    llm.switch("other")
    in_use = counted.blocks_in_use
    gone = f"qwen-{LENGTHS[-1]}"
    llm.abort_request([gone], model="qwen")
    assert counted.blocks_in_use < in_use
    answers.running.discard(gone)
    del answers.said[gone]
    llm.switch("qwen")
    more = Answers(llm, "qwen", LENGTHS[-1:])  # into the blocks that came free
    assert set(answers.whole()) == set(expected) - {gone}
    assert {len(said) for said in (answers.said | more.whole()).values()} == {ANSWER}
    assert counted.blocks_in_use == 0


def test_the_prefix_cache_can_be_reset_while_its_model_is_parked(llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tighten(llm, monkeypatch, host=KV)
    llm.switch("qwen")
    expected = Answers(llm, "qwen").whole()
    llm.switch("other")
    assert llm.info("qwen").kv_kept_bytes > 0
    assert llm.reset_prefix_cache(model="qwen")
    llm.switch("qwen")
    again = Answers(llm, "qwen")
    assert again.whole() == expected
    assert not any(again.cached.values())


def test_requests_that_are_preempted_after_the_return_say_what_they_would_have_said(llm: Any) -> None:
    """The cache is too small for all of them at their ends."""
    lengths, tokens = (400, 401, 402, 403, 404), 500
    counted = Counted(llm, "narrow")
    expected = Answers(llm, "narrow", lengths, tokens).whole()
    assert preemptions(llm, "narrow") > 0
    llm.reset_prefix_cache(model="narrow")
    answers = Answers(llm, "narrow", lengths, tokens)
    answers.until(20)
    counted.preempted = 0
    llm.switch("other")
    assert llm.park("narrow").kv_kept is KvKept.ALL
    Answers(llm, "other", (30,), 5).whole()
    assert answers.whole() == expected
    assert counted.preempted > 0


def held() -> int:
    gc.collect()
    return resident_bytes("self")


def test_a_parked_model_that_is_dropped_leaves_nothing(llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tighten(llm, monkeypatch, host=KV)
    sizes = []
    for _ in range(4):
        llm.switch("qwen")
        Answers(llm, "qwen").whole()
        llm.switch("other")
        assert llm.info("qwen").kv_kept_bytes > 0
        llm.drop("qwen")
        assert (llm.info("qwen").tier, llm.info("qwen").kv_kept_bytes) == (Tier.DROPPED, 0)
        sizes.append(held())
    assert sizes[-1] - sizes[0] < KV // 4


@pytest.mark.parametrize("whole", [pytest.param(False, id="before its work"), pytest.param(True, id="after it")])
@pytest.mark.parametrize("step", ["park", "wake"])
def test_parking_or_waking_that_fails_costs_no_prefill(llm: Any, step: str, whole: bool) -> None:
    counted = Counted(llm, "qwen")
    expected = Answers(llm, "qwen").whole()
    undisturbed, counted.tokens = counted.tokens, 0
    llm.reset_prefix_cache(model="qwen")
    answers = Answers(llm, "qwen")
    answers.until(30)
    if step == "wake":
        llm.switch("other")
    with failing(platform(), step, whole=whole), pytest.raises(SwitchFailed, match=f"no memory for {step}"):
        llm.switch("other" if step == "park" else "qwen")
    active, tier = ("qwen", Tier.RESIDENT) if step == "park" else ("other", Tier.PARKED)
    assert (llm.active, llm.info("qwen").tier) == (active, tier)
    assert answers.whole() == expected
    assert (counted.tokens, counted.preempted) == (undisturbed, 0)
    assert llm.info("qwen").kv_kept_bytes == 0


def test_what_is_kept_counts_and_the_rest_of_the_cache_is_given_back(llm: Any) -> None:
    llm.switch("qwen")
    answers = Answers(llm, "qwen")
    answers.until(30)
    (sizes,) = [each for each in llm.describe()["contexts"] if each["kv"] and each["unfinished"]]
    assert sizes["kv_kept"] == 0
    llm.switch("other")
    (parked,) = [each for each in llm.describe()["contexts"] if each["unfinished"]]
    assert parked["kv"] == 0
    assert parked["kv_kept"] == llm.info("qwen").kv_kept_bytes
    assert parked["kv_kept"] < sizes["kv"] // 2
    answers.whole()
