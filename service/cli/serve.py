"""``gearshift serve``: the same worker with its HTTP server alone, without a broker."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import typer
from pydantic import TypeAdapter, ValidationError

from service import telemetry
from service.app import Parts, open_vllm, serve_http, share_imports, stop_on_signals, with_new_engines
from service.cli.options import Set, settings_of
from service.cli.run import Models, argument_names, models_reader
from service.errors import ConfigError
from service.http.server import try_address
from service.models_file import OF_THE_SERVER, ModelsFile, one_model
from service.settings import Inactive, Settings


def add_to(app: typer.Typer) -> None:
    """The commands of this module."""
    # What follows MODEL is vLLM's to read.
    app.command(context_settings={"allow_extra_args": True, "allow_interspersed_args": False})(serve)


def serve(
    context: typer.Context,
    model: Annotated[
        str | None,
        typer.Argument(
            help="One model instead of models.yaml; after it, the arguments of vllm serve.", metavar="MODEL"
        ),
    ] = None,
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
    [bold]One model, as vllm serve[/]: gearshift serve /models/qwen3-8b --max-model-len 8192 --port 8000
    """
    options: dict[str, Any] = {
        "models": models,
        "http_port": http_port,
        "http_host": http_host,
        "inactive": inactive,
        "enable_auto_tool_choice": enable_auto_tool_choice,
        "tool_call_parser": tool_call_parser,
        "chat_template": chat_template,
    }
    if model is None:
        settings = settings_of(assignments, **options)
        telemetry.configure(settings.log)
        read_models = models_reader(settings)
        read_models()  # what is wrong there is said before vLLM is imported, which takes long
        try_address(settings.http)
        share_imports()
    elif models is not None:
        raise ConfigError(f"{model} and --models {models}: one of them, please")
    else:
        share_imports()
        settings, read_models = one_model_of([model, *context.args], assignments, options)
        telemetry.configure(settings.log)
    asyncio.run(run_server(settings, Parts(read_models=read_models, open_engine=open_vllm)))


def one_model_of(
    words: list[str], assignments: list[str] | None, options: Mapping[str, Any]
) -> tuple[Settings, Callable[[], ModelsFile]]:
    """What ``vllm serve WORDS`` says, as settings and as what to serve. Raises ConfigError."""
    from service.engine.answering.arguments import command_line

    given = command_line(words)
    if "api_key" in given:
        raise ConfigError("--api-key: keys are read from a file: gearshift serve --set api_keys_file=FILE MODEL ...")
    own = {setting: given.pop(name) for name, setting in OF_THE_SERVER.items() if setting and name in given}
    if "cors_origins" in own:
        own["cors_origins"] = ",".join(_origins(own["cors_origins"]))
    settings = settings_of(assignments, **{**options, **own})
    return settings, lambda: one_model(given, settings.engine, **argument_names())


def _origins(said: str) -> list[str]:
    try:
        return TypeAdapter(list[str]).validate_json(said)
    except ValidationError:
        raise ConfigError(f'--allowed-origins: must be a list, as ["https://example.org"], got {said}') from None


async def run_server(settings: Settings, parts: Parts) -> None:
    """One worker and its HTTP server until a signal ends it."""
    async with stop_on_signals() as stop:
        await with_new_engines(lambda: serve_http(settings, parts, stop), stop, settings)
