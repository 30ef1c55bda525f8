"""The names of vLLM's arguments are read from its source, which takes milliseconds; importing it takes ten seconds."""

import subprocess
import sys
from pathlib import Path

import pytest

from service.engine.answering.arguments import engine_arg_names, frontend_arg_names


def test_engine_and_server_arguments_are_told_apart() -> None:
    assert {"model", "max_model_len", "kv_cache_memory_bytes", "enable_log_requests"} <= engine_arg_names()
    assert {"chat_template", "tool_call_parser", "enable_auto_tool_choice", "host"} <= frontend_arg_names()


def test_private_fields_are_no_arguments() -> None:
    assert not [name for name in engine_arg_names() | frontend_arg_names() if name.startswith("_")]


def test_the_names_are_found_without_importing_vllm() -> None:
    code = (
        "import sys; from service.engine.answering.arguments import *; engine_arg_names(); frontend_arg_names(); "
        "print(sorted({'vllm', 'torch'} & sys.modules.keys()))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


@pytest.mark.parametrize("command", ["worker", "serve"])
def test_what_is_wrong_in_models_yaml_is_said_without_importing_vllm(tmp_path: Path, command: str) -> None:
    file = tmp_path / "models.yaml"
    file.write_text("default_model: m\nmodels:\n  m: {model: /m, max_modl_len: 3}\n")
    words = [sys.executable, "-X", "importtime", "-m", "service.cli", command, "--models", str(file)]
    ran = subprocess.run(words, capture_output=True, text=True, check=False)
    assert ran.returncode == 2
    assert "did you mean 'max_model_len'?" in " ".join(ran.stderr.split())
    assert not {"vllm", "torch"} & {line.rpartition("|")[2].strip() for line in ran.stderr.splitlines()}
