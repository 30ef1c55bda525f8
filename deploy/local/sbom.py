"""What a release is made of, and where it comes from: ``python -m deploy.local.sbom FOLDER`` writes three files there.

The wheel of this checkout's commit, a bill of materials of the environment beside it (CycloneDX: what is installed,
with versions, licences and who needs whom), and a statement that binds both to the commit and to the lock (in-toto,
SLSA's provenance). The wheel is the same whenever it is built. Standard library only; the bill's generator comes from
a lock of its own.
"""

import argparse
import hashlib
import json
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from deploy.local.setup import ROOT, SetupFailed, call, ensure_uv, say

LOCKS = ROOT / "deploy" / "lock"
BUILD_TYPE = "urn:gearshift:wheel:1"


def write(folder: Path, python: Path, lock: Path, *, validate: bool = True) -> None:
    """Write the files for the commit that is checked out. Raises SetupFailed.

    ``validate``: the bill is checked against CycloneDX's schema, which takes ten times as long as all the rest.
    """
    if changed := git("status", "--porcelain"):
        first = changed.splitlines()[0].strip()
        raise SetupFailed(f"the checkout is no commit ({first}): commit first, so that others can make the same")
    folder.mkdir(parents=True, exist_ok=True)
    if found := next(folder.iterdir(), None):
        raise SetupFailed(f"{folder} has {found.name} already: name an empty folder")
    began = datetime.now(UTC)
    uv, commit = ensure_uv(), git("rev-parse", "HEAD")
    variables = {"SOURCE_DATE_EPOCH": git("show", "--no-patch", "--format=%ct", commit)}
    build = (
        "build",
        "--quiet",
        "--wheel",
        "--no-create-gitignore",
        "--no-build-isolation",
        "--python",
        python,
        "--out-dir",
        folder,
        ROOT,
    )
    call(uv, *build, variables=variables)
    bill = folder / "gearshift.cdx.json"
    generator = ("run", "--quiet", "--no-project", "--with-requirements", LOCKS / "sbom" / "requirements.txt")
    described = ("environment", "--pyproject", ROOT / "pyproject.toml", "--output-reproducible", "--output-file", bill)
    checked = "--validate" if validate else "--no-validate"
    call(uv, *generator, "cyclonedx-py", *described, checked, python, variables=variables)
    subjects = [*sorted(folder.glob("gearshift-*.whl")), bill]
    stated = statement(subjects, commit, lock, began)
    (folder / "gearshift.provenance.json").write_text(json.dumps(stated, indent=2) + "\n")
    for subject in subjects:
        say(f"{subject.name}: sha256 {digest(subject)}")


def statement(subjects: list[Path], commit: str, lock: Path, began: datetime) -> dict[str, Any]:
    """An in-toto statement with SLSA's provenance. It is not signed: whoever publishes the files signs this one."""
    materials = [
        {"uri": "pkg:generic/gearshift", "digest": {"gitCommit": commit}},
        *({"uri": str(path.relative_to(ROOT)), "digest": {"sha256": digest(path)}} for path in (lock, *BUILDERS)),
    ]
    return {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [{"name": path.name, "digest": {"sha256": digest(path)}} for path in subjects],
        "predicateType": "https://slsa.dev/provenance/v1",
        "predicate": {
            "buildDefinition": {
                "buildType": BUILD_TYPE,
                "externalParameters": {"commit": commit, "lock": str(lock.relative_to(ROOT))},
                "resolvedDependencies": materials,
            },
            "runDetails": {
                "builder": {"id": "urn:gearshift:deploy.local.sbom"},
                "metadata": {"startedOn": began.isoformat(), "finishedOn": datetime.now(UTC).isoformat()},
            },
        },
    }


BUILDERS = (LOCKS / "sbom" / "requirements.txt", ROOT / "Dockerfile")


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def git(*arguments: str) -> str:
    done = subprocess.run(["git", "-C", ROOT, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SetupFailed(f"git {arguments[0]} failed: {done.stderr.strip()}")
    return done.stdout.strip()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m deploy.local.sbom", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", type=Path, default=Path(sys.executable), help="whose packages the bill names")
    parser.add_argument("--lock", type=Path, default=LOCKS / "cpu-vllm-0.32.txt", help="what they were installed from")
    parser.add_argument("--no-validate", action="store_true", help="do not check the bill against CycloneDX's schema")
    chosen = parser.parse_args()
    try:
        write(chosen.folder.absolute(), chosen.python, chosen.lock.absolute(), validate=not chosen.no_validate)
    except SetupFailed as failure:
        say(str(failure))
        sys.exit(1)
