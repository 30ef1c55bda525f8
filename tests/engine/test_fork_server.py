"""One import of vLLM for all processes of an engine: which are forked, from what, and when they are not."""

import asyncio
import atexit
import ctypes
import json
import logging
import multiprocessing
import os
import random
import re
import resource
import signal
import subprocess
import sys
import threading
import time
import uuid
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from resource import getrlimit
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from vllm import AsyncEngineArgs, SamplingParams
from vllm.v1.engine.exceptions import EngineDeadError

from service.engine import MultiModelEngine
from service.engine.processes import fork_server, launch
from service.engine.processes.fork_server import ForkServer, Report, refused
from service.engine.system import envelope
from service.engine.system.environment import environment_of
from service.engine.system.threads import tasks
from tests.support.volume import shown
from tests.support.waiting import PATIENCE_S

pytestmark = pytest.mark.engine
SMALL = {"max_model_len": 256, "enforce_eager": True, "dtype": "float32", "kv_cache_memory_bytes": 16 << 20}


@pytest.fixture(scope="module", autouse=True)
def own_server() -> Iterator[None]:
    """These tests kill their server; the engine that other tests share is forked from another one."""
    own = ForkServer()
    with pytest.MonkeyPatch.context() as patch, own.kept():
        for module in (fork_server, launch):
            patch.setattr(module, "server", own)
        yield


def arguments(models_path: Path) -> AsyncEngineArgs:
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
    assert server.ppid() == os.getpid()
    assert server.num_threads() == 1

    again, same = await started(models_path)
    assert same == {server.pid}
    assert again == first
    assert server.children() == []  # nor zombies


@pytest.mark.long
async def test_an_engine_that_is_started_by_vllm_s_own_way_says_the_same(
    models_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forked, _ = await started(models_path)
    monkeypatch.setenv("RAY_JOB_ID", "1")  # one of the reasons
    spawned, parents = await started(models_path)
    assert os.getpid() in parents
    assert spawned == forked


@pytest.mark.long
async def test_two_engines_that_start_at_once_by_vllm_s_own_way_have_each_its_own_key(
    models_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_JOB_ID", "1")
    names = (envelope.KEY_VARIABLE, launch._SOCKETS)
    before = [os.environ.get(name) for name in names]
    engines = [MultiModelEngine({"qwen": arguments(models_path)}) for _ in range(2)]
    try:
        await asyncio.gather(*(engine.initialize("qwen") for engine in engines))
        assert [os.environ.get(name) for name in names] == before
        for engine in engines:
            assert await engine.collective_rpc("check_health") == [None]
    finally:
        for engine in engines:
            engine.shutdown()


@pytest.mark.long
async def test_a_server_that_was_killed_is_made_anew(models_path: Path) -> None:
    first, (old,) = await started(models_path)
    os.kill(old, signal.SIGKILL)
    await asyncio.to_thread(os.waitid, os.P_PID, old, os.WEXITED | os.WNOWAIT)
    again, (new,) = await started(models_path)
    assert new != old
    assert again == first


def under(folder: str) -> list[Path]:
    """Everything in a folder."""
    return list(Path(folder).rglob("*"))


def folder_of(outer: str, length: int) -> str:
    """A new folder whose path is so long."""
    folder = f"{outer}/".ljust(length, "x")
    Path(folder).mkdir()
    return folder


@pytest.mark.parametrize(("length", "left"), [(51, False), pytest.param(52, True, marks=pytest.mark.long)])
async def test_an_engine_leaves_no_socket_behind(
    models_path: Path, monkeypatch: pytest.MonkeyPatch, length: int, left: bool
) -> None:
    """vLLM leaves five of each: a worker that starts new engines, and a host of many starts, would collect them.

    Where a socket's path would be too long in a folder of ours, they are where vLLM has them, and the engine starts.
    """
    with TemporaryDirectory(dir="/tmp", prefix="s-") as outer:
        folder = folder_of(outer, length)
        monkeypatch.setenv("VLLM_RPC_BASE_PATH", folder)
        engine = MultiModelEngine({"qwen": arguments(models_path)})
        await engine.initialize("qwen")
        assert sum(path.is_socket() for path in under(folder)) > 2
        engine.shutdown()
        assert bool(under(folder)) == left


def test_a_variable_that_says_nothing_puts_no_sockets_into_the_current_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VLLM_RPC_BASE_PATH", "")
    made = launch.EngineProcesses(None, clients=1, log_stats=False, environment={})
    assert under(str(tmp_path)) == []
    made.stop()


@contextmanager
def served(server: ForkServer) -> Iterator[Any]:
    with server.lent() as context:
        assert context is not None
        yield context


def ask(context: Any, question: Any) -> Any:
    """What a child of the context answers."""
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=question, args=(theirs,))
    child.start()
    theirs.close()
    child_says = ours.recv()
    child.join()
    assert child.exitcode == 0
    return child_says


def tell_parent(answer: Any) -> None:
    answer.send(os.getppid())


ANEW = ("VLLM_OBJECT_STORAGE_SHM_BUFFER_NAME", "LD_LIBRARY_PATH")
"""What is made anew whenever it is asked for, and what the import of cv2 adds to, once more than in its parent."""


def tell_state(answer: Any) -> None:
    """What a process takes from its parent or has of its own, and what vLLM and torch keep from their import."""
    import_module(fork_server.IMPORTS)
    import torch
    from vllm import envs

    answer.send(
        {
            "environment": dict(os.environ),
            "folder": Path.cwd(),
            "arguments": (sys.argv, sys.orig_argv[:1]),
            "path": sys.path,
            "limits": {name: getrlimit(value) for name, value in vars(resource).items() if name.startswith("RLIMIT_")},
            "cpus": os.sched_getaffinity(0),
            "signals": {number: str(signal.getsignal(number)) for number in signal.valid_signals()},
            "blocked": signal.pthread_sigmask(signal.SIG_BLOCK, ()),
            "umask": re.findall(r"Umask:\t(.*)", Path("/proc/self/status").read_text()),
            "parent": (multiprocessing.parent_process().pid, multiprocessing.current_process().daemon),
            "threads": len(tasks()) - [one.name for one in threading.enumerate()].count("gearshift-parent-watch"),
            "torch": (torch.get_num_threads(), str(torch.get_default_dtype())),
            "inductor": torch._inductor.config.save_config_portable(),
            "vllm": {name: getattr(envs, name) for name in envs.environment_variables if name not in ANEW},
            "loggers": {name: logging.getLogger(name).level for name in ("vllm", "torch", "")},
            "warnings": len(warnings.filters),
            "descriptors": [str(Path(f"/proc/self/fd/{number}").readlink()) for number in range(3)],
        }
    )


@pytest.mark.long
def test_a_forked_process_has_of_its_parent_what_a_spawned_one_has(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    soft, hard = getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft - 1, hard))
    try:
        # Torch writes its folder where none is said; what another test has said may be gone since the server was made.
        said = {"SAID_BY_THE_CALLER": "yes", "VLLM_PLUGINS": None, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
        with environment_of(said), served(fork_server.server) as context:
            forked = ask(context, tell_state)
            with environment_of({"OPENBLAS_NUM_THREADS": "1"}):  # it starts threads otherwise, where nothing is forked
                spawned = ask(multiprocessing.get_context("spawn"), tell_state)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert forked["environment"]["SAID_BY_THE_CALLER"] == "yes"
    for name in ("OPENBLAS_NUM_THREADS", "COLUMNS", "LINES", *ANEW):  # ours, and readline's
        spawned["environment"].pop(name, None)
        forked["environment"].pop(name, None)
    for kind, state in forked.items():
        assert (kind, differences(state, spawned[kind])) == (kind, {})


def differences(ours: Any, theirs: Any) -> dict[Any, Any]:
    if not isinstance(ours, dict):
        return {} if ours == theirs else {"": (ours, theirs)}
    names = ours.keys() | theirs.keys()
    return {name: (ours.get(name), theirs.get(name)) for name in names if ours.get(name) != theirs.get(name)}


def tell_random(answer: Any) -> None:
    import numpy as np
    import torch

    answer.send((random.random(), float(np.random.random()), torch.initial_seed(), uuid.uuid4().hex))


def test_no_two_children_have_the_same_random_state() -> None:
    with served(fork_server.server) as context:
        one, other = (ask(context, tell_random) for _ in range(2))
    assert not set(one) & set(other)


def write(answer: Any) -> None:
    atexit.register(os.write, 1, b" at the end")
    os.write(1, b"written")
    answer.send(None)


def test_a_child_writes_where_its_caller_does_and_ends_as_an_interpreter(capfd: pytest.CaptureFixture[str]) -> None:
    with served(fork_server.server) as context:
        ask(context, write)
    assert capfd.readouterr().out.endswith("written at the end")


def crash(answer: Any) -> None:
    answer.send(os.getppid())
    ctypes.string_at(0)


def test_a_child_that_crashes_hurts_nobody_else() -> None:
    with served(fork_server.server) as context:
        ours, theirs = context.Pipe(duplex=False)
        child = context.Process(target=crash, args=(theirs,))
        child.start()
        child.join()
        assert child.exitcode == -signal.SIGSEGV
        assert ask(context, tell_parent) == ours.recv()


def never_end(answer: Any) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    answer.send(os.getpid())
    signal.pause()


def start_another(answer: Any) -> None:
    """A core, which starts a worker and leaves it behind."""
    from vllm.v1.engine import utils

    utils.get_mp_context().Process(target=never_end, args=(answer,)).start()
    os._exit(0)


_IGNORING = """
import signal, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
from service.engine.processes.fork_server import ForkServer
server = ForkServer()
with server.lent():
    used = server._current[0]
import os
print(os.path.exists(f"/proc/{used.pid}"), os.path.exists(used.address))
"""


@pytest.mark.long
def test_a_server_ends_with_a_process_that_ignores_signals() -> None:
    """As below ``trap '' TERM`` in a shell, or a parent that wants to hear nothing of its children."""
    done = subprocess.run([sys.executable, "-c", _IGNORING], capture_output=True, text=True, timeout=120, check=False)
    assert (done.stdout, done.returncode) == ("False False\n", 0), done.stderr[-2000:]


def test_what_a_killed_child_has_started_does_not_outlive_the_loan() -> None:
    with served(fork_server.server) as context:
        ours, theirs = context.Pipe(duplex=False)
        context.Process(target=start_another, args=(theirs,)).start()
        left = psutil.Process(ours.recv())
        assert left.is_running()
    assert psutil.wait_procs([left], timeout=PATIENCE_S)[1] == []


@pytest.mark.long
def test_a_variable_that_says_something_else_than_at_the_import_makes_a_new_server() -> None:
    server = ForkServer()
    with server.kept():
        with served(server) as context:
            before = ask(context, tell_parent)
            with environment_of({"NOBODY_READS_THIS_AT_IMPORT": "1"}), served(server) as same:
                assert ask(same, tell_parent) == before
            with environment_of({"VLLM_LOGGING_PREFIX": "another "}), served(server) as other:
                assert ask(other, tell_parent) != before
                assert ask(context, tell_parent) == before  # for as long as somebody uses it
        assert not psutil.pid_exists(before)
        with environment_of({"VLLM_LOGGING_PREFIX": "another "}), served(server) as other:
            kept = ask(other, tell_parent)
        assert psutil.pid_exists(kept)
    assert not psutil.pid_exists(kept)


FRONTEND = """
import asyncio, sys, json
from service.app import share_imports
async def main():
    from vllm import AsyncEngineArgs
    from service.engine import MultiModelEngine
    engine = MultiModelEngine({"qwen": AsyncEngineArgs(model=sys.argv[1], **json.loads(sys.argv[2]))})
    await engine.initialize("qwen")
    print("serves", flush=True)
    await asyncio.Event().wait()
if __name__ == "__main__":
    share_imports()
    print("imported", flush=True)
    asyncio.run(main())
"""


def children_of(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children()
    except psutil.NoSuchProcess:  # some live for a moment
        return []


@pytest.mark.parametrize("when", shown(["imported", "core", "serves"], "core"))
def test_nothing_outlives_a_frontend_that_is_killed(models_path: Path, tmp_path: Path, when: str) -> None:
    script = tmp_path / "frontend.py"
    script.write_text(FRONTEND)
    model = arguments(models_path).model
    with subprocess.Popen(
        [sys.executable, str(script), model, json.dumps(SMALL)], stdout=subprocess.PIPE, text=True
    ) as frontend:
        try:
            assert frontend.stdout is not None
            process = psutil.Process(frontend.pid)
            for line in frontend.stdout:
                if line.strip() == when or (line.strip() == "imported" and when == "core"):
                    break
            while when == "core" and not any(map(children_of, process.children())):
                time.sleep(0.01)  # or it would keep a processor from what it waits for
            children = process.children(recursive=True)
            assert children
        finally:
            frontend.kill()
    assert psutil.wait_procs(children, timeout=PATIENCE_S)[1] == []


def tell_cpus(answer: Any) -> None:
    import torch

    torch.ones(1 << 20).add_(1)
    bound = {tuple(sorted(os.sched_getaffinity(int(task.name)))) for task in Path("/proc/self/task").iterdir()}
    answer.send((torch.get_num_threads(), bound))


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one CPU")
def test_the_threads_of_a_child_are_where_its_variables_say() -> None:
    first, second, *_ = sorted(os.sched_getaffinity(0))
    apart, together = {(first,), (second,)}, {(first, second)}
    with served(fork_server.server) as context:
        for variables, threads, cpus in (
            ({"GOMP_CPU_AFFINITY": f"{first} {second}"}, 2, apart),
            ({"KMP_AFFINITY": f"granularity=fine,explicit,proclist=[{first},{second}]"}, 2, apart),
            ({"GOMP_CPU_AFFINITY": f"{second}"}, 1, {(second,)}),
            ({"OMP_PLACES": f"{{{first},{second}}}", "OMP_PROC_BIND": "true"}, 2, together),
            ({"OMP_NUM_THREADS": "1"}, 1, together),
        ):
            with environment_of(variables):
                assert ask(context, tell_cpus) == (threads, cpus)


@pytest.mark.parametrize(
    ("report", "why"),
    [
        (Report([], device_open=False, read={}), None),
        (Report(["jemalloc_bg_thd"], device_open=False, read={}), None),
        (Report(["cuda-EvtHandlr", "jemalloc_bg_thd", "x"], device_open=False, read={}), "threads (cuda-EvtHandlr, x)"),
        (Report([], device_open=True, read={}), "device"),
        (Report((), device_open=False, read={}, missing="no module"), "no module"),
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


async def test_an_engine_ends_with_its_server_and_so_does_what_puts_its_end_off(models_path: Path) -> None:
    """The last that is asked of this module's server."""
    engine = MultiModelEngine({"qwen": arguments(models_path)})
    await engine.initialize("qwen")
    processes = [psutil.Process(pid) for pid in (engine.core_pid, *engine.worker_pids)]
    with served(fork_server.server) as context:
        ours, theirs = context.Pipe(duplex=False)
        context.Process(target=never_end, args=(theirs,)).start()
        processes.append(psutil.Process(ours.recv()))
        (killed,) = {process.ppid() for process in processes}
        os.kill(killed, signal.SIGKILL)
        assert psutil.wait_procs(processes, timeout=PATIENCE_S)[1] == []
    with pytest.raises(EngineDeadError):
        await answer(engine)
    engine.shutdown()
