"""What the switch bench and its baseline have in common: the models, their arguments, the requests, the figures."""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ALIASES = ("llama", "qwen", "lynx")
KV_BYTES = 64 << 20
LOAD = 64
"""Requests in flight of each model, where there are any."""
PROMPT = "Tell me about your day."


def arguments(path: Path) -> Any:
    """Engine arguments of one model, the same for this engine and for the baseline."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    return AsyncEngineArgs(
        model=str(path),
        max_model_len=1024,
        max_num_seqs=LOAD,
        dtype="float32",
        enforce_eager=True,
        kv_cache_memory_bytes=KV_BYTES,
    )


def percentile(values: Sequence[float], share: float) -> float:
    """The value that ``share`` of ``values`` don't exceed."""
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


def show(figures: Mapping[str, float]) -> None:
    print("  ".join(f"{name} {value:.3f}" for name, value in figures.items()), flush=True)


class Run:
    """One engine with three models, the requests that it is given, and what was measured of it."""

    def __init__(self, engine: Any, *, quick: bool) -> None:
        self.engine = engine
        self.quick = quick
        self.figures: dict[str, float] = {}
        self._number = 0
        self.heard = asyncio.Event()
        """Set whenever a request has said something."""

    def note(self, **figures: float) -> None:
        """Keep figures, and print them."""
        self.figures.update({name: round(value, 4) for name, value in figures.items()})
        show(figures)

    async def say(self, model: str, tokens: int, extra: str = "") -> tuple[int, ...]:
        """The token ids of one greedy request."""
        from vllm import SamplingParams

        self._number += 1
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        async for output in self.engine.generate(PROMPT + extra, params, f"bench-{self._number}", model=model):
            self.heard.set()
            ids = tuple(output.outputs[0].token_ids)
        return ids

    async def many(self, model: str, tokens: int) -> list[tuple[int, ...]]:
        """So many requests as the load is, all at once."""
        return list(await asyncio.gather(*(self.say(model, tokens, f" {n}") for n in range(LOAD))))
