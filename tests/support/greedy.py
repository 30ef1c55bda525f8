"""Greedy requests to a MultiModelEngine, told apart by their prompts, and waited for by what they have generated."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from weakref import WeakKeyDictionary

from schemas.contexts import SwitchReport
from tests.support.waiting import LOOKS, PATIENCE_S

PROMPT = "Tell me about your day."
_NUMBERS = itertools.count()


class Greedy:
    """One running request. Awaiting ``tokens()`` gives all of its token ids."""

    def __init__(
        self,
        multi: Any,
        model: str | None,
        prompt: Any,
        tokens: int,
        *,
        priority: int = 0,
        lora_request: Any = None,
        **params: Any,
    ) -> None:
        from vllm import SamplingParams

        self.multi = multi
        self.id = f"greedy-{next(_NUMBERS)}"
        self.finish_reason: str | None = None
        self.text = ""
        self.logprob: float | None = None
        """Of all its tokens together, where that was asked for."""
        self.seen = 0
        self.outputs = 0
        """In how many pieces its tokens came."""
        self._progress = asyncio.Condition()
        chosen = SamplingParams(**{"temperature": 0, "max_tokens": tokens, "ignore_eos": True, **params})
        self._outputs = multi.generate(
            prompt, chosen, self.id, model=model, priority=priority, lora_request=lora_request
        )
        self.task = asyncio.create_task(self._run(), name=self.id)

    async def _run(self) -> tuple[int, ...]:
        ids: tuple[int, ...] = ()
        async for output in self._outputs:
            ids = tuple(output.outputs[0].token_ids)
            self.text = output.outputs[0].text
            self.logprob = output.outputs[0].cumulative_logprob
            self.finish_reason = output.outputs[0].finish_reason
            async with self._progress:
                self.seen = len(ids)
                self.outputs += 1
                self._progress.notify_all()
        return ids

    async def has(self, tokens: int) -> None:
        """Wait until so many tokens have come."""
        async with asyncio.timeout(PATIENCE_S), self._progress:
            await self._progress.wait_for(lambda: self.seen >= tokens)

    async def tokens(self) -> tuple[int, ...]:
        async with asyncio.timeout(PATIENCE_S):
            return await self.task


async def greedy(
    multi: Any, model: str | None = None, prompt: Any = PROMPT, tokens: int = 24, **params: Any
) -> tuple[int, ...]:
    """The token ids of one request, run to its end."""
    return await Greedy(multi, model, prompt, tokens, **params).tokens()


async def in_core(multi: Any, alias: str) -> dict[str, Any]:
    """What the core says of a model's context."""
    key = multi._frontend(alias).key
    return next(context for context in (await multi.describe())["contexts"] if context["key"] == key)


async def frozen(multi: Any, model: str, away: str, tokens: int) -> tuple[Greedy, SwitchReport]:
    """A request of ``model`` that a switch to ``away`` met in the middle, and what the switch reported."""
    for _ in range(LOOKS):
        await multi.switch(model)
        before = (await in_core(multi, model))["unfinished"]
        request = Greedy(multi, model, PROMPT, tokens)
        await request.has(10)
        report = await multi.switch(away)
        if (await in_core(multi, model))["unfinished"] > before:
            return request, report
        await request.tokens()
    raise AssertionError(f"{LOOKS} requests of {model} had ended before they were met in the middle")


async def alone(multi: Any, model: str, prompt: str = PROMPT, tokens: int = 24) -> tuple[int, ...]:
    """What a model says when nothing interferes: it is active and runs this request only."""
    await multi.switch(model)
    return await greedy(multi, model, prompt, tokens)


@asynccontextmanager
async def serving(multi: Any, model: str) -> AsyncIterator[None]:
    """``model`` is active inside, and again whichever was before."""
    before = multi.active
    await multi.switch(model)
    try:
        yield
    finally:
        await multi.switch(before)


_USUAL: WeakKeyDictionary[Any, dict[tuple[str, str], tuple[int, ...]]] = WeakKeyDictionary()


async def usual(multi: Any, model: str, prompt: str = PROMPT, tokens: int = 24) -> tuple[int, ...]:
    """As ``alone``, asked once in an engine's life: what others are compared with, and not what is looked at."""
    await multi.switch(model)
    known = _USUAL.setdefault(multi, {})
    if len(known.get((model, prompt), ())) < tokens:
        known[model, prompt] = await greedy(multi, model, prompt, tokens)
    return known[model, prompt][:tokens]
