"""A tenant that asks for ten times its rate, and another one beside it: by turns alone and together.

``quota_rate_error``: how far the tokens per second that the first one got are from its rate, once what it may have at
once is spent, at the worst. ``quota_others_more_s``: how much longer the other's 95th percentile was together than
alone, in the median of the pairs; ``quota_others_over_alone``: the same as a ratio. Over the bus, where the first one
waits (what is left of it is cancelled after each turn), with the other one in another partition and in the same, and
over HTTP, where it is refused.
"""

import asyncio
import itertools
import statistics
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
from aiokafka import AIOKafkaProducer

from schemas.codec import decode_result, encode_request, kind_of
from service.client import Client
from service.kafka.reader import TopicReader
from service.scheduling.quotas import BURST_S
from service.settings import Settings

TOKENS_PER_S = 500
WORDS = 20
PROMPT = "one two three four five"
TIMES = 10
OTHERS_PER_S = 20.0
TENANT, OTHER, NEIGHBOUR = "red", "green", "blue"
"""As keys they lead to two partitions of twelve: the neighbour's to the tenant's own."""
QUOTAS = f"tenants: {{{TENANT}: {{tokens_per_minute: {60 * TOKENS_PER_S}}}}}"
_SETTLED_S = BURST_S + 2


@dataclass
class Turn:
    """What was answered in one turn: the tenant's tokens, by their time, and how long the other's answers took."""

    tokens: list[tuple[float, int]] = field(default_factory=list)
    took: list[float] = field(default_factory=list)

    def note(self, tenant: str, began: float, tokens: int) -> None:
        """One of a tenant's was answered just now."""
        if tenant == TENANT:
            self.tokens.append((time.time(), tokens))
        else:
            self.took.append(time.time() - began)

    def rate(self, began: float, ended: float) -> float:
        """Tokens per second between two moments."""
        return sum(count for at, count in self.tokens if began <= at < ended) / (ended - began)

    @property
    def p95(self) -> float:
        return statistics.quantiles(self.took, n=20)[-1]


Ask = Callable[[Turn, str], Coroutine[Any, Any, None]]
Clear = Callable[[], Awaitable[None]]


async def in_turns(ask: Ask, clear: Clear, *, other: str = OTHER, pairs: int, seconds: float) -> dict[str, float]:
    """Both tenants, by turns."""
    more, over, errors = [], [], []
    for _ in range(pairs):
        alone, together = Turn(), Turn()
        await _turn(ask, alone, other, seconds, flooded=False)
        began = time.time()
        await _turn(ask, together, other, seconds, flooded=True)
        await clear()
        rate = together.rate(began + _SETTLED_S, began + seconds)
        errors.append(abs(rate / TOKENS_PER_S - 1))
        more.append(together.p95 - alone.p95)
        over.append(together.p95 / alone.p95)
        print(f"  {rate:.0f} of {TOKENS_PER_S} tokens/s; p95 {together.p95:.3f} s, alone {alone.p95:.3f} s", flush=True)
    return {
        "rate_error": max(errors),
        "others_more_s": statistics.median(more),
        "others_over_alone": statistics.median(over),
    }


async def _turn(ask: Ask, turn: Turn, other: str, seconds: float, *, flooded: bool) -> None:
    """Requests at their moments, whatever becomes of those before; what the tenant still waits for is let go."""
    loop = asyncio.get_running_loop()
    began = loop.time()

    async def of(tenant: str, per_s: float) -> list[asyncio.Task[None]]:
        asked = []
        for n in range(int(seconds * per_s)):
            await asyncio.sleep(began + n / per_s - loop.time())
            asked.append(asyncio.create_task(ask(turn, tenant)))
        return asked

    others, flood = await asyncio.gather(
        of(other, OTHERS_PER_S), of(TENANT, flooded * TIMES * TOKENS_PER_S / (WORDS + len(PROMPT.split())))
    )
    await asyncio.gather(*others)
    for one in flood:
        one.cancel()
    await asyncio.gather(*flood, return_exceptions=True)


BODY = {"model": "llama", "prompt": PROMPT, "max_tokens": WORDS}


@asynccontextmanager
async def over_the_bus(settings: Settings) -> AsyncIterator[tuple[Ask, Clear]]:
    """Each tenant is the key of what it writes. Clearing cancels what the tenant has waiting."""
    topics = settings.topics
    results = topics.named(topics.results)
    waiting: dict[str, asyncio.Future[int]] = {}
    name = uuid.uuid4().hex

    async def read(reader: TopicReader) -> None:
        async for record in reader:
            if kind_of(record) == "result":
                result = decode_result(record)
                answered = waiting.pop(result.id, None)
                if answered is not None and not answered.done():
                    answered.set_result(tokens_in(result.body))

    async with (
        AIOKafkaProducer(bootstrap_servers=settings.kafka.bootstrap_servers) as producer,
        TopicReader(kafka=settings.kafka, topics=[results], from_end=[results]) as reader,
        Client(settings=settings) as client,
    ):

        async def ask(turn: Turn, tenant: str) -> None:
            id_ = uuid.uuid4().hex
            answered = waiting[id_] = asyncio.get_running_loop().create_future()
            correlation = f"{name} {tenant}"
            record = encode_request(
                topics.named(topics.requests),
                BODY,
                id_=id_,
                key=tenant.encode(),
                tenant=tenant,
                correlation_id=correlation,
            )
            began = time.time()
            try:
                await producer.send(record.topic, record.value, record.key, headers=list(record.headers))
            except asyncio.CancelledError:
                del waiting[id_]
                raise
            turn.note(tenant, began, await answered)

        async def clear() -> None:
            while waiting:
                await client.cancel(correlation_id=f"{name} {TENANT}")
                await asyncio.sleep(1.0)

        reading = asyncio.create_task(read(reader))
        try:
            yield ask, clear
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)


@asynccontextmanager
async def over_http(addresses: Sequence[str]) -> AsyncIterator[tuple[Ask, Clear]]:
    """At one door after the other; who is refused asks no second time."""
    doors = itertools.cycle(addresses)
    async with httpx.AsyncClient(limits=httpx.Limits(max_connections=None), timeout=60) as http:

        async def ask(turn: Turn, tenant: str) -> None:
            began = time.time()
            answer = await http.post(f"{next(doors)}/v1/completions", json=BODY, headers={"x-gearshift-tenant": tenant})
            if answer.status_code == httpx.codes.OK:
                turn.note(tenant, began, tokens_in(answer.json()))
            elif tenant != TENANT or answer.status_code != httpx.codes.TOO_MANY_REQUESTS:
                raise AssertionError(f"{tenant}: {answer.status_code} {answer.text}")

        async def clear() -> None:
            return

        yield ask, clear


def tokens_in(body: Mapping[str, Any] | None) -> int:
    """Of a prompt and its answer."""
    return 0 if body is None else int(body["usage"]["total_tokens"])
