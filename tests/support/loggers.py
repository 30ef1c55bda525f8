"""Stat loggers of our own, for where vLLM takes one; what they hear is counted by model."""

from collections import Counter
from typing import Any, ClassVar

from vllm.v1.metrics.loggers import StatLoggerBase


class Tally(StatLoggerBase):
    """Counts, by the path of a model, in all of this process's engines."""

    generated: ClassVar[Counter[str]] = Counter()
    """Tokens."""
    scheduled: ClassVar[Counter[str]] = Counter()
    """How often it was told what the scheduler of the model's core did."""
    logged: ClassVar[Counter[str]] = Counter()
    """How often it was told to log what it has."""
    refused: ClassVar[frozenset[str]] = frozenset()
    """Models that it can't be made for."""

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
        self.model: str = vllm_config.model_config.model
        if self.model in self.refused:
            raise OSError("there is nowhere to log to")

    def record(self, scheduler_stats: Any, iteration_stats: Any, *_: Any, **__: Any) -> None:
        if scheduler_stats is not None:
            self.scheduled[self.model] += 1
        if iteration_stats is not None:
            self.generated[self.model] += iteration_stats.num_generation_tokens

    def log(self) -> None:
        self.logged[self.model] += 1

    def log_engine_initialized(self) -> None: ...


class PluginTally(Tally):
    """The same, for what vLLM finds as a plugin."""

    generated: ClassVar[Counter[str]] = Counter()
    scheduled: ClassVar[Counter[str]] = Counter()
    logged: ClassVar[Counter[str]] = Counter()
