"""Several workers for a model (tensor parallel), and several cores (data parallel): all of them switch, or none."""

import asyncio
import os
from pathlib import Path
from typing import Any

import psutil
import pytest

from schemas.contexts import Tier
from service.errors import ConfigError, SwitchFailed
from tests.support.asked import Asked, async_args, said
from tests.support.checkpoints import make_endless
from tests.support.faults import broken, mended
from tests.support.greedy import PROMPT, Greedy, alone, greedy, usual
from tests.support.kinds import alone as alone_in_vllm
from tests.support.waiting import PATIENCE_S

pytestmark = pytest.mark.engine
MIB = 1 << 20


def engine_args(path: Path, **given: Any) -> Any:
    from vllm.engine.arg_utils import AsyncEngineArgs

    common = {"max_model_len": 1024, "dtype": "float32", "enforce_eager": True, "kv_cache_memory_bytes": 32 * MIB}
    return AsyncEngineArgs(model=str(path), **{**common, **given})


@pytest.fixture(autouse=True)
def cores_to_bind(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM wants a NUMA node for each worker, or to be told which core each may have."""
    cores = sorted(os.sched_getaffinity(0))
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", f"{cores[0]}|{cores[-1]}")


async def opened(checkpoints: dict[str, Path], **parallel: Any) -> Any:
    from service.engine import MultiModelEngine

    engine = MultiModelEngine(
        {alias: engine_args(path, **parallel) for alias, path in checkpoints.items()},
        aggregate_engine_logging=True,
        device_memory_bytes=1 << 40,
    )
    await engine.initialize("lynx")
    return engine


def break_loading(rank: int) -> Any:
    """A fault for one rank: its disk can't be read any more. Called in the workers."""

    def fault(worker: Any) -> int:
        from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

        parallel = worker.vllm_config.parallel_config
        if max(parallel.rank, parallel.data_parallel_index) == rank and "whole" not in vars(DefaultModelLoader):

            def unreadable(*_: Any, **__: Any) -> None:
                raise OSError("the disk of this rank can't be read")

            DefaultModelLoader.whole = DefaultModelLoader.load_weights
            DefaultModelLoader.load_weights = unreadable
        return parallel.rank

    return fault


def mend_loading(_worker: Any) -> None:
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    if "whole" in vars(DefaultModelLoader):
        DefaultModelLoader.load_weights = DefaultModelLoader.whole
        del DefaultModelLoader.whole


async def check_a_failure_in_one_rank_is_undone_in_all(multi: Any) -> None:
    expected = await usual(multi, "lynx", tokens=100)
    requests = [Greedy(multi, "lynx", PROMPT, 100) for _ in range(4)]
    for request in requests:
        await request.has(5)
    await multi.collective_rpc(break_loading(1), model="lynx")
    with pytest.raises(SwitchFailed, match="the disk of this rank"):
        await multi.switch("qwen")
    assert multi.active == "lynx"
    assert multi.info("qwen").tier is Tier.DROPPED
    described = await multi.describe()
    assert sum(context["loaded"] for context in described["contexts"]) == 1
    assert {await request.tokens() for request in requests} == {expected}
    await multi.collective_rpc(mend_loading, model="lynx")


async def check_frozen_requests_go_on_in_every_rank(multi: Any) -> None:
    expected = {alias: await usual(multi, alias, tokens=100) for alias in ("lynx", "qwen")}
    running = [(alias, Greedy(multi, alias, PROMPT, 100)) for alias in ("lynx", "qwen") for _ in range(2)]
    for alias in ("lynx", "qwen", "lynx", "qwen", "lynx"):
        await multi.switch(alias)
        await greedy(multi, alias, tokens=5)
    await multi.park("qwen")
    for alias in ("qwen", "lynx"):
        await multi.switch(alias)
        for name, request in running:
            if name == alias:
                assert await request.tokens() == expected[alias]


async def check_a_rank_that_can_not_seat_a_model_leaves_no_other_waiting_for_it(multi: Any) -> None:
    expected = await usual(multi, "qwen"), await usual(multi, "lynx", tokens=100)
    request = Greedy(multi, "lynx", PROMPT, 100)
    await request.has(5)
    fault = broken("enter", times=1 << 30, key=multi._frontend("qwen").key)
    await multi.collective_rpc(lambda worker: worker.vllm_config.parallel_config.rank == 1 and fault(worker))
    await multi.switch("qwen")
    doomed = Greedy(multi, "qwen", PROMPT, 24)
    await doomed.tokens()
    assert doomed.finish_reason == "error"
    await multi.switch("lynx")
    assert await request.tokens() == expected[1]
    await multi.collective_rpc(mended("enter"))
    assert await alone(multi, "qwen") == expected[0]


async def check_a_load_beside_a_stream_is_done_in_every_rank_or_in_none(multi: Any) -> None:
    expected = await usual(multi, "qwen"), await usual(multi, "lynx", tokens=100)
    await multi.drop("qwen")
    await multi.collective_rpc(break_loading(1))
    for fails in (True, False):
        request = Greedy(multi, "lynx", PROMPT, 100)
        await request.has(5)
        if fails:
            with pytest.raises(SwitchFailed, match="the disk of this rank"):
                await multi.preload("qwen", stall=False)
            await multi.collective_rpc(mend_loading)
        tier = multi.info("qwen").tier if fails else (await multi.preload("qwen", stall=False)).tier
        assert tier is (Tier.DROPPED if fails else Tier.RESIDENT)
        described = {context["key"]: context["loaded"] for context in (await multi.describe())["contexts"]}
        assert described[multi._frontend("qwen").key] is not fails
        assert await request.tokens() == expected[1]
    assert await alone(multi, "qwen") == expected[0]


async def check_a_stuck_core_is_declared_dead_and_its_processes_end(multi: Any) -> None:
    from vllm.v1.engine.exceptions import EngineDeadError

    processes = [psutil.Process(pid) for pid in (multi.core_pid, *multi.worker_pids)]
    frozen = Greedy(multi, "qwen", PROMPT, 50)
    multi._performer.timeout_s = multi._performer.stuck_s = 1.0
    with pytest.raises(EngineDeadError, match="stuck: it neither loaded a model nor gave it up in 2 s"):
        await multi.switch("endless")
    assert "stuck" in str(await multi.died())
    with pytest.raises(EngineDeadError):
        await frozen.tokens()
    _, alive = psutil.wait_procs(processes, timeout=PATIENCE_S)
    assert alive == []


def test_a_synchronous_engine_has_one_core_and_refuses_arguments_that_want_more(models: dict[str, Path]) -> None:
    from service.engine import MultiModelLLM

    for given, says in (
        ({"data_parallel_size": 2}, "lynx: data_parallel_size is 2, but a MultiModelLLM has one engine core"),
        ({"distributed_executor_backend": "external_launcher"}, "lynx: distributed_executor_backend is 'external_la"),
    ):
        with pytest.raises(ConfigError, match=says):
            MultiModelLLM({"lynx": engine_args(models["lynx"], **given)})


async def test_an_engine_whose_processes_others_launch_is_refused(models: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match="lynx: distributed_executor_backend is 'external_launcher': each process"):
        await opened(models, distributed_executor_backend="external_launcher")


FROZEN = check_frozen_requests_go_on_in_every_rank
LOADED = check_a_load_beside_a_stream_is_done_in_every_rank_or_in_none


@pytest.mark.parametrize(
    ("axis", "cores", "checks"), [("tensor_parallel_size", 1, (FROZEN, LOADED)), ("data_parallel_size", 2, (FROZEN,))]
)
async def test_what_runs_is_frozen_and_what_is_loaded_comes_in_every_rank_and_its_cores_are_logged_as_one(
    models: dict[str, Path], logged: pytest.LogCaptureFixture, axis: str, cores: int, checks: tuple[Any, ...]
) -> None:
    multi = await opened({"lynx": models["lynx"], "qwen": models["qwen"]}, **{axis: 2})
    try:
        for check in checks:
            await check(multi)
        logged.clear()
        await multi.do_log_stats(model="qwen")
        (said,) = (line for line in logged.messages if "Avg generation throughput" in line)
        assert said.startswith(f"{cores} Engines Aggregated: ")
    finally:
        multi.shutdown()


@pytest.mark.parametrize("first", ["other", pytest.param("moe", marks=pytest.mark.long)])
async def test_a_mixture_of_experts_beside_a_dense_model_says_on_two_workers_what_it_says_alone(first: str) -> None:
    """Alone means vLLM's own LLM, with one worker. The group of the experts' ranks is made with whichever is first."""
    from service.engine import MultiModelEngine

    pair = (first, "moe" if first == "other" else "other")  # the dense one whose heads two workers can share
    expected = alone_in_vllm(*pair)
    models = {name: async_args(name, tensor_parallel_size=2) for name in pair}
    async with MultiModelEngine(models, disable_log_stats=True, device_memory_bytes=1 << 40) as multi:
        await multi.initialize(first)
        assert len(multi.worker_pids) == 2
        assert {name: await said(multi, name) for name in pair} == expected
        running = {}
        for name in pair:
            await multi.switch(name)
            running[name] = Asked(multi, name)
            await running[name].has(4)
        await multi.park(first)
        for name in pair:
            await multi.switch(name)
            assert await running[name].said() == expected[name]
        await multi.drop(first)
        assert await said(multi, first) == expected[first]


@pytest.mark.long
@pytest.mark.timeout(600)
async def test_two_workers_share_a_model_and_switch_together(models: dict[str, Path]) -> None:
    multi = await opened({"lynx": models["lynx"], "qwen": models["qwen"]}, tensor_parallel_size=2)
    try:
        assert len(multi.worker_pids) == 2
        await check_a_failure_in_one_rank_is_undone_in_all(multi)
        await check_frozen_requests_go_on_in_every_rank(multi)
        await check_a_rank_that_can_not_seat_a_model_leaves_no_other_waiting_for_it(multi)
        ranks = await multi.collective_rpc(lambda worker: worker.vllm_config.parallel_config.rank, model="qwen")
        assert ranks == [0, 1]
    finally:
        multi.shutdown()


@pytest.mark.long
@pytest.mark.timeout(600)
async def test_two_cores_serve_together_and_a_switch_reaches_both_or_none(
    models: dict[str, Path], tmp_path: Path
) -> None:
    endless = make_endless(tmp_path / "endless", models["qwen"], library=True)
    multi = await opened({"lynx": models["lynx"], "qwen": models["qwen"], "endless": endless}, data_parallel_size=2)
    try:
        assert len(multi.worker_pids) == 2
        await check_a_failure_in_one_rank_is_undone_in_all(multi)
        await check_frozen_requests_go_on_in_every_rank(multi)
        await check_a_load_beside_a_stream_is_done_in_every_rank_or_in_none(multi)
        ranks = await multi.collective_rpc(lambda w: w.vllm_config.parallel_config.data_parallel_index, model="qwen")
        assert sorted(ranks) == [0, 1]
        for alias in ("lynx", "qwen"):  # what has ended counts for no rank's load any more
            await multi.switch(alias)
            await asyncio.gather(*(greedy(multi, alias, tokens=4) for _ in range(6)))
            assert multi.context(alias).engine_core.reqs_in_flight == {}
        await multi.switch("qwen")
        request = Greedy(multi, "qwen", PROMPT, 500)
        await request.has(5)
        await multi.switch("lynx")
        with pytest.raises(SwitchFailed, match="1 unfinished"):
            await multi.drop("qwen")
        await multi.switch("qwen")
        assert len(await request.tokens()) == 500
        await multi.switch("lynx")
        await check_a_stuck_core_is_declared_dead_and_its_processes_end(multi)
    finally:
        multi.shutdown()
