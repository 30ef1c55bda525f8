"""What vllm-gaudi's unit tests check of its multi-model engine, and where it is checked here.

Theirs, in v0.26.0: tests/unit_tests/test_multi_model_engine_unit.py, and the script full_tests/online_model_swap.py.
The first tests are theirs that were checked nowhere else, under their names; the last one holds the list.
"""

import ast
from pathlib import Path
from typing import Any

import pytest

from service.engine import MultiModelEngine
from service.engine.models.catalog import Catalog
from service.models_file import load_models
from service.settings import EngineSettings

ROOT = Path(__file__).parents[3]
TWO = "models: {llama: {model: meta-llama/Llama-3.1-8B-Instruct}, qwen: {model: Qwen/Qwen3-0.6B}}"


def test_load_multi_model_config_falls_back_to_model_env(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "multi.yaml"
    path.write_text(TWO)
    monkeypatch.setenv("MODEL", "qwen")
    assert load_models(path, EngineSettings(), engine_keys=("model",), frontend_keys=()).default_model == "qwen"


@pytest.mark.parametrize("callers", [None, "/callers.json"])
def test_switch_preserves_quant_config_when_not_specified(monkeypatch: pytest.MonkeyPatch, callers: str | None) -> None:
    """Preserved is what the caller's environment says, and not, as there, what the model before it was given."""
    if callers is None:
        monkeypatch.delenv("QUANT_CONFIG", raising=False)
    else:
        monkeypatch.setenv("QUANT_CONFIG", callers)
    named: dict[str, Any] = dict.fromkeys(("llama", "qwen", "lynx"))
    catalog = Catalog(named, quant_configs={"llama": "/llamas.json", "lynx": None})
    wanted = {alias: catalog.environment(alias) for alias in named}
    assert wanted == {
        "llama": {"QUANT_CONFIG": "/llamas.json"},
        "qwen": {"QUANT_CONFIG": callers},
        "lynx": {"QUANT_CONFIG": None},
    }


def test_an_engine_without_models_is_refused() -> None:
    with pytest.raises(ValueError, match="model_configs cannot be empty"):
        MultiModelEngine({})


HERE = "tests/unit/engine/test_gaudi_behaviours.py"
FILE, CONTEXTS = "tests/unit/test_models_file.py", "tests/unit/platforms/test_worker_contexts.py"
ENVELOPE, FAILURE = "tests/unit/engine/test_envelope.py", "tests/engine/test_failure.py"
EVERYWHERE = "tests/support/context_spec.py"
SWITCH, SURFACE, HPU = (f"tests/engine/test_{name}.py" for name in ("switch", "surface", "hpu"))

SHOWN = {
    "load_multi_model_config_success": (FILE, "test_aliases_engine_arguments_and_our_own_keys_are_told_apart"),
    "load_multi_model_config_falls_back_to_model_env": (HERE, "test_load_multi_model_config_falls_back_to_model_env"),
    "load_multi_model_config_extracts_frontend_overrides": (
        FILE,
        "test_relative_paths_resolve_against_the_files_folder",
    ),
    "load_multi_model_config_extracts_quant_configs": (FILE, "test_relative_paths_resolve_against_the_files_folder"),
    "load_multi_model_config_extracts_explicit_quant_config_null": (
        FILE,
        "test_no_quant_config_null_and_a_path_are_three_things",
    ),
    "resolve_frontend_settings_uses_model_override_then_cli": (
        FILE,
        "test_command_line_defaults_hold_for_aliases_that_do_not_set_them",
    ),
    # Order: drain, switch, done; in the worker: environment, runner, device, weights.
    "initialize_and_switch_reconfigures_engine": (EVERYWHERE, "test_a_switch_tells_each_of_its_phases"),
    "... with the quantization of the target": (
        CONTEXTS,
        "test_a_model_is_built_with_its_own_quant_config_in_place_from_the_start",
    ),
    "switch_preserves_quant_config_when_not_specified": (HERE, "test_switch_preserves_quant_config_when_not_specified"),
    "switch_same_model_is_noop": (SWITCH, "test_a_switch_to_the_active_model_does_nothing"),
    "initialize_invalid_model_raises": (SURFACE, "test_unknown_names_and_second_starts_are_refused_as_documented"),
    # The opposite: nothing insecure is asked for, and what is not signed is never opened.
    "deserialize_reconfigure_config_requires_insecure_serialization": (
        ENVELOPE,
        "test_a_foreign_payload_is_refused_before_it_is_unpickled",
    ),
    "deserialize_reconfigure_config_rejects_non_vllm_config": (ENVELOPE, "test_anything_else_is_refused"),
    "deserialize_reconfigure_config_accepts_valid_payload": (ENVELOPE, "test_what_was_sealed_comes_out_again"),
    "gaudi_reconfigure_engine_rolls_back_on_load_failure": (
        FAILURE,
        "test_a_model_that_can_not_be_loaded_leaves_everything_as_it_was",
    ),
    "... on HPU's worker": (HPU, "test_a_model_that_can_not_be_loaded_leaves_everything_as_it_was"),
    "gaudi_reconfigure_engine_rolls_back_on_normalize_failure": (
        FAILURE,
        "test_a_model_that_can_not_be_loaded_leaves_everything_as_it_was",
    ),
    # There is no stash to have or to lack: the model before stays loaded, and is seated again.
    "gaudi_reconfigure_engine_skips_restore_without_stash_marker": (
        CONTEXTS,
        "test_a_load_that_fails_leaves_the_model_before_it_and_its_environment",
    ),
    "normalize_reconfigure_config_aligns_granite_hybrid_mamba_state": (
        HPU,
        "test_a_mixed_model_is_aligned_as_it_is_where_it_comes_first",
    ),
    # The same: configurations are made and aligned by vLLM's own start, so there is nothing to reset.
    "normalize_reconfigure_resets_mamba_block_size_from_max_model_len_sentinel": (
        HPU,
        "test_a_mixed_model_is_aligned_as_it_is_where_it_comes_first",
    ),
    "online_model_swap": (SWITCH, "test_the_answer_of_switch_model_has_the_gaudi_servers_fields"),
}


@pytest.mark.parametrize("theirs", SHOWN)
def test_each_of_their_behaviours_is_shown_where_the_list_says(theirs: str) -> None:
    path, name = SHOWN[theirs]
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
