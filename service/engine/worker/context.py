"""A context in a worker process: one model's whole worker, and what was its own of the process."""

from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from service.engine.versions.held import Holdings
from service.engine.worker.slices import Pieces, Sliced
from service.platforms.base import Asleep


@dataclass(slots=True)
class WorkerContext:
    """One model in this process."""

    worker: Any
    vllm_config: Any
    mm_receiver_cache: Any
    held: Holdings | None = None
    """What the process held for it when it left."""
    environment: dict[str, str | None] = field(default_factory=dict)
    """Environment variables likewise."""
    asleep: Asleep = field(default_factory=Asleep)
    used_before: int = 0
    """Bytes in use on the device before it was built; none for the model that the process started with.

    Where it is built in slices, what others take or give back in between is none of it.
    """
    used_after: int = 0
    """Bytes in use after the last slice."""
    weights: int | None = None
    """Bytes of its weights; None: they may have changed. To look at all that a model has takes milliseconds."""
    overhead: int | None = None
    """Bytes that it takes of the device beside weights and KV cache; measured once it is loaded."""
    weights_away: bool = False
    """Whether the weights are on the host only."""
    emptied: set[str] = field(default_factory=set)
    """What sleeping at level 2 let go of and waking has not yet brought back."""
    kv_config: Any = None
    waking: Future[None] | Pieces | None = None
    """It is being brought back, in a thread of its own or between the steps of the one that runs."""
    sliced: Sliced | Pieces | None = None
    """What is done to it in slices, or was last: its load, the making of its KV cache, or its way back."""


class Unseated:
    """What sits in the wrapper where a model could not be seated: it can do nothing."""

    def __init__(self, why: str) -> None:
        self._why = why

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"no model is seated: {self._why}")

    def shutdown(self) -> None:
        """vLLM ends what is seated with the process."""
