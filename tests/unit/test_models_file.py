"""models.yaml as users of the multi-model Gaudi server know it, and errors that say where and what is right."""

import datetime as dt
from pathlib import Path

import pytest
import yaml

from schemas.objectives import Objective
from service.errors import ConfigError
from service.models_file import UNSET, load_models
from service.settings import EngineSettings
from service.yaml_files import read_yaml
from tests.support.judge import judge

ENGINE_KEYS = ("model", "max_model_len", "dtype", "max_num_seqs", "tensor_parallel_size")
FRONTEND_KEYS = ("enable_auto_tool_choice", "tool_call_parser", "chat_template")


def load(tmp_path: Path, text: str, **settings: object):
    path = tmp_path / "models.yaml"
    path.write_text(text)
    return load_models(path, EngineSettings(**settings), engine_keys=ENGINE_KEYS, frontend_keys=FRONTEND_KEYS)


@judge("vllm-gaudi", "test_load_multi_model_config_success")
def test_aliases_engine_arguments_and_our_own_keys_are_told_apart(tmp_path):
    models = load(
        tmp_path,
        """
        default_model: qwen
        models:
          llama: {model: /m/llama, max-model-len: 512, pin: true, weight: 2, objective: {ttft_s: 2, tpot_s: 0.1}}
          qwen: {model: /m/qwen, tool_call_parser: hermes}
        """,
    )
    assert models.default_model == "qwen"
    assert models.models["llama"].engine_args == {"model": "/m/llama", "max_model_len": 512}
    assert models.models["llama"].scheduling.pin
    assert models.models["llama"].scheduling.objective == Objective(ttft_s=2, tpot_s=0.1)
    assert models.models["qwen"].frontend["tool_call_parser"] == "hermes"


@pytest.mark.parametrize("alias", ["8", "0", "yes"])
def test_a_default_model_that_yaml_takes_for_something_else_is_the_alias_that_it_takes_for_the_same(tmp_path, alias):
    text = f"default_model: {alias}\nmodels: {{a: {{model: x}}, {alias}: {{model: y}}}}"
    assert load(tmp_path, text).default_model == str(yaml.safe_load(alias))


def test_the_default_model_is_the_files_then_the_settings_then_the_first(tmp_path):
    text = "models: {a: {model: x}, b: {model: y}}"
    assert load(tmp_path, text).default_model == "a"
    assert load(tmp_path, text, default_model="b").default_model == "b"
    assert load(tmp_path, "default_model: a\n" + text, default_model="b").default_model == "a"


@judge("vllm-gaudi", "test_resolve_frontend_settings_uses_model_override_then_cli")
def test_command_line_defaults_hold_for_aliases_that_do_not_set_them(tmp_path):
    models = load(
        tmp_path,
        "models: {a: {model: x}, b: {model: y, tool_call_parser: pythonic, enable_auto_tool_choice: false}}",
        enable_auto_tool_choice=True,
        tool_call_parser="hermes",
    )
    assert models.models["a"].frontend == {"enable_auto_tool_choice": True, "tool_call_parser": "hermes"}
    assert models.models["b"].frontend == {"enable_auto_tool_choice": False, "tool_call_parser": "pythonic"}


@judge(
    "vllm-gaudi",
    "test_load_multi_model_config_extracts_frontend_overrides",
    "test_load_multi_model_config_extracts_quant_configs",
)
def test_relative_paths_resolve_against_the_files_folder(tmp_path):
    (tmp_path / "chat.jinja").write_text("{{ messages }}")
    (tmp_path / "quant.json").write_text("{}")
    models = load(tmp_path, "models: {a: {model: x, chat_template: chat.jinja, quant_config: quant.json}}")
    assert models.models["a"].frontend["chat_template"] == str(tmp_path / "chat.jinja")
    assert models.models["a"].quant_config == tmp_path / "quant.json"


@judge("vllm-gaudi", "test_load_multi_model_config_extracts_explicit_quant_config_null")
def test_no_quant_config_null_and_a_path_are_three_things(tmp_path):
    (tmp_path / "q.json").write_text("{}")
    text = "models: {a: {model: x}, b: {model: x, quant_config: null}, c: {model: x, quant_config: q.json}}"
    models = load(tmp_path, text).models
    assert [models[alias].quant_config for alias in "abc"] == [UNSET, None, tmp_path / "q.json"]


def test_an_inline_template_stays_a_template(tmp_path):
    models = load(tmp_path, "models: {a: {model: x, chat_template: '{{ messages[0].content }}'}}")
    assert models.models["a"].frontend["chat_template"] == "{{ messages[0].content }}"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("model: {}", ["unknown key 'model'", "'models'"]),
        ("models: {}", ["at least one alias"]),
        ("- a", ["must be a mapping"]),
        ("models: [", ["not valid YAML"]),
        ("models: {a: {model: 2024-99-99}}", ["models.yaml", "not valid YAML", "month"]),
        ("models: {a: {pin: !!bool maybe}}", ["models.yaml", "not valid YAML", "maybe"]),
        ("models: {a: 3}", ["models.a: must be a mapping"]),
        ("models: {a: {}}", ["models.a.model: is missing"]),
        ("models: {a: {model: x, max_modle_len: 3}}", ["models.a.max_modle_len", "'max_model_len'"]),
        ("models: {a: {model: x, port: 80}}", ["models.a.port: is of the server", "http_port"]),
        ("models: {a: {model: x, chat_template: chta.jinja}}", ["models.a.chat_template", "'chat.jinja'"]),
        ("models: {a: {model: x, quant_config: q.json}}", ["models.a.quant_config", "q.json"]),
        ("models: {a: {model: x, quant_config: 3}}", ["models.a.quant_config", "path or null"]),
        ("models: {a: {model: x, weight: -1}}", ["models.a.weight", "greater than 0"]),
        ("models: {a: {model: x, weight: .inf}}", ["models.a.weight", "finite"]),
        ("models: {a: {model: x, objective: {ttft_s: 0, tpot_s: 1}}}", ["models.a.objective", "greater than 0"]),
        ("default_model: qwem\nmodels: {qwen: {model: x}}", ["default_model", "'qwem'", "'qwen'"]),
        ("default_model: [qwen]\nmodels: {qwen: {model: x}}", ["default_model", "['qwen']"]),
        ("a: " + "[" * 5000, ["not valid YAML", "too deeply"]),
        *(
            (f'models: {{a: {{model: x, {key}: "{name}"}}}}', [f"models.a.{key}", "no file"])
            for key in ("chat_template", "quant_config")
            for name in ("x" * 300, r"a\0b")
        ),
    ],
)
def test_a_mistake_is_named_with_file_alias_key_and_the_nearest_right_one(tmp_path, text, says):
    (tmp_path / "chat.jinja").write_text("{{ messages }}")
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text)
    assert str(tmp_path / "models.yaml") in str(caught.value)
    for part in says:
        assert part in str(caught.value)


def test_a_missing_file_says_who_names_it(tmp_path):
    with pytest.raises(ConfigError, match="VLLM_HPU_MULTI_MODEL_CONFIG"):
        load_models(tmp_path / "no.yaml", EngineSettings(), engine_keys=ENGINE_KEYS, frontend_keys=FRONTEND_KEYS)


def test_a_library_that_changes_pyyaml_for_all_does_not_change_what_a_file_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """lm-format-enforcer does, as it is imported: a file said something else at a reload than at the start."""
    tag = "tag:yaml.org,2002:timestamp"
    (tmp_path / "file.yaml").write_text("date: 2024-01-01")
    monkeypatch.setitem(yaml.SafeLoader.yaml_constructors, tag, yaml.SafeLoader.construct_yaml_str)
    assert yaml.safe_load("date: 2024-01-01") == {"date": "2024-01-01"}
    assert read_yaml(tmp_path / "file.yaml") == {"date": dt.date(2024, 1, 1)}
