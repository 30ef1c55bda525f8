"""What a process remembers of a checkpoint's files is read anew when a model is loaded: they may be others by now."""

import json
import threading
from collections.abc import Callable
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from service.engine.core.context import read_tokenizer
from service.engine.versions import checkpoints


def picture(size: int) -> dict[str, Any]:
    return {"image_processor_type": "Idefics3ImageProcessor", "size": {"longest_edge": size}}


def sound(size: int) -> dict[str, Any]:
    return {"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": size}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("made", "reading", "size_of"),
    [
        (picture, "cached_get_image_processor", lambda processor: processor.size["longest_edge"]),
        (sound, "cached_get_feature_extractor", lambda extractor: extractor.feature_size),
    ],
)
def test_pictures_and_sound_are_prepared_as_the_new_files_say(
    tmp_path: Path, made: Callable[[int], Any], reading: str, size_of: Callable[[Any], int]
) -> None:
    read = getattr(import_module("vllm.transformers_utils.processor"), reading)
    files = tmp_path / "preprocessor_config.json"
    files.write_text(json.dumps(made(64)))
    assert size_of(read(str(tmp_path))) == 64
    files.write_text(json.dumps(made(32)))
    assert size_of(read(str(tmp_path))) == 64  # remembered
    checkpoints.forget()
    assert size_of(read(str(tmp_path))) == 32


def test_a_tokenizer_that_was_still_read_for_a_load_that_was_given_up_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, goes_on, files = threading.Event(), threading.Event(), tmp_path / "tokenizer.json"

    @lru_cache
    def reading(model_config: Path) -> str:
        said = model_config.read_text()
        begun.set()
        assert goes_on.wait(60)
        return said

    monkeypatch.setattr("vllm.tokenizers.registry.cached_get_tokenizer", reading)
    monkeypatch.setattr("vllm.tokenizers.cached_tokenizer_from_config", reading)
    config = SimpleNamespace(model_config=files)
    files.write_text("old")
    first = read_tokenizer(config, after=None)
    assert begun.wait(60)
    files.write_text("new")
    second = read_tokenizer(config, after=first)
    goes_on.set()
    second.join(60)
    assert reading(model_config=files) == "new"
    assert reading.cache_info().hits == 1
    files.write_text("newest")
    read_tokenizer(config, after=None).join(60)
    assert reading(model_config=files) == "newest"
