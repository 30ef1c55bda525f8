"""What vllm-gaudi's unit tests check of its multi-model engine, and is checked here in no other file.

Theirs, in v0.26.0: tests/unit_tests/test_multi_model_engine_unit.py, and the script full_tests/online_model_swap.py.
Tests that show one of their behaviours say so: ``@judge("vllm-gaudi", ...)``; the end of a run counts them. Of some
it is the opposite that is shown: nothing insecure is asked for, and what is not signed is never opened; there is no
stash to have or to lack, for the model before stays loaded and is seated again; configurations are made and aligned by
vLLM's own start, so there is nothing to reset.
"""

from pathlib import Path
from typing import Any

import pytest

from service.engine import MultiModelEngine
from service.engine.models.catalog import Catalog
from service.models_file import load_models
from service.settings import EngineSettings
from tests.support.judge import judge

TWO = "models: {llama: {model: meta-llama/Llama-3.1-8B-Instruct}, qwen: {model: Qwen/Qwen3-0.6B}}"


@judge("vllm-gaudi", "test_load_multi_model_config_falls_back_to_model_env")
def test_load_multi_model_config_falls_back_to_model_env(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "multi.yaml"
    path.write_text(TWO)
    monkeypatch.setenv("MODEL", "qwen")
    assert load_models(path, EngineSettings(), engine_keys=("model",), frontend_keys=()).default_model == "qwen"


@pytest.mark.parametrize("callers", [None, "/callers.json"])
@judge("vllm-gaudi", "test_switch_preserves_quant_config_when_not_specified")
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


@judge("vllm-gaudi", "test_init_with_empty_configs")
def test_an_engine_without_models_is_refused() -> None:
    with pytest.raises(ValueError, match="model_configs cannot be empty"):
        MultiModelEngine({})
