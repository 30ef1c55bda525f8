"""The code of an earlier commit, in a folder of its own: what a pool runs beside the present one during an upgrade."""

import io
import subprocess
import tarfile
from pathlib import Path

from deploy.local.setup import ROOT

COMMIT = "0e838cc087583c70733c01aaa72846c96b47e542"
"""Before the topic `throttled`, sessions that outlive their worker, and objectives per class of requests."""


class NoHistory(Exception):
    """The commit is not in this checkout."""


def missing(commit: str = COMMIT) -> str | None:
    """Why that commit's code can't be had here; None: it can."""
    try:
        _git("cat-file", "-e", f"{commit}^{{commit}}")
    except NoHistory as reason:
        return str(reason)
    return None


def unpack(folder: Path, commit: str = COMMIT) -> Path:
    """Write the files of a commit below ``folder``, and return where. Raises NoHistory."""
    packed = _git("archive", "--format=tar", commit, "schemas", "service", "tests", "deploy")
    there = folder.resolve() / f"older-{commit[:10]}"
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", None)  # Python 3.11.2 has none
        archive.extractall(there)
    return there


def _git(*words: str) -> bytes:
    try:
        done = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, check=False)
    except FileNotFoundError:
        raise NoHistory("git is not installed") from None
    if done.returncode:
        said = done.stderr.decode("utf-8", "replace").strip()
        raise NoHistory(f"history is missing here (a shallow clone has none; git fetch --unshallow): {said}")
    return done.stdout
