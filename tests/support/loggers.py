"""A stat logger of our own, for where vLLM takes one; what is logged is counted by model."""

from collections import Counter
from typing import Any

from vllm.v1.metrics.loggers import StatLoggerBase

GENERATED: Counter[str] = Counter()
"""Tokens that each model (by its path) generated in this process's engines, as their loggers were told."""
SCHEDULED: Counter[str] = Counter()
"""How often each was told what the scheduler of its model's core did."""
LOGGED: Counter[str] = Counter()
"""How often each was told to log what it has."""
BY_PLUGIN: Counter[str] = Counter()
"""The same by the logger that vLLM finds as a plugin."""


class Tally(StatLoggerBase):
    """Counts the tokens of one model."""

    counted = GENERATED

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
        self.model: str = vllm_config.model_config.model

    def record(self, scheduler_stats: Any, iteration_stats: Any, *_: Any, **__: Any) -> None:
        if scheduler_stats is not None:
            SCHEDULED[self.model] += 1
        if iteration_stats is not None:
            self.counted[self.model] += iteration_stats.num_generation_tokens

    def log(self) -> None:
        LOGGED[self.model] += 1

    def log_engine_initialized(self) -> None: ...


class PluginTally(Tally):
    counted = BY_PLUGIN
