"""A checkpoint's files: how much its weights are, and whether the others are still those that were read."""

import hashlib
import json
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
Fingerprint = frozenset[tuple[str, int, int]]
"""Name, size in bytes and time of change of each file."""

_WEIGHTS = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz"})
_KINDS = (("*.safetensors", "model.safetensors"), ("*.bin", "pytorch_model.bin"))
"""Which files hold weights, the first kind that is there, and what the index of several is named after."""


_PIECES, _PIECE_BYTES = 16, 4096
_READERS, _READ_BYTES = 4, 32 << 20
"""How many threads read a checkpoint ahead, each so much at a time."""


def fingerprint(model: str) -> Fingerprint:
    """Of the files in a local checkpoint's folder that are no weights; empty for one that is not here."""
    folder = Path(model)
    if not folder.is_dir():
        return frozenset()
    files = [path for path in folder.iterdir() if path.suffix not in _WEIGHTS and path.is_file()]
    return frozenset((path.name, found.st_size, found.st_mtime_ns) for path in files for found in [path.stat()])


def identity(model: str, revision: str | None = None) -> list[Any]:
    """What tells a checkpoint, or an adapter, from others of its configuration, wherever its files lie.

    The commit of a hub's, and of the weights how they lie in which files, and a few pieces of each: two fine-tunes of
    one model differ in nothing else.
    """
    folder = _folder(model, revision)
    commit = folder.name if folder is not None and folder.parent.name == "snapshots" else revision
    files = [Path(model)] if Path(model).is_file() else _weight_files(folder)
    return [commit, [(path.name, path.stat().st_size, _pieces(path)) for path in files], _index(folder)]


def _pieces(path: Path) -> str:
    """A digest of some pages of a file, evenly apart."""
    digest, size = hashlib.sha256(), path.stat().st_size
    with path.open("rb", buffering=0) as file:
        for n in range(_PIECES):
            file.seek(size * n // _PIECES)
            digest.update(file.read(_PIECE_BYTES))
    return digest.hexdigest()


def checkpoint_bytes(model: str, revision: str | None = None) -> int:
    """Bytes of a checkpoint's weights as they are stored; 0 where that can't be known yet.

    Of a hub's model they are those that were downloaded, or what its index or the hub itself says they will be.
    """
    folder = _folder(model, revision)
    if files := _weight_files(folder):
        index = _index(folder)
        if not index or {path.name for path in files} >= set(index["weight_map"].values()):
            return sum(path.stat().st_size for path in files)
        return int(index["metadata"]["total_size"])
    if index := _index(folder):
        return int(index["metadata"]["total_size"])
    return 0 if Path(model).is_dir() else _remote_bytes(model, revision)


def in_pieces(config: Any) -> bool:
    """Whether a model's weights come tensor by tensor: made up, or out of files that are mapped into memory.

    Others are read by Python as a whole, for which nothing else could run, and which nothing interrupts in a thread.
    """
    files = _weight_files(_folder(config.model_config.model, config.model_config.revision))
    mapped = bool(files) and all(path.suffix == ".safetensors" for path in files)
    return mapped or config.load_config.load_format == "dummy"


def read_ahead(model: str, revision: str | None = None) -> None:
    """Have the system read a checkpoint's weights into its memory, from where they are loaded.

    They are copied nowhere on their way, so that those that are there already take next to no time. Most disks give
    several readers more than one.
    """
    parts = [
        (path, at)
        for path in _weight_files(_folder(model, revision))
        for at in range(0, path.stat().st_size, _READ_BYTES)
    ]
    with ThreadPoolExecutor(_READERS, "gearshift-read") as readers:
        for _ in readers.map(_read, parts):
            pass


def _read(part: tuple[Path, int]) -> None:
    path, at = part
    with path.open("rb") as file, Path(os.devnull).open("wb") as nowhere:
        end = at + _READ_BYTES
        while at < end and (read := os.sendfile(nowhere.fileno(), file.fileno(), at, end - at)):
            at += read


def _folder(model: str, revision: str | None) -> Path | None:
    """Where a model's files are: a local checkpoint, or what the hub's cache has of it."""
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(model, "config.json", revision=revision)
    except HFValidationError:  # no name of a model, and no folder
        return None
    return Path(found).parent if isinstance(found, str) else None


def _weight_files(folder: Path | None) -> list[Path]:
    """Those that vLLM reads: where there is an index, what it names; a consolidated copy beside others is not read."""
    if folder is None:
        return []
    for pattern, _ in _KINDS:
        # Of a pipe, what was read would be gone.
        if found := [path for path in sorted(folder.glob(pattern)) if path.is_file()]:
            named = set(_index(folder).get("weight_map", {}).values())
            return [path for path in found if path.name in named] or _apart({path.name: path for path in found})
    return []


def _apart(files: Mapping[str, T]) -> list[T]:
    """Without a consolidated copy, where there are others."""
    return [of for name, of in files.items() if not name.startswith("consolidated")] or list(files.values())


def _index(folder: Path | None) -> Mapping[str, Any]:
    """A folder's index of its weights; empty where there is none."""
    for _, name in _KINDS if folder is not None else ():
        path = Path(f"{folder}/{name}.index.json")
        if path.is_file():
            return _checked(path)
    return {}


@cache
def _remote_bytes(model: str, revision: str | None) -> int:
    """The weights of a hub's model that was not downloaded: as its index says, else as the hub lists its files.

    0 where no hub answers, or says it.
    """
    from huggingface_hub import HfApi, constants, hf_hub_download

    if constants.HF_HUB_OFFLINE:
        return 0
    limit_s = constants.HF_HUB_ETAG_TIMEOUT
    with suppress(Exception):  # whoever loads it meets it again, and tells
        told = HfApi().model_info(model, revision=revision, files_metadata=True, timeout=limit_s)
        sizes = {file.rfilename: file.size or 0 for file in told.siblings or () if "/" not in file.rfilename}
        for pattern, name in _KINDS:
            if (index := f"{name}.index.json") in sizes:
                found = _checked(Path(hf_hub_download(model, index, revision=revision)))
                return int(found["metadata"]["total_size"]) if found else 0
            if there := {file: size for file, size in sizes.items() if fnmatchcase(file, pattern)}:
                return sum(_apart(there))
    return 0


def _checked(path: Path) -> Mapping[str, Any]:
    """An index that says what an index says; empty otherwise: vLLM tells what is wrong with it."""
    try:
        index = json.loads(path.read_text())
        sound = isinstance(index["weight_map"], dict) and int(index["metadata"]["total_size"]) >= 0
    except (ValueError, KeyError, TypeError):
        return {}
    return index if sound else {}
