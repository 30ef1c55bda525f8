"""A checkpoint's weights are read into the system's memory before they are loaded: all of them, and each once."""

from pathlib import Path

import pytest

from service.engine.models import checkpoint

SIZE = (5 << 20) + 7


def read_by_this_process() -> int:
    """Bytes that it has asked the system for, in all of its threads."""
    counts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counts["rchar"])


def weights(folder: Path, files: int) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    for number in range(files):
        (folder / f"model-{number}.safetensors").write_bytes(b"w" * SIZE)
    (folder / "consolidated.safetensors").write_bytes(b"w" * SIZE)


def test_every_part_of_every_file_that_is_loaded_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "_READ_BYTES", 1 << 20)
    weights(tmp_path / "model", files=3)
    before = read_by_this_process()
    checkpoint.read_ahead(str(tmp_path / "model"))
    assert 3 * SIZE <= read_by_this_process() - before < 3.5 * SIZE


def test_of_a_model_of_the_hub_it_is_the_revision_that_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--who--what"
    for revision, files in (("main", 1), ("wide", 4)):
        weights(repository / "snapshots" / f"commit-of-{revision}", files)
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs" / revision).write_text(f"commit-of-{revision}")
    before = read_by_this_process()
    checkpoint.read_ahead("who/what", "wide")
    assert 4 * SIZE <= read_by_this_process() - before < 4.5 * SIZE


def test_where_nothing_is_here_nothing_is_read(tmp_path: Path) -> None:
    before = read_by_this_process()
    checkpoint.read_ahead(str(tmp_path))
    assert read_by_this_process() - before < SIZE
