"""The command as a person and a script use it, against a worker around the fake engine on the real broker."""

import asyncio
import csv
import io
import json
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from click.testing import Result
from typer.testing import CliRunner

from schemas.control import CONTROL_TYPES
from service.cli.main import app
from service.errors import ConfigError, GroupBusy, NoAnswer
from service.settings import Settings
from tests.support.pool import delete_topics, serving, settings_for
from tests.support.waiting import PATIENCE_S

Gearshift = Callable[..., Awaitable[Result]]


def commands(settings: Settings) -> Gearshift:
    """``await gearshift("send", "llama", "hello")``: one command, in a thread beside the worker's loop."""
    where = ["--bootstrap-servers", settings.kafka.bootstrap_servers, "--topic-prefix", settings.topics.topic_prefix]

    async def run(*words: str) -> Result:
        return await asyncio.to_thread(CliRunner().invoke, app, [*words, *where])

    return run


@pytest.fixture(scope="module")
async def pool(bootstrap) -> AsyncIterator[Settings]:
    settings = settings_for(bootstrap)
    async with serving(settings, step_s=0.001):
        yield settings
    await delete_topics(settings)


@pytest.fixture
def gearshift(pool) -> Gearshift:
    """Commands to a worker that other tests use, too."""
    return commands(pool)


@pytest.fixture
async def gearshift_alone(bootstrap) -> AsyncIterator[Gearshift]:
    """Commands to a worker to which nobody has said anything."""
    settings = settings_for(bootstrap)
    async with serving(settings, step_s=0.001):
        yield commands(settings)
    await delete_topics(settings)


def lines(result: Result) -> list[dict]:
    try:
        return [json.loads(line) for line in result.stdout.splitlines()]
    except ValueError:
        pytest.fail(f"no objects, a line each: {result.stdout!r}, and beside it {result.stderr!r}")


async def test_a_prompt_is_answered_by_its_model(gearshift):
    result = await gearshift("send", "qwen", "hello", "--max-tokens", "3")
    assert result.exit_code == 0, result.output
    assert "qwen0 qwen1 qwen2" in result.output
    assert "3 tokens" in result.output


async def test_a_script_gets_one_json_object(gearshift):
    result = await gearshift(
        "send", "--body", '{"model": "llama", "prompt": "x", "max_tokens": 2}', "--json", "--id", "r1"
    )
    (found,) = lines(result)
    assert (found["id"], found["outcome"]) == ("r1", "completed")
    assert found["body"]["choices"][0]["text"] == "llama0 llama1 "


async def test_a_stream_is_printed_as_it_comes(gearshift):
    result = await gearshift("send", "llama", "hello", "--stream", "--max-tokens", "4")
    assert result.exit_code == 0
    assert "llama0 llama1 llama2 llama3" in result.stdout  # what the worker logs meanwhile is elsewhere


async def test_a_script_gets_nothing_of_a_stream_but_its_result(gearshift):
    (found,) = lines(await gearshift("send", "llama", "hello", "--stream", "--max-tokens", "4", "--json"))
    assert found["body"]["usage"]["completion_tokens"] == 4


async def test_what_a_stranger_asked_for_is_shown_as_it_was_written_and_not_read_as_markup(gearshift):
    name = "[/red]llama:bug:"
    sent = await gearshift("send", name, "hello")
    assert sent.exit_code == 1
    assert name in sent.output
    for command in ("usage",), ("results", "--past", "--no-follow"), ("dead-letters", "list"):
        found = await gearshift(*command)
        assert found.exit_code == 0, found.exception
        assert name in "".join(found.output.split()), command


async def test_a_name_that_a_spreadsheet_would_compute_is_a_text_there(gearshift):
    await gearshift("send", "=1+1", "hello")
    found = await gearshift("usage", "--csv")
    assert [row["model"] for row in csv.DictReader(io.StringIO(found.stdout)) if "1+1" in row["model"]] == ["'=1+1"]


async def test_a_failed_request_is_said_and_the_exit_code_tells(gearshift):
    result = await gearshift("send", "lama", "hello")
    assert result.exit_code == 1
    assert "404" in result.output
    assert "'llama'" in result.output


async def test_a_switch_is_told_step_by_step_with_its_milliseconds(gearshift):
    await gearshift("switch", "llama")
    result = await gearshift("switch", "qwen")
    assert result.exit_code == 0, result.output
    for step in ("accepted", "switching", "completed", " ms"):
        assert step in result.output
    again = await gearshift("switch", "qwen", "--json")
    assert [status["state"] for status in lines(again)] == ["no_op"]


async def test_a_switch_to_an_unknown_model_is_rejected_with_the_nearest_one(gearshift):
    result = await gearshift("switch", "qwem")
    assert result.exit_code == 1
    assert "rejected" in result.output
    assert "'qwen'" in result.output


async def test_an_event_for_nobody_is_told_and_not_only_waited_for(gearshift):
    result = await gearshift("switch", "qwen", "--target", "nobdy", "--timeout", "1", "--json")
    assert isinstance(result.exception, NoAnswer)
    assert "no worker that is there is meant by 'nobdy'" in result.stderr
    assert result.stdout == ""


async def test_every_control_event_has_a_command_and_is_answered_with_what_it_did(gearshift_alone):
    told: set[str] = {"switch", "cancel"}  # have commands of their own, and tests

    async def tell(kind: str, *fields: str) -> dict:
        told.add(kind)
        result = await gearshift_alone("control", kind, *fields, "--json")
        assert result.exit_code == 0, (kind, result.output)
        (answer,) = lines(result)
        assert (answer["state"], answer["kind"]) == ("completed", kind)
        return answer

    async def qwen(kind: str, *fields: str) -> dict:
        contexts = (await tell(kind, "model=qwen", *fields))["contexts"]
        return next(context for context in contexts if context["alias"] == "qwen")

    assert [(await qwen(kind))["pinned"] for kind in ("pin", "unpin")] == [True, False]
    assert (await qwen("preload"))["tier"] == "resident"
    assert (await qwen("sleep", "level=1"))["tier"] == "parked"
    assert (await qwen("sleep", "level=2"))["tier"] == "dropped"
    await tell("wake", "model=qwen")
    assert (await qwen("lora.add", "name=poet", "path=poet"))["loras"] == ["poet"]
    await tell("lora.pin", "model=qwen", "name=poet")
    assert (await tell("lora.list"))["answer"] == {"loras": {"llama": [], "qwen": ["poet"]}}
    assert (await qwen("lora.remove", "name=poet"))["loras"] == []
    await tell("pause")
    assert (await tell("query"))["answer"]["paused"] is True
    await tell("resume")
    assert (await tell("query"))["answer"]["paused"] is False
    await tell("reset_cache")
    await tell("objective", "model=qwen", "request_class=chat", "ttft_s=2", "tpot_s=0.1")
    await tell("profile", "action=start")
    await tell("profile", "action=stop")
    assert (await tell("reload"))["answer"] == {"models": {"llama": "kept", "qwen": "kept"}}
    assert told == CONTROL_TYPES


async def test_a_dead_letter_is_listed_shown_and_tried_again_under_a_new_id(gearshift_alone):
    await gearshift_alone("send", "lama", "hello", "--id", "r1", "--max-tokens", "2")
    (letter,) = lines(await gearshift_alone("dead-letters", "list", "--json", "--class", "unknown_model"))
    assert (letter["id"], letter["redriven_as"]) == ("r1", None)
    shown = await gearshift_alone("dead-letters", "show", "r1")
    assert json.loads(json.loads(shown.stdout)["value"])["model"] == "lama"
    (renamed,) = lines(await gearshift_alone("dead-letters", "redrive", "--class", "unknown_model", "--json"))
    letters: list[dict] = []
    async with asyncio.timeout(PATIENCE_S):
        while len(letters) < 2:
            letters = lines(await gearshift_alone("dead-letters", "list", "--json"))
    assert [(one["id"], one["redriven_as"]) for one in letters] == [("r1", renamed["r1"]), (renamed["r1"], None)]
    nothing = await gearshift_alone("dead-letters", "redrive", "--class", "poison")
    assert "nothing to redrive" in nothing.output


async def test_offsets_are_shown_and_set_elsewhere_once_the_pool_is_stopped(bootstrap):
    settings = settings_for(bootstrap, request_partitions=1)
    where = ["--bootstrap-servers", bootstrap, "--topic-prefix", settings.topics.topic_prefix]
    group = ["--group-id", settings.worker.group_id]

    async def offsets(*words: str) -> Result:
        return await asyncio.to_thread(CliRunner().invoke, app, ["offsets", *words, *where, *group, "--json"])

    async with serving(settings):
        for n in range(3):
            await asyncio.to_thread(CliRunner().invoke, app, ["send", "llama", "hello", "--id", f"r{n}", *where])
        busy = await offsets("reset", "beginning")
        assert isinstance(busy.exception, GroupBusy)
    before = next(one for one in lines(await offsets("show")) if one["end"])
    assert (before["watermark"], before["lag"]) == (3, 0)
    first = next(one for one in lines(await offsets("reset", "1960-01-01")) if one["end"])
    assert (first["watermark"], first["lag"]) == (0, 3), "before there was a log"
    after = next(one for one in lines(await offsets("reset", "1", "--topic", before["topic"])) if one["end"])
    assert (after["watermark"], after["lag"]) == (1, 2)
    short = before["topic"].removeprefix(settings.topics.topic_prefix)
    assert [one["watermark"] for one in lines(await offsets("reset", "1", "--topic", short))] == [1]
    for words, reason in (
        (("--topic", "reqests"), "no topic 'reqests' of requests"),
        (("--topic", short, "--partition", "7"), "no partition 7 there: the last one is 0"),
    ):
        refused = (await offsets("reset", "end", *words)).exception
        assert isinstance(refused, ConfigError)
        assert reason in str(refused)
    counts: list[int] = []
    async with serving(settings), asyncio.timeout(PATIENCE_S):
        await asyncio.to_thread(CliRunner().invoke, app, ["send", "llama", "hello", "--id", "new", *where])
        while counts != [1, 2, 2, 1]:  # answered again from where it was set to
            past = await asyncio.to_thread(
                CliRunner().invoke, app, ["results", "--past", "--no-follow", "--json", *where]
            )
            ids = [result["id"] for result in lines(past)]
            counts = [ids.count(name) for name in ("r0", "r1", "r2", "new")]
    await delete_topics(settings)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("puase",), "unknown control event 'puase' (did you mean 'pause'?)"),
        (("pin", "modle=qwen"), "pin: unknown field 'modle' (did you mean 'model'?)"),
        (("pin",), "pin.model: Field required"),
        (("objective", "model=qwen", "share=null"), "objective.share: "),
        (("switch", "model=qwen", "hold=-1"), "switch.hold: give seconds (0 or more), 'drained' or 'forever'"),
    ],
)
async def test_a_misspelt_control_event_is_a_usage_error(gearshift, words, says):
    result = await gearshift("control", *words)
    assert says in str(result.exception)


@pytest.mark.parametrize(
    "words", [("pause", "model=null"), ("preload", "model=70"), ("pin", "model=true"), ("lora.list", "model=[1]")]
)
async def test_a_name_is_a_name_whatever_it_looks_like(gearshift, words):
    """``null`` for a model would be all of them."""
    result = await gearshift("control", *words, "--timeout", "10")
    assert "rejected" in result.output
    assert f"unknown model {words[1].partition('=')[2]!r}" in result.output


async def test_results_and_the_pool_are_listed(gearshift, pool):
    await gearshift("send", "llama", "hello", "--id", "r7", "--max-tokens", "2")
    past = await gearshift("results", "--past", "--no-follow")
    assert "r7" in past.output
    status = await gearshift("status", "--json")
    (presence,) = lines(status)
    assert presence["pool"] == pool.worker.group_id
    table = await gearshift("status")
    assert "serving" in table.output


async def test_a_sent_request_can_be_asked_about_and_cancelled(gearshift):
    sent = await gearshift("send", "llama", "hello", "--max-tokens", "100000", "--no-wait", "--id", "long")
    assert sent.stdout.strip() == "long"
    found: list[dict] = []
    async with asyncio.timeout(PATIENCE_S):
        while not found:  # on the bus, but perhaps not read yet
            answer = await gearshift("query", "long", "--json")
            found = [place for worker in lines(answer)[0].values() for place in worker["found"]]
    assert [place["model"] for place in found] == ["llama"]
    await gearshift("cancel", "long")
    result = await gearshift("send", "llama", "hello", "--max-tokens", "2")
    assert result.exit_code == 0
    past = await gearshift("results", "--past", "--no-follow", "--json")
    assert {found["id"]: found["outcome"] for found in lines(past)}["long"] == "cancelled"


async def test_a_batch_is_run_to_its_end_or_left_on_the_bus_and_fetched(gearshift, tmp_path):
    source = tmp_path / "in.jsonl"
    bodies = [{"model": model, "prompt": "x", "max_tokens": 1} for model in ("llama", "qwen", "lama")]
    written = [
        {"custom_id": str(n), "method": "POST", "url": "/v1/completions", "body": b} for n, b in enumerate(bodies)
    ]
    source.write_text("".join(json.dumps(line) + "\n" for line in written))
    done = await gearshift("batch", "run", str(source), str(tmp_path / "out.jsonl"))
    assert done.exit_code == 0, done.output
    assert "2 completed, 1 failed of 3" in done.output
    submitted = await gearshift("batch", "submit", str(source))
    name = submitted.stdout.strip()
    progress = {"completed": 0, "failed": 0}
    async with asyncio.timeout(PATIENCE_S):
        while progress["completed"] + progress["failed"] < 3:
            (progress,) = lines(await gearshift("batch", "status", name, "--json"))
    fetched = await gearshift("batch", "fetch", name, str(tmp_path / "fetched.jsonl"))
    assert "2 completed, 1 failed of 3" in fetched.output
    answers = [(tmp_path / file).read_text().splitlines() for file in ("out.jsonl", "fetched.jsonl")]
    said = [
        {(found := json.loads(line))["custom_id"]: found["response"]["body"]["model"] for line in a} for a in answers
    ]
    assert said == [{"0": "llama", "1": "qwen"}] * 2


async def test_topics_are_made_once(gearshift):
    await gearshift("send", "llama", "hello", "--max-tokens", "1")  # the worker has made them by now
    result = await gearshift("topics", "create")
    assert result.exit_code == 0, result.output
    assert "all there" in result.output
