"""The environment of ``gaudi``: that of vLLM 0.26 with what its lock lacks for vllm-gaudi, and vllm-gaudi itself."""

import hashlib
import shutil
import sys
import tempfile
from pathlib import Path

from setup import ROOT, SetupFailed, alone, call, ensure_uv, fingerprint, home, say, sync, works

LOCKS = tuple(ROOT / "deploy" / "lock" / name for name in ("cpu-vllm-0.26.txt", "gaudi-0.26.txt"))


def ensure(source: Path) -> Path:
    """The environment for the vllm-gaudi in ``source``, which stays as it is. Raises SetupFailed."""
    if not (source / "vllm_gaudi" / "__init__.py").is_file():
        raise SetupFailed(f"{source} is no checkout of vllm-gaudi")
    environment = home() / "env-gaudi"
    stamp, wanted = environment / "gearshift-stamp", state(source)
    if stamp.is_file() and stamp.read_text() == wanted:
        return environment
    with alone("gaudi"):
        make(environment, source)
        stamp.write_text(wanted)
    return environment


def make(environment: Path, source: Path) -> None:
    uv, python = ensure_uv(), environment / "bin" / "python"
    if not works(python):
        call(uv, "venv", "--quiet", "--clear", "--python", sys.executable, environment)
    say(
        f"installing vllm-gaudi from {source}, and what {', '.join(str(lock.relative_to(ROOT)) for lock in LOCKS)} name"
    )
    with tempfile.TemporaryDirectory() as folder:
        everything = Path(folder) / "lock.txt"
        everything.write_text("\n".join(lock.read_text() for lock in LOCKS))
        sync(uv, python, everything)
        call(uv, "pip", "install", "--quiet", "--python", python, "--no-deps", "--no-build-isolation", "-e", ROOT)
        # Building writes into the source.
        copy = Path(folder) / "vllm-gaudi"
        shutil.copytree(source, copy, ignore=shutil.ignore_patterns(".git", "tests", "docs"))
        call(uv, "pip", "install", "--quiet", "--python", python, "--no-deps", "--reinstall", copy)


def state(source: Path) -> str:
    """Changes when the locks, this checkout's declaration or vllm-gaudi's code changes."""
    digest = hashlib.sha256(fingerprint(LOCKS[0]).encode() + LOCKS[1].read_bytes())
    for path in sorted(source.glob("vllm_gaudi/**/*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


if __name__ == "__main__":
    try:
        sys.stdout.write(f"{ensure(Path(sys.argv[1]))}\n")
    except SetupFailed as failure:
        say(str(failure))
        sys.exit(1)
