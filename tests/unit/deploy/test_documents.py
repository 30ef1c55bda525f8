"""The documents of deploy/ and of the rooms, and README: current, complete, and naming only what there is."""

import ast
import importlib
import importlib.util
import inspect
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import yaml
from typer.main import get_command

from deploy.local import reference
from schemas import headers as h
from schemas.contexts import ContextInfo
from schemas.control import SetObjective, Switch
from schemas.results import Result
from service.cli.main import app
from service.cli.options import settings_of
from service.client import Client
from service.engine import MultiModelEngine, MultiModelLLM
from service.engine.answering.arguments import engine_arg_names, frontend_arg_names
from service.engine.models.operations import Operation
from service.http.server import HttpServer
from service.models_file import OF_THE_SERVER, Scheduling
from service.quotas_file import Quota
from service.settings import GROUPS, TopicSettings, load

ROOT = Path(__file__).parents[3]
PAGES = sorted(ROOT.glob("deploy/coming-from/*.md"))
DOCUMENTS = sorted([*ROOT.glob("deploy/*.md"), *ROOT.glob("service/*/README.md"), *ROOT.glob("deploy/*/README.md")])
HAND_WRITTEN = [path for path in [ROOT / "README.md", *DOCUMENTS, *PAGES] if path != reference.FILE]
ids = [str(path.relative_to(ROOT)) for path in HAND_WRITTEN]
COMMANDS = {" ".join(words) for words, _ in reference.walk(get_command(app), ())}
FIRST = {words.split()[0] for words in COMMANDS}
SETTINGS = {name for group in GROUPS.values() for name in group.model_fields}
TOPICS = {field.default for field in TopicSettings.model_fields.values()} - {""}
ENGINES = (MultiModelEngine, MultiModelLLM)


def known() -> set[str]:
    """Settings, topics, keys of models.yaml, fields of messages, headers, and what the engines' classes have."""
    fields = {name for message in (Result, ContextInfo, Switch, SetObjective, Quota) for name in message.model_fields}
    members = {name for engine in ENGINES for name in (*dir(engine), *inspect.signature(engine).parameters)}
    keys = {*Scheduling.model_fields, *engine_arg_names(), *frontend_arg_names()}
    return {*SETTINGS, *TOPICS, *fields, *members, *keys, *h.OURS, "ce_id", "requests.ALIAS"}


def test_the_reference_is_current():
    assert reference.FILE.read_text() == reference.page(), "python -m deploy.local.configuration --write"


def test_the_reference_has_every_setting_and_every_setting_s_group():
    text = reference.page()
    assert all(f"| `{name}` |" in text for name in SETTINGS)


def test_a_group_of_settings_says_what_it_is_for():
    """One without a docstring of its own would have pydantic's."""
    assert [name for name, group in GROUPS.items() if not group.__doc__] == []


def test_the_guide_says_of_every_alert_what_it_means_and_of_no_other():
    rules = yaml.safe_load((ROOT / "deploy/kubernetes/gearshift/files/alerts.yaml").read_text())
    alerts = {rule["alert"] for group in rules["groups"] for rule in group["rules"]}
    guide = (ROOT / "deploy/OPERATING.md").read_text()
    assert set(re.findall(r"^### (Gearshift\w+)$", guide, re.MULTILINE)) == alerts


def test_readme_names_the_commands_that_the_help_names():
    named = re.findall(r"(?:^|`)gearshift ([a-z-]+)", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert set(named) == FIRST


@pytest.mark.parametrize("path", HAND_WRITTEN, ids=ids)
def test_the_files_and_modules_that_it_names_are_there(path: Path):
    text = path.read_text()
    linked = {(path.parent / link).resolve() for link in re.findall(r"\]\((?!https?:)([^)#]+)\)", text)}
    named = {ROOT / name for name in re.findall(r"`((?:deploy|service|tests|schemas)/[\w./-]+)`", text)}
    assert not [str(each) for each in linked | named if not each.exists()]
    modules = re.findall(r"python -m ([a-z_.]+)", text)
    theirs = [module for module in modules if module.startswith("vllm_gaudi.")]
    assert not [module for module in modules if module not in theirs and importlib.util.find_spec(module) is None]


@pytest.mark.parametrize("path", HAND_WRITTEN, ids=ids)
def test_the_commands_and_settings_that_it_names_are_there(path: Path):
    text = path.read_text()
    for words in re.findall(r"`gearshift ([a-z -]+)", text):
        found = words.split()
        assert words in FIRST or any(" ".join(found[:length]) in COMMANDS for length in (1, 2)), words
    named = set(re.findall(r"`([a-z]+(?:_[a-z]+)+)(?:=\w+)?`", text))
    ours = {name for name in named if name.endswith(("_s", "_file", "_mode", "_topics", "_bytes", "_tokens"))}
    assert ours - known() == set()


# --- what can be copied out of them -------------------------------------------------------------------------------


def blocks(path: Path, *languages: str) -> list[str]:
    """The fenced blocks of these languages."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", path.read_text(), re.MULTILINE | re.DOTALL)
    return [block for language, block in found if language in languages]


@pytest.mark.parametrize("path", HAND_WRITTEN, ids=ids)
def test_the_cli_takes_its_command_lines(path: Path):
    lines = "".join(blocks(path, "", "bash")).replace("\\\n", "").splitlines()
    for line in (line for line in lines if line.startswith("gearshift ")):
        command, words = get_command(app), shlex.split(line, comments=True)[1:]
        while getattr(command, "commands", None):
            command = command.commands[words.pop(0)]
        context = command.make_context(line, words)
        settings_of(context.params.get("assignments"))
        vllms = {word.partition("=")[0].strip("-").replace("-", "_") for word in context.args if word.startswith("--")}
        assert vllms <= engine_arg_names() | frontend_arg_names() | OF_THE_SERVER.keys(), line


@pytest.mark.parametrize("path", HAND_WRITTEN, ids=ids)
def test_its_python_uses_what_there_is(path: Path):
    for block in blocks(path, "python"):
        compile(block, str(path), "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        tree = ast.parse(block)
        ours = dict(imported(tree))
        ours |= {name: ours[made] for name, made in opened(tree) if made in ours}
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and (owner := named(node.value, ours)) is not None:
                assert hasattr(owner, node.attr), ast.unparse(node)
            if isinstance(node, ast.Call) and (called := named(node.func, ours)) is not None:
                require_keywords(called, {each.arg for each in node.keywords if each.arg}, ast.unparse(node))


def imported(tree: ast.Module) -> Iterator[tuple[str, Any]]:
    """What a block imports from here, by the name that it has there. Raises AttributeError, ImportError."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] in {"service", "schemas"}:
            for each in node.names:
                yield each.asname or each.name, getattr(importlib.import_module(node.module), each.name)


def opened(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Variables, and the name of what they are made by: ``x = A(...)``, ``x = A.from_b(...)``, ``with A(...) as x``."""
    for node in ast.walk(tree):
        match node:
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=ast.Call(func=made))
                | ast.withitem(optional_vars=ast.Name(id=name), context_expr=ast.Call(func=made))
            ):
                match made:
                    case ast.Name(id=kind) | ast.Attribute(value=ast.Name(id=kind), attr="from_engine_args"):
                        yield name, kind


def named(node: ast.expr, ours: dict[str, Any]) -> Any:
    """What an expression of names and attributes means, where it is one of ours."""
    match node:
        case ast.Name(id=name):
            return ours.get(name)
        case ast.Attribute(value=owner, attr=name):
            found = getattr(named(owner, ours), name, None)
            return get_type_hints(found.fget)["return"] if isinstance(found, property) else found
    return None


def require_keywords(called: Any, given: set[str], where: str) -> None:
    if isinstance(called, Operation):
        return  # vLLM's own parameters: tests/engine/test_signatures.py
    parameters = inspect.signature(called).parameters
    unknown = given - parameters.keys()
    if called is Client:
        unknown -= SETTINGS
    elif any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values()):
        return  # a request's own fields
    assert not unknown, where


# --- coming from ... ----------------------------------------------------------------------------------------------


def on_our_side(path: Path) -> list[str]:
    """What is in code in the last column of its tables: the first one is theirs."""
    cells = [line.rstrip(" |").rpartition(" | ")[2] for line in path.read_text().splitlines() if line.startswith("| ")]
    return [code for cell in cells for code in re.findall(r"`([^`]+)`", cell)]


@pytest.mark.parametrize("path", PAGES, ids=[path.stem for path in PAGES])
def test_a_page_is_a_screen_long_and_its_names_mean_something_here(path: Path):
    assert len(path.read_text().splitlines()) <= 60
    names = [code for code in on_our_side(path) if re.fullmatch(r"[a-z][\w.-]*(=\S*)?", code)]
    assert names
    assert {name.partition("=")[0] for name in names} - known() == set()


async def test_the_routes_that_the_pages_name_are_there():
    server = HttpServer(load(http_port=0, dev_mode=True))
    async with server.opened():
        there = {route.path for route in server.app.routes}
    routes = {code for path in PAGES for code in on_our_side(path) if code.startswith("/")}
    assert routes
    assert routes <= there
