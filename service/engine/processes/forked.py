"""A process forked from a fork server, started by multiprocessing as a spawned one would be.

What a spawned process takes from whoever starts it, a forked one would have from the server instead: it is handed over
with the target. ``Context`` is what to start with; a forked process starts its own with the same server.
"""

import atexit
import ctypes
import io
import os
import random
import re
import resource
import signal
import struct
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing import context, forkserver, popen_forkserver, resource_tracker, spawn, util
from multiprocessing.context import reduction, set_spawning_popen  # type: ignore[attr-defined]
from pathlib import Path
from typing import Any

import psutil

from service import platforms
from service.engine.system import ending
from service.engine.system.threads import listed, tasks
from service.engine.versions import vllm_core

IMPORTS = "service.engine.processes.imports"
"""What a fork server imports; its variables say what came of that."""
_STDIO = (1, 2)
_ENTRY = struct.Struct("i")
_LIMITS = tuple(number for name, number in vars(resource).items() if name.startswith("RLIMIT_"))
_OPENMP = ("OMP_NUM_THREADS", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
_PARALLEL_ELEMENTS = 1 << 20
_PR_SET_PDEATHSIG = 1


class Server(forkserver.ForkServer):  # type: ignore[misc]  # its typing is private
    """A running fork server. It ends when ``alive`` is closed, which its children don't hold, and they end with it."""

    def __init__(self, address: str, alive: int, pid: int, code: Callable[[], int | None] = lambda: None) -> None:
        """Where it listens, what keeps it, and ``code``, which reaps it and gives its exit code, or None."""
        super().__init__()
        self._forkserver_address, self._forkserver_alive_fd, self._forkserver_pid = address, alive, pid
        self.code = code
        self.users = 0

    def ensure_running(self) -> None:
        """It runs, or connecting fails."""
        resource_tracker.ensure_running()

    @property
    def address(self) -> str:
        """The path of its socket."""
        return str(self._forkserver_address)

    @property
    def pid(self) -> int:
        """Its process id."""
        return int(self._forkserver_pid)

    def end(self) -> None:
        """End it, and what was forked from it and still runs."""
        if self.code() is None:
            with suppress(ProcessLookupError, ChildProcessError):  # the system reaps where SIGCHLD is ignored
                os.kill(self.pid, signal.SIGTERM)
                os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
            self.code()
        os.close(self._forkserver_alive_fd)
        Path(self.address).unlink(missing_ok=True)


class _Popen(popen_forkserver.Popen):  # type: ignore[misc]  # its typing is private
    _fds: list[int]

    def _launch(self, process_obj: Any) -> None:
        context: Context = process_obj.__dict__.pop("context")
        self._fds += (*_STDIO, context.roll)
        message = io.BytesIO()
        set_spawning_popen(self)
        try:
            reduction.dump(
                {"inherited": _Inherited(context.server), **spawn.get_preparation_data(process_obj._name)}, message
            )
            reduction.dump(process_obj, message)
        finally:
            set_spawning_popen(None)
        self.sentinel, write = context.server.connect_to_new_process(self._fds)
        parent = os.dup(write)  # while it is open the child knows that its parent lives
        self.finalizer = util.Finalize(self, util.close_fds, (parent, self.sentinel))  # type: ignore[attr-defined]
        with os.fdopen(write, "wb") as pipe:
            pipe.write(message.getbuffer())
        self.pid = forkserver.read_signed(self.sentinel)


class _Process(context.ForkServerProcess):
    context: "Context"

    @staticmethod
    def _Popen(process_obj: Any) -> Any:  # noqa: N802 - multiprocessing's name
        return _Popen(process_obj)

    def _bootstrap(self, parent_sentinel: int | None = None) -> int:
        """Run, and do at the end what an interpreter does; the fork server's children leave without."""
        code: int = super()._bootstrap(parent_sentinel)  # type: ignore[misc]
        atexit._run_exitfuncs()
        return code


class Context(context.ForkServerContext):
    """What vLLM gets from ``get_mp_context``: everything as with spawn, but for where a process comes from."""

    def __init__(self, server: Server, roll: int) -> None:
        """Processes of ``server``, which write their ids to the pipe ``roll``."""
        super().__init__()
        self.server = server
        self.roll = roll

    def Process(self, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]  # noqa: N802 - multiprocessing's name
        process = _Process(*args, **kwargs)
        process.context = self
        return process

    def ask(self, target: Callable[..., None], *args: Any, name: str) -> Any:
        """What ``target`` sends, called in a process of its own with the end of a pipe and ``args``.

        Raises EOFError where it ends without, and OSError where it does not start.
        """
        ours, theirs = self.Pipe(duplex=False)
        with ours, theirs:
            child = self.Process(target=target, args=(theirs, *args), name=name)
            child.start()
            theirs.close()
            try:
                said = ours.recv()
            except (EOFError, OSError) as error:  # in the middle of it, too
                child.join()
                raise EOFError(f"{name} ended: {child.exitcode}") from error
            child.join()
        return said


@contextmanager
def processes_of(server: Server) -> Iterator[Context]:
    """What starts processes of ``server``. Those that are left at the end, and what they started with it, are killed.

    To the system a worker is no child of its core: who kills a core and its children does not reach it.
    """
    read, write = os.pipe()
    try:
        yield Context(server, write)
    finally:
        os.close(write)
        os.set_blocking(read, False)
        with suppress(BlockingIOError), os.fdopen(read, "rb", buffering=0) as roll:
            while entry := roll.read(_ENTRY.size):
                with suppress(psutil.NoSuchProcess):
                    process = psutil.Process(*_ENTRY.unpack(entry))
                    if process.ppid() == server.pid:
                        process.kill()


class _Inherited:
    """What a spawned process would take from its parent; unpickled in the child before its target is."""

    def __init__(self, server: Server) -> None:
        self._server = server

    def __reduce__(self) -> Any:
        limits = {number: resource.getrlimit(number) for number in _LIMITS}
        frontend = ending.forked_for or os.getpid()
        return _inherit, (dict(os.environ), limits, frontend, self._server.address, self._server.pid)


def _inherit(environment: dict[str, str], limits: dict[int, Any], frontend: int, address: str, server: int) -> None:
    """Be a child of ``frontend`` as far as it matters: in its environment, with its limits, writing where it does."""
    started_with = dict(os.environ)
    environment = _as_imported(environment)
    _end_with_server(server)
    ending.forked_for = frontend
    out, err, roll, *_ = forkserver._forkserver._inherited_fds  # type: ignore[attr-defined]
    for theirs, ours in zip((out, err), _STDIO, strict=True):
        os.dup2(theirs, ours)
        os.close(theirs)
    os.set_inheritable(roll, False)
    os.write(roll, _ENTRY.pack(os.getpid()))
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    os.environ.update({name: value for name, value in environment.items() if os.environ.get(name) != value})
    for number, limit in limits.items():
        with suppress(ValueError, PermissionError):
            resource.setrlimit(number, limit)
    _forget()
    if environment.get(vllm_core.LOGGING) not in {None, started_with.get(vllm_core.LOGGING)}:
        vllm_core.follow_logging()
    _follow_openmp(environment, started_with)
    ending.end_with(server)  # a thread, which runs where the variables have it by now
    vllm_core.start_processes_with(Context(Server(address, _let_go(), server), roll))


def _as_imported(environment: Mapping[str, str]) -> dict[str, str]:
    """With what vLLM's import writes there, which a spawned process does itself."""
    written: Mapping[str, str | None] = sys.modules[IMPORTS].written
    return {name: value for name, value in {**environment, **written}.items() if value is not None}


def _end_with_server(server: int) -> None:
    """End when the server is gone: nobody would hear of this process's end then. The system says so at once."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != server:  # it went before that
        os._exit(1)


def _let_go() -> int:
    """Stop keeping the server alive: only the frontend does. What is handed to further children keeps nothing."""
    alive: int = forkserver._forkserver._forkserver_alive_fd  # type: ignore[attr-defined]
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, alive, inheritable=False)
    os.close(nothing)
    return alive


def _forget() -> None:
    """Nothing of the server's own: its random state, and what it would end with."""
    random.seed()
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()
    if (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.seed()
    platforms.current.cache_clear()
    atexit._clear()
    weakref.finalize._registered_with_atexit = False  # type: ignore[attr-defined]
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = False


def _follow_openmp(environment: dict[str, str], loaded_with: Mapping[str, str]) -> None:
    """As many threads, on the CPUs, as the variables say: OpenMP reads them as it is loaded, in the server."""
    changed = {
        name: environment[name] for name in _OPENMP if environment.get(name) not in {None, loaded_with.get(name)}
    }
    cpus = _cpus(changed)
    threads = re.match(r"\d+", changed.get("OMP_NUM_THREADS", ""))
    if not cpus and threads is None:
        return
    import torch

    one_place = "{" in changed.get("OMP_PLACES", "")
    if cpus:
        os.sched_setaffinity(0, cpus if one_place else cpus[:1])
    torch.set_num_threads(int(threads[0]) if threads else len(cpus))
    before = tasks()
    torch.ones(_PARALLEL_ELEMENTS).add_(1)  # the first parallel region makes the threads, in order
    if not one_place:
        for task, cpu in zip(sorted(tasks() - before), cpus[1:], strict=False):
            os.sched_setaffinity(task, {cpu})


def _cpus(variables: Mapping[str, str]) -> list[int]:
    """The CPUs that the variables of an OpenMP library name, as vLLM writes them."""
    for name in _OPENMP[1:]:
        value = variables.get(name, "")
        if name == "KMP_AFFINITY":
            value = next(iter(re.findall(r"proclist=\[([\d,-]+)\]", value)), "")
        if cpus := listed(value):
            return cpus
    return []
