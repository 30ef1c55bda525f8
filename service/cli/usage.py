"""``gearshift usage``: what results have cost, by whom and of what, from the topic of that."""

import asyncio
import csv
import re
import sys
import time
from datetime import UTC, datetime
from typing import Annotated

import typer
from rich.table import Table

from schemas.errors import nearest
from schemas.words import shown
from service.cli.options import Bootstrap, Json, Prefix, console, print_json, settings_of
from service.errors import ConfigError
from service.kafka.usage import GROUPS, Sum, Sums, summed_usage

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_SPAN = re.compile(r"([0-9]{1,9})([smhd])")


def add_to(app: typer.Typer) -> None:
    """The command of this module."""
    app.command("usage")(show_usage)


def show_usage(
    by: Annotated[str, typer.Option(help=f"Groups, with commas between them: {', '.join(GROUPS)}.")] = "tenant,model",
    since: Annotated[str | None, typer.Option(help="A moment in RFC 3339, or how long ago: 30m, 12h, 7d.")] = None,
    bootstrap_servers: Bootstrap = None,
    topic_prefix: Prefix = None,
    as_csv: Annotated[bool, typer.Option("--csv", help="For spreadsheets.")] = False,
    as_json: Json = False,
) -> None:
    """Sum up what results have cost: tokens, seconds on the device, seconds of waiting for switches.

    [bold]Example[/]: gearshift usage --by tenant,model --since 7d
    """
    groups, moment = groups_of(by), moment_of(since, now=time.time())
    settings = settings_of(bootstrap_servers=bootstrap_servers, topic_prefix=topic_prefix)
    sums = asyncio.run(summed_usage(settings, by=groups, since=moment))
    if as_json:
        for row in sums.rows():
            print_json(row)
    elif as_csv:
        writer = csv.DictWriter(sys.stdout, [*groups, *Sum.__slots__])
        writer.writeheader()
        rows = sums.rows()
        writer.writerows({name: cell(of) if isinstance(of, str) else of for name, of in row.items()} for row in rows)
    else:
        console.print(table_of(groups, sums))


def groups_of(text: str) -> tuple[str, ...]:
    """The groups that are asked for. Raises ConfigError."""
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    for name in names:
        if name not in GROUPS:
            raise ConfigError(f"--by: unknown group {name!r}{nearest(name, GROUPS)}; known: {', '.join(GROUPS)}")
    return names


def moment_of(text: str | None, *, now: float) -> float | None:
    """Seconds since the epoch; a moment that names no time zone is one of UTC. Raises ConfigError."""
    if text is None:
        return None
    if span := _SPAN.fullmatch(text):
        return now - int(span[1]) * _UNITS[span[2]]
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise ConfigError(f"--since {text!r}: give a moment in RFC 3339, or a span as 30m, 12h or 7d") from None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


_FORMULAS = ("=", "+", "-", "@", "\t", "\r", "\n")


def cell(text: str) -> str:
    """The text as a spreadsheet takes it for text: behind an apostrophe where it would be a formula."""
    return shown(f"'{text}" if text.startswith(_FORMULAS) else text)


def table_of(groups: tuple[str, ...], sums: Sums) -> Table:
    """Where there is little room, names go on in the next line before a number is cut."""
    table = Table(box=None, pad_edge=False)
    for name in groups:
        table.add_column(name, overflow="fold")
    for name in Sum.__slots__:
        table.add_column(name.replace("_", "\n"), justify="right", no_wrap=True)
    for row in sums.rows():
        table.add_row(*(f"{value:,.2f}" if isinstance(value, float) else f"{value}" for value in row.values()))
    return table
