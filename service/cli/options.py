"""What several commands share: options that become settings, and printing for people and for scripts."""

import json
import sys
from collections.abc import Iterable
from typing import Annotated, Any

import typer
from pydantic import BaseModel
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from service import settings as settings_module
from service.errors import ConfigError
from service.settings import Settings

_CONTROLS = (*range(0x20), *range(0x7F, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A))
_OBEYED = dict.fromkeys({*_CONTROLS} - {ord("\n"), ord("\t")}, "\N{REPLACEMENT CHARACTER}")
"""Control characters, and those that turn the direction of what stands behind them."""


class Terminal(Console):
    """For people: what strangers wrote is shown, and neither read as markup nor obeyed by the terminal.

    ``options`` are rich's. Where it is no terminal, control characters are passed on, as far as rich does.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(highlight=False, markup=False, emoji=False, **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """As rich's."""
        for segment in super().render(renderable, options):
            if segment.control or not self.is_terminal:
                yield segment
            else:
                yield Segment(segment.text.translate(_OBEYED), segment.style)

    def say(self, text: str, *, end: str = "\n") -> None:
        """Show what a model said; where it is no terminal, to the character."""
        if self.is_terminal:
            self.out(text, end=end)
        else:
            self.file.write(text + end)
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


def print_json(value: Any) -> None:
    """One JSON object on a line of its own."""
    text = value.model_dump_json(exclude_none=True) if isinstance(value, BaseModel) else json.dumps(value)
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
