"""One import of vLLM for all processes of an engine: the core and its workers are forked from one that has it.

Importing vLLM is nearly all of what a new process of an engine does: some twelve seconds of a core, in each of them.
The process forked from is multiprocessing's fork server. It has imported modules and nothing else: it has one thread,
and has opened no device and begun no parallel region (``Report`` says so, or it is not used). ``forked.py`` says how a
child of it is what a spawned process would be.

``refused`` says where vLLM's own way, a new interpreter per process, is taken. Not run: ROCm.
"""

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing import connection, forkserver, resource_tracker, spawn, util
from pathlib import Path
from threading import RLock
from typing import Any

import structlog

from service.engine.processes.forked import IMPORTS, Context, Server, processes_of
from service.engine.system.threads import further_threads
from service.engine.versions.vllm_core import LOGGING
from service.platforms import current

log = structlog.get_logger(__name__)

_NATIVE = (
    *("PYTHON", "LD_", "MALLOC_", "GLIBC_", "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "DNNL_", "ONEDNN_", "ATEN_"),
    *("TORCH_", "PYTORCH_", "GLOO_", "CUDA_", "NCCL_", "HIP_", "ROCR_"),
)
"""Beginnings of variables that the interpreter and libraries read by themselves as they are loaded."""


def busy(threads: Sequence[str]) -> list[str]:
    """Those of them beside which a process can't be forked."""
    return [name for name in threads if not re.fullmatch(current().idle_threads, name)]


@dataclass(frozen=True, slots=True)
class Report:
    """What a fork server has become by its imports."""

    threads: Sequence[str]
    """The names of all but the main one."""
    device_open: bool
    read: dict[str, tuple[str | None, str | None]]
    """The environment variables that were read by the imports, with what they said before and after it."""
    missing: str | None = None
    """Why the imports failed, if they did."""
    cpus: frozenset[int] = frozenset(os.sched_getaffinity(0))
    """Where it may run, which libraries count as they are loaded."""

    def unfit(self) -> str | None:
        """Why nothing may be forked from it; None where it is fit."""
        if self.missing is not None:
            return f"the imports failed there: {self.missing}"
        if self.device_open:
            return "its imports have opened the device"
        if others := busy(self.threads):
            return f"its imports have started threads ({', '.join(others)})"
        return None

    def outdated(self) -> str | None:
        """The first variable that says something else now than when it was read at import; None where all agree."""
        if self.missing is not None:
            return None
        if self.cpus != os.sched_getaffinity(0):
            return "the CPUs that this process may run on"
        names = self.read.keys() | {name for name in os.environ if name.startswith(_NATIVE)}
        names -= {LOGGING}  # a child follows it
        if current().own_preloads:
            names -= {"LD_PRELOAD"}
        return next((name for name in sorted(names) if os.environ.get(name) not in self.read.get(name, (None,))), None)


class ForkServer:
    """The fork server of this process: made when it is needed, and kept for as long as somebody wants it."""

    def __init__(self) -> None:
        self._lock = RLock()
        self._keepers = 0
        self._current: tuple[Server, Report] | None = None

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Keep the server between two engines. Without that it ends with the last engine that was forked from it."""
        self._keepers += 1
        try:
            yield
        finally:
            with self._lock:
                self._keepers -= 1
                self._drop_if_idle()

    def fork_here(self) -> None:
        """Import here, fork the server from this process, and keep it: the first thing of a command.

        Does nothing where this process has threads already, or the platform's imports are more than imports: an
        engine makes its own server then, or does without.
        """
        with self._lock:
            self._keepers += 1
            if self._current is None and not further_threads():
                __import__(IMPORTS)  # before anything else of vLLM: it notes what is read
                if not busy(further_threads()) and refused() is None:
                    self._adopt(_forked_here())

    @contextmanager
    def lent(self, config: Any = None) -> Iterator[Context | None]:
        """What vLLM is to start an engine's processes of this config with; None: its own way.

        To be left when these processes have ended; those that have not are killed. Waits for the imports of a server
        that has to be made. One that died, or has read variables that say something else now, is replaced; what was
        forked from it goes on.
        """
        with self._lock:
            reason = refused(config)
            if reason is None:
                used, report = self._up_to_date()
                reason = report.unfit()
            if reason is None:
                used.users += 1
        if reason is not None:
            log.info("engine.not_forked", reason=reason)
            yield None
            return
        try:
            with processes_of(used) as context:
                yield context
        finally:
            with self._lock:
                used.users -= 1
                if self._current is None or used is not self._current[0]:
                    _end_if_unused(used)
                self._drop_if_idle()

    @contextmanager
    def lent_if_there(self) -> Iterator[Context | None]:
        """The same of a server that there is, and that may be used as it is; None where it would have to be made."""
        with self._lock, ExitStack() as used:
            found = self._current
            there = found is not None and found[0].code() is None and found[1].outdated() is None
            context = used.enter_context(self.lent()) if there else None
            left = used.pop_all()
        with left:
            yield context

    def _up_to_date(self) -> tuple[Server, Report]:
        if self._current is not None and self._current[0].code() is not None:
            log.warning("engine.fork_server_died", code=self._current[0].code())
            self._retire()
        if self._current is not None and (stale := self._current[1].outdated()) is not None:
            log.info("engine.fork_server_replaced", variable=stale)
            self._retire()
        return self._current or self._adopt(_started())

    def _adopt(self, server: Server) -> tuple[Server, Report]:
        self._current = server, _reported(server)
        return self._current

    def _retire(self) -> None:
        if self._current is not None:
            server, self._current = self._current[0], None
            _end_if_unused(server)

    def _drop_if_idle(self) -> None:
        if self._keepers == 0 and self._current is not None and self._current[0].users == 0:
            self._retire()


def _end_if_unused(server: Server) -> None:
    if server.users == 0:
        server.end()


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


server = ForkServer()
"""The one of this process."""


# --- how a server comes to be -------------------------------------------------------------------------------------


@contextmanager
def _ends() -> Iterator[tuple[str, int, int, int]]:
    """A server's address, its listening socket, and both ends of the pipe whose closing ends it."""
    resource_tracker.ensure_running()
    address = connection.arbitrary_address("AF_UNIX")  # type: ignore[attr-defined]
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        Path(address).chmod(0o600)
        listener.listen()
        alive_r, alive_w = os.pipe()
        try:
            yield address, listener.fileno(), alive_r, alive_w
        finally:
            os.close(alive_r)


def _started() -> Server:
    """A new interpreter with the environment of this one; its imports begin."""
    program = "import sys; sys.path[:] = {!r}; from {} import serve; serve({}, {})"
    with _ends() as (address, listener, alive_r, alive_w):
        options = util._args_from_interpreter_flags()  # type: ignore[attr-defined]
        interpreter = os.fsdecode(spawn.get_executable())
        process = subprocess.Popen(  # noqa: S603 - this very interpreter
            [interpreter, *options, "-c", program.format(sys.path, __name__, listener, alive_r)],
            stdin=subprocess.DEVNULL,
            env=dict(os.environ),  # as Python has it: C libraries write to what a process inherits otherwise
            pass_fds=(listener, alive_r),
        )
    return Server(address, alive_w, process.pid, process.poll)


def _forked_here() -> Server:
    """A fork of this process."""
    util._flush_std_streams()  # type: ignore[attr-defined]  # or each child writes what is still in them
    with _ends() as (address, listener, alive_r, alive_w):
        pid = os.fork()
        if pid == 0:
            os.close(alive_w)
            _leave_after(lambda: forkserver.main(listener, alive_r, []))
    return Server(address, alive_w, pid, _reaper(pid))


def _leave_after(serving: Callable[[], None]) -> None:
    """Be a fork server, and nothing else of what this process was before."""
    code = 1
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        serving()
    except SystemExit:
        code = 0
    finally:
        os._exit(code)


def _reaper(pid: int) -> Callable[[], int | None]:
    codes: list[int] = []

    def code() -> int | None:
        if not codes:
            try:
                found, status = os.waitpid(pid, os.WNOHANG)
            except ChildProcessError:  # somebody else has waited for it
                found, status = pid, 0
            codes.extend([os.waitstatus_to_exitcode(status)] if found else [])
        return codes[0] if codes else None

    return code


def serve(listener: int, alive_r: int) -> None:
    """The whole life of a server that is an interpreter of its own."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # which ends it, also where it was started by one that ignores it
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal is for the frontend
    __import__(IMPORTS)
    signal.signal(signal.SIGINT, handler)  # which a child gets back
    forkserver.main(listener, alive_r, [])


# --- what the server tells of itself ------------------------------------------------------------------------------


def _reported(server: Server) -> Report:
    """The server's report, from a child of it, after its imports."""
    with processes_of(server) as context:
        try:
            found: Report = context.ask(_tell, name="gearshift-report")
        except (OSError, EOFError) as error:
            return Report((), device_open=False, read={}, missing=str(error))
        return found


def _tell(answer: Any) -> None:
    imports = sys.modules[IMPORTS]
    before, after = imports.before, imports.after
    names = imports.read | {name for name in before.keys() | after.keys() if name.startswith(_NATIVE)}
    read = {name: (before.get(name), after.get(name)) for name in names}
    answer.send(Report(imports.threads, imports.device_open, read, imports.missing, imports.cpus))
