"""The documents of deploy/ and of the rooms: current, complete, and naming only what there is."""

import importlib.util
import re
from pathlib import Path

import pytest
import yaml
from typer.main import get_command

from deploy.local import reference
from service.cli.main import app
from service.settings import GROUPS

ROOT = Path(__file__).parents[3]
DOCUMENTS = sorted([*ROOT.glob("deploy/*.md"), *ROOT.glob("service/*/README.md"), *ROOT.glob("deploy/*/README.md")])
HAND_WRITTEN = [path for path in DOCUMENTS if path != reference.FILE]
ids = [str(path.relative_to(ROOT)) for path in HAND_WRITTEN]
COMMANDS = {" ".join(words) for words, _ in reference.walk(get_command(app), ())}


def test_the_reference_is_current():
    assert reference.FILE.read_text() == reference.page(), "python -m deploy.local.configuration --write"


def test_the_reference_has_every_setting_and_every_setting_s_group():
    text = reference.page()
    assert all(f"| `{name}` |" in text for group in GROUPS.values() for name in group.model_fields)


def test_the_guide_says_of_every_alert_what_it_means_and_of_no_other():
    rules = yaml.safe_load((ROOT / "deploy/kubernetes/gearshift/files/alerts.yaml").read_text())
    alerts = {rule["alert"] for group in rules["groups"] for rule in group["rules"]}
    guide = (ROOT / "deploy/OPERATING.md").read_text()
    assert set(re.findall(r"^### (Gearshift\w+)$", guide, re.MULTILINE)) == alerts


@pytest.mark.parametrize("path", HAND_WRITTEN, ids=ids)
def test_the_files_and_modules_that_it_names_are_there(path: Path):
    text = path.read_text()
    linked = {(path.parent / link).resolve() for link in re.findall(r"\]\((?!https?:)([^)#]+)\)", text)}
    named = {ROOT / name for name in re.findall(r"`((?:deploy|service|tests|schemas)/[\w./-]+)`", text)}
    assert not [str(each) for each in linked | named if not each.exists()]
    modules = re.findall(r"python -m ([a-z_.]+)", text)
    assert not [module for module in modules if importlib.util.find_spec(module) is None]


@pytest.mark.parametrize("path", HAND_WRITTEN, ids=ids)
def test_the_commands_and_settings_that_it_names_are_there(path: Path):
    text = path.read_text()
    for words in re.findall(r"`gearshift ([a-z -]+)", text):
        found = words.split()
        assert any(" ".join(found[:length]) in COMMANDS for length in (1, 2)), words
    settings = {name for group in GROUPS.values() for name in group.model_fields}
    named = set(re.findall(r"`([a-z]+(?:_[a-z]+)+)(?:=\w+)?`", text))
    ours = {name for name in named if name.endswith(("_s", "_file", "_mode", "_topics", "_bytes", "_tokens"))}
    assert ours - settings - {"kv_cache_memory_bytes"} == set()
