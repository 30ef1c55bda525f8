"""A local checkpoint's files: how much its weights are, and whether the others are still those that were read."""

from pathlib import Path

Fingerprint = frozenset[tuple[str, int, int]]
"""Name, size in bytes and time of change of each file."""

_WEIGHTS = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz"})


def fingerprint(model: str) -> Fingerprint:
    """Of the files in a local checkpoint's folder that are no weights; empty for one that is not here."""
    folder = Path(model)
    if not folder.is_dir():
        return frozenset()
    files = [path for path in folder.iterdir() if path.suffix not in _WEIGHTS and path.is_file()]
    return frozenset((path.name, found.st_size, found.st_mtime_ns) for path in files for found in [path.stat()])


def checkpoint_bytes(model: str) -> int:
    """Bytes of a local checkpoint's weights; 0 for one that is not here."""
    return sum(path.stat().st_size for path in _weight_files(model))


def read_ahead(model: str) -> None:
    """Read a local checkpoint's weights, so that the system has them in memory when they are loaded."""
    buffer = bytearray(8 << 20)
    for path in _weight_files(model):
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def _weight_files(model: str) -> list[Path]:
    folder = Path(model)
    found = list(folder.glob("*.safetensors")) or list(folder.glob("*.bin"))
    return [path for path in found if path.is_file()]  # of a pipe, what was read would be gone
