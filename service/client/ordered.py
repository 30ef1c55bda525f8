"""Many calls from a few at a time, their answers in the order of what was asked."""

import asyncio
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable
from itertools import islice
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

    An answer whose turn it is does not wait for the next item: that may come for this answer only. What is under way
    when the iteration ends early is cancelled.
    """
    if concurrency < 1:
        raise ValueError(f"concurrency must be at least 1, not {concurrency}")
    source, over = _each(items), False
    window: deque[asyncio.Task[R]] = deque()
    taking: deque[asyncio.Task[list[T]]] = deque()
    """The one that takes the next item, if there is room for it."""

    async def one(item: T) -> R:
        return await call(item)

    async def take() -> list[T]:
        async for item in source:
            return [item]
        return []

    try:
        while not over or window:
            if not over and not taking and len(window) < concurrency:
                taking.append(asyncio.create_task(take(), name="client-map-source"))
            first = *taking, *islice(window, 1)
            await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
            if taking and taking[0].done():
                taken = taking.popleft().result()
                over = not taken
                window.extend(asyncio.create_task(one(item), name="client-map") for item in taken)
            else:
                yield await _outcome(window.popleft(), errors)
    finally:
        for task in (*taking, *window):
            task.cancel()
        await asyncio.gather(*taking, *window, return_exceptions=True)


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
