"""When a load, a switch or a process fails: the previous model serves, or everything says at once that all is over.

The faults are real ones: wrong arguments, missing and broken weights, a KV cache that can't be, a killed process.
"""

import asyncio
import gc
import json
import os
import shutil
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from schemas.contexts import SwitchMode, SwitchPhase, Tier
from service.errors import EngineDied, SwitchFailed
from service.platforms.cpu import resident_bytes
from service.settings import EngineSettings
from tests.support.checkpoints import make_endless
from tests.support.context_spec import refuses
from tests.support.engine_spec import until
from tests.support.engines import open_engine
from tests.support.faults import broken
from tests.support.greedy import PROMPT, Greedy, alone, greedy, usual
from tests.support.judge import judge
from tests.support.waiting import PATIENCE_S

pytestmark = pytest.mark.engine
KV = 64 << 20


def engine_args(path: Path, **given: Any) -> Any:
    from vllm.engine.arg_utils import AsyncEngineArgs

    chosen = {"max_model_len": 1024, "dtype": "float32", "enforce_eager": True, "kv_cache_memory_bytes": KV, **given}
    return AsyncEngineArgs(model=str(path), **chosen)


def paths_in(models_path: Path) -> dict[str, Path]:
    return {alias: Path(entry["model"]) for alias, entry in json.loads(models_path.read_text())["models"].items()}


def damage(checkpoint: Path, folder: Path) -> None:
    """Copies of a checkpoint: one without its weights, one with half of them, one with half of its tokenizer, and
    a whole one."""
    for name in ("weightless", "torn", "untokenized", "unlogged"):
        shutil.copytree(checkpoint, folder / name)
    tokenizer = folder / "untokenized" / "tokenizer.json"
    tokenizer.write_bytes(tokenizer.read_bytes()[: tokenizer.stat().st_size // 2])
    for name in ("weightless", "torn"):
        (weights,) = (folder / name).glob("*.safetensors")
        content = weights.read_bytes()
        weights.unlink()
        if name == "torn":
            weights.write_bytes(content[: len(content) // 2])


def offer_plugin(folder: Path) -> None:
    """What installing a package with a stat logger leaves on the import path."""
    installed = folder / "tally-1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: tally\nVersion: 1.0\n")
    (installed / "entry_points.txt").write_text(
        "[vllm.stat_logger_plugins]\ntally = tests.support.loggers:PluginTally\n"
    )


@pytest.fixture(scope="module")
async def started(models_path: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Any]:
    """An engine of its own, whose other models each fail in their own way."""
    from service.engine import MultiModelEngine
    from tests.support.loggers import Tally

    paths = paths_in(models_path)
    folder = tmp_path_factory.mktemp("faulty")
    damage(paths["qwen"], folder)
    for name in ("empty", "plugin"):
        (folder / name).mkdir()
    offer_plugin(folder / "plugin")
    engine = MultiModelEngine(
        {
            "llama": engine_args(paths["llama"]),
            "qwen": engine_args(paths["qwen"]),
            "weightless": engine_args(folder / "weightless"),
            "torn": engine_args(folder / "torn"),
            "missing": engine_args(folder / "empty"),
            "greedy": engine_args(paths["qwen"], max_model_len=1 << 20),
            "cramped": engine_args(paths["qwen"], kv_cache_memory_bytes=1 << 16),
            "huge": engine_args(paths["qwen"], kv_cache_memory_bytes=1 << 50),
            "split": engine_args(paths["qwen"], tensor_parallel_size=2),
            "roomy": engine_args(paths["qwen"], kv_cache_memory_bytes=None),
            "untokenized": engine_args(folder / "untokenized"),
            "unlogged": engine_args(folder / "unlogged"),
            "endless": engine_args(make_endless(folder / "endless", paths["qwen"], library=False)),
        },
        disable_log_stats=True,
        stat_loggers=[Tally],
        model_memory={"roomy": 2 * KV},
        device_memory_bytes=1 << 60,
    )
    async with engine:
        with pytest.MonkeyPatch.context() as patch:
            patch.syspath_prepend(folder / "plugin")
            patch.setattr(Tally, "refused", frozenset({str(folder / "unlogged")}))
            await engine.initialize("llama")
        yield engine


@pytest.fixture
async def faulty(started: Any) -> Any:
    """With ``llama`` active."""
    await started.switch("llama")
    return started


@pytest.mark.parametrize(
    ("alias", "core_tried"),
    [
        ("weightless", True),
        ("torn", True),
        ("missing", False),
        ("greedy", False),
        ("untokenized", False),
        ("unlogged", False),
        ("cramped", True),
        ("huge", True),
        ("split", False),
    ],
)
@judge(
    "vllm-gaudi",
    "test_gaudi_reconfigure_engine_rolls_back_on_load_failure",
    "test_gaudi_reconfigure_engine_rolls_back_on_normalize_failure",
)
async def test_a_model_that_can_not_be_loaded_leaves_everything_as_it_was(
    faulty: Any, alias: str, core_tried: bool
) -> None:
    await refuses(faulty, alias, "", core_tried=core_tried)


@pytest.mark.parametrize("mode", [SwitchMode.DRAIN, SwitchMode.ABORT])
@pytest.mark.parametrize("alias", ["missing", "greedy", "split", "torn"])
async def test_a_target_that_is_broken_is_refused_before_anything_ends_for_it(
    faulty: Any, alias: str, mode: SwitchMode
) -> None:
    """Also where only loading it shows that: it is loaded while the others run."""
    running = Greedy(faulty, "llama", PROMPT, 900)
    await running.has(1)
    phases: list[SwitchPhase] = []
    with pytest.raises(SwitchFailed):
        await faulty.switch(alias, mode=mode, observe=lambda to: phases.append(to.phase))
    assert phases == [SwitchPhase.ACCEPTED, SwitchPhase.FAILED]
    if alias == "greedy":
        with pytest.raises(ValueError, match="max_model_len"):
            faulty.info(alias)
    assert all(info.tier is Tier.DROPPED for info in faulty.contexts() if info.alias == alias)
    assert not running.task.done()
    seen = running.seen
    await running.has(seen + 5)
    await faulty.abort(running.id)
    await running.tokens()


async def test_loggers_given_and_found_as_plugins_hear_of_the_core_also_where_statistics_are_off(faulty: Any) -> None:
    from tests.support.loggers import PluginTally, Tally

    path, other = (faulty.get_vllm_config(alias).model_config.model for alias in ("llama", "torn"))
    for tally in (Tally, PluginTally):
        before = tally.generated[path], tally.scheduled[path]
        await greedy(faulty, "llama", tokens=9)
        assert tally.generated[path] - before[0] == 9
        assert tally.scheduled[path] - before[1] > 0
        logged = tally.logged.copy()
        await faulty.do_log_stats()
        assert {of: tally.logged[of] - logged[of] for of in (path, other)} == {path: 1, other: 1}
        await faulty.do_log_stats(model="llama")
        assert {of: tally.logged[of] - logged[of] for of in (path, other)} == {path: 2, other: 1}
    assert faulty.registries == {}


async def test_a_model_whose_logger_can_not_be_made_leaves_its_place_to_the_next_one(
    faulty: Any, models_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.support.loggers import Tally

    shutil.copytree(paths_in(models_path)["qwen"], path := tmp_path / "added")
    monkeypatch.setattr(Tally, "refused", frozenset({str(path)}))
    with pytest.raises(OSError, match="there is nowhere to log to"):
        await faulty.add_model("added", engine_args(path))
    gc.collect()
    await faulty.check_health()
    monkeypatch.undo()
    await faulty.add_model("added", engine_args(path))
    assert await alone(faulty, "added") == await alone(faulty, "qwen")
    await faulty.remove_model("added")


async def test_after_failed_loads_others_still_load_and_serve(faulty: Any) -> None:
    with pytest.raises(SwitchFailed):
        await faulty.switch("torn")
    assert len(await alone(faulty, "qwen")) == 24
    with pytest.raises(SwitchFailed):
        await faulty.switch("cramped")
    assert faulty.active == "qwen"
    assert len(await alone(faulty, "llama")) == 24


async def test_a_load_that_takes_too_long_is_given_up_and_the_previous_model_goes_on(faulty: Any) -> None:
    expected = await usual(faulty, "llama", tokens=100)
    request = Greedy(faulty, "llama", PROMPT, 100)
    await request.has(10)
    performer = faulty._performer
    patience, performer.timeout_s = performer.timeout_s, 1.0
    try:
        for attempt in (faulty.switch, faulty.preload):
            with pytest.raises(SwitchFailed, match="took longer than 1 s"):
                await attempt("endless")
    finally:
        performer.timeout_s = patience
    assert faulty.active == "llama"
    assert faulty.info("endless").tier is Tier.DROPPED
    assert await request.tokens() == expected
    assert len(await alone(faulty, "qwen")) == 24


@pytest.mark.long
async def test_failed_loads_leave_no_memory_behind(faulty: Any) -> None:
    await faulty.switch("llama")
    sizes = []
    for _ in range(5):
        for alias in ("torn", "cramped"):
            with pytest.raises(SwitchFailed):
                await faulty.switch(alias)
        sizes.append(sum(map(resident_bytes, (faulty.core_pid, *faulty.worker_pids))))
    assert sizes[-1] - sizes[1] < 8 << 20


async def test_a_failed_preload_leaves_the_active_model_serving(faulty: Any) -> None:
    expected = await usual(faulty, "llama")
    with pytest.raises(SwitchFailed, match="Failed to preload torn"):
        await faulty.preload("torn")
    assert await greedy(faulty) == expected


async def test_a_model_that_could_not_be_brought_back_is_tried_again(faulty: Any) -> None:
    expected = await usual(faulty, "qwen"), await usual(faulty, "llama", tokens=100)
    await faulty.park("qwen")
    request = Greedy(faulty, "llama", PROMPT, 100)
    await request.has(10)
    await faulty.collective_rpc(broken("wake", times=1))
    with pytest.raises(SwitchFailed, match=r"from llama to qwen: .*no memory to wake"):
        await faulty.switch("qwen")
    assert faulty.active == "llama"
    assert await request.tokens() == expected[1]
    assert await alone(faulty, "qwen") == expected[0]


@pytest.mark.parametrize(
    "times", [1, *(pytest.param(n, marks=pytest.mark.long) for n in (2, 3, 4))], ids="wakes fail {}".format
)
async def test_a_model_that_made_room_for_one_that_failed_comes_back_in_the_end(faulty: Any, times: int) -> None:
    """The first to fail is the one that was to come; the others are of the one that had made room."""
    from service.scheduling.memory import Budgets

    expected = await usual(faulty, "qwen"), await usual(faulty, "llama", tokens=100)
    await faulty.park("qwen")
    request = Greedy(faulty, "llama", PROMPT, 100)
    await request.has(10)
    await faulty.collective_rpc(broken("wake", times=times))
    residency = faulty._residency
    generous, residency.budgets = residency.budgets, Budgets(device=KV * 3 // 2, shared=True)
    try:
        with pytest.raises(SwitchFailed, match=r"from llama to qwen: .*no memory to wake"):
            await faulty.switch("qwen")
    finally:
        residency.budgets = generous
    assert faulty.active == "llama"
    assert await request.tokens() == expected[1]
    assert await alone(faulty, "qwen") == expected[0]


async def test_a_model_that_could_not_be_parked_is_whole(faulty: Any) -> None:
    expected = await usual(faulty, "qwen")
    await faulty.switch("llama")
    await faulty.collective_rpc(broken("park", times=1))
    with pytest.raises(SwitchFailed, match=r"qwen can.t be parked: .*no memory to park"):
        await faulty.park("qwen")
    assert await greedy(faulty, "llama")
    assert await alone(faulty, "qwen") == expected


async def test_a_payload_without_the_launchs_signature_is_refused(faulty: Any) -> None:
    from service.engine.system import envelope

    forged = envelope.seal(("config", {}), key="somebody else's")
    frontend = faulty._frontend("torn")
    with pytest.raises(Exception, match="not signed with this launch's key") as refusal:
        await frontend.ask("activate", frontend.key, forged, False)
    assert "config" not in str(refusal.value)
    llama = faulty._frontend("llama")
    with pytest.raises(Exception, match="not signed with this launch's key"):
        await llama.ask("rpc", llama.key, forged)
    assert len(await greedy(faulty, "llama")) == 24


async def test_a_load_that_the_budget_has_no_room_for_is_refused_beforehand(faulty: Any) -> None:
    from service.scheduling.memory import Budgets, NoRoom

    residency = faulty._residency
    generous, residency.budgets = residency.budgets, Budgets(device=KV // 2, shared=True)
    try:
        with pytest.raises(SwitchFailed) as failure:
            await faulty.switch("huge")
        assert isinstance(failure.value.__cause__, NoRoom)
    finally:
        residency.budgets = generous
    assert len(await greedy(faulty, "llama")) == 24


@pytest.mark.long
async def test_an_engine_that_does_not_come_up_in_time_leaves_no_process_behind(
    models_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a platform takes to warm up comes on top, at the start too."""
    from service.platforms import current

    monkeypatch.setattr(type(current()), "warm_up_s", 2.0)
    endless = make_endless(tmp_path / "endless", paths_in(models_path)["llama"], library=False)
    entry = {"model": str(endless), "dtype": "float32", "enforce_eager": True, "kv_cache_memory_bytes": KV}
    before = set(psutil.Process().children(recursive=True))
    with pytest.raises(EngineDied, match="did not load within 7 s: load_timeout_s is 5"):
        await open_engine(tmp_path, {"endless": entry}, EngineSettings(load_timeout_s=5))
    started = set(psutil.Process().children(recursive=True)) - before
    _, alive = psutil.wait_procs(started, timeout=PATIENCE_S)
    assert [each.cmdline() for each in alive if "resource_tracker" not in " ".join(each.cmdline())] == []


async def test_a_killed_worker_is_the_end_of_everything_at_once(faulty: Any) -> None:
    from vllm.v1.engine.exceptions import EngineDeadError

    await faulty.switch("llama")
    running, frozen = Greedy(faulty, "llama", PROMPT, 900), Greedy(faulty, "qwen", PROMPT, 900)
    await running.has(5)
    os.kill(faulty.worker_pids[0], signal.SIGKILL)
    async with asyncio.timeout(PATIENCE_S):
        cause = await faulty.died()
    assert isinstance(cause, EngineDeadError)
    for request in (running, frozen):
        with pytest.raises(EngineDeadError):
            await request.tokens()
    with pytest.raises(EngineDeadError):
        await faulty.switch("qwen")
    with pytest.raises(EngineDeadError):
        await greedy(faulty, "llama")
    with pytest.raises(EngineDeadError):
        await faulty.check_health()
    assert faulty.errored
    assert not faulty.is_running


async def test_an_engine_that_was_shut_down_is_initialized_again(started: Any) -> None:
    """The last test of this engine, which died."""
    with pytest.raises(RuntimeError, match="already initialized"):
        await started.initialize("llama")
    started.shutdown()
    for asked in (started.switch("llama"), started.died()):
        with pytest.raises(RuntimeError, match="not initialized"):
            await asked
    await started.initialize("qwen")
    assert started.current_model == "qwen"
    qwens = await greedy(started, "qwen")
    report = await started.switch("roomy")  # what it may take is divided anew
    assert (report.switched, report.kept) == (True, 0)
    assert await greedy(started, "roomy") == qwens
    assert not started.errored


async def test_shutting_an_engine_down_ends_all_that_wait_for_it(started: Any) -> None:
    """The end of this engine: what runs, what is frozen, what its model was never loaded for, and calls."""
    from vllm.v1.engine.exceptions import EngineDeadError

    active, frozen = started.current_model, "qwen" if started.current_model != "qwen" else "llama"
    await started.switch(frozen)
    requests = [Greedy(started, frozen, PROMPT, 900)]
    await requests[0].has(1)
    await started.switch(active)
    requests += [Greedy(started, alias, PROMPT, 900) for alias in (active, "endless")]
    await requests[1].has(1)
    await until(lambda: started.info("endless").unfinished == 1)
    call = asyncio.create_task(started.sleep(mode="wait", model=frozen))
    await until(lambda: bool(started._frontend(frozen).llm.engine_core.utility_results))
    started.shutdown()
    for request in requests:
        with pytest.raises(EngineDeadError, match="the engine was shut down"):
            await request.tokens()
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(EngineDeadError, match="the engine was shut down"):
            await call
