"""Set-up: everything that the project needs, in one ignored folder of the checkout. Standard library only.

Run by ``run``, ``test`` and ``demo`` before they do anything; a second run finds the stamps and is done at once. What
it downloads and makes lies below ``.gearshift`` (or ``GEARSHIFT_HOME``): uv, its cache, and one environment per vLLM
version from its lock. It needs no root, no home directory and no variable of the caller's.
"""

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
VERSIONS = ("0.32", "0.26")
UV = "uv>=0.9"


class SetupFailed(Exception):
    """A step did not work; the message says which, and what it said."""


def say(text: str) -> None:
    sys.stderr.write(f"set-up: {text}\n")
    sys.stderr.flush()


def home() -> Path:
    return Path(os.environ.get("GEARSHIFT_HOME") or ROOT / ".gearshift").absolute()


def ensure(version: str) -> Path:
    """The environment for one vLLM version, made or brought up to date where needed. Raises SetupFailed."""
    lock = ROOT / "deploy" / "lock" / f"cpu-vllm-{version}.txt"
    if not lock.is_file():
        raise SetupFailed(f"there is no lock for vLLM {version}; there are: {', '.join(VERSIONS)}")
    environment = home() / f"env-{version}"
    stamp, wanted = environment / "gearshift-stamp", fingerprint(lock)
    if stamp.is_file() and stamp.read_text() == wanted:
        return environment
    with alone(version):
        if not (stamp.is_file() and stamp.read_text() == wanted):
            began = time.monotonic()
            make(environment, lock, version)
            stamp.write_text(wanted)
            say(f"ready after {time.monotonic() - began:.0f} s")
    return environment


def make(environment: Path, lock: Path, version: str) -> None:
    """Three steps: uv, the locked packages, this checkout itself."""
    uv = ensure_uv()
    python = environment / "bin" / "python"
    if not is_this_python(python):
        say(f"making an environment for Python {sys.version_info.major}.{sys.version_info.minor}")
        call(uv, "venv", "--quiet", "--clear", "--python", sys.executable, environment)
    say(f"installing what {lock.relative_to(ROOT)} names (vLLM {version}; the first time takes minutes)")
    sync(uv, python, lock)
    say("installing this checkout")
    # The lock has the build backend, so that nothing is fetched for a build.
    editable = ("--no-deps", "--no-build-isolation", "-e", ROOT)
    call(uv, "pip", "install", "--quiet", "--python", python, *editable)


def sync(uv: Path, python: Path, lock: Path) -> None:
    """Install exactly what a lock names. A package whose hash is not there, or another one, is refused.

    But for torch where ``UV_TORCH_BACKEND`` chooses an index that has builds of its own: no lock knows their hashes.
    """
    if not os.environ.get("UV_TORCH_BACKEND"):
        call(uv, "pip", "sync", "--quiet", "--require-hashes", "--python", python, lock)
        return
    with tempfile.TemporaryDirectory() as folder:
        partly = Path(folder) / lock.name
        partly.write_text(re.sub(r"(?m)^(torch==\S+)(?: \\\n +--hash=\S+)+", r"\1", lock.read_text()))
        call(uv, "pip", "sync", "--quiet", "--python", python, partly)


def ensure_uv() -> Path:
    """uv, installed by pip into an environment of its own."""
    tools = home() / "tools"
    uv = tools / "bin" / "uv"
    if works(uv):
        return uv
    say("installing uv")
    shutil.rmtree(tools, ignore_errors=True)
    try:
        call(sys.executable, "-m", "venv", tools)
    except SetupFailed as error:
        raise SetupFailed(f"{error}\nPython's venv module is missing (on Debian: the package python3-venv)") from None
    call(tools / "bin" / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", UV)
    return uv


def works(program: Path) -> bool:
    """Whether a program is there and starts: an environment does not survive the Python that it was made from."""
    return answer(program, "--version") is not None


def is_this_python(python: Path) -> bool:
    """Whether an environment's Python is the one that runs this: the caller may have named another one since."""
    return answer(python, "-I", "-c", "import sys; print(sys.version)") == sys.version


def answer(program: Path, *words: str) -> str | None:
    """What a program says; None where it is not there or fails."""
    if not program.exists():
        return None
    done = subprocess.run([program, *words], capture_output=True, text=True, check=False)
    return None if done.returncode else done.stdout.removesuffix("\n")


def call(*command: str | Path, variables: Mapping[str, str] | None = None) -> None:
    variables = {
        **os.environ,
        **(variables or {}),
        "UV_CACHE_DIR": str(home() / "cache" / "uv"),
        "UV_PYTHON_DOWNLOADS": "never",
    }
    variables.setdefault("HOME", str(home()))
    variables.setdefault("UV_SYSTEM_CERTS", "1")  # as pip does: networks with a certificate of their own work too
    variables.pop("VIRTUAL_ENV", None)
    done = subprocess.run([str(part) for part in command], env=variables, cwd=ROOT, stdout=sys.stderr, check=False)
    if done.returncode:
        raise SetupFailed(f"this failed with {done.returncode}: {' '.join(map(str, command))}")


def fingerprint(lock: Path) -> str:
    """Changes when the lock, the project's own declaration or the place of the checkout changes."""
    parts = (lock.read_bytes(), (ROOT / "pyproject.toml").read_bytes(), str(ROOT).encode(), sys.version.encode())
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


@contextlib.contextmanager
def alone(version: str) -> Iterator[None]:
    """Only one set-up at a time works in the folder; a second one waits and says so."""
    home().mkdir(parents=True, exist_ok=True)
    with (home() / ".setup.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"another set-up is at work here; waiting for it (vLLM {version})")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


if __name__ == "__main__":
    try:
        sys.stdout.write(f"{ensure(sys.argv[1])}\n")
    except SetupFailed as failure:
        say(str(failure))
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
