"""OpenAI batch files over the bus: run one here and now, or leave it on the bus and fetch it later."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, TypeVar

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from service.cli.options import Bootstrap, Json, Prefix, console, print_json, settings_of
from service.client import Client
from service.client import batch as batches

T = TypeVar("T")
Source = Annotated[Path, typer.Argument(help="The batch's input: custom_id, method, url, body per line.", exists=True)]
Output = Annotated[Path, typer.Argument(help="Where answers go; errors go to a file beside it.")]
BatchId = Annotated[str, typer.Argument(help="What `batch submit` printed.")]


def add_to(app: typer.Typer) -> None:
    """The commands of this module."""
    batch = typer.Typer(help="OpenAI batch files.", no_args_is_help=True)
    for command in (run, submit, status, fetch, cancel):
        batch.command()(command)
    app.add_typer(batch, name="batch")


def run(
    source: Source,
    output: Output,
    errors: Annotated[Path | None, typer.Option(help="Where failed lines go.")] = None,
    concurrency: Annotated[int, typer.Option(help="Lines asked at once.")] = 256,
    bootstrap_servers: Bootstrap = None,
    topic_prefix: Prefix = None,
    as_json: Json = False,
) -> None:
    """Ask all lines and write their answers; run it again after an interruption, and finished lines are kept.

    [bold]Example[/]: gearshift batch run in.jsonl out.jsonl
    """
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
    )
    bar = Progress(*columns, console=console, disable=as_json)
    with bar:
        task = bar.add_task(source.name, total=None, rate="")

        async def work(client: Client) -> batches.Progress:
            return await batches.run_batch(
                client, source, output, errors=errors, concurrency=concurrency, on_progress=_shown(bar, task)
            )

        progress = _with_client(work, bootstrap_servers, topic_prefix)
    _print(progress, as_json=as_json)


def submit(source: Source, bootstrap_servers: Bootstrap = None, topic_prefix: Prefix = None) -> None:
    """Put all lines on the bus and print the batch's id; nothing has to stay running here."""
    console.print(_with_client(lambda client: batches.submit_batch(client, source), bootstrap_servers, topic_prefix))


def status(
    batch: BatchId, bootstrap_servers: Bootstrap = None, topic_prefix: Prefix = None, as_json: Json = False
) -> None:
    """Say how far a submitted batch is."""
    progress = _with_client(lambda client: batches.batch_status(client, batch), bootstrap_servers, topic_prefix)
    _print(progress, as_json=as_json)


def fetch(
    batch: BatchId,
    output: Output,
    bootstrap_servers: Bootstrap = None,
    topic_prefix: Prefix = None,
    as_json: Json = False,
) -> None:
    """Write the answers of a submitted batch that are there by now."""
    progress = _with_client(lambda client: batches.fetch_batch(client, batch, output), bootstrap_servers, topic_prefix)
    _print(progress, as_json=as_json)


def cancel(batch: BatchId, bootstrap_servers: Bootstrap = None, topic_prefix: Prefix = None) -> None:
    """Cancel what is left of a submitted batch."""
    _with_client(lambda client: batches.cancel_batch(client, batch), bootstrap_servers, topic_prefix)
    console.print("asked")


def _with_client(work: Callable[[Client], Awaitable[T]], bootstrap_servers: str | None, topic_prefix: str | None) -> T:
    settings = settings_of(bootstrap_servers=bootstrap_servers, topic_prefix=topic_prefix)

    async def run_it() -> T:
        async with Client(settings=settings) as client:
            return await work(client)

    return asyncio.run(run_it())


def _shown(bar: Progress, task: TaskID) -> Callable[[batches.Progress], None]:
    def show(progress: batches.Progress) -> None:
        bar.update(task, total=progress.total, completed=progress.done, rate=f"{progress.rate:.0f}/s")

    return show


def _print(progress: batches.Progress, *, as_json: bool) -> None:
    if as_json:
        print_json(asdict(progress))
        return
    colour = "red" if progress.failed else "green"
    console.print(f"{progress.completed} completed, [{colour}]{progress.failed} failed[/] of {progress.total}")
