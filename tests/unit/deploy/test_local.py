"""What sets a checkout up and starts its demo."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from deploy.local import setup
from deploy.local.setup import ROOT

OTHER = "3.11.0 (another one)"


def program(path: Path, *lines: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(["#!/bin/bash", *lines, ""]))
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(("version", "made"), [(sys.version, False), (OTHER, True)], ids=["this", "another"])
def test_an_environment_is_made_anew_for_another_python(
    version: str, made: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GEARSHIFT_HOME", str(tmp_path))
    told = tmp_path / "told"
    program(tmp_path / "tools/bin/uv", f'echo "$@" >> {told}')
    program(tmp_path / "env/bin/python", f"echo {json.dumps(version)}")
    setup.make(tmp_path / "env", ROOT / "deploy/lock/cpu-vllm-0.32.txt", "0.32")
    assert ("venv --quiet --clear" in told.read_text()) is made


def test_the_demo_starts_from_any_folder_and_takes_paths_from_there(tmp_path: Path) -> None:
    """Also from one that has a ``deploy`` of its own."""
    local, caller = tmp_path / "checkout/deploy/local", tmp_path / "caller"
    for folder in (local, caller / "deploy"):
        folder.mkdir(parents=True)
    shutil.copy(ROOT / "deploy/local/demo", local)
    environment = Path(sys.executable).parents[1]
    (local / "environment.sh").write_text(f"checkout={tmp_path}/checkout environment={environment}\nunset PYTHONPATH\n")
    (local / "demo.py").write_text("import os, sys\nprint(os.getcwd(), *sys.argv[1:])\n")
    (caller / "deploy/__init__.py").write_text("raise SystemExit(3)\n")
    done = subprocess.run(
        [local / "demo", "--json", "FILE"], cwd=caller, env=os.environ, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, f"{caller} --json FILE\n"), done.stderr
