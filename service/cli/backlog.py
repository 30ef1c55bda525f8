"""Dead letters and offsets: what could not be answered, and where the pool stands."""

import asyncio
import json
from datetime import UTC, datetime
from typing import Annotated

import typer
from rich.table import Column, Table
from rich.text import Text

from schemas.errors import FailureClass
from service.cli.options import Bootstrap, Json, Prefix, console, print_json, settings_of
from service.consumer.positions import Position, Positions, Target
from service.errors import ConfigError
from service.kafka.dead_letters import DeadLetter, dead_letter, dead_letters, redrive


def add_to(app: typer.Typer) -> None:
    """The commands of this module."""
    letters = typer.Typer(help="Failed requests, kept as they were.", no_args_is_help=True)
    letters.command("list")(list_letters)
    letters.command("show")(show_letter)
    letters.command("redrive")(redrive_letters)
    app.add_typer(letters, name="dead-letters")
    offsets = typer.Typer(help="Where the pool stands, its ledger included.", no_args_is_help=True)
    offsets.command("show")(show_offsets)
    offsets.command("reset")(reset_offsets)
    app.add_typer(offsets, name="offsets")


def list_letters(
    failure: Annotated[FailureClass | None, typer.Option("--class", help="Only this class of failure.")] = None,
    bootstrap_servers: Bootstrap = None,
    topic_prefix: Prefix = None,
    as_json: Json = False,
) -> None:
    """List dead letters, newest last."""
    settings = settings_of(bootstrap_servers=bootstrap_servers, topic_prefix=topic_prefix)
    found = asyncio.run(dead_letters(settings, failure=failure))
    if as_json:
        for letter in found:
            print_json(_summary(letter))
        return
    for letter in found:
        attempts = "1 attempt" if letter.attempts == 1 else f"{letter.attempts} attempts"
        redriven = f", redriven as {letter.redriven_as}" if letter.redriven_as else ""
        parts = f"{letter.at:%Y-%m-%d %H:%M:%S} ", (letter.failure, "red"), f" {letter.id} {attempts}{redriven}"
        console.print(Text.assemble(*parts), soft_wrap=True)
        console.print("   ", *letter.error.message[:300].split(), style="dim", soft_wrap=True)


def show_letter(
    letter_id: Annotated[str, typer.Argument(help="The request's id.")],
    bootstrap_servers: Bootstrap = None,
    topic_prefix: Prefix = None,
) -> None:
    """Show one dead letter whole: its headers and its original bytes."""
    settings = settings_of(bootstrap_servers=bootstrap_servers, topic_prefix=topic_prefix)
    letter = asyncio.run(dead_letter(settings, letter_id))
    headers = {name: (value or b"").decode("utf-8", "replace") for name, value in letter.headers}
    value = None if letter.value is None else letter.value.decode("utf-8", "replace")
    print_json({**_summary(letter), "headers": headers, "value": value})


def redrive_letters(
    ids: Annotated[list[str] | None, typer.Argument(help="Which ones; or --class.")] = None,
    failure: Annotated[FailureClass | None, typer.Option("--class", help="All of this class not yet redriven.")] = None,
    bootstrap_servers: Bootstrap = None,
    topic_prefix: Prefix = None,
    as_json: Json = False,
) -> None:
    """Ask again, under new ids that name the old ones (``redrive_of``); the history of attempts is kept.

    [bold]Example[/]: gearshift dead-letters redrive --class load_failed
    """
    settings = settings_of(bootstrap_servers=bootstrap_servers, topic_prefix=topic_prefix)
    if not ids and failure is None:
        raise ConfigError("give ids, or --class")

    async def run() -> dict[str, str]:
        if ids:
            letters = [await dead_letter(settings, id_) for id_ in ids]
        else:
            letters = [one for one in await dead_letters(settings, failure=failure) if one.redriven_as is None]
        return await redrive(settings, letters)

    renamed = asyncio.run(run())
    if as_json:
        print_json(renamed)
    else:
        for old, new in renamed.items():
            console.print(Text.assemble(f"{old} -> ", (new, "green")), soft_wrap=True)
        if not renamed:
            console.print("nothing to redrive")


def _summary(letter: DeadLetter) -> dict[str, object]:
    return {
        "id": letter.id,
        "class": str(letter.failure),
        "error": letter.error.model_dump(),
        "attempts": letter.attempts,
        "at": letter.at.isoformat(),
        "origin": letter.origin,
        "redriven_as": letter.redriven_as,
    }


def show_offsets(
    group_id: Annotated[str | None, typer.Option(help="The pool.")] = None,
    bootstrap_servers: Bootstrap = None,
    topic_prefix: Prefix = None,
    as_json: Json = False,
) -> None:
    """Show each partition: its watermark, what is finished above it, lag, and starts that were never settled."""
    settings = settings_of(bootstrap_servers=bootstrap_servers, topic_prefix=topic_prefix, group_id=group_id)

    async def run() -> list[Position]:
        async with Positions(settings=settings) as positions:
            return await positions.show()

    _print_positions(asyncio.run(run()), as_json=as_json)


def reset_offsets(
    to: Annotated[str, typer.Argument(help="An offset, 'beginning', 'end', or a moment in RFC 3339.")],
    topic: Annotated[list[str] | None, typer.Option(help="Only these topics.")] = None,
    partition: Annotated[list[int] | None, typer.Option(help="Only these partitions.")] = None,
    group_id: Annotated[str | None, typer.Option(help="The pool.")] = None,
    bootstrap_servers: Bootstrap = None,
    topic_prefix: Prefix = None,
    as_json: Json = False,
) -> None:
    """Set the pool elsewhere, with an empty ledger there, and show what was set.

    Refused while workers of the pool run, and for topics and partitions that there are not.
    """
    target = _target(to)
    settings = settings_of(bootstrap_servers=bootstrap_servers, topic_prefix=topic_prefix, group_id=group_id)

    async def run() -> list[Position]:
        async with Positions(settings=settings) as positions:
            reset = await positions.reset(target, topics=topic or (), partitions=partition or ())
            moved = {(one.topic, one.partition) for one, _ in reset}
            return [one for one in await positions.show() if (one.topic, one.partition) in moved]

    _print_positions(asyncio.run(run()), as_json=as_json)


def _target(text: str) -> Target:
    words: dict[str, Target] = {"beginning": "beginning", "end": "end"}
    if text in words:
        return words[text]
    if text.isdecimal():
        return int(text)
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise ConfigError(f"{text!r}: give an offset, 'beginning', 'end' or a moment in RFC 3339") from None
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


def _print_positions(positions: list[Position], *, as_json: bool) -> None:
    if as_json:
        for one in positions:
            print_json(json.loads(json.dumps({name: getattr(one, name) for name in one.__slots__})))
        return
    numbers = "partition", "first", "watermark", "end", "finished\nabove", "lag"
    table = Table(
        Column("topic", overflow="fold"),
        *(Column(name, no_wrap=True) for name in numbers),
        Column("unsettled\nstarts", overflow="fold"),
        Column("problem", overflow="fold"),
        box=None,
        pad_edge=False,
    )
    for one in positions:
        watermark = "-" if one.watermark is None else str(one.watermark)
        suspects = ", ".join(f"{offset} ({starts} times)" for offset, starts in one.suspects)
        table.add_row(
            one.topic,
            str(one.partition),
            str(one.first),
            watermark,
            str(one.end),
            str(one.finished_above),
            str(one.lag),
            suspects,
            one.problem or "",
        )
    console.print(table)
