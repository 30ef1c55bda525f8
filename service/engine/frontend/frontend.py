"""The frontends: one AsyncLLM per model, each a client of the one engine core.

A frontend exists whether or not its model is loaded. As long as it is not, its requests wait: for the answer to
vLLM's first question (which tasks the model supports), or, already sent, in the core. They can be aborted all the same.
"""

import asyncio
import copy
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from zmq.sugar.socket import Socket

from service.engine.frontend.early import Early, early_llm
from service.engine.frontend.ranks import Command, ask_all
from service.engine.models.changes import Abort, Ask, EndStreams, Finish, HandBack, LetGo, Step, Wake
from service.engine.models.stat_loggers import Logging, Steps, prometheus
from service.engine.processes.launch import EngineProcesses
from service.engine.versions import vllm_core, vllm_frontend
from service.errors import UnknownModel

_DRAIN_POLL_S = 0.005


class Frontend:
    """One model as its callers see it. ``llm`` is vLLM's AsyncLLM, ``key`` the context's key in the core.

    ``client`` is the core's client with this key.
    """

    def __init__(
        self,
        alias: str,
        config: Any,
        *,
        key: int,
        processes: EngineProcesses,
        logging: Logging,
        client: Any,
    ) -> None:
        self.alias = alias
        self.key = key
        self.early = Early()
        """Its requests that wait for the model's first load."""
        self._processes = processes
        self.registry, loggers = prometheus(logging)
        """The Prometheus registry with this model's metrics, where statistics are kept."""
        self.steps = Steps()
        """How many steps of it were heard of, where they are."""
        if logging.stats:
            loggers.append(self.steps.logger())
        adopted = copy.deepcopy(config)
        self.llm = vllm_frontend.async_llm(
            adopted,
            kind=partial(early_llm(), self.early),
            client=client,
            log_stats=logging.stats,
            log_requests=logging.requests,
            stat_loggers=[*logging.factories, *loggers],
            aggregate_engine_logging=logging.aggregate,
        )

    def adopt(self, settled: dict[str, Any]) -> None:
        """Take over what loading settled: the number of blocks, perhaps a shorter context."""
        vllm_core.adopt(self.llm.vllm_config, settled)
        vllm_frontend.set_kv_event_sources(self.llm.engine_core, settled["kv_events"])
        vllm_frontend.tell_settled(self.llm)

    @property
    def running(self) -> frozenset[str]:
        """Internal ids of the requests that have not ended, those included that wait for their model's first load."""
        return frozenset(self.llm.output_processor.request_states) | self.early.keys()

    def tokens(self, request_id: str) -> int:
        """Tokens generated so far by the request that its caller named ``request_id``."""
        processor = self.llm.output_processor
        states = [processor.request_states.get(name) for name in processor.external_req_ids.get(request_id, ())]
        return sum(len(state.detokenizer.output_token_ids) for state in states if state and state.detokenizer)

    async def perform(self, step: Step, loading: Any, *, within_s: float, undo: Sequence[Command] = ()) -> Any:
        """One step of a change of contexts; ``loading`` is what loading the model takes, where the step is to load it.

        The core gives a load up after ``within_s`` seconds; ``undo`` is for ``ask``, and so is what is raised.
        """
        match step:
            case Ask():
                sealed = None if loading is None else await asyncio.to_thread(self._processes.seal, loading)
                return await self.ask(step.command, self.key, *step.arguments(sealed, within_s), undo=undo)
            case Finish(requests=requests, seconds=seconds):
                deadline = time.perf_counter() + seconds
                while requests & self.running and time.perf_counter() < deadline:  # noqa: ASYNC110 - nobody tells
                    await asyncio.sleep(_DRAIN_POLL_S)
            case Abort(requests=requests):
                await self.llm.abort(sorted(requests), internal=True)
            case HandBack(error=error):
                await self._hand_back(error)
            case EndStreams(error=error):
                await self.end_waiting_streams(error)
            case LetGo():
                await self.llm.renderer.clear_mm_cache_async()
                vllm_frontend.set_kv_event_sources(self.llm.engine_core, {})
                if self.llm.vllm_config.profiler_config.profiler is not None:
                    await self.llm.stop_profile()
            case Wake(tags=tags):
                return await self.wake(tags)
        return None

    async def wake(self, tags: Sequence[str] | None) -> bool:
        """Wake the model, or parts of it. Whether all of it is awake."""
        await self.llm.wake_up(None if tags is None else list(tags))
        return not await self.llm.is_sleeping()

    async def call_workers(self, method: Any, args: Any, kwargs: dict[str, Any]) -> list[Any]:
        """Run a method of the workers on this model; the workers open the envelope, the core does not."""
        answer = await self.ask("rpc", self.key, self._processes.seal((method, args, kwargs)))
        return [value for sealed in answer["sealed"] for value in self._processes.unseal(sealed)]

    async def ask(self, command: str, *args: Any, undo: Sequence[Command] = ()) -> Any:
        """One command on contexts, answered by the cores of all data-parallel ranks: all do it, or none has.

        ``undo`` takes it back in those that could where another could not. Raises EngineDeadError, RanksApart, or
        Exception with the core's message.
        """
        return await ask_all(self.llm.engine_core, (command, *args), undo)

    def answered(self, call_id: int, answer: Any) -> None:
        """A call's answer that did not come by vLLM's client. Where nobody waits for it any more it is nobody's."""
        future = self.llm.engine_core.utility_results.pop(call_id, None)
        if future is not None and not future.done():
            future.set_result(answer)

    def fail(self, error: BaseException) -> None:
        """The engine is dead: everything that waits for an answer gets the error now."""
        client = self.llm.engine_core
        client.resources.engine_dead = True
        self._fail_calls(error)
        client.utility_results.clear()
        client.outputs_queue.put_nowait(error)

    async def _hand_back(self, error: BaseException) -> None:
        """End every request with ``error``: the callers' generators raise it, as the cause of vLLM's own."""
        self.early.end(error)
        await self._end(dict(self.llm.output_processor.request_states), error)

    async def end_waiting_streams(self, error: BaseException) -> None:
        """End the requests that wait for more of their prompt: they hold KV cache without being scheduled."""
        states = {
            name: state
            for name, state in self.llm.output_processor.request_states.items()
            if state.streaming_input and state.input_chunk_queue is None
        }
        await self._end(states, error)

    async def _end(self, states: dict[str, Any], error: BaseException) -> None:
        await self.llm.abort(sorted(states), internal=True)
        for state in states.values():
            if state.queue is not None:
                state.queue.put(error)

    def retire(self) -> Any:
        """The model is no more: end its AsyncLLM, and answer with its client, for another model to use.

        The core greets a client once, so a new one would never hear of it. Calls that the core has not answered fail.
        They stay known to the client: an answer that still comes is to one of them. Whoever still holds the AsyncLLM
        is told, whatever it asks.
        """
        self._fail_calls(UnknownModel(f"{self.alias} was removed"))
        client = self._shut_down()
        self.llm.engine_core = _Removed(self.alias)
        return client

    def close(self) -> None:
        """Close its sockets and tasks; who waits for it, or still holds its AsyncLLM, finds a dead engine."""
        from vllm.v1.engine.exceptions import EngineDeadError

        with suppress(RuntimeError):  # where the event loop is closed nobody waits any more
            self._end_waiting(EngineDeadError("the engine was shut down"))
        client = self._shut_down()
        close_client(client)
        self.llm.engine_core = client

    def _end_waiting(self, error: Exception) -> None:
        """End with an error what was asked and has no answer: requests, wherever they are, and calls."""
        self.early.end(error)
        self.llm.output_processor.propagate_error(error)
        self._fail_calls(error)

    def _fail_calls(self, error: BaseException) -> None:
        for future in self.llm.engine_core.utility_results.values():
            if not future.done():
                future.set_exception(error)

    def _shut_down(self) -> Any:
        """End its AsyncLLM, but not its client, and answer with that."""
        client, self.llm.engine_core = self.llm.engine_core, None
        self.llm.shutdown()
        return client


class _Removed:
    """In the place of the client of a model that was removed."""

    def __init__(self, alias: str) -> None:
        self._alias = alias

    def shutdown(self, timeout: float | None = None) -> None:
        """There is nothing to end."""

    def __getattr__(self, name: str) -> Any:
        raise UnknownModel(f"{self._alias} was removed")


def close_client(client: Any) -> None:
    """Close a client, and its socket contexts, which vLLM leaves to the garbage collector.

    The sockets are closed one by one: vLLM 0.26 leaves them open where the client's loop has ended, and their context
    forgets them when the garbage collector takes all at once, and would wait for them for ever.
    """
    client.shutdown()
    for resource in list(vars(client.resources).values()):
        if isinstance(resource, Socket):
            resource.close(linger=0)
    client.resources.ctx.destroy(linger=0)
