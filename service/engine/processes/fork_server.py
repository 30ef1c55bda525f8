"""One import of vLLM for all processes of an engine: the core and its workers are forked from one that has it.

Importing vLLM is nearly all of what a new process of an engine does: some twelve seconds of a core, in each of them.
The process forked from is multiprocessing's fork server. It has imported modules and nothing else: it has one thread,
and has opened no device and begun no parallel region (``Report`` says so, or it is not used). A child gets its target
as a spawned one would; what a spawned process takes from its parent besides, and a forked one from the server, is
handed over with the target: the environment, random state, the CPUs of OpenMP, and whose process it is.

``refused`` says where vLLM's own way, a new interpreter per process, is taken. Not run: CUDA and ROCm.
"""

import functools
import io
import os
import random
import re
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import connection, context, forkserver, popen_forkserver, resource_tracker, spawn, util
from multiprocessing.context import reduction, set_spawning_popen  # type: ignore[attr-defined]
from pathlib import Path
from threading import RLock
from typing import Any

import structlog

from service.engine.system import ending
from service.engine.versions import vllm_core
from service.platforms import current

log = structlog.get_logger(__name__)

IMPORTS = "service.engine.processes.imports"
_NATIVE = ("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "LD_", "MALLOC_", "GLIBC_", "CUDA_", "NCCL_", "HIP_", "ROCR_")
"""Beginnings of variables that libraries read by themselves as they are loaded."""
_PLACES = ("OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
_REPORT_WITHIN_S = 300.0
_PARALLEL_ELEMENTS = 1 << 20


@dataclass(frozen=True, slots=True)
class Report:
    """What a fork server has become by its imports."""

    threads: int
    device_open: bool
    read: dict[str, tuple[str | None, str | None]]
    """The environment variables that were read by the imports, with what they said before and after it."""
    missing: str | None = None
    """Why the imports failed, if they did."""

    def unfit(self) -> str | None:
        """Why nothing may be forked from it; None where it is fit."""
        if self.missing is not None:
            return f"the imports failed there: {self.missing}"
        if self.device_open:
            return "its imports have opened the device"
        if self.threads != 1:
            return f"its imports have started threads ({self.threads})"
        return None

    def outdated(self) -> str | None:
        """The first variable that says something else now than when it was read at import; None where all agree."""
        names = self.read.keys() | {name for name in os.environ if name.startswith(_NATIVE)}
        if current().own_preloads:
            names -= {"LD_PRELOAD"}
        return next((name for name in sorted(names) if os.environ.get(name) not in self.read.get(name, (None,))), None)


class _Server(forkserver.ForkServer):  # type: ignore[misc]  # its typing is private
    """Multiprocessing's fork server, beside the one that whoever uses multiprocessing may have."""

    def adopt(self, pid: int, address: str, alive: int) -> None:
        """A fork of this process serves."""
        self._forkserver_pid, self._forkserver_address, self._forkserver_alive_fd = pid, address, alive


class ForkServer:
    """The fork server of this process. It lives for as long as somebody ``uses`` it."""

    def __init__(self) -> None:
        self._lock = RLock()
        self._users = 0
        self._server: _Server | None = None
        self._report: Report | None = None

    @contextmanager
    def used(self) -> Iterator[None]:
        """Keep it, and begin its imports beside what this process does meanwhile."""
        self.use()
        try:
            yield
        finally:
            self.leave()

    def use(self) -> None:
        """Keep it until ``leave``; it is started where the platform allows that."""
        with self._lock:
            self._users += 1
            if self._server is None and refused() is None:
                self._start()

    def leave(self) -> None:
        """Undo one ``use``; the last one ends the server. What was forked from it goes on."""
        with self._lock:
            self._users -= 1
            if self._users == 0:
                self._stop()

    def fork_here(self) -> None:
        """Import here, fork the server from this process, and keep it: the first thing of a command.

        Falls back to a server that imports by itself where this process has threads.
        """
        with self._lock:
            self._users += 1
            if self._server is not None or refused() is not None:
                return
            __import__(IMPORTS)
            if _threads() == 1:
                self._fork()
            else:
                self._start()

    def context(self, config: Any = None) -> "_Context | None":
        """What vLLM is to start an engine's processes of this config with; None: its own way.

        Waits for the server's imports. One that died, or has read variables that say something else now, is replaced.
        """
        with self._lock:
            reason = refused(config)
            if reason is None:
                if self._server is None:
                    self._start()
                reason = self._unfit()
            if reason is None:
                return _CONTEXT
            log.info("engine.not_forked", reason=reason)
            return None

    def connect(self, descriptors: list[int]) -> tuple[int, int]:
        """A new process of the server: where its id and exit code are read, and where its target is written."""
        with self._lock:
            assert self._server is not None
            found: tuple[int, int] = self._server.connect_to_new_process(descriptors)
            return found

    def _unfit(self) -> str | None:
        report = self._reported()
        stale = report.outdated()
        if stale is not None:
            log.info("engine.fork_server_replaced", variable=stale)
            self._stop()
            self._start()
            report = self._reported()
        return report.unfit()

    def _start(self) -> None:
        self._server, self._report = _Server(), None
        self._server.set_forkserver_preload([IMPORTS])
        self._server.ensure_running()

    def _stop(self) -> None:
        server, self._server, self._report = self._server, None, None
        if server is not None:
            with suppress(ChildProcessError, FileNotFoundError):
                server._stop()  # type: ignore[attr-defined]

    def _fork(self) -> None:
        """Let a fork of this process be the server, instead of a new interpreter that imports once more."""
        resource_tracker.ensure_running()
        with socket.socket(socket.AF_UNIX) as listener:
            address = connection.arbitrary_address("AF_UNIX")  # type: ignore[attr-defined]
            listener.bind(address)
            Path(address).chmod(0o600)
            listener.listen()
            alive_r, alive_w = os.pipe()
            pid = os.fork()
            if pid == 0:
                _serve(listener.fileno(), alive_r, alive_w)
            os.close(alive_r)
        self._server, self._report = _Server(), None
        self._server.adopt(pid, address, alive_w)

    def _reported(self) -> Report:
        """What the server is; asked of a child of it, and again of a server that had to be started again."""
        assert self._server is not None
        before = self._server._forkserver_pid
        self._server.ensure_running()
        if self._report is None or self._server._forkserver_pid != before:
            self._report = _ask()
        return self._report


def _serve(listener: int, alive_r: int, alive_w: int) -> None:
    """Be a fork server, and nothing else of what this process was before."""
    code = 1
    try:
        os.close(alive_w)
        forkserver.main(listener, alive_r, [])
    except SystemExit:
        code = 0
    finally:
        os._exit(code)


def refused(config: Any = None) -> str | None:
    """Why the processes of an engine are not forked but started by vLLM's own way; None where they are forked.

    These are vLLM's reasons for insisting on new interpreters that do not depend on who forks.
    """
    if not current().imports_only:
        return "importing vLLM opens the device of this platform"
    if "--numa-bind" in sys.argv or getattr(getattr(config, "parallel_config", None), "numa_bind", False):
        return "a process is bound to its NUMA node by the program that it is started with"
    if "microsoft" in " ".join(os.uname()).lower():
        return "NVML does not stand a fork under WSL"
    backend = getattr(getattr(config, "parallel_config", None), "distributed_executor_backend", None)
    if "ray" in str(getattr(backend, "__name__", backend)).lower() or "RAY_JOB_ID" in os.environ:
        return "Ray starts its own processes"
    return None


# --- what a child is handed over ----------------------------------------------------------------------------------


class _Popen(popen_forkserver.Popen):  # type: ignore[misc]  # its typing is private
    """Starts a process by the server that this process uses; in a child, the one that it was forked from."""

    def _launch(self, process_obj: Any) -> None:
        preparation = {"gearshift": _Inherited(), **spawn.get_preparation_data(process_obj._name)}
        message = io.BytesIO()
        set_spawning_popen(self)
        try:
            reduction.dump(preparation, message)
            reduction.dump(process_obj, message)
        finally:
            set_spawning_popen(None)
        self.sentinel, write = _connect(self._fds)  # type: ignore[attr-defined]
        parent = os.dup(write)  # while it is open the child knows that its parent lives
        self.finalizer = util.Finalize(self, util.close_fds, (parent, self.sentinel))  # type: ignore[attr-defined]
        with os.fdopen(write, "wb") as pipe:
            pipe.write(message.getbuffer())
        self.pid = forkserver.read_signed(self.sentinel)


class _Process(context.ForkServerProcess):
    @staticmethod
    def _Popen(process_obj: Any) -> Any:  # noqa: N802 - multiprocessing's name
        return _Popen(process_obj)


class _Context(context.ForkServerContext):
    Process = _Process  # type: ignore[assignment]


_CONTEXT = _Context()
server = ForkServer()
"""The one of this process."""


def _connect(descriptors: list[int]) -> tuple[int, int]:
    if ending.forked_for is None:
        return server.connect(descriptors)
    ours = forkserver._forkserver  # type: ignore[attr-defined]
    found: tuple[int, int] = _without_starting(ours).connect_to_new_process(descriptors)
    return found


@functools.cache
def _without_starting(ours: Any) -> Any:
    """Python does not tell a forked process that its server runs: it would start an empty one of its own."""
    ours.ensure_running = lambda: None
    return ours


class _Inherited:
    """What a spawned process would take from its parent; unpickled in the child before its target is."""

    def __reduce__(self) -> Any:
        return _inherit, (dict(os.environ), ending.forked_for or os.getpid())


def _inherit(environment: dict[str, str], frontend: int) -> None:
    """Be a child of ``frontend`` as far as it matters, in its environment."""
    ending.forked_for = frontend
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    os.environ.update({name: value for name, value in environment.items() if os.environ.get(name) != value})
    _reseed()
    _bind_openmp(environment)
    vllm_core.start_processes_with(_CONTEXT)


def _reseed() -> None:
    """Random state of its own, as a new interpreter has it; torch's starts from a constant there as well."""
    random.seed()
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()


def _bind_openmp(environment: dict[str, str]) -> None:
    """Threads on the CPUs that a worker was given. OpenMP read its variables when it was loaded, in the server."""
    cpus = _cpus(environment)
    if not cpus:
        return
    import torch

    os.sched_setaffinity(0, cpus[:1])
    torch.set_num_threads(len(cpus))
    before = _tasks()
    torch.ones(_PARALLEL_ELEMENTS).add_(1)  # the first parallel region makes the threads, in order
    for task, cpu in zip(sorted(_tasks() - before), cpus[1:], strict=False):
        os.sched_setaffinity(task, {cpu})


def _cpus(environment: dict[str, str]) -> list[int]:
    """The CPUs that the variables of an OpenMP library name, as vLLM writes them."""
    for name in _PLACES:
        value = environment.get(name, "")
        if name == "KMP_AFFINITY":
            value = next(iter(re.findall(r"proclist=\[([\d,]+)\]", value)), "")
        if numbers := re.findall(r"\d+", value):
            return list(map(int, numbers))
    return []


# --- what the server tells of itself ------------------------------------------------------------------------------


def _ask() -> Report:
    """The server's report, from a child of it."""
    ours, theirs = _CONTEXT.Pipe(duplex=False)
    child = _CONTEXT.Process(target=_tell, args=(theirs,), name="gearshift-report")
    child.start()
    theirs.close()
    try:
        if not ours.poll(_REPORT_WITHIN_S):
            return Report(0, device_open=False, read={}, missing=f"they took more than {_REPORT_WITHIN_S:.0f} s")
        found: Report = ours.recv()
    except EOFError:
        return Report(0, device_open=False, read={}, missing="its child died")
    else:
        return found
    finally:
        ours.close()
        child.join()


def _tell(answer: Any) -> None:
    imports = sys.modules.get(IMPORTS)
    if imports is None:
        answer.send(Report(0, device_open=False, read={}, missing=f"{IMPORTS} can't be found there"))
    else:
        before, after = imports.before, imports.after
        names = imports.read | {name for name in before.keys() | after.keys() if name.startswith(_NATIVE)}
        read = {name: (before.get(name), after.get(name)) for name in names}
        answer.send(Report(imports.threads, imports.device_open, read, imports.missing))


def _threads() -> int:
    return len(_tasks())


def _tasks() -> set[int]:
    return {int(task.name) for task in Path("/proc/self/task").iterdir()}
