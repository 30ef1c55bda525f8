"""Many calls from a few at a time, their answers in the order of what was asked."""

import asyncio
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable
from typing import Literal, TypeVar

from service.errors import GearshiftError

T = TypeVar("T")
R = TypeVar("R")
Errors = Literal["raise", "return"]


async def in_order(
    items: Iterable[T] | AsyncIterable[T],
    call: Callable[[T], Awaitable[R]],
    *,
    concurrency: int,
    errors: Errors = "raise",
) -> AsyncIterator[R | GearshiftError]:
    """``call`` of each item, ``concurrency`` of them at once; items are taken when there is room for them.

    What is under way when the iteration ends early is cancelled.
    """
    window: deque[asyncio.Task[R]] = deque()

    async def one(item: T) -> R:
        return await call(item)

    try:
        async for item in _each(items):
            if len(window) >= concurrency:
                yield await _outcome(window.popleft(), errors)
            window.append(asyncio.create_task(one(item), name="client-map"))
        while window:
            yield await _outcome(window.popleft(), errors)
    finally:
        for task in window:
            task.cancel()
        await asyncio.gather(*window, return_exceptions=True)


async def _each(items: Iterable[T] | AsyncIterable[T]) -> AsyncIterator[T]:
    if isinstance(items, AsyncIterable):
        async for item in items:
            yield item
    else:
        for item in items:
            yield item


async def _outcome(task: asyncio.Task[R], errors: Errors) -> R | GearshiftError:
    try:
        return await task
    except GearshiftError as error:
        if errors == "raise":
            raise
        return error
