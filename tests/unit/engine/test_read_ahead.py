"""A checkpoint's weights are read into the system's memory before they are loaded: all of them, and each once."""

import os
from pathlib import Path

import pytest

from service.engine.models import checkpoint

SIZE = (5 << 20) + 7


def read_by_this_process() -> int:
    """Bytes that it has asked the system for, in all of its threads."""
    counts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counts["rchar"])


def weights(folder: Path, files: int) -> None:
    """On the disk, and not in the system's memory."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    for name in (*(f"model-{number}" for number in range(files)), "consolidated"):
        with (folder / f"{name}.safetensors").open("wb") as file:
            file.write(b"w" * SIZE)
            file.flush()
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def missing(path: Path) -> int:
    """Pages of a file that are not in the system's memory."""
    with path.open("rb") as file:
        found = 0
        for at in range(0, SIZE, 4096):
            try:
                os.preadv(file.fileno(), [bytearray(1)], at, os.RWF_NOWAIT)
            except BlockingIOError:
                found += 1
        return found


def test_every_part_of_every_file_that_is_loaded_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "_READ_BYTES", 1 << 20)
    weights(tmp_path / "model", files=3)
    before = read_by_this_process()
    checkpoint.read_ahead(str(tmp_path / "model"))
    assert read_by_this_process() - before < 3.5 * SIZE  # a part may be there because the one before it was read
    assert [missing(tmp_path / "model" / f"model-{number}.safetensors") for number in range(3)] == [0, 0, 0]


def test_what_is_there_already_is_not_read_again_and_what_is_not_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "_READ_BYTES", 1 << 20)
    weights(tmp_path / "model", files=2)
    checkpoint.read_ahead(str(tmp_path / "model"))
    files = [tmp_path / "model" / f"model-{number}.safetensors" for number in range(2)]
    assert [missing(file) for file in files] == [0, 0]
    before = read_by_this_process()
    checkpoint.read_ahead(str(tmp_path / "model"))
    assert read_by_this_process() - before < SIZE / 5
    with files[1].open("rb") as file:
        os.posix_fadvise(file.fileno(), 3 << 20, 2 << 20, os.POSIX_FADV_DONTNEED)
    before = read_by_this_process()
    checkpoint.read_ahead(str(tmp_path / "model"))
    assert 2 << 20 <= read_by_this_process() - before < (2 << 20) + SIZE / 5
    assert missing(files[1]) == 0


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
    assert read_by_this_process() - before < 4.5 * SIZE
    assert not any(map(missing, (repository / "snapshots" / "commit-of-wide").glob("model-*")))
    assert missing(repository / "snapshots" / "commit-of-main" / "model-0.safetensors")


def test_where_nothing_is_here_nothing_is_read(tmp_path: Path) -> None:
    before = read_by_this_process()
    checkpoint.read_ahead(str(tmp_path))
    assert read_by_this_process() - before < SIZE
