"""The frontends: one unmodified AsyncLLM per model, each a client of the one engine core.

A frontend exists whether or not its model is loaded. As long as it is not, its requests wait: for the answer to
vLLM's first question (which tasks the model supports), or, already sent, in the core.
"""

import copy
from dataclasses import dataclass
from typing import Any

from service.engine import versions
from service.engine.launch import EngineProcesses


@dataclass(frozen=True, slots=True)
class Logging:
    """What frontends log, in AsyncLLM's terms."""

    stats: bool = True
    requests: bool = False
    aggregate: bool = False
    factories: tuple[Any, ...] = ()


class Frontend:
    """One model as its callers see it. ``llm`` is vLLM's AsyncLLM, ``key`` the context's key in the core."""

    def __init__(
        self,
        alias: str,
        config: Any,
        *,
        key: int,
        processes: EngineProcesses,
        logging: Logging,
    ) -> None:
        from vllm.v1.engine.async_llm import AsyncLLM
        from vllm.v1.executor import Executor

        self.alias = alias
        self.key = key
        self._processes = processes
        self.registry: Any = None
        """The Prometheus registry with this model's metrics, where statistics are kept."""
        adopted = copy.deepcopy(config)
        unsettled = versions.settled(adopted)
        self.llm = AsyncLLM(
            vllm_config=adopted,
            executor_class=Executor.get_class(adopted),
            log_stats=logging.stats,
            log_requests=logging.requests,
            stat_loggers=[*logging.factories, *self._prometheus(logging)],
            aggregate_engine_logging=logging.aggregate,
            client_addresses=processes.address(key),
            client_index=key,
        )
        # The core greets every client with what its first model settled.
        versions.adopt(adopted, unsettled)

    def _prometheus(self, logging: Logging) -> list[Any]:
        """This model's metrics in a registry of its own: in the common one each model removes the others'."""
        if not logging.stats:
            return []
        self.registry, logger = versions.prometheus_logger()
        return [logger]

    def adopt(self, settled: dict[str, Any]) -> None:
        """Take over what loading settled: the number of blocks, perhaps a shorter context."""
        versions.adopt(self.llm.vllm_config, settled)

    @property
    def running(self) -> frozenset[str]:
        """Internal ids of the requests that have not ended."""
        return frozenset(self.llm.output_processor.request_states)

    def tokens(self, request_id: str) -> int:
        """Tokens generated so far by the request that its caller named ``request_id``."""
        processor = self.llm.output_processor
        states = [processor.request_states.get(name) for name in processor.external_req_ids.get(request_id, ())]
        return sum(len(state.detokenizer.output_token_ids) for state in states if state and state.detokenizer)

    async def call_workers(self, method: Any, args: Any, kwargs: dict[str, Any]) -> list[Any]:
        """Run a method of the workers on this model; the workers open the envelope, the core does not."""
        answer = await self.ask("rpc", self.key, self._processes.seal((method, args, kwargs)))
        values: list[Any] = self._processes.unseal(answer)
        return values

    async def ask(self, command: str, *args: Any) -> Any:
        """One command on contexts, answered by the core. Raises EngineDeadError, or Exception with its message."""
        return await self.llm.engine_core.call_utility_async("gearshift", command, args)

    def fail(self, error: BaseException) -> None:
        """The engine is dead: everything that waits for an answer gets the error now."""
        client = self.llm.engine_core
        client.resources.engine_dead = True
        for future in client.utility_results.values():
            if not future.done():
                future.set_exception(error)
        client.utility_results.clear()
        client.outputs_queue.put_nowait(error)

    async def hand_back(self, error: BaseException) -> None:
        """End every request with ``error``: the callers' generators raise it, as the cause of vLLM's own."""
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

    def close(self) -> None:
        """Close its sockets and tasks, and the socket contexts, which vLLM leaves to the garbage collector."""
        client = self.llm.engine_core
        self.llm.shutdown()
        client.resources.ctx.destroy(linger=0)
