"""What several commands share: options that become settings, and printing for people and for scripts."""

import json
import sys
from typing import Annotated, Any

import typer
from pydantic import BaseModel
from rich.console import Console

from service import settings as settings_module
from service.errors import ConfigError
from service.settings import Settings

console = Console(highlight=False)

Bootstrap = Annotated[
    str | None,
    typer.Option("--bootstrap-servers", "-b", help="Kafka brokers; KAFKA_BOOTSTRAP_SERVERS.", metavar="HOST:PORT"),
]
Prefix = Annotated[str | None, typer.Option("--topic-prefix", help="Before every topic's name.")]
Json = Annotated[bool, typer.Option("--json", help="For scripts: one JSON object per line.")]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", "-s", help="Any setting: NAME=VALUE; may be given several times.", metavar="NAME=VALUE"),
]


def settings_of(assignments: list[str] | None = None, **given: object) -> Settings:
    """Settings from options (None: not given) and ``--set`` assignments. Raises ConfigError."""
    for assignment in assignments or ():
        name, equals, value = assignment.partition("=")
        if not equals:
            raise ConfigError(f"--set {assignment!r}: write NAME=VALUE")
        given[name.replace("-", "_")] = value
    return settings_module.load(**given)


def print_json(value: Any) -> None:
    """One JSON object on a line of its own."""
    text = value.model_dump_json(exclude_none=True) if isinstance(value, BaseModel) else json.dumps(value)
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
