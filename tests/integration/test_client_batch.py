"""Batches from Python and from the command, on the real broker: the ones that every door shows."""

import asyncio
import json
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from schemas.batches import BatchEnd, BatchEnded
from service.cli.main import app
from service.client import Batches, BatchInvalid, Client, Progress
from service.kafka.batch_lines import digest
from service.kafka.files import BATCH, Files, begin_of, owner_named
from service.kafka.topics import ensure_topics
from tests.support.bus import until
from tests.support.http_pool import Pool, official
from tests.support.pool import delete_topics

pytestmark = pytest.mark.broker


@pytest.fixture(scope="module")
async def pool(bootstrap: str) -> AsyncIterator[Pool]:
    made = Pool(bootstrap)
    await ensure_topics(made.settings, ["llama", "qwen"])
    async with made.door("one"):
        yield made
    await delete_topics(made.settings)


@pytest.fixture
async def client(pool: Pool) -> AsyncIterator[Client]:
    async with Client(settings=pool.settings, timeout_s=60) as opened:
        yield opened


def batch_file(path: Path, count: int, *, wrong: int = 0, tokens: int = 1, url: str = "/v1/completions") -> Path:
    """Lines over two models, the last ``wrong`` of them for one that is not there."""
    with path.open("w") as file:
        for n in range(count):
            model = "lama" if n >= count - wrong else ("llama", "qwen")[n % 2]
            body = {"model": model, "prompt": f"{path.name} {n}", "max_tokens": tokens}
            line = {"custom_id": f"line-{n}", "method": "POST", "url": url, "body": body}
            file.write(json.dumps(line) + "\n")
    return path


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def answers(path: Path) -> dict[str, str]:
    """Custom id to the alias that spoke; fails where a custom id is there twice."""
    found = lines(path)
    assert max(Counter(line["custom_id"] for line in found).values()) == 1
    return {line["custom_id"]: line["response"]["body"]["model"] for line in found}


async def asked(pool: Pool, name: str) -> Counter[str]:
    """How often each prompt of a file was asked."""
    bodies = [json.loads(one.value or b"null") for one in await pool.records("calls")]
    return Counter(body["prompt"] for body in bodies if body and body["prompt"].startswith(f"{name} "))


async def test_every_line_is_answered_by_its_own_model(client: Client, tmp_path: Path) -> None:
    seen: list[Progress] = []
    source = batch_file(tmp_path / "in.jsonl", 200, wrong=3)
    done = await client.batch.run(source, tmp_path / "out.jsonl", on_progress=seen.append)
    assert (done.status, done.total, done.completed, done.failed) == ("completed", 200, 197, 3)
    assert answers(tmp_path / "out.jsonl") == {f"line-{n}": ("llama", "qwen")[n % 2] for n in range(197)}
    assert {line["response"]["status_code"] for line in lines(tmp_path / "out.errors.jsonl")} == {404}
    assert seen[0].total == 200
    assert seen[-1] == done
    assert [one.done for one in seen] == sorted(one.done for one in seen)
    assert names(tmp_path) == {"in.jsonl", "out.errors.jsonl", "out.jsonl"}


async def test_an_interrupted_run_goes_on_and_the_next_one_comes_back_to_it(
    client: Client, pool: Pool, tmp_path: Path
) -> None:
    source, output = batch_file(tmp_path / "interrupted", 120, tokens=200), tmp_path / "out.jsonl"
    begun = asyncio.Event()
    running = asyncio.create_task(client.batch.run(source, output, on_progress=lambda _progress: begun.set()))
    await begun.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert not output.exists()
    done = await client.batch.run(source, output)
    assert (done.completed, done.failed) == (120, 0)
    assert len(answers(output)) == 120
    assert set((await asked(pool, source.name)).values()) == {1}


RUN = """
import asyncio, sys
from pathlib import Path
from service.client import Client
async def main():
    async with Client(sys.argv[1], topic_prefix=sys.argv[2], group_id=sys.argv[3]) as client:
        await client.batch.run(Path(sys.argv[4]), Path(sys.argv[5]), on_progress=lambda p: print(p.done, flush=True))
asyncio.run(main())
"""


async def test_a_run_that_is_killed_is_come_back_to_and_nothing_is_asked_twice(
    client: Client, pool: Pool, tmp_path: Path
) -> None:
    source, output = batch_file(tmp_path / "killed", 2000, tokens=20), tmp_path / "out.jsonl"
    settings = pool.settings
    where = (settings.kafka.bootstrap_servers, settings.topics.topic_prefix, settings.worker.group_id)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", RUN, *where, str(source), str(output), stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    assert await process.stdout.readline(), "it has begun"
    process.send_signal(signal.SIGKILL)
    await process.wait()
    done = await client.batch.run(source, output)
    assert (done.completed, done.failed) == (2000, 0)
    assert len(answers(output)) == 2000
    assert {n: times for n, times in (await asked(pool, source.name)).items() if times != 1} == {}


async def test_a_run_that_was_killed_before_its_batch_was_asked_asks_it(client: Client, tmp_path: Path) -> None:
    source, output = batch_file(tmp_path / "early", 3), tmp_path / "out.jsonl"
    id_ = f"{begin_of(BATCH, owner_named(''))}{'0' * 32}"
    (tmp_path / "out.jsonl.state").write_text(json.dumps({"batch": id_, "source": digest(source)}))
    done = await client.batch.run(source, output)
    assert (done.id, done.completed) == (id_, 3)


async def test_a_batch_is_the_same_from_python_and_at_a_door(client: Client, pool: Pool, tmp_path: Path) -> None:
    async with pool.door("two") as door:
        openai = official(door)
        id_ = await client.batch.submit(batch_file(tmp_path / "in.jsonl", 6, wrong=1), metadata={"of": "mine"})

        async def over() -> bool:
            return (await openai.batches.retrieve(id_)).status == "completed"

        await until(over)
        found = await openai.batches.retrieve(id_)
        assert (found.request_counts.completed, found.request_counts.failed) == (5, 1)
        assert (found.endpoint, found.metadata) == ("/v1/completions", {"of": "mine"})
        told = (await openai.files.content(found.output_file_id or "")).read()
        fetched = await client.batch.fetch(id_, tmp_path / "out.jsonl")
        assert (fetched.completed, fetched.failed) == (5, 1)
        assert (tmp_path / "out.jsonl").read_bytes() == told

        file = await openai.files.create(file=(tmp_path / "in.jsonl"), purpose="batch")
        theirs = await openai.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
        assert (await client.batch.fetch(theirs.id, tmp_path / "theirs.jsonl")).completed == 5
        assert {theirs.id, id_} <= {one.id for one in await client.batch.list()}
        assert (await client.batch.list())[0].id == theirs.id


async def test_a_tenants_batches_are_not_found_by_others(pool: Pool, tmp_path: Path) -> None:
    async with (
        Batches(settings=pool.settings, tenant="blue") as blue,
        Batches(settings=pool.settings, tenant="red") as red,
        pool.door("three") as door,
    ):
        id_ = await blue.submit(batch_file(tmp_path / "blue", 1))
        with pytest.raises(BatchInvalid, match=r"there is no batch .* of tenant 'red'"):
            await red.get(id_)
        assert id_ not in {one.id for one in await red.list()}
        headers = {"x-gearshift-tenant": "blue"}
        assert (await door.get(f"/v1/batches/{id_}", headers=headers)).json()["id"] == id_
        assert (await door.get(f"/v1/batches/{id_}")).status_code == 404
        assert (await blue.fetch(id_, tmp_path / "out.jsonl")).completed == 1
    tenants = [
        dict(record.headers).get("tenant")
        for record in await pool.records("calls")
        if b"blue 0" in (record.value or b"")
    ]
    assert tenants == [b"blue"]


async def test_a_batch_that_was_cancelled_says_so_of_each_line(client: Client, tmp_path: Path) -> None:
    id_ = await client.batch.submit(batch_file(tmp_path / "in.jsonl", 10, tokens=100_000))
    assert (await client.batch.cancel(id_)).status in {"cancelling", "cancelled"}
    done = await client.batch.fetch(id_, tmp_path / "out.jsonl")
    assert (done.status, done.completed, done.failed) == ("cancelled", 0, 10)
    assert [line["error"]["code"] for line in lines(tmp_path / "out.errors.jsonl")] == ["batch_cancelled"] * 10
    assert not (tmp_path / "out.jsonl").exists()
    assert (await client.batch.cancel(id_)).status == "cancelled", "what has ended stays as it is"


async def test_what_is_no_batch_is_told_and_leaves_nothing(client: Client, pool: Pool, tmp_path: Path) -> None:
    known = {one.id for one in await client.batch.list()}
    twice, empty, mixed = tmp_path / "twice", tmp_path / "empty", tmp_path / "mixed"
    twice.write_text(batch_file(tmp_path / "one", 1).read_text() * 2)
    empty.write_text("\n\n")
    mixed.write_text(
        batch_file(tmp_path / "one", 1).read_text()
        + batch_file(tmp_path / "other", 2, url="/v1/embeddings").read_text().splitlines()[1]
    )
    good = batch_file(tmp_path / "good", 1)
    for source, said in {
        tmp_path / "none": "none: No such file",
        tmp_path: "directory",
        twice: "twice: line 2: custom_id 'line-0' is that of line 1",
        empty: "empty: the file has no requests",
        mixed: "mixed: the lines ask for /v1/completions, /v1/embeddings, and a batch has one endpoint",
    }.items():
        with pytest.raises(BatchInvalid, match=said):
            await client.batch.run(source, tmp_path / "out.jsonl")
        with pytest.raises(BatchInvalid, match=said):
            await client.batch.submit(source)
    for window in ("", "0h", "25h", "1 day", "24"):
        with pytest.raises(BatchInvalid, match="must be like 24h, and 86400 s at most"):
            await client.batch.submit(good, window=window)
    for id_ in ("what", "batch_" + "0" * 48, ""):
        with pytest.raises(BatchInvalid, match="there is no batch"):
            await client.batch.get(id_)
    assert not [name for name in names(tmp_path) if name.startswith("out")]
    assert {one.id for one in await client.batch.list()} == known
    stored = {json.loads(one.value or b"{}").get("filename") for one in await pool.records("batches") if one.value}
    assert not stored & {"twice", "empty", "mixed", "good"}


async def test_a_batch_may_not_outlast_its_file(pool: Pool, tmp_path: Path) -> None:
    topics = pool.settings.topics.model_copy(update={"files_retention_s": 8 * 3600.0})
    async with Batches(settings=pool.settings.model_copy(update={"topics": topics}), tenant="brief") as brief:
        source = batch_file(tmp_path / "in.jsonl", 1)
        with pytest.raises(BatchInvalid, match="must be like 24h, and 25200 s at most"):
            await brief.submit(source)
        assert await brief.list() == ()
        assert (await brief.get(await brief.submit(source, window="7h"))).total == 1


async def test_what_is_there_is_not_written_over(client: Client, tmp_path: Path) -> None:
    source, output, errors = batch_file(tmp_path / "in.jsonl", 1), tmp_path / "out.jsonl", tmp_path / "errors.jsonl"
    id_ = await client.batch.submit(source)
    for kept in (output, errors):
        kept.write_text("precious notes")
        with pytest.raises(BatchInvalid, match="is there already"):
            await client.batch.run(source, output, errors=errors)
        with pytest.raises(BatchInvalid, match="is there already"):
            await client.batch.fetch(id_, output, errors=errors)
        assert kept.read_text() == "precious notes"
        kept.unlink()
    for one, other in ((source, None), (output, source), (output, output)):
        with pytest.raises(BatchInvalid, match="are three files"):
            await client.batch.run(source, one, errors=other)
    state = tmp_path / "out.jsonl.state"
    of_blue = json.dumps({"batch": f"{begin_of(BATCH, owner_named('blue'))}{'0' * 32}", "source": digest(source)})
    others = '{"batch": "b", "source": "other"}'
    known = await client.batch.list()
    for text, said in {others: "for another input", "{": "can't be read", of_blue: "not this tenant's"}.items():
        state.write_text(text)
        with pytest.raises(BatchInvalid, match=said):
            await client.batch.run(source, output)
    assert await client.batch.list() == known


async def test_the_commands_say_what_python_says(pool: Pool, tmp_path: Path) -> None:
    where = ["--bootstrap-servers", pool.settings.kafka.bootstrap_servers]
    where += ["--topic-prefix", pool.settings.topics.topic_prefix, "--tenant", "commands"]
    source, output = batch_file(tmp_path / "in.jsonl", 4, wrong=1), tmp_path / "out.jsonl"

    async def gearshift(*words: str, code: int = 0) -> str:
        found = await asyncio.to_thread(CliRunner().invoke, app, ["batch", *words, *where])
        assert found.exit_code == code, found.output
        return found.stdout.strip()

    assert await gearshift("list") == "none"
    ran = json.loads(await gearshift("run", str(source), str(output), "--json"))
    assert (ran["status"], ran["completed"], ran["failed"]) == ("completed", 3, 1)
    id_ = await gearshift("submit", str(source))
    fetched = json.loads(await gearshift("fetch", id_, str(tmp_path / "again.jsonl"), "--json"))
    assert fetched == {"id": id_, "status": "completed", "total": 4, "completed": 3, "failed": 1, "reason": None}
    assert answers(tmp_path / "again.jsonl") == answers(output)
    assert "3 completed, 1 failed of 4" in await gearshift("status", id_)
    assert "completed" in await gearshift("cancel", id_)
    listed = [json.loads(line) for line in (await gearshift("list", "--json")).splitlines()]
    assert [one["id"] for one in listed] == [id_, ran["id"]]
    assert id_ in await gearshift("list")
    async with Files(settings=pool.settings) as files:
        asked = files.index.batch(id_)
        assert asked is not None
        gone = asked.asked.model_copy(update={"id": f"{id_[:-4]}dead"})
        await files.end(BatchEnded(id=gone.id, at=time.time(), end=BatchEnd.FAILED, reason="its file is gone"))
        await files.store(gone)
    assert "failed: 0 completed, 0 failed of 4 (its file is gone)" in await gearshift("status", gone.id)
    failed = json.loads(await gearshift("fetch", gone.id, str(tmp_path / "none.jsonl"), "--json", code=1))
    assert (failed["status"], failed["reason"]) == ("failed", "its file is gone")
