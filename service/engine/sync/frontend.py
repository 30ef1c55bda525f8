"""The synchronous frontends: one unmodified LLMEngine per model, each a client of the one engine core."""

import copy
from collections.abc import Sequence
from typing import Any

from service.engine.models.stat_loggers import Logging, prometheus
from service.engine.sync.cores import Core
from service.engine.versions import vllm_core, vllm_frontend


class SyncFrontend:
    """One model as its caller sees it. Its LLMEngine is made when its model is loaded for the first time."""

    def __init__(self, alias: str, config: Any, *, key: int, core: Core, logging: Logging) -> None:
        self.alias = alias
        self.key = key
        self.config = copy.deepcopy(config)
        self._core = core
        self._logging = logging
        self._llm: Any = None
        self.registry, self._loggers = prometheus(logging)

    @property
    def opened(self) -> bool:
        """Whether its LLMEngine is there."""
        return self._llm is not None

    @property
    def llm(self) -> Any:
        """vLLM's LLMEngine. The model must be loaded, or have been."""
        if self._llm is None:
            self.open()
        return self._llm

    def open(self) -> None:
        """Make the LLMEngine; its model is loaded."""
        self._llm = vllm_frontend.llm_engine(
            self.config,
            lambda **given: self._core.client(self.key, **given),
            log_stats=self._logging.stats,
            aggregate_engine_logging=self._logging.aggregate,
            stat_loggers=[*self._logging.factories, *self._loggers],
        )

    def adopt(self, settled: dict[str, Any]) -> None:
        """Take over what loading settled: the number of blocks, perhaps a shorter context."""
        vllm_core.adopt(self.config, settled)
        if self._llm is not None:
            vllm_frontend.tell_settled(self._llm)

    @property
    def running(self) -> frozenset[str]:
        """Internal ids of the requests that have not ended."""
        return frozenset(self._llm.output_processor.request_states) if self._llm is not None else frozenset()

    def wake(self, tags: Sequence[str] | None) -> bool:
        """Wake the model, or parts of it. Whether all of it is awake."""
        self.llm.wake_up(None if tags is None else list(tags))
        return not self.llm.is_sleeping()

    def let_go(self) -> None:
        """End what there is of the model in its core: a profile, and which images and sounds it has."""
        if self._llm is not None:
            self._llm.renderer.clear_mm_cache()
            if self.config.profiler_config.profiler is not None:
                self._llm.stop_profile()

    @property
    def ready(self) -> bool:
        """Whether outputs are there to be had without a step."""
        return self._llm is not None and self._core.waiting(self.key)

    def abort(self, requests: frozenset[str]) -> None:
        """End requests (by internal id)."""
        if requests:
            self.llm.abort_request(sorted(requests), internal=True)
