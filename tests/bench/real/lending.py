"""How much sooner a peak's first tokens come where idle models lend their KV memory to the one that has the peak."""

import asyncio
import time
from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

from tests.bench.card.models import SHAPES, arguments, ensure
from tests.bench.card.run import Card

_ALIASES = ("red", "green", "blue")
_SHAPE = "lending"
_BLOCK = 64
_PROMPT, _TOKENS = 16, 47
"""One block from its first step to its end: how many run at once is settled when they are let in."""
_AT_ONCE = 12
"""Requests that a share has room for."""
_PAGE = 4096
_NUMBERS = count()
BARS = {
    "kv_lent_ttft_ratio": (">=", 2),
    "kv_lent_equal": (">=", 1),
    "kv_lent_memory_over_budget": ("<=", 1),
}

Answer = tuple[float, tuple[int, ...]]
"""Seconds to the first token, and all tokens."""


async def figures(card: Card) -> dict[str, float]:
    """Three models of one shape take turns; each has a peak of requests of one length when its turn comes.

    ``kv_lent_ttft_ratio``: p99 time to the first token where each has its own third of the KV memory only, over that
    where idle ones lend; each peak needs two shares. The same for peaks of one share and of all three. ``equal``:
    whether all answers are the same in both. ``memory_over_budget``: pages of the KV caches that the worker's system
    had given, at the most that was seen, over the three shares together.
    """
    found: dict[bool, dict[int, list[Answer]]] = {}
    known: dict[str, float] = {}
    for lend in (False, True):
        async with _engine(card, lend=lend) as (multi, budget):
            for alias in _ALIASES:
                await multi.switch(alias)
                await _answer(multi, alias, 1)
            found[lend], present, waits, borrowed = {}, [], [], []
            for shares in (1, 2, 3):
                found[lend][shares] = []
                for alias in _ALIASES:
                    report = await multi.switch(alias)
                    waits.append(report.kv_wait_s)
                    borrowed.append(report.kv_borrowed_mb)
                    peak = [asyncio.create_task(_answer(multi, alias, at)) for at in range(shares * _AT_ONCE)]
                    for answer in asyncio.as_completed(peak):
                        found[lend][shares].append(await answer)
                        present.append(await _pages(multi) * _PAGE)
        if lend:
            known["kv_lent_memory_over_budget"] = max(present) / budget
            known["kv_wait_longest_ms"] = 1e3 * max(waits)
            known["kv_borrowed_most_mib"] = max(borrowed)
    for shares, name in ((1, "kv_lent_ttft_ratio_one"), (2, "kv_lent_ttft_ratio"), (3, "kv_lent_ttft_ratio_three")):
        equal, lent = (_p99([first for first, _ in found[lend][shares]]) for lend in (False, True))
        card.note(**{f"ttft_p99_s_{shares}_equal": equal, f"ttft_p99_s_{shares}_lent": lent})
        known[name] = equal / lent
    said = [sorted(tokens for shares in each.values() for _, tokens in shares) for each in found.values()]
    return {**known, "kv_lent_equal": float(said[0] == said[1])}


@asynccontextmanager
async def _engine(card: Card, *, lend: bool) -> AsyncIterator[tuple[Any, int]]:
    """Three models that share what is left by their weights, and how many bytes of KV memory that is."""
    from service.engine import MultiModelEngine
    from service.engine.models.checkpoint import checkpoint_bytes

    path, shape = ensure(card.folder, _SHAPE)["llama"], SHAPES[_SHAPE]
    numbers = shape.models["llama"][1]
    block = 2 * _BLOCK * numbers["num_key_value_heads"] * numbers["head_dim"] * numbers["num_hidden_layers"]
    share = (_AT_ONCE + 1) * block * (2 if shape.dtype == "bfloat16" else 4)
    size = checkpoint_bytes(str(path), None)
    if lend:  # with its buffers, for which the engine leaves room then
        size += size // 32 + (1 << 20)
    multi = MultiModelEngine(
        dict.fromkeys(
            _ALIASES, replace(arguments(path, shape, eager=True, block_size=_BLOCK), kv_cache_memory_bytes=None)
        ),
        disable_log_stats=True,
        device_memory_bytes=len(_ALIASES) * (size + share),
        lend_kv=lend,
    )
    await multi.initialize(_ALIASES[0])
    try:
        yield multi, len(_ALIASES) * share
    finally:
        multi.shutdown()


async def _answer(multi: Any, alias: str, at: int) -> Answer:
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    params = SamplingParams(temperature=0, max_tokens=_TOKENS, ignore_eos=True, detokenize=False)
    ids = TokensPrompt(prompt_token_ids=[3 + (7 * at * each + 11 * each + at) % 400 for each in range(_PROMPT)])
    asked, first = time.perf_counter(), 0.0
    said: tuple[int, ...] = ()
    async for output in multi.generate(ids, params, f"peak-{next(_NUMBERS)}", model=alias):
        first = first or time.perf_counter() - asked
        said = tuple(output.outputs[0].token_ids)
    return first, said


def _p99(times: list[float]) -> float:
    ordered = sorted(times)
    return ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]


async def _pages(multi: Any) -> int:
    return sum(await multi.collective_rpc(pages_present))


def pages_present(wrapper: Any) -> int:
    """Runs in a worker: how many pages of its models' KV caches the system has given, by its own page tables."""
    from service.platforms.base import kv_tensors, storages

    pages = 0
    for context in vars(wrapper)["gearshift"].by_key.values():
        for storage in storages(kv_tensors(context.worker)):
            first, last = storage.data_ptr() // _PAGE, -(-(storage.data_ptr() + storage.nbytes()) // _PAGE)
            with Path("/proc/self/pagemap").open("rb") as pagemap:
                pagemap.seek(8 * first)
                pages += sum(entry >> 63 for entry in array("Q", pagemap.read(8 * (last - first))))
    return pages
