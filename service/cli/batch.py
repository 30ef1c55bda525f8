"""OpenAI's batches from the command: those of `/v1/batches`, and no door needed."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, TypeVar

import typer
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.text import Text

from schemas.batches import BatchEnd
from service.cli.options import Bootstrap, Json, Prefix, console, print_json, settings_of
from service.client.batches import Batches, OnProgress, Progress

T = TypeVar("T")
Source = Annotated[Path, typer.Argument(help="The batch's input: custom_id, method, url, body per line.")]
Output = Annotated[Path, typer.Argument(help="Where answers go.")]
Errors = Annotated[Path | None, typer.Option(help="Where lines go that failed; else a file beside the output.")]
BatchId = Annotated[str, typer.Argument(help="What `batch submit` printed, or `batch list` shows.")]
Tenant = Annotated[str, typer.Option(help="Whose it is, as with a door's tenants.")]
Window = Annotated[str, typer.Option(help="How long it may take: 90m, 24h, 1d.")]
_COLOURS = {"completed": "green", "failed": "red", "expired": "red", "cancelled": "yellow", "cancelling": "yellow"}


def add_to(app: typer.Typer) -> None:
    """The commands of this module."""
    batch = typer.Typer(help="OpenAI's batches, which any worker of the pool works on.", no_args_is_help=True)
    for command in (run, submit, status, fetch, cancel):
        batch.command()(command)
    batch.command("list")(list_)
    app.add_typer(batch, name="batch")


def run(
    source: Source,
    output: Output,
    errors: Errors = None,
    window: Window = "24h",
    tenant: Tenant = "",
    bootstrap_servers: Bootstrap = None,
    topic_prefix: Prefix = None,
    as_json: Json = False,
) -> None:
    """Ask all lines, wait, and write their answers. Interrupted, it goes on: run it again to come back to it.

    [bold]Example[/]: gearshift batch run in.jsonl out.jsonl
    """
    with _bar(source.name, quiet=as_json) as show:
        progress = _do(
            lambda batches: batches.run(source, output, errors=errors, window=window, on_progress=show),
            bootstrap_servers,
            topic_prefix,
            tenant,
        )
    print_end(progress, as_json=as_json)


def submit(
    source: Source,
    window: Window = "24h",
    tenant: Tenant = "",
    bootstrap_servers: Bootstrap = None,
    topic_prefix: Prefix = None,
) -> None:
    """Leave all lines to the pool and print the batch's id; nothing has to stay running here."""
    console.print(
        _do(lambda batches: batches.submit(source, window=window), bootstrap_servers, topic_prefix, tenant),
        soft_wrap=True,
    )


def list_(
    tenant: Tenant = "", bootstrap_servers: Bootstrap = None, topic_prefix: Prefix = None, as_json: Json = False
) -> None:
    """Show the batches that there are, the youngest first."""
    found = _do(lambda batches: batches.list(), bootstrap_servers, topic_prefix, tenant)
    if as_json:
        for one in found:
            print_json(asdict(one))
        return
    for one in found:
        console.print(Text.assemble(f"{one.id}  ", _said(one)), soft_wrap=True)
    if not found:
        console.print("none")


def status(
    batch: BatchId,
    tenant: Tenant = "",
    bootstrap_servers: Bootstrap = None,
    topic_prefix: Prefix = None,
    as_json: Json = False,
) -> None:
    """Say how far a batch is."""
    _print(_do(lambda batches: batches.get(batch), bootstrap_servers, topic_prefix, tenant), as_json=as_json)


def fetch(
    batch: BatchId,
    output: Output,
    errors: Errors = None,
    tenant: Tenant = "",
    bootstrap_servers: Bootstrap = None,
    topic_prefix: Prefix = None,
    as_json: Json = False,
) -> None:
    """Wait for a batch's end, and write its answers."""
    with _bar(batch, quiet=as_json) as show:
        progress = _do(
            lambda batches: batches.fetch(batch, output, errors=errors, on_progress=show),
            bootstrap_servers,
            topic_prefix,
            tenant,
        )
    print_end(progress, as_json=as_json)


def cancel(
    batch: BatchId,
    tenant: Tenant = "",
    bootstrap_servers: Bootstrap = None,
    topic_prefix: Prefix = None,
    as_json: Json = False,
) -> None:
    """Let nothing more of a batch be asked."""
    _print(_do(lambda batches: batches.cancel(batch), bootstrap_servers, topic_prefix, tenant), as_json=as_json)


def _do(
    work: Callable[[Batches], Awaitable[T]], bootstrap_servers: str | None, topic_prefix: str | None, tenant: str
) -> T:
    settings = settings_of(bootstrap_servers=bootstrap_servers, topic_prefix=topic_prefix)

    async def done() -> T:
        async with Batches(settings=settings, tenant=tenant) as batches:
            return await work(batches)

    return asyncio.run(done())


@contextmanager
def _bar(name: str, *, quiet: bool) -> Iterator[OnProgress]:
    """Shows progress on a terminal."""
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Bar(*columns, console=console, disable=quiet) as bar:
        task = bar.add_task(name, total=None)
        yield lambda progress: bar.update(task, total=progress.total, completed=progress.done)


def _said(progress: Progress) -> Text:
    return Text.assemble(
        (progress.status, _COLOURS.get(progress.status, "default")),
        f": {progress.completed} completed, ",
        (f"{progress.failed} failed", "red" if progress.failed else ""),
        f" of {progress.total}",
        f" ({progress.reason})" if progress.reason else "",
    )


def print_end(progress: Progress, *, as_json: bool) -> None:
    """Exits 1 unless it is completed: a batch that failed, expired or was cancelled has not asked all its lines."""
    _print(progress, as_json=as_json)
    if progress.status != BatchEnd.COMPLETED:
        raise typer.Exit(1)


def _print(progress: Progress, *, as_json: bool) -> None:
    if as_json:
        print_json(asdict(progress))
    else:
        console.print(_said(progress))
