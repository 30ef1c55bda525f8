"""What it costs an answer that its model is parked in the middle of it, and how soon the model is back."""

import itertools
from collections.abc import AsyncIterator
from contextlib import aclosing
from statistics import median
from typing import Any

from tests.bench.card.parts import plain_copy_s
from tests.bench.card.run import Card, Engine

_PARKED, _OTHER = "qwen", "llama"
_CYCLES = 5
_PROMPT, _TOKENS = 1700, 150
_BETWEEN = 20
"""Tokens of the answer between two parkings."""
_NUMBERS = itertools.count()
BARS = {
    "parked_return_over_copy": ("<=", 1),
    "prefilled_again_tokens": ("<=", 0),
    "equal": (">=", 1),
}


async def figures(card: Card) -> dict[str, float]:
    """A model in the middle of a long answer is parked five times, and another one answers meanwhile.

    ``parked_return_over_copy``: how long the switch back takes over one copy of what was kept of the KV cache, in the
    same worker; medians. ``prefilled_again_tokens``: how many tokens the model computes beyond those of the same answer
    undisturbed. ``equal``: whether it says the same.
    """
    async with card.engine(device_memory_bytes=1 << 40) as engine:
        for alias in (_OTHER, _PARKED):
            await engine.multi.switch(alias)
            await engine.say(alias, 4)
        await engine.worker(count, model=_PARKED)
        expected = [said async for said in _answer(engine)][-1]
        undisturbed = await engine.worker(counted, model=_PARKED)
        returns, copies = [], []
        async with aclosing(_answer(engine)) as answer:
            for _ in range(_CYCLES):
                for _ in range(_BETWEEN):
                    said = await anext(answer)
                await engine.multi.switch(_OTHER)
                info = await engine.multi.park(_PARKED)
                await engine.say(_OTHER, 4)
                report = await engine.multi.switch(_PARKED)
                returns.append(report.ms)
                copies.append(1e3 * await engine.worker(plain_copy_s, info.kv_kept_bytes))
                card.note(kept_mib=info.kv_kept_bytes / (1 << 20), return_ms=returns[-1], copy_ms=copies[-1])
            async for each in answer:
                said = each
        again = await engine.worker(counted, model=_PARKED) - 2 * undisturbed
        return {
            "parked_return_over_copy": median(returns) / median(copies),
            "prefilled_again_tokens": float(again),
            "equal": float(said == expected),
        }


async def _answer(engine: Engine) -> AsyncIterator[tuple[int, ...]]:
    """What the model has said so far to a long prompt, after each token or some."""
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    params = SamplingParams(temperature=0, max_tokens=_TOKENS, ignore_eos=True, detokenize=False)
    ids = TokensPrompt(prompt_token_ids=[3 + (7 * at * at + at) % 400 for at in range(_PROMPT)])
    async for output in engine.multi.generate(ids, params, f"long-{next(_NUMBERS)}", model=_PARKED):
        yield tuple(output.outputs[0].token_ids)


def count(wrapper: Any) -> None:
    """Runs in a worker: from now on the tokens are counted that the model there computes."""
    runner = wrapper.worker.model_runner
    execute, runner.tokens_computed = runner.execute_model, 0

    def counting(scheduled: Any, *given: Any, **more: Any) -> Any:
        runner.tokens_computed += scheduled.total_num_scheduled_tokens
        return execute(scheduled, *given, **more)

    runner.execute_model = counting


def counted(wrapper: Any) -> int:
    """Runs in a worker: how many those were."""
    return int(wrapper.worker.model_runner.tokens_computed)
