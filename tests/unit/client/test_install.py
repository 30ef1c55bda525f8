"""What `pip install gearshift` brings, without any extra, is enough for the client and the command."""

import importlib.metadata
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[3]
HEAVY = ("vllm", "torch", "transformers", "numpy")


def distributions(requirement: str, extras: frozenset[str] = frozenset(), seen: set[str] | None = None) -> set[str]:
    """The names of everything that a requirement needs, itself included, by what is installed here."""
    seen = set() if seen is None else seen
    for extra in extras or {""}:
        for text in importlib.metadata.requires(requirement) or ():
            needed = Requirement(text)
            if needed.marker is not None and not needed.marker.evaluate({"extra": extra}):
                continue
            name = canonicalize_name(needed.name)
            if name not in seen:
                seen.add(name)
                distributions(name, frozenset(needed.extras), seen)
    return seen


def files(name: str) -> Iterator[tuple[Path, Path]]:
    """A distribution's files: their place in it, and where they are."""
    distribution = importlib.metadata.distribution(name)
    for file in distribution.files or ():
        if ".." not in file.parts and "__pycache__" not in file.parts:
            yield Path(file), Path(str(distribution.locate_file(file)))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the declared dependencies of gearshift, and theirs, and nothing else."""
    folder = tmp_path_factory.mktemp("site")
    for name in ("gearshift", *sorted(distributions("gearshift"))):
        for place, found in files(name):
            link = folder / place
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(found)
    return folder


def run(site: Path, program: str) -> subprocess.CompletedProcess[str]:
    """Run a program with that folder and this checkout to import from."""
    paths = f"import sys; sys.path[:0] = [{str(site)!r}, {str(ROOT)!r}]\n"
    compiled = f"pycache_prefix={site}.compiled"  # what one has compiled the next one finds
    command = [sys.executable, "-I", "-S", "-X", compiled, "-c", paths + program]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def gearshift(site: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return run(site, f"from service.cli import main; sys.argv = {['gearshift', *words]}\nmain()")


def test_the_client_imports_neither_vllm_nor_torch(site: Path) -> None:
    done = run(
        site,
        "import importlib.util, json, service.client\n"
        f"found = {{name: importlib.util.find_spec(name) is not None for name in {HEAVY}}}\n"
        "print(json.dumps({'there': found, 'names': [hasattr(service.client, n) for n in service.client.__all__]}))",
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["there"] == dict.fromkeys(HEAVY, False)
    assert all(answer["names"])


@pytest.mark.parametrize("words", [[], ["batch", "run"], ["worker"]])
def test_the_command_explains_itself(site: Path, words: list[str]) -> None:
    done = gearshift(site, *words, "--help")
    assert done.returncode == 0, done.stderr
    assert "Usage: gearshift" in done.stdout


def test_a_worker_without_an_engine_says_which_extra_is_missing(site: Path, tmp_path: Path) -> None:
    models = tmp_path / "models.yaml"
    models.write_text("models: {a: {model: /nowhere}}")
    done = gearshift(site, "config", "check", "--models", str(models))
    assert done.returncode == 2
    assert "install gearshift with one of the extras cpu, cuda, hpu" in done.stderr
