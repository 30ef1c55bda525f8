"""``gearshift schemas export``: the wire contract as files, for producers and consumers in any language."""

import importlib.metadata
import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from schemas.examples import Kind, examples
from schemas.export import Channel, asyncapi, json_schemas
from service.cli.options import Prefix, Set, settings_of
from service.kafka.topics import plan
from service.settings import TopicSettings

Folder = Annotated[Path, typer.Argument(help="Where the files go; it is made if it is not there.")]


def add_to(app: typer.Typer) -> None:
    """The commands of this module."""
    schemas = typer.Typer(help="The wire contract.", no_args_is_help=True)
    schemas.command()(export)
    schemas.callback()(lambda: None)
    app.add_typer(schemas, name="schemas")


def export(folder: Folder, topic_prefix: Prefix = None, assignments: Set = None) -> None:
    """Write a JSON Schema per kind of message, an AsyncAPI 3 document with examples, and the examples as records.

    [bold]Example[/]: gearshift schemas export contract/
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name, document in documents(settings_of(assignments, topic_prefix=topic_prefix).topics):
        (folder / name).write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def documents(topics: TopicSettings) -> Iterator[tuple[str, Any]]:
    """The files of the contract: name and content."""
    for kind, schema in json_schemas().items():
        yield f"{kind.value}.schema.json", schema
    yield "asyncapi.json", asyncapi(_channels(topics), version=importlib.metadata.version("gearshift"))
    yield "examples.json", [asdict(example) for example in examples()]


def _channels(topics: TopicSettings) -> dict[str, Channel]:
    planned = {topic.name: topic for topic in plan(topics, ["{alias}"])}
    named: dict[str, tuple[Kind, str, Any]] = {
        "requests": (Kind.REQUEST, topics.named(topics.requests), "receive"),
        "model-requests": (Kind.REQUEST, topics.for_alias("{alias}"), "receive"),
        "throttled": (Kind.REQUEST, topics.named(topics.throttled), "send"),
        "control": (Kind.CONTROL, topics.named(topics.control), "receive"),
        "commands": (Kind.COMMAND, topics.named(topics.commands), "receive"),
        "calls": (Kind.REQUEST, topics.named(topics.calls), "receive"),
        "answers": (Kind.RESULT, topics.named(topics.answers), "send"),
        "results": (Kind.RESULT, topics.named(topics.results), "send"),
        "batches": (Kind.STORED, topics.named(topics.batches), "send"),
        "usage": (Kind.USAGE, topics.named(topics.usage), "send"),
        "chunks": (Kind.CHUNK, topics.named(topics.chunks), "send"),
        "status": (Kind.STATUS, topics.named(topics.status), "send"),
        "workers": (Kind.PRESENCE, topics.named(topics.workers), "send"),
        "progress": (Kind.PROGRESS, topics.named(topics.progress), "send"),
        "dead-letters": (Kind.DEAD_LETTER, topics.named(topics.dead_letters), "send"),
    }
    channels = {
        name: Channel(kind, address, action, planned[address].partitions, planned[address].configs)
        for name, (kind, address, action) in named.items()
    }
    channels["calls"] = replace(channels["calls"], answered_in="answers")
    channels["answers"] = replace(channels["answers"], besides=(Kind.CHUNK,))
    return channels
