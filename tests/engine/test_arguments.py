"""models.yaml's values mean what they mean to vLLM's own command line."""

import dataclasses
import datetime as dt
import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from service.cli.serve import one_model_of
from service.engine.answering.arguments import (
    Arguments,
    command_line,
    engine_arg_names,
    frontend_arg_names,
    model_arguments,
)
from service.engine.versions import vllm_frontend
from service.errors import ConfigError
from service.models_file import load_models
from service.settings import EngineSettings

pytestmark = pytest.mark.engine


def arguments(folder: Path, entry: dict[str, Any], **defaults: Any) -> Arguments:
    path = folder / "models.yaml"
    path.write_text(yaml.safe_dump({"models": {"qwen": {"model": str(folder), **entry}}}))
    models = load_models(path, EngineSettings(), engine_keys=engine_arg_names(), frontend_keys=frontend_arg_names())
    return model_arguments(models, defaults)["qwen"]


def test_the_names_are_the_fields_of_vllms_dataclasses() -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs

    public = {field.name for field in dataclasses.fields(AsyncEngineArgs) if not field.name.startswith("_")}
    assert engine_arg_names() == public
    assert frontend_arg_names() == {field.name for field in dataclasses.fields(vllm_frontend.frontend_args())}


def test_values_of_every_kind_arrive(tmp_path: Path) -> None:
    entry = {
        "max_model_len": "2k",
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "dtype": "float32",
        "gpu_memory_utilization": 0.5,
        "hf_overrides": {"rope_theta": 1000},
        "allowed_media_domains": ["example.org"],
        "tokenizer": None,
    }
    engine = arguments(tmp_path, entry).engine
    assert {name: getattr(engine, name) for name in entry} == {**entry, "max_model_len": 2000}
    assert engine.served_model_name == ["qwen"]


def test_the_server_and_the_engine_get_the_same(tmp_path: Path) -> None:
    both = arguments(tmp_path, {"enable_auto_tool_choice": True, "tool_call_parser": "hermes", "max_logprobs": 7})
    assert (both.server.enable_auto_tool_choice, both.server.tool_call_parser) == (True, "hermes")
    assert both.server.max_logprobs == both.engine.max_logprobs == 7


def test_each_of_vllms_tool_and_reasoning_parsers_can_be_an_alias_own(tmp_path: Path) -> None:
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

    tools, thoughts = ToolParserManager.list_registered(), ReasoningParserManager.list_registered()
    assert min(len(tools), len(thoughts)) > 10
    pairs = zip(range(max(len(tools), len(thoughts))), itertools.cycle(tools), itertools.cycle(thoughts), strict=False)
    common = {"model": str(tmp_path), "enable_auto_tool_choice": True}
    path = tmp_path / "models.yaml"
    entries = {f"m{n}": {**common, "tool_call_parser": tool, "reasoning_parser": thought} for n, tool, thought in pairs}
    path.write_text(json.dumps({"models": entries}))
    models = load_models(path, EngineSettings(), engine_keys=engine_arg_names(), frontend_keys=frontend_arg_names())
    made = model_arguments(models, {}).values()
    assert {each.server.tool_call_parser for each in made} == set(tools)
    assert {each.engine.reasoning_parser for each in made} == set(thoughts)


def test_what_vllm_writes_into_one_alias_arguments_no_other_alias_has(tmp_path: Path) -> None:
    path = tmp_path / "models.yaml"
    entry = {"model": str(tmp_path)}
    path.write_text(json.dumps({"models": {"thinks": entry, "plain": entry}}))
    models = load_models(path, EngineSettings(), engine_keys=engine_arg_names(), frontend_keys=frontend_arg_names())
    made = model_arguments(models, {})
    for part in ("engine", "server"):
        config = getattr(made["thinks"], part).structured_outputs_config
        config.reasoning_parser = "deepseek_r1"  # as create_engine_config does
        assert getattr(made["plain"], part).structured_outputs_config.reasoning_parser == ""


def test_a_platforms_default_gives_way_to_the_file(tmp_path: Path) -> None:
    assert arguments(tmp_path, {}, block_size=64).engine.block_size == 64
    assert arguments(tmp_path, {"block_size": 16}, block_size=64).engine.block_size == 16


def test_media_are_fetched_from_nowhere_unless_domains_are_allowed(tmp_path: Path) -> None:
    (nowhere,) = arguments(tmp_path, {}).engine.allowed_media_domains
    assert nowhere.endswith(".invalid")  # a name that RFC 6761 keeps from ever existing
    assert arguments(tmp_path, {}).engine.allowed_local_media_path == ""


@pytest.mark.parametrize(
    ("entry", "key", "complaint"),
    [
        ({"max_model_len": "long"}, "max_model_len", "long"),
        ({"dtype": "float33"}, "dtype", "float33"),
        ({"enforce_eager": "yes"}, "enforce_eager", "true or false"),
        ({"max_num_seqs": [1, 2]}, "max_num_seqs", "[1, 2]"),
        ({"revision": dt.date(2024, 1, 1)}, "revision", "must be a string"),
        ({"model": "no/such-weights"}, "model", "not in the hub's cache"),
        ({"served_model_name": "other"}, "served_model_name", "served by its alias"),
    ],
)
def test_a_wrong_value_is_an_error_that_names_file_alias_and_key(
    tmp_path: Path, entry: dict[str, Any], key: str, complaint: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        arguments(tmp_path, entry)
    assert str(raised.value).startswith(f"{tmp_path}/models.yaml: models.qwen.{key}: ")
    assert complaint in str(raised.value)


@pytest.mark.parametrize(
    ("entry", "complaint"),
    [
        ({"enable_auto_tool_choice": True}, "tool-call-parser"),
        ({"enable_auto_tool_choice": True, "tool_call_parser": "hermés"}, "hermés"),
    ],
)
def test_values_that_do_not_go_together_name_file_and_alias(
    tmp_path: Path, entry: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint) as raised:
        arguments(tmp_path, entry)
    assert str(raised.value).startswith(f"{tmp_path}/models.yaml: models.qwen: ")


# --- vllm serve's command line ---


def test_what_vllm_serve_is_told_arrives_as_models_yaml_would_say_it() -> None:
    words = "/m/q --max-model-len 2k -tp 2 --enforce-eager --no-enable-prefix-caching --compilation-config.mode 3"
    assert command_line(words.split()) == {
        "model": "/m/q",
        "max_model_len": "2k",
        "tensor_parallel_size": "2",
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "compilation_config": '{"mode": 3}',
    }


def test_the_model_before_the_arguments_wins_over_one_among_them_as_in_vllm() -> None:
    assert command_line(["m", "--model", "n"]) == {"model": "m"}
    assert command_line(["--model", "n"]) == {"model": "n"}


def test_what_is_about_the_server_becomes_a_setting_wherever_it_stands() -> None:
    words = ["m", "--host", "0.0.0.0", "--port=9", "--allowed-origins", '["https://a", "https://b"]', "--dtype", "auto"]
    settings, read = one_model_of(words, ["http_hosts=a.example"], {"http_port": 8, "inactive": None})
    assert (settings.http.http_host, settings.http.http_port) == ("0.0.0.0", 9)
    assert settings.http.cors_origins == ("https://a", "https://b")
    assert settings.http.http_hosts == ("a.example",)
    assert read().models["m"].engine_args == {"model": "m", "dtype": "auto"}


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("m --max-modl-len 3", "--max-modl-len 3 (did you mean '--max-model-len'?)"),
        ("m --max-model-len", "--max-model-len"),
        ("m --served-model-name a b", "--served-model-name: must be one name, got a, b"),
        ("m --uds /tmp/socket", "models.m.uds: is of the server, and not of a model; there is no setting for it here"),
        ("m --api-key secret", "api_keys_file"),
        ("m --allowed-origins https://a", "--allowed-origins: must be a list"),
        ('m --allowed-origins "https://a"', "--allowed-origins: must be a list"),
        ('m --allowed-origins {"https://a":1}', "--allowed-origins: must be a list"),
        ("m n", "n"),
    ],
)
def test_a_wrong_word_is_named(words: str, named: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(named)) as said:
        one_model_of(words.split(), None, {})[1]()
    assert "secret" not in str(said.value)
