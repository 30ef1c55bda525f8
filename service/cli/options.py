"""What several commands share: options that become settings, and printing for people and for scripts."""

import json
import sys
from collections.abc import Iterable
from typing import Annotated, Any

import typer
from pydantic import BaseModel
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from schemas.words import shown
from service import settings as settings_module
from service.errors import ConfigError
from service.settings import Settings


class Terminal(Console):
    """For people: what strangers wrote is shown, and neither read as markup nor obeyed by the terminal.

    ``options`` are rich's. A pipe is no exception, for it may end at a terminal.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(highlight=False, markup=False, emoji=False, **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """As rich's."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(shown(segment.text), segment.style)

    def say(self, text: str, *, end: str = "\n") -> None:
        """Show what a model said; where it is no terminal, to the character."""
        self.file.write((shown(text) if self.is_terminal else text) + end)
        self.file.flush()


console = Terminal()

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


def standard_input() -> str:
    """All of it. Raises ConfigError."""
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError:
        raise ConfigError("standard input: it is no text in UTF-8") from None


def print_json(value: Any) -> None:
    """One JSON object on a line of its own."""
    if isinstance(value, BaseModel):
        value = json.loads(value.model_dump_json(exclude_none=True))
    # In ASCII: whatever a terminal would obey is escaped. As a text: YAML has dates.
    sys.stdout.write(json.dumps(value, default=str) + "\n")
    sys.stdout.flush()
