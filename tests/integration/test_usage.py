"""What results have cost is in the log with them, to the token."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiokafka import AIOKafkaProducer
from typer.testing import CliRunner

from schemas.codec import decode_usage
from schemas.results import Outcome
from schemas.usage import Usage, tokens_of
from service.cli.main import app
from service.client import Client
from service.kafka.topics import ensure_topics
from service.kafka.usage import follow_usage, summed_usage
from service.settings import Settings
from tests.support.bus import Bus, until
from tests.support.pool import delete_topics, serving, settings_for
from tests.support.records import as_record

pytestmark = pytest.mark.broker


@pytest.fixture
async def settings(bootstrap: str) -> AsyncIterator[Settings]:
    made = settings_for(bootstrap)
    await ensure_topics(made, ["llama", "qwen"])
    yield made
    await delete_topics(made)


async def test_sums_over_usage_are_sums_over_results_whatever_became_of_them(settings: Settings) -> None:
    async with serving(settings), Client(settings=settings) as client:
        bodies = [{"model": "llama" if n % 3 else "qwen", "prompt": "word " * n, "max_tokens": n} for n in range(1, 31)]
        bodies += [{"model": "nobody", "prompt": "x"}, {"model": "llama", "prompt": "x", "max_tokens": -1}]
        ids = [await client.submit(body, tenant="blue" if n % 2 else "red") for n, body in enumerate(bodies)]
        results = await asyncio.gather(*map(client.result, ids))
    assert {result.outcome for result in results} == {Outcome.COMPLETED, Outcome.FAILED}
    bus = Bus(settings.kafka.bootstrap_servers, prefix=settings.topics.topic_prefix)
    usages = [decode_usage(as_record(one)) for one in await bus.read(settings.topics.named(settings.topics.usage))]
    assert sorted(usage.id for usage in usages) == sorted(ids)
    assert {usage.origin for usage in usages} == {result.origin for result in results}
    spent = [tokens_of(result.body) for result in results]
    (row,) = (await summed_usage(settings, by=())).rows()
    for name in ("prompt_tokens", "generated_tokens"):
        assert row[name] == sum(each[name] for each in spent) > 0
    arguments = ["usage", "--by", "tenant,model", "--since", "1h", "--topic-prefix", settings.topics.topic_prefix]
    arguments += ["-b", settings.kafka.bootstrap_servers, "--json"]
    said = await asyncio.to_thread(CliRunner().invoke, app, arguments)
    rows = [json.loads(line) for line in said.stdout.splitlines()]
    found = {(row["tenant"], row["model"]) for row in rows}
    assert found >= {(tenant, model) for tenant in ("blue", "red") for model in ("llama", "qwen")}
    assert sum(row["results"] for row in rows) == len(ids)


async def test_what_a_stranger_says_was_spent_counts_for_nobody_where_the_pool_has_a_key(
    bootstrap: str, tmp_path: Path
) -> None:
    (tmp_path / "key").write_text("secret")
    settings = settings_for(bootstrap, pool_key_file=str(tmp_path / "key"))
    await ensure_topics(settings, ["llama", "qwen"])
    topic = settings.topics.named(settings.topics.usage)
    told: list[Usage] = []
    async with serving(settings), Client(settings=settings) as client:
        await client.complete(model="llama", prompt="x", max_tokens=3, tenant="blue")
        bus = Bus(settings.kafka.bootstrap_servers, prefix=settings.topics.topic_prefix)
        (ours,) = [one for one in await bus.read(topic) if b"blue" in (one.key or b"")]
        forged = json.dumps({**json.loads(ours.value), "generated_tokens": 1 << 50}).encode()
        async with AIOKafkaProducer(bootstrap_servers=settings.kafka.bootstrap_servers) as stranger:
            await stranger.send_and_wait(topic, forged, key=ours.key, headers=[*ours.headers])
        await client.complete(model="llama", prompt="x", max_tokens=4, tenant="blue")
        following = asyncio.create_task(follow_usage(settings, lambda usage, _: told.append(usage)))
        await until(lambda: len(told) >= 2 or following.done())
        following.cancel()
    assert [usage.generated_tokens for usage in told] == [3, 4]
    await delete_topics(settings)


async def test_a_plan_reads_the_pool_s_own_topics(settings: Settings, tmp_path: Path) -> None:
    """Results and usage of the same requests, which are counted once."""
    async with serving(settings), Client(settings=settings) as client:
        bodies = [{"model": "llama" if n % 3 else "qwen", "prompt": "word " * n, "max_tokens": n} for n in range(1, 21)]
        ids = [await client.submit(body) for body in bodies]
        await asyncio.gather(*map(client.result, ids))
    models, figures = tmp_path / "models.yaml", tmp_path / "plan.json"
    models.write_text("models: {llama: {model: llama-8b}, qwen: {model: qwen-14b}}", encoding="utf-8")
    arguments = ["plan", "--results", settings.topics.results, "--results", settings.topics.usage]
    arguments += ["--models", str(models), "--objective", "ttft_s=2,tpot_s=0.1", "--devices", "1..2"]
    arguments += ["--json", str(figures), "--topic-prefix", settings.topics.topic_prefix]
    arguments += ["-b", settings.kafka.bootstrap_servers]
    said = await asyncio.to_thread(CliRunner().invoke, app, arguments)
    assert said.exit_code == 0, said.exception
    made = json.loads(figures.read_text(encoding="utf-8"))
    assert made["plans"]["as it is"]["requests"] == len(ids)
    assert sum(made["left_out"].values()) == len(ids)
