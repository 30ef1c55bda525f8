"""What sets a checkout up and starts its demo."""

import hashlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.local import models, setup
from deploy.local.demo import Left
from deploy.local.setup import ROOT
from tests.support.bus import until

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


@pytest.mark.parametrize("named", ["/nowhere/python", "an old one/python3"])
def test_a_python_that_is_named_and_does_not_fit_is_refused_by_its_name(named: str, tmp_path: Path) -> None:
    """Another one that is in the path would do, and is not taken instead."""
    program(tmp_path / "an old one/python3", 'exec python3 -c "import sys; sys.version_info = (3, 9); ${@: -1}"')
    variables = {**os.environ, "GEARSHIFT_PYTHON": named, "GEARSHIFT_HOME": str(tmp_path / "home")}
    done = subprocess.run(
        [ROOT / "deploy/local/run", "true"], cwd=tmp_path, env=variables, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "3.11, 3.12 or 3.13 is needed" in done.stderr
    assert f"GEARSHIFT_PYTHON names: {named} " in done.stderr
    assert not (tmp_path / "home").exists()


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


@pytest.fixture
def listener() -> Iterator[str]:
    """The address of somebody's broker, of which the demo asks no more than whether it listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def demo(folder: Path, broker: str, worker: str) -> subprocess.Popen[str]:
    """``demo --keep`` with models that are there and a worker that is no more than a command."""
    program(folder / "bin/gearshift", worker)
    recipe = hashlib.sha256(Path(models.__file__).read_bytes()).hexdigest()
    for speaker in models.SPEAKERS:
        (made := folder / "home/models" / speaker.alias).mkdir(parents=True)
        (made / "recipe").write_text(recipe)
    variables = {
        "PATH": f"{folder}/bin:{os.environ['PATH']}",
        "GEARSHIFT_HOME": f"{folder}/home",
        "KAFKA_BOOTSTRAP_SERVERS": broker,
        "PYTHONUNBUFFERED": "1",
    }
    return subprocess.Popen(
        [sys.executable, "-m", "deploy.local.demo", "--keep"],
        cwd=ROOT,
        env=os.environ | variables,
        stdout=subprocess.PIPE,
        text=True,
    )


async def test_a_demo_that_is_interrupted_tells_what_it_leaves_running(listener: str, tmp_path: Path) -> None:
    with demo(tmp_path, listener, "echo here; exec sleep 60") as running:
        assert running.stdout is not None
        await until(lambda: any(log.stat().st_size for log in (tmp_path / "home").glob("demo/*/worker.log")))
        running.send_signal(signal.SIGINT)
        said = running.stdout.read()
    assert running.returncode == 130
    (worker,) = re.findall(r"^ +kill (\d+)$", said, re.MULTILINE)
    os.kill(int(worker), signal.SIGTERM)
    (prefix,) = set(re.findall(r"demo-[0-9a-f]{8}-", said))
    assert f"gearshift status --topic-prefix {prefix}" in said
    assert f"--bootstrap-server {listener} --delete --topic '{prefix}.*'" in said


def test_a_demo_that_failed_tells_it_too(listener: str, tmp_path: Path) -> None:
    with demo(tmp_path, listener, "exit 3") as running:
        assert running.stdout is not None
        said = running.stdout.read()
    assert running.returncode == 1
    assert "the worker ended with 3" in said
    assert "--delete --topic 'demo-" in said
    assert "kill" not in said


class Container:
    bootstrap = "127.0.0.1:1"
    ended_by = "docker rm --force --volumes sweet_name"


def test_a_container_is_told_by_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    Left(Container(), "").tell()  # type: ignore[arg-type]
    said = capsys.readouterr().out
    assert "the broker goes on" in said
    assert said.rstrip().endswith("docker rm --force --volumes sweet_name")
