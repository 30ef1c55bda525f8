"""Kinds of models asked in a running MultiModelEngine, in the words in which each is asked alone."""

import asyncio
from contextlib import aclosing
from typing import Any

from tests.support.greedy import Greedy
from tests.support.kinds import KINDS, TOKENS, Said, adapter_of, engine_args, numbers
from tests.support.waiting import PATIENCE_S


class Asked:
    """One question under way. ``has`` waits for the first tokens; a vector comes as a whole."""

    def __init__(self, multi: Any, name: str) -> None:
        kind = KINDS[name]
        self._greedy = None if kind.pools else Greedy(multi, name, kind.prompt(), TOKENS, lora_request=adapter_of(name))
        self.task = asyncio.create_task(_vector(multi, name)) if self._greedy is None else self._greedy.task

    async def has(self, tokens: int) -> None:
        if self._greedy is not None:
            await self._greedy.has(tokens)

    async def said(self) -> Said:
        async with asyncio.timeout(PATIENCE_S):
            answer: Said = await self.task
            return answer


async def _vector(multi: Any, name: str) -> Said:
    from vllm import PoolingParams

    params = PoolingParams(task="embed")
    request = f"pooled-{id(asyncio.current_task())}"
    async with aclosing(multi.encode(KINDS[name].prompt(), params, request, model=name)) as outputs:
        async for output in outputs:
            said = numbers(output)
    return said


async def said(multi: Any, name: str) -> Said:
    """What a kind's model says now, made active."""
    await multi.switch(name)
    return await Asked(multi, name).said()


def long_run(request: Any) -> bool:
    """Whether long tests are run, too."""
    return "not long" not in (request.config.option.markexpr or "")


def async_args(name: str, **more: Any) -> Any:
    """A kind's AsyncEngineArgs."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    return AsyncEngineArgs(**{**engine_args(name), **more})


def engine_of(*names: str, **options: Any) -> Any:
    """A MultiModelEngine with a model of each kind, not yet started."""
    from service.engine import MultiModelEngine

    arguments = {name: async_args(name) for name in names}
    return MultiModelEngine(arguments, disable_log_stats=True, device_memory_bytes=1 << 40, **options)
