"""``gearshift serve``: the same worker with its HTTP server alone, without a broker."""

import asyncio
from typing import Annotated

import typer

from service import telemetry
from service.app import Parts, open_vllm, serve_http, share_imports, stop_on_signals
from service.cli.options import Set, settings_of
from service.cli.run import Models, models_reader
from service.settings import Inactive, Settings


def add_to(app: typer.Typer) -> None:
    """The commands of this module."""
    app.command()(serve)


def serve(
    models: Models = None,
    http_port: Annotated[int | None, typer.Option("--port", "-p", help="Where to listen; 8000 by default.")] = None,
    http_host: Annotated[str | None, typer.Option("--host", help="127.0.0.1 by default; 0.0.0.0 for everyone.")] = None,
    inactive: Annotated[Inactive | None, typer.Option(help="What to do for a model that is not active.")] = None,
    enable_auto_tool_choice: Annotated[bool | None, typer.Option("--enable-auto-tool-choice")] = None,
    tool_call_parser: Annotated[str | None, typer.Option(help="Default of aliases that set none.")] = None,
    chat_template: Annotated[str | None, typer.Option(help="Default of aliases that set none.")] = None,
    assignments: Set = None,
) -> None:
    """Serve OpenAI's API for all models on one engine, without a broker.

    [bold]Example[/]: gearshift serve --models models.yaml --port 8000
    """
    settings = settings_of(
        assignments,
        models=models,
        http_port=http_port,
        http_host=http_host,
        inactive=inactive,
        enable_auto_tool_choice=enable_auto_tool_choice,
        tool_call_parser=tool_call_parser,
        chat_template=chat_template,
    )
    telemetry.configure(settings.log)
    share_imports()
    asyncio.run(run_server(settings, Parts(read_models=models_reader(settings), open_engine=open_vllm)))


async def run_server(settings: Settings, parts: Parts) -> None:
    """One worker and its HTTP server until a signal ends it."""
    async with stop_on_signals() as stop:
        await serve_http(settings, parts, stop)
