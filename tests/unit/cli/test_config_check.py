"""``gearshift config check``: what a worker with these settings would not start with, or would not serve."""

import json
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from service.cli.main import app
from service.errors import ConfigError

HUB = "models: {{{alias}: {{model: {model}}}}}"


def checked(tmp_path: Path, *words: str, alias: str = "llama", model: str = "org/llama") -> Result:
    (file := tmp_path / "models.yaml").write_text(HUB.format(alias=alias, model=model))
    return CliRunner().invoke(app, ["config", "check", "--models", str(file), *words])


def refused(found: Result) -> str:
    assert isinstance(found.exception, ConfigError), found.output
    return str(found.exception)


def settings(*assignments: str) -> list[str]:
    return [word for assignment in assignments for word in ("--set", assignment)]


@pytest.mark.parametrize(
    ("setting", "more"),
    [
        ("quotas_file", ()),
        ("control_key_file", ()),
        ("pool_key_file", ()),
        ("api_keys_file", ()),
        ("http_ssl_certfile", ("http_ssl_keyfile=/nowhere/key",)),
        ("ssl_cafile", ("security_protocol=SSL",)),
        ("sasl_password_file", ("security_protocol=SASL_PLAINTEXT", "sasl_username=worker")),
    ],
)
def test_a_file_that_a_setting_names_must_be_there(setting: str, more: tuple[str, ...], tmp_path: Path) -> None:
    said = refused(checked(tmp_path, *settings(f"{setting}=/nowhere/file", *more)))
    assert "/nowhere/file" in said
    assert setting in said or setting == "ssl_cafile"


@pytest.mark.parametrize("model", ["/nowhere/weights", "./weights", "../weights", "some/where/else", "~/weights"])
def test_weights_that_are_a_path_must_be_there(model: str, tmp_path: Path) -> None:
    assert f"models.llama.model: there is no {model}" in refused(checked(tmp_path, model=model))


@pytest.mark.parametrize("model", ["gpt2", "org/llama", "s3://bucket/some/weights", "org/llama/file.gguf", "{}"])
def test_a_hubs_name_and_weights_that_are_there_will_do(model: str, tmp_path: Path) -> None:
    assert checked(tmp_path, model=model.format(tmp_path)).exit_code == 0


@pytest.mark.parametrize("alias", ["a/b", "ä", "a b", "a" * 249])
def test_an_alias_must_do_for_its_topic(alias: str, tmp_path: Path) -> None:
    assert f"requests.{alias}" in refused(checked(tmp_path, alias=alias))


def test_a_prefix_must_do_for_topics(tmp_path: Path) -> None:
    assert "a/requests" in refused(checked(tmp_path, *settings("topic_prefix=a/")))


def test_a_date_is_shown_as_it_was_written(tmp_path: Path) -> None:
    found = checked(tmp_path, "--json", model="org/llama, revision: 2024-01-01")
    assert json.loads(found.stdout)["models"]["llama"]["revision"] == "2024-01-01"
