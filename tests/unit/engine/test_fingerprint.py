"""What an answer is gone on with by: the same checkpoint, adapter and prompt, wherever their files lie."""

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from service.engine.answering.said import digest, features_of
from service.engine.models.checkpoint import identity
from service.engine.versions import vllm_progress


def folder(path: Path, *, weights: int, tensor: str = "a") -> str:
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}")
    (path / "model-1.safetensors").write_bytes(b"\0" * weights)
    index = {"metadata": {"total_size": weights}, "weight_map": {tensor: "model-1.safetensors"}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return str(path)


def fingerprint(model: str) -> str:
    hf_config = SimpleNamespace(to_dict=lambda: {"_name_or_path": model, "hidden_size": 8})
    model_config = SimpleNamespace(hf_config=hf_config, dtype="bfloat16", quantization=None)
    return vllm_progress.fingerprint(SimpleNamespace(model_config=model_config), identity(model))


def test_a_copy_is_the_same_checkpoint_and_other_weights_of_the_same_configuration_are_not(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    one = folder(tmp_path / "one", weights=64)
    copy = folder(tmp_path / "copy", weights=64)
    os.utime(Path(copy, "model-1.safetensors"), (1, 1))
    assert fingerprint(one) == fingerprint(copy)
    others = [folder(tmp_path / "larger", weights=65), folder(tmp_path / "other", weights=64, tensor="b")]
    assert len({fingerprint(model) for model in (one, *others)}) == 3


def test_two_commits_of_a_hub_are_two_checkpoints(tmp_path: Path) -> None:
    commits = [folder(tmp_path / "snapshots" / commit, weights=64) for commit in ("0a", "0b")]
    assert identity(commits[0]) != identity(commits[1])


def adapter(name: str, path: str) -> Any:
    return SimpleNamespace(lora_name=name, lora_path=path)


def test_a_prompt_is_another_one_for_another_adapter_or_with_another_image(tmp_path: Path) -> None:
    paths = [folder(tmp_path / at / "tuned", weights=weights) for at, weights in (("a", 8), ("b", 8), ("c", 9))]
    adapters = [adapter("tuned", path) for path in paths]
    assert digest([1, 2], adapters[0]) == digest([1, 2], adapters[1])
    pictures = [features_of(SimpleNamespace(mm_features=[SimpleNamespace(identifier=each)])) for each in ("x", "y")]
    assert features_of(SimpleNamespace(mm_features=None)) == ()
    prompts = [
        digest([1, 2]),
        digest([1, 3]),
        digest([1, 2], adapters[0]),
        digest([1, 2], adapters[2]),
        digest([1, 2], adapter("other", paths[0])),
        *(digest([1, 2], None, picture) for picture in pictures),
    ]
    assert len(set(prompts)) == len(prompts)


def test_weights_of_one_size_are_told_apart_by_what_they_hold(tmp_path: Path) -> None:
    for name, byte in (("one", b"1"), ("copy", b"1"), ("other", b"2")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(1_000_000 * byte)
    one, copy, other = (identity(str(tmp_path / name)) for name in ("one", "copy", "other"))
    assert one == copy != other
