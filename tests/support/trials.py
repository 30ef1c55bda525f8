"""Trials of constraints without a model: one whose configuration takes for ever to read in a trial."""

import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil

from service.engine.processes.trial import Trials

WITHIN_S = 240
"""Where the processors have other work, vLLM alone is imported for minutes."""


def configuration(*, sleeps: bool) -> Any:
    """A model's, made where cloudpickle takes its code along."""

    class Config(SimpleNamespace):
        @property
        def model_config(self) -> Any:
            self.home = getattr(self, "home", os.getpid())
            if sleeps and os.getpid() != self.home:
                time.sleep(600)
            return SimpleNamespace(skip_tokenizer_init=True)

    return Config(
        structured_outputs_config=SimpleNamespace(backend="guidance", enable_in_reasoning=False),
        scheduler_config=SimpleNamespace(max_num_seqs=1),
        parallel_config=SimpleNamespace(distributed_executor_backend="mp"),
    )


def under_way(trials: Trials) -> list[psutil.Process]:
    """The processes of a trial, once it goes first where memory is short: that which waits for it, and its own."""
    until = time.monotonic() + WITHIN_S
    while time.monotonic() < until:
        started = trials._started
        found = [] if started is None else psutil.Process(started.process.pid).children(recursive=True)
        if len(found) == 2 and Path(f"/proc/{found[1].pid}/oom_score_adj").read_text() == "1000\n":
            return found
        time.sleep(0.01)
    raise AssertionError("no trial was begun")
