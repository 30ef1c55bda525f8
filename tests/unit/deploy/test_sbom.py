"""What a release is made of and where it comes from, written for the commit of this checkout."""

import hashlib
import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from deploy.local.setup import ROOT, home


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clone, so that what is being worked on here is no change of it."""
    folder = tmp_path_factory.mktemp("sbom") / "checkout"
    subprocess.run(["git", "clone", "--quiet", ROOT, folder], check=True)
    return folder


def written(checkout: Path, folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "GEARSHIFT_HOME": str(home()), "PYTHONPATH": str(checkout)}
    command = [sys.executable, "-m", "deploy.local.sbom", str(folder), *options]
    return subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def files(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    done = written(checkout, folder, "--no-validate")
    assert done.returncode == 0, done.stderr
    return folder


def test_the_bill_names_what_is_installed(files: Path) -> None:
    bill: dict[str, Any] = json.loads((files / "gearshift.cdx.json").read_text())
    assert bill["bomFormat"] == "CycloneDX"
    assert bill["metadata"]["component"]["name"] == "gearshift"
    versions = {component["name"]: component["version"] for component in bill["components"]}
    for name in ("aiokafka", "pydantic", "torch"):
        assert versions[name] == importlib.metadata.version(name)
    assert all(component["purl"].startswith("pkg:pypi/") for component in bill["components"] if "purl" in component)


def test_the_statement_binds_the_files_to_the_commit_and_the_lock(checkout: Path, files: Path) -> None:
    statement: dict[str, Any] = json.loads((files / "gearshift.provenance.json").read_text())
    subjects = {subject["name"]: subject["digest"]["sha256"] for subject in statement["subject"]}
    assert subjects == {path.name: digest(path) for path in files.iterdir() if path.name != "gearshift.provenance.json"}
    assert any(name.endswith(".whl") for name in subjects)
    commit = subprocess.run(["git", "-C", checkout, "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    materials = statement["predicate"]["buildDefinition"]["resolvedDependencies"]
    assert {"gitCommit": commit.stdout.strip()} in [material["digest"] for material in materials]
    lock = ROOT / "deploy" / "lock" / "cpu-vllm-0.32.txt"
    assert {"uri": "deploy/lock/cpu-vllm-0.32.txt", "digest": {"sha256": digest(lock)}} in materials


@pytest.mark.long
def test_whoever_builds_the_commit_again_gets_the_same(checkout: Path, files: Path, tmp_path: Path) -> None:
    """And the bill is as CycloneDX wants it, which is not looked at by default: it takes long."""
    assert written(checkout, tmp_path).returncode == 0
    names = [path.name for path in files.iterdir() if path.name != "gearshift.provenance.json"]
    assert {name: digest(tmp_path / name) for name in names} == {name: digest(files / name) for name in names}


def test_files_of_another_commit_are_not_taken_for_this_ones(checkout: Path, files: Path) -> None:
    done = written(checkout, files)
    assert done.returncode == 1
    assert "name an empty folder" in done.stderr


def test_a_checkout_that_is_no_commit_is_refused(checkout: Path, files: Path, tmp_path: Path) -> None:
    (checkout / "more.py").touch()
    try:
        done = written(checkout, tmp_path)
    finally:
        (checkout / "more.py").unlink()
    assert done.returncode == 1
    assert "more.py" in done.stderr
    assert not list(tmp_path.iterdir())
