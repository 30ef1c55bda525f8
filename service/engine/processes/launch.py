"""The engine core's processes: started with a client slot per model and some to spare, watched, and stopped."""

import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import structlog

from service.engine.processes.fork_server import server
from service.engine.system import envelope, segments
from service.engine.system.environment import CHANGING, environment_of
from service.engine.versions import vllm_core

log = structlog.get_logger(__name__)

_INSECURE = "VLLM_ALLOW_INSECURE_SERIALIZATION"
_SOCKETS = "VLLM_RPC_BASE_PATH"
"""Where vLLM makes sockets by random names, which it leaves there when it ends."""
_LONGEST_FOLDER = 107 - 37
"""Of these names, for Linux: a longer one leaves them where vLLM has them."""
SPARE_CLIENTS = 8
"""Slots for models that models.yaml gets while the engine runs; a slot costs two idle sockets on either side."""
STOP_GRACE_S = 15.0
"""How long a core may take to stop: longer than it waits for a worker that hangs (5 s, and 4 s after SIGTERM)."""


class EngineProcesses:
    """The core and its workers, from their start to their end."""

    def __init__(self, config: Any, *, clients: int, log_stats: bool, environment: Mapping[str, str | None]) -> None:
        """Processes for so many clients, a model each, with ``config`` as the first one; ``start`` starts them.

        ``environment`` is what loading that model wants there; None clears a variable.
        """
        self._config = config
        self._clients = clients
        self._log_stats = log_stats
        self._environment = environment
        self._folder = tempfile.mkdtemp(prefix="gearshift-", dir=os.environ.get(_SOCKETS) or None)
        self._key = envelope.new_key()
        self._server = ExitStack()
        self._started: vllm_core.Launch | None = None
        self._segments: frozenset[str] = frozenset()
        self._stopping = False

    def start(self) -> None:
        """Start the core. Blocks until it serves (half a minute), or until another thread calls ``stop``.

        Engines that are started at once are so one after another.

        Raises RuntimeError where it does not come up; nothing is left running then.
        """
        from vllm.v1.executor import Executor

        refuse_insecure_serialization()
        executor_class = Executor.get_class(self._config)
        try:
            sockets = {_SOCKETS: self._folder} if len(self._folder) <= _LONGEST_FOLDER else {}
            with (
                CHANGING,
                environment_of(inherited(self._environment)),
                vllm_core.starting_with(self._server.enter_context(server.lent(self._config))),
                environment_of({envelope.KEY_VARIABLE: self._key, **sockets}),
                vllm_core.launching(
                    self._config,
                    executor_class,
                    log_stats=self._log_stats,
                    folder=self._folder,
                    clients=self._clients,
                ) as launch,
            ):
                self._started = launch
                if self._stopping:
                    self._end(0)
            self._segments = segments.segments_of(launch.pids)
        except BaseException:
            self._server.close()
            shutil.rmtree(self._folder, ignore_errors=True)
            raise

    @property
    def _launch(self) -> vllm_core.Launch:
        assert self._started is not None
        return self._started

    @property
    def pids(self) -> tuple[int, ...]:
        """The process id of each engine core."""
        return self._launch.pids

    @property
    def slots(self) -> int:
        """How many clients the core was started for."""
        return len(self._launch.addresses)

    @property
    def replies(self) -> str:
        """Where the core may send answers to, beside a client's own way."""
        return f"{self._folder}/r"

    def address(self, client: int) -> dict[str, Any]:
        """Where client ``client`` talks to the core."""
        return self._launch.addresses[client]

    def seal(self, value: Any) -> bytes:
        """``value`` in an envelope that this launch's core opens."""
        return envelope.seal(value, key=self._key)

    def unseal(self, sealed: bytes) -> Any:
        """What this launch's core put into an envelope."""
        return envelope.unseal(sealed, key=self._key)

    def watch(self, died: Callable[[str], None]) -> None:
        """Call ``died`` with the reason, from a thread, as soon as a core ends that was not stopped."""

        def wait() -> None:
            self._launch.manager.monitor_engine_liveness()
            if not self._stopping:
                ended = ", ".join(f"{name} with code {code}" for name, code in self._codes().items())
                died(f"the engine core ended: {ended or 'for no known reason'}")

        threading.Thread(target=wait, name="gearshift-engine-watch", daemon=True).start()

    def _codes(self) -> dict[str, int]:
        return {process.name: process.exitcode for process in self._launch.manager.processes if process.exitcode}

    def stop(self, timeout: float | None = None) -> None:
        """End every process, by force after ``timeout`` seconds (None: ``STOP_GRACE_S``). May be called twice."""
        if self._stopping:
            return
        self._stopping = True
        if self._started is not None:
            self._end(timeout)
        self._server.close()
        segments.unlink(self._segments)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _end(self, timeout: float | None) -> None:
        self._launch.manager.shutdown(timeout=STOP_GRACE_S if timeout is None else timeout)
        if self._launch.coordinator is not None:
            self._launch.coordinator.shutdown()
        self._launch.close_listeners()


def inherited(wanted: Mapping[str, str | None]) -> dict[str, str | None]:
    """What the engine's processes inherit: ``wanted``, and our plugin where plugins are filtered by name."""
    values = dict(wanted)
    plugins = os.environ.get("VLLM_PLUGINS")
    if plugins is not None and "gearshift" not in plugins.split(","):
        values["VLLM_PLUGINS"] = ",".join(filter(None, (plugins, "gearshift")))
    return values


def refuse_insecure_serialization() -> None:
    """Unset vLLM's switch for pickles that nobody signed, in this process and those to come, and say so.

    The guide of vllm-gaudi's multi-model server tells its users to export it.
    """
    if os.environ.pop(_INSECURE, "0") not in {"", "0"}:
        log.warning(
            "engine.insecure_serialization_refused",
            variable=_INSECURE,
            reason="it is not needed here, and lets anyone who reaches the engine's sockets run code; it is off now, "
            "and whatever is pickled must be signed",
        )
