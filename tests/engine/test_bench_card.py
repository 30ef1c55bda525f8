"""The run on a card works before there is one: on this CPU, with small models, each part that is asked for."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.engine]
ROOT = Path(__file__).parents[2]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """``python -m tests.bench.card`` as somebody at a card starts it."""
    command = [sys.executable, "-m", "tests.bench.card", *arguments]
    variables = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=240, check=False)


@pytest.mark.long
def test_a_part_by_itself_writes_its_figures_and_says_which_hold(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    done = run("--json", str(figures), "--shape", "small", "--only", "resident", "parked", "--folder", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    written = json.loads(figures.read_text())
    assert written["shape"] == "small"
    assert {"vllm", "torch"} <= written.keys()
    found = written["figures"]
    assert {"import_s", "resident_p50_ms", "resident_p99_ms", "resident_loaded_p50_ms", "parked_s"} <= found.keys()
    assert {"load_pause_ms", "equal", "crowd_switch_s", "memory_growth"}.isdisjoint(found), "nobody asked for them"
    assert all(value > 0 for name, value in found.items() if name.endswith(("_ms", "_s", "_mib")))
    assert f"resident_p50_ms {found['resident_p50_ms']}" in done.stdout
    assert "-- resident\n" in done.stdout


def test_a_part_that_there_is_not_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    done = run("--json", str(tmp_path / "figures.json"), "--only", "switch")
    assert done.returncode == 2
    assert "invalid choice: 'switch'" in done.stderr
    assert not (tmp_path / "figures.json").exists()
