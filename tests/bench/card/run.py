"""An engine on the card, what it is asked, and the figures: told and written as soon as they are there."""

import itertools
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tests.bench.card.models import ALIASES, SHAPES, arguments, ensure, on_cpu
from tests.bench.setting import LOAD

_NUMBERS = itertools.count()


class Figures:
    """Everything that was measured; ``path`` has it all at any time."""

    def __init__(self, path: Path | None, **about: Any) -> None:
        self._path = path
        self._about = about
        self.known: dict[str, float] = {}

    def note(self, **figures: float) -> None:
        rounded = {name: round(value, 5) for name, value in figures.items()}
        self.known |= rounded
        print(json.dumps(rounded), flush=True)
        if self._path is not None:
            self._path.write_text(json.dumps({**self._about, "figures": self.known}, indent=1))


class Card:
    """Where and with what is measured."""

    def __init__(
        self, folder: Path, shape_name: str, figures: Figures, *, cycles: int, backend: str | None = None
    ) -> None:
        self.folder = folder
        self.shape = SHAPES[shape_name]
        self.shape_name = shape_name
        self.figures = figures
        self.backend = backend
        """Whether the workers are in the core's process (``uni``) or in their own (``mp``); vLLM decides on None."""
        self.cycles = cycles
        """How often each model is parked, dropped and loaded to see whether memory grows."""
        self.note: Callable[..., None] = figures.note

    @property
    def paths(self) -> dict[str, Path]:
        return ensure(self.folder, self.shape_name)

    @asynccontextmanager
    async def engine(
        self, *, eager: bool | None = None, shape: str | None = None, **options: Any
    ) -> AsyncIterator["Engine"]:
        """An engine with the models of a shape, the first one loaded.

        Graphs are captured unless ``eager``, or on a CPU.
        """
        from service.engine import MultiModelEngine

        eager, shape = on_cpu() if eager is None else eager, shape or self.shape_name
        paths = ensure(self.folder, shape)
        further = {} if self.backend is None else {"distributed_executor_backend": self.backend}
        models = {alias: arguments(path, SHAPES[shape], eager=eager, **further) for alias, path in paths.items()}
        multi = MultiModelEngine(models, disable_log_stats=True, **options)
        started = time.perf_counter()
        await multi.initialize(ALIASES[0])
        try:
            yield Engine(multi, time.perf_counter() - started)
        finally:
            multi.shutdown()


class Engine:
    """A MultiModelEngine and what is asked of its models: greedy requests of token ids."""

    def __init__(self, multi: Any, start_s: float) -> None:
        self.multi = multi
        self.start_s = start_s

    async def stream(self, alias: str, tokens: int, prompt: int = 0) -> AsyncIterator[tuple[int, ...]]:
        """What a request has said so far, after each token or some; ``prompt`` tells one from another."""
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        ids = TokensPrompt(prompt_token_ids=[3 + (7 * prompt + 11 * at) % 400 for at in range(24)])
        async for output in self.multi.generate(ids, params, f"card-{next(_NUMBERS)}", model=alias):
            yield tuple(output.outputs[0].token_ids)

    async def say(self, alias: str, tokens: int, prompt: int = 0) -> tuple[int, ...]:
        """The tokens of one request."""
        *_, said = [each async for each in self.stream(alias, tokens, prompt)]
        return said

    async def load_all(self) -> None:
        for alias in ALIASES:
            await self.multi.switch(alias)
            await self.say(alias, 4)

    def running(self) -> list[str]:
        """Requests that have not ended, by their internal ids."""
        return [each for alias in ALIASES for each in self.multi.context(alias).output_processor.request_states]

    async def worker(self, function: Callable[..., Any], *args: Any, model: str | None = None) -> Any:
        """A function's answer in the first worker."""
        return (await self.multi.collective_rpc(function, args=args, model=model))[0]


__all__ = ["ALIASES", "LOAD", "Card", "Engine", "Figures"]
