"""Batches on the real broker: run, interrupted, killed, resumed, and left on the bus."""

import asyncio
import json
import sys
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from service.client import BatchInvalid, Client
from service.client.batch import Progress, batch_status, cancel_batch, fetch_batch, run_batch, submit_batch
from service.settings import Settings
from tests.support.pool import delete_topics, serving, settings_for

pytestmark = pytest.mark.broker


@pytest.fixture(scope="module")
async def pool(bootstrap: str) -> AsyncIterator[Settings]:
    settings = settings_for(bootstrap)
    async with serving(settings, step_s=0.001):
        yield settings
    await delete_topics(settings)


@pytest.fixture
async def client(pool: Settings) -> AsyncIterator[Client]:
    async with Client(settings=pool, timeout_s=60) as opened:
        yield opened


def batch_file(path: Path, count: int, *, wrong: int = 0, tokens: int = 1) -> Path:
    """Lines over two models, the last ``wrong`` of them for one that is not there."""
    with path.open("w") as file:
        for n in range(count):
            model = "lama" if n >= count - wrong else ("llama", "qwen")[n % 2]
            body = {"model": model, "prompt": "hello", "max_tokens": tokens}
            line = {"custom_id": f"line-{n}", "method": "POST", "url": "/v1/completions", "body": body}
            file.write(json.dumps(line) + "\n")
    return path


def answers(path: Path) -> dict[str, str]:
    """Custom id to the alias that spoke; fails where a custom id is there twice."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert max(Counter(line["custom_id"] for line in lines).values()) == 1
    return {line["custom_id"]: line["response"]["body"]["model"] for line in lines}


async def asked(client: Client) -> Counter[str]:
    """How often each line was sent to the bus."""
    sent: Counter[str] = Counter()
    async for record in client.requests(past=True):
        sent.update(value.decode() for name, value in record.headers if name == "custom-id")
    return sent


async def test_every_line_is_answered_by_its_own_model(client: Client, tmp_path: Path):
    seen: list[Progress] = []
    source = batch_file(tmp_path / "in.jsonl", 200, wrong=3)
    done = await run_batch(client, source, tmp_path / "out.jsonl", concurrency=32, on_progress=seen.append)
    assert (done.total, done.completed, done.failed) == (200, 197, 3)
    assert answers(tmp_path / "out.jsonl") == {f"line-{n}": ("llama", "qwen")[n % 2] for n in range(197)}
    failed = [json.loads(line) for line in (tmp_path / "out.errors.jsonl").read_text().splitlines()]
    assert {line["response"]["status_code"] for line in failed} == {404}
    assert [progress.done for progress in seen] == list(range(201))
    assert seen[-1].rate > 0


async def test_a_cancelled_run_withdraws_what_it_asked_and_the_next_one_finishes(client: Client, tmp_path: Path):
    source, output = batch_file(tmp_path / "in.jsonl", 120, tokens=20), tmp_path / "out.jsonl"
    earlier = await asked(client)
    some = asyncio.Event()
    running = asyncio.create_task(
        run_batch(
            client, source, output, concurrency=16, on_progress=lambda progress: progress.done >= 30 and some.set()
        )
    )
    await some.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    before = answers(output)
    assert 30 <= len(before) < 120
    done = await run_batch(client, source, output, concurrency=16)
    assert (done.completed, done.failed) == (120, 0)
    assert len(answers(output)) == 120
    again = {line for line, times in (await asked(client) - earlier).items() if times > 1}
    assert not again & before.keys()


RUN = """
import asyncio, sys
from pathlib import Path
from service.client import Client
from service.client.batch import run_batch
async def main():
    async with Client(sys.argv[1], topic_prefix=sys.argv[2], group_id=sys.argv[3]) as client:
        await run_batch(client, Path(sys.argv[4]), Path(sys.argv[5]), on_progress=lambda p: print(p.done, flush=True))
asyncio.run(main())
"""


@pytest.mark.parametrize("lines", [600, pytest.param(5000, marks=pytest.mark.long)])
async def test_a_run_killed_half_way_is_resumed_without_asking_anything_twice(
    client: Client, pool: Settings, tmp_path: Path, lines: int
):
    source, output = batch_file(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    where = (pool.kafka.bootstrap_servers, pool.topics.topic_prefix, pool.worker.group_id)
    before = await asked(client)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", RUN, *where, str(source), str(output), stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    while int(await process.stdout.readline()) < lines // 2:
        pass
    process.kill()
    await process.wait()
    done = await run_batch(client, source, output)
    assert (done.completed, done.failed) == (lines, 0)
    assert len(answers(output)) == lines
    sent = await asked(client) - before
    assert {n: times for n, times in sent.items() if times != 1} == {}


async def test_a_batch_left_on_the_bus_is_found_by_its_id_from_anywhere(client: Client, pool: Settings, tmp_path: Path):
    batch = await submit_batch(client, batch_file(tmp_path / "in.jsonl", 60, wrong=2))
    async with Client(settings=pool) as elsewhere, asyncio.timeout(30):
        while (progress := await batch_status(elsewhere, batch)).done < 60:
            assert (progress.total, progress.sent) == (60, 60)
        fetched = await fetch_batch(elsewhere, batch, tmp_path / "out.jsonl")
        assert (fetched.completed, fetched.failed) == (58, 2)
        again = await fetch_batch(elsewhere, batch, tmp_path / "out.jsonl")
    assert (again.completed, again.failed) == (58, 2)
    assert len(answers(tmp_path / "out.jsonl")) == 58


async def test_a_submitted_batch_can_be_cancelled(client: Client, tmp_path: Path):
    batch = await submit_batch(client, batch_file(tmp_path / "in.jsonl", 10, tokens=4000))
    await cancel_batch(client, batch)
    async with asyncio.timeout(30):
        while (progress := await batch_status(client, batch)).done < 10:
            pass
    assert progress.completed == 0
    await fetch_batch(client, batch, tmp_path / "out.jsonl")
    errors = [json.loads(line)["error"]["code"] for line in (tmp_path / "out.errors.jsonl").read_text().splitlines()]
    assert errors == ["batch_cancelled"] * 10


async def test_an_unknown_batch_and_another_input_for_a_begun_output_are_refused(client: Client, tmp_path: Path):
    with pytest.raises(BatchInvalid, match="is no batch's id"):
        await batch_status(client, "what")
    with pytest.raises(BatchInvalid, match="no request of"):
        await fetch_batch(client, "batch-ffffffffff-0", tmp_path / "out.jsonl")
    (tmp_path / "out.jsonl.state").write_text(json.dumps({"batch": "batch-1-1", "source": "other", "round": 1}))
    with pytest.raises(BatchInvalid, match="another input"):
        await run_batch(client, batch_file(tmp_path / "in.jsonl", 1), tmp_path / "out.jsonl")
