"""What is installed is what was locked: versions, and the hashes of their files."""

import re
from pathlib import Path

import pytest

from deploy.local.setup import ROOT

LOCKS = sorted(path for path in (ROOT / "deploy" / "lock").rglob("*.txt") if not path.name.startswith("overrides"))


@pytest.mark.parametrize("lock", LOCKS, ids=lambda path: str(path.relative_to(ROOT)))
def test_each_package_of_a_lock_has_a_version_and_hashes_and_no_address(lock: Path) -> None:
    for entry in re.split(r"\n(?=\S)", lock.read_text().strip()):
        assert re.match(r"[\w.\[\],-]+==\S+( ; [^\\]+)? \\\n +--hash=sha256:[0-9a-f]{64}", entry), entry.splitlines()[0]
        assert "://" not in entry


def test_installing_insists_on_the_hashes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from deploy.local import setup

    monkeypatch.delenv("UV_TORCH_BACKEND", raising=False)
    uv, python = setup.ensure_uv(), tmp_path / "bin" / "python"
    setup.call(uv, "venv", "--quiet", tmp_path)
    entry = next(entry for entry in LOCKS[1].read_text().split("\n") if entry.startswith("annotated-types"))
    lock = tmp_path / "lock.txt"
    for hashes in ("", " \\\n    --hash=sha256:" + "0" * 64):
        lock.write_text(entry.removesuffix(" \\") + hashes + "\n")
        with pytest.raises(setup.SetupFailed):
            setup.sync(uv, python, lock)
