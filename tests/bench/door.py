"""``python -m tests.bench.door``: what is asked durably over HTTP, while workers and the broker are killed.

Worker processes around the tests' engine, a door each, over one pool's topics; OpenAI's own client asks.

``batch_missing`` and ``batch_repeated``: custom ids of a batch over three models that are in neither of its files, or
there more than once, after ``kills`` SIGKILLs of the worker that worked on it and one of the broker.
``background_lost``: background responses, asked at one door before every worker was killed, that another door does not
have whole. ``idempotent_results``: results in the topic of answers of calls that several processes made with the same
keys while workers were killed; ``idempotent_answers``: different answers that they were told.
``usage_difference_tokens``: by how much usage says another thing than results, summed over the requests of all that
ran before. ``quota_...``: what ``tests.bench.door_quotas`` says. ``batch_over_bus``: lines per second of a batch that
nobody disturbs over requests per second of the bus (``tests.bench.bus``), by one worker each, of the same requests.
"""

import argparse
import asyncio
import json
import multiprocessing
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai

from deploy.local.broker import Broker, find_broker, free_port
from schemas.codec import decode_result, decode_usage, kind_of
from schemas.usage import tokens_of
from service.kafka.batch_runs import place_of
from service.kafka.reader import TopicReader
from service.kafka.topics import ensure_topics
from service.settings import Settings
from tests.bench import bus, door_quotas
from tests.support.bus import until
from tests.support.pool import delete_topics, settings_for
from tests.support.workers import Workers

MODELS = ("llama", "qwen", "lynx")
PARTITIONS = 12
WORDS = 20
"""Of an answer; a word takes a step of the engine."""
SESSION_TIMEOUT_S = 6.0
AT_ONCE = 16
_ROUNDS = 3
"""Of a batch and as many requests over the bus, whose rates are compared."""
_INSIST = 1000
"""As often as a client of OpenAI's asks again: doors are away for a while here."""
_PAUSE_S = 0.2
_WITHIN_S = 1800.0


def as_alone(figures: Mapping[str, float], way: str) -> bool:
    """Within a tenth, or 50 ms."""
    return figures[f"{way}_others_over_alone"] <= 1.1 or figures[f"{way}_others_more_s"] <= 0.05


Bars = Mapping[str, Callable[[Mapping[str, float]], bool]]
BARS: Mapping[str, Bars] = {
    "batch": {
        "every line once": lambda at: at["batch_missing"] == at["batch_repeated"] == at["batch_failed"] == 0,
        "counted": lambda at: at["batch_counted"] == at["batch_lines"],
        "kills >= 10": lambda at: at["kills"] >= 10,
    },
    "background": {"no response lost": lambda at: at["background_lost"] == 0},
    "idempotent": {
        "one result per key": lambda at: at["idempotent_results"] == at["idempotent_keys"],
        "one answer per key": lambda at: at["idempotent_answers"] == at["idempotent_keys"],
    },
    "usage": {"to the token": lambda at: at["usage_difference_tokens"] == 0},
    "quotas": {
        "its rate within 5 %": lambda at: (
            max(at[f"quota_{way}_rate_error"] for way in ("bus", "shared", "http")) <= 0.05
        ),
        "others over the bus as alone": lambda at: as_alone(at, "quota_bus"),
        "others in the same partition as alone": lambda at: as_alone(at, "quota_shared"),
        "others over HTTP as alone": lambda at: as_alone(at, "quota_http"),
    },
    "rate": {"half of the bus": lambda at: at["batch_over_bus"] >= 0.5},
}
PARTS = tuple(BARS)


# --- doors --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pool:
    """Workers that come back after each kill, at the same addresses, and a client of OpenAI's for each."""

    settings: Settings
    workers: Workers
    addresses: Sequence[str]
    clients: Sequence[openai.AsyncOpenAI]

    async def ready(self) -> None:
        """Return when every door is open."""
        async with httpx.AsyncClient() as http:
            for address in self.addresses:
                await until(partial(_is_ready, http, address), within_s=120)

    async def kill_runner(self, batch: str, *, back_after_s: float) -> None:
        """Kill whoever works on a batch, as soon as somebody does."""
        topics = self.settings.topics
        place = place_of(batch, topics.request_partitions)
        async with httpx.AsyncClient() as http, asyncio.timeout(_WITHIN_S):
            while True:
                for index, address in enumerate(self.addresses):
                    if place in await _partitions(http, address, topics.named(topics.calls)):
                        self.workers.kill(index, back_after_s=back_after_s)
                        return
                await asyncio.sleep(_PAUSE_S)

    async def results(self) -> int:
        """How many there are in the topic of answers."""
        topics = self.settings.topics
        async with TopicReader(kafka=self.settings.kafka, topics=[topics.named(topics.answers)]) as reader:
            return sum([kind_of(record) == "result" async for record in reader.backlog()])


@asynccontextmanager
async def opened(bootstrap: str, count: int, *, step_s: float, **more: str) -> AsyncIterator[Pool]:
    """Workers that are ready, over topics of their own."""
    settings = settings_for(bootstrap, request_partitions=PARTITIONS, result_partitions=PARTITIONS)
    ports = [free_port() for _ in range(count)]
    values = {
        "bootstrap_servers": bootstrap,
        "topic_prefix": settings.topics.topic_prefix,
        "group_id": settings.worker.group_id,
        "request_partitions": str(PARTITIONS),
        "result_partitions": str(PARTITIONS),
        "session_timeout_s": str(SESSION_TIMEOUT_S),
        "hold_s": "0",
        "log_level": "warning",
        **more,
    }
    each = [{**values, "http_port": str(port)} for port in ports]
    addresses = [f"http://127.0.0.1:{port}" for port in ports]
    await ensure_topics(settings, MODELS)
    try:
        async with AsyncExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            workers = Workers(settings=each, folder=folder, aliases=MODELS, step_s=step_s)
            await stack.enter_async_context(workers)
            clients = [await stack.enter_async_context(official(address)) for address in addresses]
            pool = Pool(settings, workers, addresses, clients)
            await pool.ready()
            yield pool
    finally:
        await delete_topics(settings)


def official(address: str) -> openai.AsyncOpenAI:
    """OpenAI's own client of a door."""
    return openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="none", max_retries=_INSIST, timeout=60)


async def _is_ready(http: httpx.AsyncClient, address: str) -> bool:
    try:
        return (await http.get(f"{address}/ready")).status_code == 200
    except httpx.TransportError:
        return False


async def _partitions(http: httpx.AsyncClient, address: str, topic: str) -> Sequence[int]:
    """Those of a topic that the worker behind a door has; none where it is away."""
    try:
        answer = await http.get(f"{address}/state")
    except httpx.TransportError:
        return ()
    found: Sequence[int] = answer.json()["worker"]["partitions"].get(topic, ()) if answer.is_success else ()
    return found


# --- a batch ------------------------------------------------------------------------------------------------------


def lines(bodies: Iterable[Mapping[str, Any]], url: str) -> bytes:
    """A batch's input; custom ids count from 0."""
    return b"".join(
        json.dumps({"custom_id": str(number), "method": "POST", "url": url, "body": body}).encode() + b"\n"
        for number, body in enumerate(bodies)
    )


async def begun(client: openai.AsyncOpenAI, source: bytes, url: Any) -> Any:
    file = await client.files.create(file=("lines.jsonl", source), purpose="batch")
    return await client.batches.create(input_file_id=file.id, endpoint=url, completion_window="24h")


async def ended(look: Callable[[], Awaitable[Any]]) -> Any:
    """A batch or a response, once nothing more comes of it."""
    async with asyncio.timeout(_WITHIN_S):
        while True:
            found = await look()
            if found.status not in {"queued", "in_progress"}:
                return found
            await asyncio.sleep(_PAUSE_S)


async def batch(pool: Pool, broker: Broker, given: argparse.Namespace) -> dict[str, float]:
    """A batch over all models, and kills in the middle of it, so many lines apart."""
    url, client = "/v1/completions", pool.clients[-1]
    words = ({"model": MODELS[n % len(MODELS)], "prompt": f"{n}", "max_tokens": WORDS} for n in range(given.lines))
    asked = await begun(client, lines(words, url), url)
    began = time.monotonic()
    kills = 0
    for turn in range(given.kills):
        reached = (turn + 1) * given.lines / (1.5 * given.kills)  # the last third is done between two looks
        while (now := await client.batches.retrieve(asked.id)).status == "in_progress":
            if now.request_counts.completed >= reached:
                break
            await asyncio.sleep(_PAUSE_S)
        else:
            break
        # By turns it is back before anybody takes its partitions, and after somebody has.
        back_after_s = 0.5 if turn % 2 == 0 else SESSION_TIMEOUT_S + 2
        await pool.kill_runner(asked.id, back_after_s=back_after_s)
        kills += 1
        print(f"  killed at {now.request_counts.completed} lines, {time.monotonic() - began:.0f} s", flush=True)
        if turn == given.kills // 2:
            await asyncio.to_thread(broker.kill)
            await asyncio.to_thread(broker.start)
            print(f"  the broker was killed, {time.monotonic() - began:.0f} s", flush=True)
    found = await ended(partial(client.batches.retrieve, asked.id))
    seconds = time.monotonic() - began
    contents = [await client.files.content(id_) for id_ in (found.output_file_id, found.error_file_id) if id_]
    custom_ids = [json.loads(line)["custom_id"] for content in contents for line in content.text.splitlines()]
    return {
        "batch_lines": given.lines,
        **counted(custom_ids, given.lines),
        "batch_counted": found.request_counts.completed,
        "batch_failed": found.request_counts.failed,
        "batch_s": seconds,
        "kills": kills,
    }


def counted(custom_ids: Iterable[str], wanted: int) -> dict[str, float]:
    """Which of so many lines are missing from a batch's files, and which lines there are too many."""
    seen = Counter(custom_ids)
    expected = Counter(map(str, range(wanted)))
    return {"batch_missing": (expected - seen).total(), "batch_repeated": (seen - expected).total()}


# --- responses in the background ----------------------------------------------------------------------------------


async def background(pool: Pool, given: argparse.Namespace) -> dict[str, float]:
    """Responses asked at the first door and fetched at the last one, all workers killed in between."""
    first, last = pool.clients[0], pool.clients[-1]
    slots = asyncio.Semaphore(2 * AT_ONCE)

    async def ask(number: int) -> str:
        async with slots:
            model = MODELS[number % len(MODELS)]
            response = await first.responses.create(
                model=model, input="hello", background=True, max_output_tokens=WORDS
            )
            return response.id

    async def is_lost(id_: str) -> bool:
        async with slots:
            try:
                response = await ended(partial(last.responses.retrieve, id_))
            except openai.NotFoundError:
                return True
            return len(response.output_text.split()) != WORDS

    before = await pool.results()
    ids = await asyncio.gather(*map(ask, range(given.responses)))
    for index in range(given.workers):
        pool.workers.kill(index, back_after_s=SESSION_TIMEOUT_S)
    under_way = given.responses - (await pool.results() - before)
    lost = await asyncio.gather(*map(is_lost, ids))
    return {"background": len(set(ids)), "background_under_way": under_way, "background_lost": sum(lost)}


# --- idempotency keys ---------------------------------------------------------------------------------------------


async def idempotent(pool: Pool, given: argparse.Namespace) -> dict[str, float]:
    """Several processes make calls with the same keys at all doors, and one worker after the other is killed."""
    before, began = await pool.results(), time.monotonic()
    loop = asyncio.get_running_loop()
    share = given.calls // given.processes
    with ProcessPoolExecutor(given.processes, mp_context=multiprocessing.get_context("spawn")) as processes:
        callers = [
            loop.run_in_executor(processes, call, pool.addresses, share, given.keys, seed)
            for seed in range(given.processes)
        ]
        for index in range(given.workers):
            await asyncio.wait(callers, timeout=SESSION_TIMEOUT_S)
            pool.workers.kill(index, back_after_s=0.5)
        told = {answer for one in await asyncio.gather(*callers) for answer in one}
    await pool.ready()
    return {
        "idempotent_calls": share * given.processes,
        "idempotent_keys": given.keys,
        "idempotent_answers": len(told),
        "idempotent_results": await pool.results() - before,
        "idempotent_s": time.monotonic() - began,
    }


def call(addresses: Sequence[str], calls: int, keys: int, seed: int) -> set[tuple[int, str]]:
    """One process's calls: each key as often as any other, in an order of its own. Gives keys with their answers."""

    async def all_of_them() -> set[tuple[int, str]]:
        dice = random.Random(seed)
        turns = [number % keys for number in range(calls)]
        dice.shuffle(turns)
        slots = asyncio.Semaphore(AT_ONCE)
        async with AsyncExitStack() as stack:
            clients = [await stack.enter_async_context(official(address)) for address in addresses]

            async def one(key: int) -> tuple[int, str]:
                async with slots:
                    answer = await dice.choice(clients).completions.create(
                        model=MODELS[key % len(MODELS)],
                        prompt=f"number {key}",
                        max_tokens=1 + key % WORDS,
                        extra_headers={"idempotency-key": f"key-{key}"},
                    )
                    return key, f"{answer.id} {answer.choices[0].text}"

            return set(await asyncio.gather(*map(one, turns)))

    return asyncio.run(all_of_them())


# --- usage --------------------------------------------------------------------------------------------------------


async def usage(pool: Pool) -> dict[str, float]:
    """What usage says beside what results do, of everything that the pool has answered."""
    topics = pool.settings.topics
    names = [topics.named(name) for name in (topics.answers, topics.results, topics.usage)]
    results: Counter[tuple[str, str]] = Counter()
    said: Counter[tuple[str, str]] = Counter()
    async with TopicReader(kafka=pool.settings.kafka, topics=names) as reader:
        async for record in reader.backlog():
            if record.topic == names[-1]:
                found = decode_usage(record)
                said.update({(found.id, name): getattr(found, name) for name in tokens_of(None)})
            elif kind_of(record) == "result":
                result = decode_result(record)
                results.update({(result.id, name): count for name, count in tokens_of(result.body).items()})
    return {"usage_tokens": said.total(), "usage_difference_tokens": difference(said, results)}


def difference(one: Counter[Any], other: Counter[Any]) -> int:
    """Summed over all that either of them counts."""
    return ((one - other) + (other - one)).total()


# --- quotas --------------------------------------------------------------------------------------------------------


async def quotas(bootstrap: str, given: argparse.Namespace) -> dict[str, float]:
    """A tenant at ten times its rate, and another one beside it, over the bus and over HTTP."""
    with tempfile.TemporaryDirectory() as folder:
        (path := Path(folder) / "quotas.yaml").write_text(door_quotas.QUOTAS)
        async with opened(bootstrap, given.workers, step_s=given.step_s, quotas_file=str(path)) as pool:
            figures: dict[str, float] = {}
            for name, other, way in (
                ("bus", door_quotas.OTHER, door_quotas.over_the_bus(pool.settings)),
                ("shared", door_quotas.NEIGHBOUR, door_quotas.over_the_bus(pool.settings)),
                ("http", door_quotas.OTHER, door_quotas.over_http(pool.addresses)),
            ):
                print(f"{name}:", flush=True)
                async with way as (ask, clear):
                    found = await door_quotas.in_turns(ask, clear, other=other, pairs=given.pairs, seconds=given.turn_s)
                figures |= {f"quota_{name}_{what}": value for what, value in found.items()}
            return figures


# --- as fast as it goes -------------------------------------------------------------------------------------------


async def rate(bootstrap: str, given: argparse.Namespace) -> dict[str, float]:
    """A batch of one worker, and the same requests over the bus to another one, by turns; medians."""
    url, body = "/v1/chat/completions", json.loads(bus.REQUEST)
    async with opened(bootstrap, 1, step_s=0.0) as pool, bus.opened("worker", bootstrap, PARTITIONS) as side:
        (client,) = pool.clients

        async def both(count: int) -> tuple[float, float]:
            asked = await begun(client, lines([body] * count, url), url)
            began = time.monotonic()
            await ended(partial(client.batches.retrieve, asked.id))
            lines_per_s = count / (time.monotonic() - began)
            await side.answer(count)
            return lines_per_s, side.rates[-1]

        await both(2000)  # all of it is slow until it is warm
        rounds = [await both(given.paired) for _ in range(_ROUNDS)]
    return {
        "batch_lines_per_s": statistics.median(of_batch for of_batch, _ in rounds),
        "bus_rps": statistics.median(of_bus for _, of_bus in rounds),
        "batch_over_bus": statistics.median(of_batch / of_bus for of_batch, of_bus in rounds),
    }


# --- all of it ----------------------------------------------------------------------------------------------------


async def measure(broker: Broker, given: argparse.Namespace) -> dict[str, float]:
    """The parts that are wanted, in their order."""
    figures: dict[str, float] = {}

    async def part(name: str, measured: Callable[[], Coroutine[Any, Any, dict[str, float]]]) -> None:
        if name in given.only:
            found = await measured()
            figures.update(found)
            print("  ".join(f"{name} {value:g}" for name, value in found.items()), flush=True)

    if {*given.only} - {"rate", "quotas"}:
        async with opened(broker.bootstrap, given.workers, step_s=given.step_s) as pool:
            await part("batch", partial(batch, pool, broker, given))
            await part("background", partial(background, pool, given))
            await part("idempotent", partial(idempotent, pool, given))
            await part("usage", partial(usage, pool))
    await part("quotas", partial(quotas, broker.bootstrap, given))
    await part("rate", partial(rate, broker.bootstrap, given))
    return figures


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lines", type=int, default=50_000)
    parser.add_argument("--kills", type=int, default=10, help="during the batch")
    parser.add_argument("--responses", type=int, default=1000)
    parser.add_argument("--calls", type=int, default=10_000)
    parser.add_argument("--keys", type=int, default=1000)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument(
        "--paired", type=int, default=30_000, help="lines and requests whose rates are compared, a round"
    )
    parser.add_argument("--pairs", type=int, default=3, help="of turns alone and beside a tenant above its quota")
    parser.add_argument("--turn-s", type=float, default=25.0, help="seconds of such a turn")
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--step-s", type=float, default=0.005, help="of their engines: a word of every answer")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="not all of it")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(arguments)
    with find_broker() as broker:
        figures = asyncio.run(measure(broker, given))
    missed = [f"{part}: {bar}" for part in given.only for bar, holds in BARS[part].items() if not holds(figures)]
    if given.json:
        given.json.write_text(json.dumps({"figures": figures, "missed": missed}, indent=2))
    for name in missed:
        print(f"FAIL {name}")
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
