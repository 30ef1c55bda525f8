"""models.yaml: which models there are, by alias, as users of vllm-gaudi's multi-model server know it.

Nothing here imports vLLM: the names of its engine arguments are given by the caller.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from schemas.errors import nearest
from schemas.objectives import CLASS_NAME, Objective
from service.errors import ConfigError
from service.settings import EngineSettings
from service.yaml_files import read_yaml


class Unset(Enum):
    """The value of a key that is not there, where null means something else."""

    UNSET = "unset"


UNSET = Unset.UNSET
_TOP_KEYS = ("default_model", "models")
OF_THE_SERVER: Mapping[str, str | None] = {
    "host": "http_host",
    "port": "http_port",
    "ssl_certfile": "http_ssl_certfile",
    "ssl_keyfile": "http_ssl_keyfile",
    "allowed_origins": "cors_origins",
    "api_key": "api_keys_file",
    "uvicorn_log_level": "log_level",
    **dict.fromkeys(
        (
            *("uds", "root_path", "middleware", "grpc_port", "sse_keep_alive_interval", "disable_fastapi_docs"),
            *("allow_credentials", "allowed_headers", "allowed_methods", "enable_offline_docs", "log_config_file"),
            *("ssl_ca_certs", "ssl_cert_reqs", "ssl_ciphers", "enable_ssl_refresh", "h11_max_header_count"),
            *("h11_max_incomplete_event_size", "disable_uvicorn_access_log", "disable_access_log_for_endpoints"),
        )
    ),
}
"""vLLM's arguments that are about its server as a whole, and the setting that is here instead; None: there is none."""
_COMMAND_LINE = Path("command line")
_ClassName = Annotated[str, Field(pattern=CLASS_NAME)]
_PATH_SUFFIXES = (".jinja", ".j2", ".json", ".yaml", ".yml", ".txt")


class Scheduling(BaseModel):
    """The keys of an alias that are ours: how its context is held and how its requests are scheduled."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    pin: bool = False
    """Keep it resident whatever the memory budget asks."""
    preload: bool = False
    """Load it at start instead of at its first request."""
    memory: int | None = Field(default=None, gt=0)
    """Bytes of device memory for weights and KV cache together; None: a share of what is there."""
    weight: float = Field(default=1.0, gt=0)
    """Its share of time against the other models, when all have requests waiting."""
    idle_ttl: float | None = Field(default=None, gt=0)
    """Seconds without a request after which it is parked."""
    drop_ttl: float | None = Field(default=None, gt=0)
    """Seconds without a request after which it is dropped."""
    max_concurrency: int | None = Field(default=None, ge=1)
    """Requests of this model given to the engine at once."""
    objective: Objective | None = None
    """What its requests are to get; None: no more than their deadlines."""
    classes: dict[_ClassName, Objective] = Field(default_factory=dict)
    """What those are to get instead whose header ``request-class`` names one of these."""
    loras: dict[str, str] = Field(default_factory=dict)
    """LoRA adapters to load with it: name to path below ``lora_root``."""


@dataclass(frozen=True)
class ModelSpec:
    """One alias of models.yaml, checked for its keys; the values of engine arguments are vLLM's to check.

    ``engine_args`` are fields of vLLM's AsyncEngineArgs, ``frontend`` those of its OpenAI server.
    ``quant_config``: UNSET leaves QUANT_CONFIG as it is, None clears it, a path sets it.
    """

    alias: str
    engine_args: Mapping[str, Any]
    frontend: Mapping[str, Any] = field(default_factory=dict)
    quant_config: Path | Unset | None = UNSET
    scheduling: Scheduling = field(default_factory=Scheduling)


@dataclass(frozen=True)
class ModelsFile:
    """A whole models.yaml. ``default_model`` is the alias to boot into."""

    path: Path
    default_model: str
    models: Mapping[str, ModelSpec]

    @property
    def scheduling(self) -> dict[str, Scheduling]:
        """What it says of each alias to the scheduler."""
        return {alias: spec.scheduling for alias, spec in self.models.items()}

    def where(self, alias: str) -> str:
        """The place to name in an error: file and alias."""
        return f"{self.path}: models.{alias}"


def load_models(
    path: Path, settings: EngineSettings, *, engine_keys: Collection[str], frontend_keys: Collection[str]
) -> ModelsFile:
    """Read and check a models.yaml; ``settings`` give the defaults of aliases that do not set them.

    Raises ConfigError naming file, alias and key, with the nearest right one.
    """
    document = _read(path)
    for key in document:
        if key not in _TOP_KEYS:
            raise ConfigError(
                f"{path}: unknown key {key!r}{nearest(str(key), _TOP_KEYS)}; known: {', '.join(_TOP_KEYS)}"
            )
    entries = document.get("models")
    if not isinstance(entries, dict) or not entries:
        raise ConfigError(f"{path}: 'models' must map at least one alias to its engine arguments")
    models = {
        str(alias): _spec(path, str(alias), entry, settings, engine_keys, frontend_keys)
        for alias, entry in entries.items()
    }
    said = document.get("default_model")
    default = settings.default_model or next(iter(models)) if said is None or said == "" else said
    if str(default) not in models:
        source = "the setting default_model (or MODEL)" if default is not said else "default_model"
        raise ConfigError(
            f"{path}: {source} names the unknown alias {default!r}{nearest(str(default), models)}; "
            f"known: {', '.join(models)}"
        )
    return ModelsFile(path=path, default_model=str(default), models=models)


def read_unchecked(path: Path) -> dict[str, ModelSpec]:
    """The aliases of a models.yaml where no vLLM is at hand: its arguments are taken as they are.

    Raises ConfigError for what is no models.yaml, and for wrong values of our own keys.
    """
    entries = _read(path).get("models")
    if not isinstance(entries, dict) or not entries:
        raise ConfigError(f"{path}: 'models' must map at least one alias to its engine arguments")
    found = {}
    for alias, entry in entries.items():
        where = f"{path}: models.{alias}"
        if not isinstance(entry, dict) or not isinstance(entry.get("model"), str):
            raise ConfigError(f"{where}: must be a mapping of engine arguments, with at least 'model'")
        given = {str(key).replace("-", "_"): value for key, value in entry.items()}
        ours = {key: given.pop(key) for key in Scheduling.model_fields.keys() & given}
        found[str(alias)] = ModelSpec(alias=str(alias), engine_args=given, scheduling=_scheduling(where, ours))
    return found


def one_model(
    entry: Mapping[str, Any],
    settings: EngineSettings,
    *,
    engine_keys: Collection[str],
    frontend_keys: Collection[str],
) -> ModelsFile:
    """The one alias that a command line describes, by its served name or its model's; relative paths are the caller's.

    Raises ConfigError naming the argument.
    """
    names = entry.get("served_model_name", [entry.get("model")])
    if len(names) != 1:
        raise ConfigError(f"{_COMMAND_LINE}: --served-model-name: must be one name, got {', '.join(names)}")
    alias = str(names[0])
    rest = {key: value for key, value in entry.items() if key != "served_model_name"}
    spec = _spec(_COMMAND_LINE, alias, rest, settings, engine_keys, frontend_keys)
    return ModelsFile(path=_COMMAND_LINE, default_model=alias, models={alias: spec})


def _instead(key: str) -> str:
    setting = OF_THE_SERVER[key]
    return f"the setting is {setting}" if setting else "there is no setting for it here"


def _read(path: Path) -> dict[str, Any]:
    try:
        document = read_yaml(path)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; --models or VLLM_HPU_MULTI_MODEL_CONFIG names models.yaml") from None
    if not isinstance(document, dict):
        raise ConfigError(f"{path}: must be a mapping with 'models', and optionally 'default_model'")
    return document


def _spec(
    path: Path,
    alias: str,
    entry: object,
    settings: EngineSettings,
    engine_keys: Collection[str],
    frontend_keys: Collection[str],
) -> ModelSpec:
    where = f"{path}: models.{alias}"
    if not isinstance(entry, dict):
        raise ConfigError(f"{where}: must be a mapping of engine arguments, with at least 'model'")
    ours = Scheduling.model_fields.keys()
    known = {*engine_keys, *frontend_keys, *ours, "quant_config"}
    engine_args: dict[str, Any] = {}
    frontend = _frontend_defaults(settings)
    scheduling: dict[str, Any] = {}
    for raw, value in entry.items():
        key = str(raw).replace("-", "_")
        if key in OF_THE_SERVER:
            raise ConfigError(f"{where}.{raw}: is of the server, and not of a model; {_instead(key)}")
        if key not in known:
            raise ConfigError(f"{where}.{raw}: unknown key{nearest(key, known)}")
        if key in ours:
            scheduling[key] = value
        elif key in frontend_keys:
            frontend[key] = value
        elif key in engine_keys:
            engine_args[key] = value
    if not isinstance(engine_args.get("model"), str) or not engine_args["model"]:
        raise ConfigError(f"{where}.model: is missing; it names the weights (a folder or a hub's name)")
    template = frontend.get("chat_template")
    if template is not None:
        frontend["chat_template"] = _template(path, where, template)
    return ModelSpec(
        alias=alias,
        engine_args=engine_args,
        frontend=frontend,
        quant_config=_quant_config(path, where, entry),
        scheduling=_scheduling(where, scheduling),
    )


def _frontend_defaults(settings: EngineSettings) -> dict[str, Any]:
    defaults: dict[str, Any] = {"enable_auto_tool_choice": settings.enable_auto_tool_choice}
    if settings.tool_call_parser is not None:
        defaults["tool_call_parser"] = settings.tool_call_parser
    if settings.chat_template is not None:
        defaults["chat_template"] = str(Path(settings.chat_template).absolute())
    return defaults


def _template(path: Path, where: str, value: object) -> str:
    """A template's absolute path, relative ones against the file's folder; or the template itself."""
    if not isinstance(value, str):
        raise ConfigError(f"{where}.chat_template: must be a path or a template, got {value!r}")
    if "{" in value or "\n" in value:
        return value
    if (found := _file(path.parent / value)) is not None:
        return str(found)
    beside = [entry.name for entry in path.parent.iterdir() if entry.suffix in _PATH_SUFFIXES]
    raise ConfigError(f"{where}.chat_template: no file {path.parent / value}{nearest(Path(value).name, beside)}")


def _file(path: Path) -> Path | None:
    """Its absolute path; None where there is no such file, or can be none of that name."""
    try:
        found = path.resolve()
        return found if found.is_file() else None
    except (OSError, ValueError, RuntimeError):
        return None


def _quant_config(path: Path, where: str, entry: Mapping[Any, Any]) -> Path | Unset | None:
    value = entry.get("quant_config", UNSET)
    if value is UNSET or value is None:
        return value
    if not isinstance(value, str):
        raise ConfigError(f"{where}.quant_config: must be a path or null, got {value!r}")
    found = _file(path.parent / value)
    if found is None:
        raise ConfigError(f"{where}.quant_config: no file {path.parent / value}")
    return found


def _scheduling(where: str, values: Mapping[str, Any]) -> Scheduling:
    try:
        return Scheduling(**values)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise ConfigError(f"{where}.{key}: {first['msg']}, got {first['input']!r}") from None
