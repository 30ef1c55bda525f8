"""Profiles that vLLM's workers wrote to a folder."""

import gzip
from pathlib import Path


def traces(folder: Path) -> dict[str, bytes]:
    """The content of each trace, by its file's name."""
    return {path.name: gzip.decompress(path.read_bytes()) for path in folder.glob("*.trace.json.gz")}
