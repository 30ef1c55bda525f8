"""``gearshift worker``, and checking its configuration before anything starts."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from service import telemetry
from service.app import Parts, open_vllm, serve, share_imports, stop_on_signals, with_new_engines
from service.cli.options import Bootstrap, Json, Prefix, Set, console, print_json, settings_of
from service.errors import ConfigError
from service.http import security
from service.http.server import try_address
from service.http.tls import certificate_of
from service.kafka.connection import client_options
from service.kafka.topics import plan, refused_names
from service.models_file import ModelsFile, load_models
from service.quotas_file import read_quotas
from service.settings import Inactive, Settings, read_keys

Models = Annotated[
    Path | None, typer.Option("--models", "-m", help="models.yaml; VLLM_HPU_MULTI_MODEL_CONFIG.", metavar="FILE")
]


def add_to(app: typer.Typer) -> None:
    """The commands of this module."""
    app.command()(worker)
    config = typer.Typer(help="Check what a worker would be started with.", no_args_is_help=True)
    config.command("check")(check)
    app.add_typer(config, name="config")


def worker(
    models: Models = None,
    bootstrap_servers: Bootstrap = None,
    group_id: Annotated[str | None, typer.Option(help="The pool: workers of one group share the requests.")] = None,
    worker_id: Annotated[str | None, typer.Option(help="A stable name; random by default.")] = None,
    inactive: Annotated[Inactive | None, typer.Option(help="What to do for a model that is not active.")] = None,
    topic_prefix: Prefix = None,
    enable_auto_tool_choice: Annotated[bool | None, typer.Option("--enable-auto-tool-choice")] = None,
    tool_call_parser: Annotated[str | None, typer.Option(help="Default of aliases that set none.")] = None,
    chat_template: Annotated[str | None, typer.Option(help="Default of aliases that set none.")] = None,
    http_port: Annotated[int | None, typer.Option("--http", help="Serve HTTP too.", metavar="PORT")] = None,
    assignments: Set = None,
) -> None:
    """Run a worker: requests in, results out, models switched inside the running engine.

    [bold]Example[/]: gearshift worker --models models.yaml --bootstrap-servers localhost:9092
    """
    settings = settings_of(
        assignments,
        models=models,
        bootstrap_servers=bootstrap_servers,
        group_id=group_id,
        worker_id=worker_id,
        inactive=inactive,
        topic_prefix=topic_prefix,
        enable_auto_tool_choice=enable_auto_tool_choice,
        tool_call_parser=tool_call_parser,
        chat_template=chat_template,
        http_port=http_port,
    )
    telemetry.configure(settings.log)
    read_models = models_reader(settings)
    read_models()  # what is wrong there is said before vLLM is imported, which takes long
    if settings.http.http_port is not None:
        try_address(settings.http)
    import uvloop  # no client needs it, and Windows has none

    share_imports()
    uvloop.run(run_worker(settings, Parts(read_models=read_models, open_engine=open_vllm)))


async def run_worker(settings: Settings, parts: Parts) -> None:
    """One worker until a signal ends it."""
    async with stop_on_signals() as stop:
        await with_new_engines(lambda: serve(settings, parts, stop), stop, settings)


def models_reader(settings: Settings) -> Callable[[], ModelsFile]:
    """How to read models.yaml, now and again on ``control.reload``. Knows vLLM's arguments without importing it."""

    def read() -> ModelsFile:
        if settings.engine.models is None:
            raise ConfigError("no models.yaml: give --models FILE or set VLLM_HPU_MULTI_MODEL_CONFIG")
        return load_models(settings.engine.models, settings.engine, **argument_names())

    return read


def argument_names() -> dict[str, frozenset[str]]:
    """vLLM's arguments, found without importing it."""
    from service.engine.answering.arguments import engine_arg_names, frontend_arg_names

    return {"engine_keys": engine_arg_names(), "frontend_keys": frontend_arg_names()}


def check(models: Models = None, as_json: Json = False, assignments: Set = None) -> None:
    """Read models.yaml and the settings as a worker would, and say what is wrong or what they mean.

    [bold]Example[/]: gearshift config check --models models.yaml
    """
    settings = settings_of(assignments, models=models)
    found = models_reader(settings)()
    _try_files(settings)
    _try_models(found, settings)
    if as_json:
        print_json(
            {
                "default_model": found.default_model,
                "models": {
                    alias: {**spec.engine_args, **spec.frontend, **spec.scheduling.model_dump(exclude_defaults=True)}
                    for alias, spec in found.models.items()
                },
            }
        )
        return
    table = Table("alias", "model", "arguments", title=str(found.path))
    for alias, spec in found.models.items():
        rest = {**spec.engine_args, **spec.frontend, **spec.scheduling.model_dump(exclude_defaults=True)}
        mark = (" (default)" if alias == found.default_model else "", "green")
        arguments = "\n".join(f"{key}: {value}" for key, value in rest.items() if key != "model")
        table.add_row(Text.assemble(alias, mark), str(rest["model"]), arguments)
    console.print(table)
    console.print("ok", style="green")


def _try_files(settings: Settings) -> None:
    """Read what settings name, as a worker does. Raises ConfigError."""
    client_options(settings.kafka)
    certificate_of(settings.http)
    if settings.http.api_keys_file is not None:
        security.read_keys(settings.http.api_keys_file)
    if settings.worker.quotas_file is not None:
        read_quotas(settings.worker.quotas_file)
    read_keys(settings.worker.control_key_file, "control_key_file")
    read_keys(settings.worker.pool_key_file, "pool_key_file")


def _try_models(found: ModelsFile, settings: Settings) -> None:
    """Raises ConfigError for weights that are not there, and for an alias that no topic can have in its name."""
    for alias, spec in found.models.items():
        model = spec.engine_args["model"]
        if _is_path(model) and not Path(model).exists():
            raise ConfigError(f"{found.where(alias)}.model: there is no {model}")
    for name in refused_names(plan(settings.topics, found.models)):
        raise ConfigError(
            f"there can be no topic {name!r}: a name in Kafka has up to 249 letters of ASCII, digits, '.', '_' and '-'"
        )


def _is_path(model: str) -> bool:
    """Whether it can't be a hub's name: those have one slash at most, but for a file of weights in a repository."""
    deep = model.count("/") > 1 and "://" not in model and not model.endswith(".gguf")
    return model.startswith(("/", "./", "../", "~")) or deep
