"""What a process remembers of a checkpoint's files is read anew when a model is loaded: they may be others by now."""

import json
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

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
