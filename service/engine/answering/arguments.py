"""From models.yaml to vLLM: the arguments that its server would be started with, one set per alias.

The names of the arguments are found without importing vLLM, so that a misspelt key is an error within a second.
The values go through vLLM's own argument parser, so that they mean what they mean to ``vllm serve --config``.
"""

import argparse
import ast
import copy
import importlib.util
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

from schemas.errors import nearest
from service.engine.versions import vllm_frontend
from service.errors import ConfigError
from service.models_file import ModelsFile, ModelSpec

NO_MEDIA_DOMAINS = ("no-domain-is-allowed.invalid",)
"""vLLM fetches media from anywhere where the list of allowed domains is empty; this one allows none."""


@dataclass(frozen=True)
class Arguments:
    """One alias as vLLM takes it: ``engine`` is an AsyncEngineArgs, ``server`` the namespace of its OpenAI server."""

    engine: Any
    server: argparse.Namespace


@cache
def engine_arg_names() -> frozenset[str]:
    """The fields of vLLM's AsyncEngineArgs."""
    return _fields(("engine/arg_utils.py",), ("EngineArgs", "AsyncEngineArgs"))


@cache
def frontend_arg_names() -> frozenset[str]:
    """The fields of vLLM's FrontendArgs."""
    return _fields(vllm_frontend.CLI_ARGS_FILES, ("BaseFrontendArgs", "FrontendArgs"))


def _fields(files: tuple[str, ...], classes: tuple[str, ...]) -> frozenset[str]:
    """The annotated names of the classes' bodies, read from the source."""
    found = importlib.util.find_spec("vllm")
    if found is None or not found.submodule_search_locations:
        raise ConfigError("vLLM is not installed; install gearshift with one of the extras cpu, cuda, hpu")
    package = Path(found.submodule_search_locations[0])
    source = next(path for path in map(package.joinpath, files) if path.is_file())
    return frozenset(
        statement.target.id
        for node in ast.parse(source.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and node.name in classes
        for statement in node.body
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
        if "ClassVar" not in ast.unparse(statement.annotation) and not statement.target.id.startswith("_")
    )


def command_line(words: Sequence[str]) -> dict[str, Any]:
    """What ``vllm serve WORDS`` gives, by argument, as models.yaml would say it.

    Raises ConfigError; ``--help`` prints vLLM's own and raises SystemExit.
    """
    parser = _parser()
    parser._defaults.clear()
    for action in parser._actions:
        action.default, action.type, action.choices = argparse.SUPPRESS, None, None
    try:
        given = vars(parser.parse_args(list(words)))
    except argparse.ArgumentError as error:
        flags = (word.partition("=")[0].replace("_", "-") for word in words if word.startswith("--"))
        unknown = next((flag for flag in flags if flag.partition(".")[0] not in parser._option_string_actions), None)
        meant = nearest(unknown, parser._option_string_actions) if unknown else ""
        raise ConfigError(f"command line: {error}{meant}") from None
    tag = given.pop("model_tag", None)
    return given if tag is None else {**given, "model": tag}


def model_arguments(models: ModelsFile, defaults: Mapping[str, Any]) -> dict[str, Arguments]:
    """The arguments of every alias; ``defaults`` are the platform's, for what an alias does not set.

    Raises ConfigError naming file, alias and key.
    """
    parser = _parser()
    return {alias: _arguments(parser, spec, models.where(alias), defaults) for alias, spec in models.models.items()}


def _arguments(parser: "_Parser", spec: ModelSpec, where: str, defaults: Mapping[str, Any]) -> Arguments:
    from huggingface_hub.errors import LocalEntryNotFoundError
    from vllm.engine.arg_utils import AsyncEngineArgs

    given = {**spec.engine_args, **spec.frontend}
    ours = {"served_model_name": [spec.alias]}
    if given.get("served_model_name", spec.alias) not in (spec.alias, [spec.alias]):
        raise ConfigError(f"{where}.served_model_name: a model is served by its alias; name the alias as it is to be")
    ordinary = {"allowed_media_domains": list(NO_MEDIA_DOMAINS), "use_tqdm_on_load": False}
    values = {**ordinary, **defaults, **given, **ours}
    server = copy.deepcopy(parser.parse_args([]))  # defaults are objects that vLLM writes into
    for key, value in values.items():
        _set(parser, server, key, value, f"{where}.{key}")
    try:
        vllm_frontend.validate_server_arguments(server)
    except (TypeError, ValueError, KeyError) as error:
        raise ConfigError(f"{where}: {error.args[0] if error.args else error}") from None
    try:
        return Arguments(engine=AsyncEngineArgs.from_cli_args(server), server=server)
    except LocalEntryNotFoundError as error:  # offline, it looks for the model's files at once
        raise ConfigError(
            f"{where}.model: {values['model']} is no folder and not in the hub's cache, and HF_HUB_OFFLINE forbids to "
            "download it"
        ) from error
    except (TypeError, ValueError, OSError) as error:
        raise ConfigError(f"{where}.model: {error}") from error


def _set(parser: "_Parser", server: argparse.Namespace, key: str, value: object, where: str) -> None:
    """Give one argument its value, as the parser reads it from a command line."""
    action = parser.by_name.get(key)
    if value is None or action is None:
        setattr(server, key, value)
        return
    if action.nargs == 0 or isinstance(action, argparse.BooleanOptionalAction):
        if not isinstance(value, bool):
            raise ConfigError(f"{where}: must be true or false, got {value!r}")
        setattr(server, key, value)
        return
    flag = action.option_strings[-1]
    try:
        if isinstance(value, list) and action.nargs is not None:
            words = [flag, *map(_word, value)]
        else:
            words = [f"{flag}={_word(value)}"]
    except TypeError:  # YAML has dates, too
        raise ConfigError(f"{where}: must be a string, a number, a list or a mapping, got {value!r}") from None
    try:
        parser.parse_args(words, namespace=server)
    except argparse.ArgumentError as error:
        raise ConfigError(f"{where}: {error.message}") from None


def _word(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _parser() -> "_Parser":
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    class Parser(FlexibleArgumentParser):
        """vLLM's parser, raising where it would end the process."""

        def error(self, message: str) -> NoReturn:
            raise argparse.ArgumentError(None, message)

    parser = vllm_frontend.make_arg_parser()(Parser())
    parser.by_name = {action.dest: action for action in parser._actions if action.option_strings}
    return parser


_Parser = Any
