"""Where the core of a synchronous engine runs: in processes of its own, or in the caller's.

Either way each model's LLMEngine gets a client of vLLM's own kind, of the one core, that says whose requests and calls
it brings. Commands on contexts reach a core of its own by a utility call, signed where they bring something along; a
core in the caller's process has no such call, and is asked directly.
"""

import copy
import gc
import queue
import time
import uuid
from collections.abc import Mapping
from concurrent.futures import Future
from functools import cache
from typing import Any, NoReturn, Protocol

from service.engine.core.context import ending_by_failed_steps
from service.engine.processes.launch import EngineProcesses, inherited
from service.engine.system.environment import environment_of


class Core(Protocol):
    """The one core of a synchronous engine."""

    pid: int

    def client(self, key: int, **given: Any) -> Any:
        """A client of context ``key``: vLLM's EngineCoreClient, made of what LLMEngine would make its own of."""
        ...

    def wrap(self, value: Any) -> Any:
        """``value`` as a command takes it along."""
        ...

    def ask(self, command: str, *arguments: Any, timeout_s: float | None = None, warm_up_s: float = 0.0) -> Any:
        """One command on contexts, which may take ``warm_up_s`` longer if it has begun to warm a model up.

        Raises EngineDeadError, also where it takes longer than ``timeout_s``, or what went wrong in the core.
        """
        ...

    def waiting(self, key: int) -> bool:
        """Whether outputs of a context can be had without a step."""
        ...

    def stop(self) -> None:
        """Free every context. May be called twice."""
        ...


class SeparateCore:
    """The core in a process of its own, its workers in theirs. Starting it blocks until it serves (half a minute)."""

    def __init__(self, config: Any, *, clients: int, log_stats: bool, environment: Mapping[str, str | None]) -> None:
        self._clients: dict[int, Any] = {}
        self._processes = EngineProcesses(config, clients=clients, log_stats=log_stats, environment=environment)
        self._processes.start()
        self._processes.watch(self._report_death)
        self.pid = self._processes.pids[0]

    def client(self, key: int, **given: Any) -> Any:
        self._clients[key] = client = _separate_client()(self._processes, key, **given)
        return client

    def wrap(self, value: Any) -> bytes:
        return self._processes.seal(value)

    def ask(self, command: str, *arguments: Any, timeout_s: float | None = None, warm_up_s: float = 0.0) -> Any:
        began = time.monotonic()
        try:
            return self.answer(command, arguments, timeout_s, warm_up_s)
        except TimeoutError:
            took = f"{time.monotonic() - began:.0f} s"
            self._give_up(f"the engine core is stuck: it neither loaded a model nor gave it up in {took}")

    def answer(self, command: str, arguments: tuple[Any, ...], timeout_s: float | None, warm_up_s: float) -> Any:
        """What the core answers. Raises TimeoutError, and whatever ``ask`` does."""
        warming = self._clients[0].call("warming", ()) if warm_up_s else None
        answer = self._clients[0].call(command, arguments)
        try:
            return answer.result(timeout_s)
        except TimeoutError:
            if warming is None or not warming.done():
                raise
        return answer.result(warm_up_s)

    def waiting(self, key: int) -> bool:
        return not self._clients[key].outputs_queue.empty()

    def _report_death(self, reason: str) -> None:
        """Called from the watching thread: whoever waits for an answer or for outputs gets the error now."""
        from vllm.v1.engine.exceptions import EngineDeadError

        for client in tuple(self._clients.values()):
            client.fail(EngineDeadError(reason))

    def _give_up(self, reason: str) -> NoReturn:
        """The core can't be worked with any more, though it runs. Raises EngineDeadError."""
        from vllm.v1.engine.exceptions import EngineDeadError

        self._report_death(reason)
        self._processes.stop(0)
        raise EngineDeadError(reason)

    def stop(self) -> None:
        for client in self._clients.values():
            client.close()
        self._clients.clear()
        self._processes.stop()


@cache
def _separate_client() -> Any:
    from vllm.v1.engine import EngineCoreRequestType
    from vllm.v1.engine.core_client import MPClient, SyncMPClient

    class Addressed(MPClient):
        """What SyncMPClient starts from, given the addresses that it does not pass on."""

        processes: EngineProcesses
        key: int

        def __init__(self, **given: Any) -> None:
            super().__init__(client_addresses=self.processes.address(self.key), **given)

    class SeparateClient(SyncMPClient, Addressed):
        """One model's client of a core in another process."""

        def __init__(self, processes: EngineProcesses, key: int, **given: Any) -> None:
            self.processes, self.key = processes, key
            super().__init__(**given)

        def _send_input(self, request_type: Any, request: Any) -> None:
            if request_type == EngineCoreRequestType.UTILITY:
                request = (self.key, *request[1:])
            elif request_type == EngineCoreRequestType.ADD:
                request.client_index = self.key
            super()._send_input(request_type, request)

        def call(self, command: str, arguments: tuple[Any, ...]) -> Future[Any]:
            call_id = uuid.uuid4().int >> 65
            self.utility_results[call_id] = future = Future[Any]()
            self._send_input(EngineCoreRequestType.UTILITY, (self.key, call_id, "gearshift", (command, arguments)))
            return future

        def collective_rpc(
            self, method: Any, timeout: float | None = None, args: Any = (), kwargs: Any = None
        ) -> list[Any]:
            """It travels in a signed envelope: arguments may be anything that can be pickled."""
            sealed = self.processes.seal((method, args, kwargs or {}))
            answer = self.call("rpc", (self.key, sealed)).result(timeout)
            return [value for each in answer["sealed"] for value in self.processes.unseal(each)]

        def fail(self, error: BaseException) -> None:
            self.resources.engine_dead = True
            for future in tuple(self.utility_results.values()):
                if not future.done():
                    future.set_exception(error)
            self.utility_results.clear()
            self.outputs_queue.put_nowait(error)

        def close(self) -> None:
            self.shutdown()
            self.output_queue_thread.join()
            self.ctx.destroy(linger=0)

    return SeparateClient


class CoreHere:
    """The core in the caller's process, whose steps the caller runs."""

    def __init__(self, config: Any, *, log_stats: bool, environment: Mapping[str, str | None]) -> None:
        from vllm.v1.engine.core import EngineCore
        from vllm.v1.executor import Executor

        from service.engine.core.routing import open_contexts
        from service.engine.processes import plugin

        plugin.register()
        with environment_of(inherited(environment)):
            self.live = EngineCore(self.wrap(config), Executor.get_class(config), log_stats)
        self.live.output_queue = self._outputs = queue.SimpleQueue[tuple[int, Any]]()
        self.contexts = open_contexts(self.live)
        self._early: dict[int, list[Any]] = {}
        self.pid = 0

    def client(self, key: int, **_: Any) -> Any:
        return _client_here()(self, key)

    def wrap(self, value: Any) -> Any:
        """A copy: loading changes it, and it may be loaded again."""
        return copy.deepcopy(value)

    def ask(self, command: str, *arguments: Any, **_limits: Any) -> Any:
        with ending_by_failed_steps():
            return self.contexts.commands[command](*arguments)

    def waiting(self, key: int) -> bool:
        while not self._outputs.empty():  # what a switch found on the device
            client, outputs = self._outputs.get()
            self._early.setdefault(client, []).append(outputs)
        return bool(self._early.get(key))

    def step(self, key: int) -> Any:
        """The next outputs of a context, by a step of the active one where none are there already."""
        from vllm.v1.engine import EngineCoreOutputs

        if self.waiting(key):
            return self._early[key].pop(0)
        outputs, executed = self.live.step_fn()
        self.live.post_step(model_executed=executed)
        return (outputs or {}).get(key) or EngineCoreOutputs()

    def stop(self) -> None:
        if not hasattr(self, "live"):
            return
        self.live.shutdown()
        del self.live, self.contexts
        gc.unfreeze()
        gc.collect()


@cache
def _client_here() -> Any:
    from vllm.v1.engine.core_client import InprocClient

    class ClientHere(InprocClient):
        """One model's client of a core in this process."""

        def __init__(self, here: CoreHere, key: int) -> None:
            self._here = here
            self._key = key

        @property
        def engine_core(self) -> Any:
            """The context's own core; its methods reach its model, active or not."""
            return self._here.contexts.of(self._key).core

        def get_output(self) -> Any:
            return self._here.step(self._key)

        def add_request(self, request: Any) -> None:
            request.client_index = self._key
            live = self._here.live
            live.add_request(*live.preprocess_add_request(request))

        def abort_requests(self, request_ids: list[str]) -> None:
            if request_ids:
                self._here.live.abort_requests(request_ids)

        def shutdown(self, timeout: float | None = None) -> None:
            """The core is not this client's to stop."""

    return ClientHere
