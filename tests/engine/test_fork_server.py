"""One import of vLLM for all processes of an engine: which are forked, from what, and when they are not."""

import os
import random
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from vllm import AsyncEngineArgs, SamplingParams

from service.engine import MultiModelEngine
from service.engine.processes import fork_server
from service.engine.processes.fork_server import ForkServer, Report, refused
from service.engine.system.environment import environment_of

pytestmark = [pytest.mark.engine, pytest.mark.parity]
SMALL = {"max_model_len": 256, "enforce_eager": True, "dtype": "float32", "kv_cache_memory_bytes": 16 << 20}


def arguments(models_path: Path) -> AsyncEngineArgs:
    import json

    return AsyncEngineArgs(model=json.loads(models_path.read_text())["models"]["qwen"]["model"], **SMALL)


async def answer(engine: MultiModelEngine) -> list[int]:
    async for output in engine.generate("Where are you?", SamplingParams(max_tokens=8, temperature=0.0), "a"):
        tokens = list(output.outputs[0].token_ids)
    return tokens


async def started(models_path: Path) -> tuple[list[int], set[int]]:
    """The tokens of an engine of its own, and the parents of its processes."""
    engine = MultiModelEngine({"qwen": arguments(models_path)})
    try:
        await engine.initialize("qwen")
        return await answer(engine), {psutil.Process(pid).ppid() for pid in (engine.core_pid, *engine.worker_pids)}
    finally:
        engine.shutdown()


async def test_core_and_workers_are_forked_from_one_process_that_has_imported_vllm(models_path: Path) -> None:
    first, parents = await started(models_path)
    assert len(parents) == 1
    server = psutil.Process(parents.pop())
    assert server.pid != os.getpid()
    assert server.num_threads() == 1
    assert "forkserver" in " ".join(server.cmdline())

    again, same = await started(models_path)
    assert same == {server.pid}
    assert again == first


async def test_an_engine_that_is_started_by_vllm_s_own_way_says_the_same(
    models_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forked, _ = await started(models_path)
    monkeypatch.setenv("RAY_JOB_ID", "1")  # one of the reasons
    spawned, parents = await started(models_path)
    assert os.getpid() in parents
    assert spawned == forked


async def test_a_server_that_was_killed_is_made_anew(models_path: Path) -> None:
    first, (old,) = await started(models_path)
    os.kill(old, signal.SIGKILL)
    again, (new,) = await started(models_path)
    assert new != old
    assert again == first


def ask(server: ForkServer, question: Any) -> Any:
    """What a child of the server answers."""
    context = server.context()
    assert context is not None
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=question, args=(theirs,))
    child.start()
    assert ours.poll(60)
    child_says = ours.recv()
    child.join()
    return child_says


def tell_state(answer: Any) -> None:
    import numpy as np

    answer.send((dict(os.environ), random.random(), float(np.random.random()), os.getppid()))


def test_a_child_has_its_caller_s_environment_and_random_state_of_its_own() -> None:
    with environment_of({"SAID_BY_THE_CALLER": "yes", "VLLM_PLUGINS": None}):
        here = dict(os.environ)
        one, other = (ask(fork_server.server, tell_state) for _ in range(2))
    assert one[0] == other[0] == here
    assert one[1] != other[1]
    assert one[2] != other[2]
    assert one[3] == other[3] != os.getpid()


def test_a_variable_that_says_something_else_than_at_the_import_makes_a_new_server() -> None:
    server = ForkServer()
    with server.used():
        before = ask(server, tell_state)[3]
        with environment_of({"NOBODY_READS_THIS_AT_IMPORT": "1"}):
            assert ask(server, tell_state)[3] == before
        with environment_of({"VLLM_LOGGING_PREFIX": "another "}):
            assert ask(server, tell_state)[3] != before
    assert not psutil.pid_exists(before)


def tell_cpus(answer: Any) -> None:
    import torch

    bound = {task.name: sorted(os.sched_getaffinity(int(task.name))) for task in Path("/proc/self/task").iterdir()}
    answer.send((torch.get_num_threads(), sorted(bound.values())))


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one CPU")
def test_the_threads_of_a_child_are_where_its_variables_say() -> None:
    first, second, *_ = sorted(os.sched_getaffinity(0))
    with environment_of({"GOMP_CPU_AFFINITY": f"{first},{second}"}):
        server = ForkServer()
        with server.used():
            threads, cpus = ask(server, tell_cpus)
    assert threads == 2
    assert cpus == [[first], [second]]


@pytest.mark.parametrize(
    ("report", "why"),
    [
        (Report(1, device_open=False, read={}), None),
        (Report(2, device_open=False, read={}), "threads"),
        (Report(1, device_open=True, read={}), "device"),
        (Report(0, device_open=False, read={}, missing="no module"), "no module"),
    ],
)
def test_nothing_is_forked_from_a_process_that_is_more_than_its_imports(report: Report, why: str | None) -> None:
    found = report.unfit()
    assert found is None if why is None else why in str(found)


@pytest.mark.parametrize(
    ("parallel", "why"),
    [
        ({"numa_bind": False, "distributed_executor_backend": "mp"}, None),
        ({"numa_bind": True, "distributed_executor_backend": "mp"}, "NUMA"),
        ({"numa_bind": False, "distributed_executor_backend": "ray"}, "Ray"),
    ],
)
def test_what_vllm_insists_on_new_interpreters_for_is_respected(parallel: dict[str, Any], why: str | None) -> None:
    found = refused(SimpleNamespace(parallel_config=SimpleNamespace(**parallel)))
    assert found is None if why is None else why in str(found)
