"""KV memory is lent in all workers of a model alike."""

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from schemas.contexts import Tier
from service.engine.models.checkpoint import checkpoint_bytes
from tests.bench.real.lending import pages_present
from tests.engine.test_parking import prompt
from tests.support.one_allocation import ONE_ALLOCATION

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(900), ONE_ALLOCATION]
KIB = 1 << 10
PAGE = 4 * KIB
ANSWER = 100


class Peak:
    """Requests of one model at once, and what each has said so far."""

    def __init__(self, multi: Any, alias: str, lengths: range) -> None:
        self._some = asyncio.Condition()
        self._said: dict[int, tuple[int, ...]] = dict.fromkeys(lengths, ())
        self._tasks = [asyncio.create_task(self._ask(multi, alias, length)) for length in lengths]

    async def _ask(self, multi: Any, alias: str, length: int) -> None:
        from vllm import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True)
        async for output in multi.generate(prompt(length), params, f"{alias}-{length}-{id(self)}", model=alias):
            async with self._some:
                self._said[length] = tuple(output.outputs[0].token_ids)
                self._some.notify_all()

    async def has(self, tokens: int) -> None:
        """Until one of them has said so much."""
        async with asyncio.timeout(200), self._some:
            await self._some.wait_for(lambda: max(map(len, self._said.values())) >= tokens)

    async def whole(self) -> dict[int, tuple[int, ...]]:
        await asyncio.gather(*self._tasks)
        return self._said


async def pages(multi: Any) -> list[int]:
    """Of the KV caches, in each worker."""
    found: list[int] = await multi.collective_rpc(pages_present)
    return found


async def opened(arguments: dict[str, Any], floor: int) -> Any:
    """An engine whose models have so many bytes each, in all workers together."""
    from service.engine import MultiModelEngine

    sizes = [checkpoint_bytes(each.model, None) for each in arguments.values()]
    workers = {each.tensor_parallel_size for each in arguments.values()}
    device = sum(size + size // 32 + max(workers) * (1 << 20) + floor for size in sizes)
    multi = MultiModelEngine(arguments, disable_log_stats=True, device_memory_bytes=device)
    await multi.initialize(next(iter(arguments)))
    return multi


async def test_all_ranks_of_a_model_lend_and_give_back_the_same_blocks(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs

    cores = sorted(os.sched_getaffinity(0))
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", f"{cores[0]}|{cores[-1]}")
    common = {"max_model_len": 512, "dtype": "float32", "enforce_eager": True, "tensor_parallel_size": 2}
    arguments = {alias: AsyncEngineArgs(model=str(models[alias]), **common) for alias in ("qwen", "lynx")}
    floor = 1280 * KIB  # of each worker
    async with await opened(arguments, 2 * floor) as multi:
        await multi.switch("lynx")
        expected = await Peak(multi, "lynx", range(300, 306)).whole()
        answers = Peak(multi, "lynx", range(300, 306))
        await answers.has(90)
        report = await multi.switch("qwen")
        assert report.tier_left is Tier.RESIDENT
        assert report.kv_borrowed_mb > 0
        await Peak(multi, "qwen", range(300, 302)).whole()
        assert all(0 < each * PAGE <= 2 * floor + 64 * PAGE for each in await pages(multi))
        assert (await multi.switch("lynx")).kv_preempted > 0
        assert await answers.whole() == expected
