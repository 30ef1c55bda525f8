"""What the documents name in passing, in code in the middle of a sentence: each is there under that name."""

import importlib.util
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

from deploy.local import reference
from schemas import headers as h
from service.cli.main import app
from service.engine.answering.arguments import engine_arg_names, frontend_arg_names
from service.http.server import HttpServer
from service.models_file import OF_THE_SERVER
from service.settings import GROUPS, TopicSettings, load

ROOT = Path(__file__).parents[3]
CHART = ROOT / "deploy/kubernetes/gearshift"
DOCUMENTS = [
    ROOT / "README.md",
    *sorted(path for path in ROOT.glob("deploy/*.md") if path != reference.FILE),
    *sorted(ROOT.glob("deploy/*/*.md")),
    *sorted(ROOT.glob("service/*/README.md")),
]
GUIDE = (ROOT / "deploy/OPERATING.md").read_text()
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
each_document = pytest.mark.parametrize(
    "text", [path.read_text() for path in DOCUMENTS], ids=[str(path.relative_to(ROOT)) for path in DOCUMENTS]
)


def spans(text: str) -> Iterator[str]:
    """What stands in code within sentences, on one line each."""
    for code in re.findall(r"`([^`]+)`", FENCE.sub("", text)):
        yield " ".join(code.split())


def sources(*patterns: str) -> str:
    return "\n".join(path.read_text() for pattern in patterns for path in sorted(ROOT.glob(pattern)) if path.is_file())


# --- commands ---


def complaint(line: str) -> str | None:
    """What the command has to object to in a command line from a sentence, which may lack what it needs."""
    command, words = get_command(app), shlex.split(line)[1:]
    while (below := getattr(command, "commands", None)) and words:
        if words[0] not in below:
            return f"there is no {words[0]}"
        command = below[words.pop(0)]
    options = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    free = command.context_settings.get("allow_extra_args")
    vllms = {f"--{name.replace('_', '-')}" for name in (*engine_arg_names(), *frontend_arg_names(), *OF_THE_SERVER)}
    given = {word.partition("=")[0] for word in words if word.startswith("-")}
    unknown = given - options - {"--help"} - (vllms if free else set())
    return f"{' '.join(sorted(unknown))} of {line}" if unknown else None


@each_document
def test_the_command_has_what_sentences_ask_of_it(text: str) -> None:
    lines = [code for code in spans(text) if re.match(r"gearshift [a-z]", code)]
    assert [said for line in lines if (said := complaint(line))] == []


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("gearshift swich qwen", "there is no swich"),
        ("gearshift switch qwen --forever", "--forever of gearshift switch qwen --forever"),
        ("gearshift dead-letters redrive --klass X", "--klass of gearshift dead-letters redrive --klass X"),
        ("gearshift dead-letters", None),
        ("gearshift switch qwen --hold 600", None),
    ],
)
def test_a_command_line_that_is_not_there_is_complained_of(line: str, said: str | None) -> None:
    assert complaint(line) == said


@each_document
def test_its_modules_take_the_options_that_it_gives_them(text: str) -> None:
    """Looked for in the module's own package, where its parser is made."""
    unknown = []
    for module, rest in re.findall(r"`python -m ((?:tests|deploy)[\w.]+)([^`]*)`", " ".join(text.split())):
        found = importlib.util.find_spec(module)
        assert found is not None, module
        file = Path(str(found.origin))
        folder = file.parent
        written = "\n".join(
            path.read_text() for path in ([*folder.glob("*.py")] if file.name == "__init__.py" else [file])
        )
        unknown += [
            f"{module} {option}" for option in re.findall(r"--[a-z][\w-]*", rest) if f'"{option}"' not in written
        ]
    assert unknown == []


# --- names ---


@cache
def metrics() -> frozenset[str]:
    """All names of samples, with and without what a counter's or a histogram's samples have at their end."""
    names = re.findall(r"^\| `(gearshift_\w+)`", reference.page(), re.MULTILINE)
    families = {*names, *(name.removesuffix("_total") for name in names)}
    return frozenset(name + end for name in families for end in ("", "_total", "_bucket", "_sum", "_count"))


@each_document
def test_its_metrics_are_there(text: str) -> None:
    assert set(re.findall(r"\bgearshift_[a-z_]+[a-z]\b", text)) - metrics() == set()


@cache
def events() -> frozenset[str]:
    return frozenset(re.findall(r'"([a-z_]+\.[a-z_]+)"', sources("service/**/*.py")))


@each_document
def test_the_log_has_the_events_that_it_names(text: str) -> None:
    kinds = {"bus", "engine", "record", "request", "worker", "broker", "topic", "switch", "models", "quotas", "log"}
    named = {
        code for code in spans(text) if re.fullmatch(r"[a-z_]+\.[a-z_]+", code) and code.partition(".")[0] in kinds
    }
    assert {name for name in named if not name.endswith((".py", ".yaml"))} - events() == set()


@each_document
def test_its_variables_are_read_somewhere(text: str) -> None:
    read = sources(
        "service/**/*.py", "deploy/**/*.py", "deploy/**/*.yaml", "deploy/local/*", "Dockerfile", "tests/**/*.py"
    )
    variables = reference.FILE.read_text()
    named = set(re.findall(r"\b(?:GEARSHIFT|KAFKA)_[A-Z_]*[A-Z]\b", text))
    assert {name for name in named if name not in read and f"`{name}`" not in variables} == set()


@each_document
def test_its_alerts_are_there(text: str) -> None:
    rules = yaml.safe_load((CHART / "files/alerts.yaml").read_text())
    alerts = {rule["alert"] for group in rules["groups"] for rule in group["rules"]}
    classes = set(re.findall(r"class (Gearshift\w+)", sources("service/**/*.py")))
    assert set(re.findall(r"\bGearshift[A-Z]\w+", text)) - alerts - classes == set()


@each_document
def test_its_topics_are_there(text: str) -> None:
    topics = {field.default for field in TopicSettings.model_fields.values()}
    named = [
        name
        for some in re.findall(r"\btopics? ((?:`[\w.-]+`(?:, | and )?)+)", text)
        for name in re.findall(r"`([^`]+)`", some)
    ]
    assert {name for name in named if name not in topics and not name.startswith(("requests.", "__"))} == set()


@each_document
def test_its_headers_are_there(text: str) -> None:
    ours = {value for name, value in vars(h).items() if name.isupper() and isinstance(value, str)}
    named = [
        name
        for some in re.findall(r"\bheaders? ((?:`[\w-]+`(?:, | and )?)+)", text)
        for name in re.findall(r"`([^`]+)`", some)
    ]
    assert {name for name in named if name not in ours and not name.startswith("ce_")} == set()


async def test_their_routes_are_there() -> None:
    server = HttpServer(load(http_port=0, dev_mode=True))
    async with server.opened():
        there = {re.sub(r"\{[^}]*\}", "ID", route.path) for route in server.app.routes}
    named = {code for path in DOCUMENTS for code in spans(path.read_text())}
    paths = {re.sub(r"[?#].*", "", code.removeprefix("POST ").removeprefix("GET ")) for code in named}
    routes = {path for path in paths if path.startswith("/v1/")}
    assert routes
    assert {path for path in routes if path not in there and not path.endswith("/")} == set()


def chart_values() -> Iterator[str]:
    return values(yaml.safe_load((CHART / "values.yaml").read_text()))


def values(found: Any, above: str = "") -> Iterator[str]:
    """The keys of the chart's values, with dots."""
    for key, below in found.items() if isinstance(found, dict) else ():
        yield f"{above}{key}"
        yield from values(below, f"{above}{key}.")


@each_document
def test_the_chart_has_the_values_that_it_names(text: str) -> None:
    there = set(chart_values())
    first = {key for key in there if "." not in key}
    dotted = {code for code in spans(text) if re.fullmatch(r"[a-z]\w*(?:\.[a-zA-Z]\w*)+", code)}
    assert {code for code in dotted if code.partition(".")[0] in first} - there - {"models.yaml"} == set()


# --- the runbook ---


def sections() -> dict[str, str]:
    found = re.findall(r"^### (Gearshift\w+)\n(.*?)(?=^##)", GUIDE, re.MULTILINE | re.DOTALL)
    return dict(found)


@pytest.mark.parametrize("alert", sorted(sections()))
def test_what_is_said_of_an_alert_names_what_to_look_at(alert: str) -> None:
    """A setting, a value of the chart, an event of the log, a metric, an endpoint or a command."""
    settings = {name for group in GROUPS.values() for name in group.model_fields}
    there = settings | set(chart_values()) | events() | metrics() | {"/health", "/ready", "/metrics"}
    named = {code.partition("{")[0].partition("=")[0] for code in spans(sections()[alert])}
    assert [name for name in named if name in there or name.startswith(("gearshift ", "kubectl ", "kafka-"))], named
