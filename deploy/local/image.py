"""The image, built and shown at work on this machine without a daemon: ``deploy/local/image [--json FILE]``.

Its base is the real one where a registry answers, else one of Debian's packages. Then it serves as an orchestrator has
it: as its own user, on a root that can't be written, without capabilities. A worker answers a request that comes over a
broker, and stops when it is told; ``gearshift serve`` gets healthy by the image's own check. Exit code 0 means that all
of it was seen; 2 that this machine lacks something; 1 anything else. All that was made goes, but with ``--keep``.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import shutil
import sys
import tempfile
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from deploy.local.apache_kafka import NoBroker
from deploy.local.broker import find_broker, free_port
from deploy.local.containers import Confined, Containers, Failed, missing
from deploy.local.models import SPEAKERS, ensure_models, write_models_file
from deploy.local.setup import ROOT, home, say
from schemas.results import Outcome
from service.client import Client

NAME = "localhost/gearshift:cpu"
USER = 10001
GRACE_S = 90.0
"""What compose and the chart give a worker to stop in; its own bound is 60."""
READY_WITHIN_S = 900.0
AT_MOST_BYTES = 3_500_000_000
ASK_EVERY_S = 0.5
COMPILED = "import torch; assert torch.compile(lambda x: x * 2 + 1)(torch.ones(64)).sum() == 192"
"""What needs a compiler, Python's headers, and a place from which code may be loaded."""
LLAMA = next(speaker for speaker in SPEAKERS if speaker.alias == "llama")
ANSWERS = {LLAMA.answer(*first).strip() for first in itertools.product(range(5), repeat=3)}
"""All that the model that is asked can say."""
ANSWER_WITHIN_S = 120.0
QUESTION = {
    "model": LLAMA.alias,
    "messages": [{"role": "user", "content": "Where are you?"}],
    "temperature": 0.0,
    "max_tokens": 1000,
}
BUILT_WITH = ("opt/tools", "wheel", "root/.cache", "tmp", "var/lib/apt/lists")
"""Folders in which a layer of ours must have no files; there may be no package either, wherever that is."""
LEFT_OVER = ("*gearshift*.egg-info", "*.deb", "*.whl")
SOURCES = ("deploy", "schemas", "service", "gearshift", "build")
"""Folders of a checkout, which are in the image as an installed package only."""


@dataclass
class Served:
    """One container from its start to its end. Times in seconds, from the command that starts it but for ``stop_s``."""

    ready_s: float = 0.0
    stop_s: float = 0.0
    exit_code: int = -1
    confined: Confined = field(default_factory=Confined)


@dataclass
class Seen:
    """What was seen, as ``--json`` writes it."""

    base: str = ""
    base_s: float = 0.0
    build_s: float = 0.0
    size_bytes: int = 0
    left_behind: list[str] = field(default_factory=list)
    worker: Served = field(default_factory=Served)
    first_answer_s: float = 0.0
    answer: str = ""
    serve: Served = field(default_factory=Served)
    healthy_before_it_serves: bool = False
    healthy_s: float = 0.0
    served_answer: str = ""
    compiles: bool = False
    warnings: list[str] = field(default_factory=list)


def failures(seen: Seen) -> list[str]:
    """What is not as it should be; empty: all of it is."""
    found = []
    if seen.size_bytes > AT_MOST_BYTES:
        found.append(f"the image has {seen.size_bytes} bytes, more than {AT_MOST_BYTES}")
    if seen.left_behind:
        found.append(f"its layers have what only builds: {', '.join(seen.left_behind[:5])}")
    for way, answer in (("the bus", seen.answer), ("HTTP", seen.served_answer)):
        if answer.strip() not in ANSWERS:
            found.append(f"the answer over {way} is not one of the model: {answer[:80]!r}")
    if seen.healthy_before_it_serves:
        found.append("the health check passes while nothing listens")
    if not seen.compiles:
        found.append("what torch compiles for the CPU does not run")
    if seen.warnings:
        found.append(f"vLLM misses a library: {seen.warnings[0]}")
    for name, served in (("worker", seen.worker), ("serve", seen.serve)):
        if served.confined != Confined(USER, 0, no_new_privileges=True, root_read_only=True):
            found.append(f"{name} is not confined: {served.confined}")
        if served.exit_code != 0:
            found.append(f"{name} ended with {served.exit_code}")
        if served.stop_s >= GRACE_S:
            found.append(f"{name} took {served.stop_s:.1f} s to stop")
    return found


def left_behind(layers: list[Path]) -> list[str]:
    """Files of the image's own layers that are there for building only, or are the checkout's source."""
    found = []
    for layer in layers:
        folders = [layer / name for name in BUILT_WITH]
        folders += [layer / place / name for name in SOURCES for place in ("", "opt/gearshift", "home/gearshift")]
        found += [path.relative_to(layer) for folder in folders for path in folder.rglob("*") if path.is_file()]
        found += [path.relative_to(layer) for kind in LEFT_OVER for path in layer.rglob(kind)]
    return sorted({str(path) for path in found})


class Shown:
    """The image at work. What it starts is ended."""

    def __init__(self, containers: Containers, models: Path) -> None:
        self._containers = containers
        self._models = models

    @contextlib.contextmanager
    def container(self, served: Served, variables: dict[str, str], *command: str) -> Iterator[str]:
        """A container of the image, by its name, which is stopped as by an orchestrator; ``served`` gets how it was."""
        name = f"gearshift-{uuid.uuid4().hex[:8]}"
        options = ["--network=host", "--read-only", "--cap-drop=ALL", "--security-opt=no-new-privileges"]
        # The image's check is called here: podman has systemd do it, which is not everywhere.
        options += ["--health-interval=disable", "--shm-size=1g", f"--volume={self._models}:/models:ro"]
        options += ["--tmpfs=/tmp:exec,size=4g", "--tmpfs=/home/gearshift:exec,size=4g,mode=1777"]
        options += [f"--env={key}={value}" for key, value in variables.items()]
        try:
            self._containers.start(name, NAME, options, command)
            served.confined = Confined.of(self._containers.process(name))
            yield name
            began = time.monotonic()
            self._containers.run("podman", "stop", "--time", int(GRACE_S), name)
            served.stop_s = time.monotonic() - began
            served.exit_code = self._containers.exit_code(name)
        except BaseException:
            say(f"the container's log ends:\n{self._containers.logs(name)[-4000:]}")
            raise
        finally:
            self._containers.remove(name)

    def until(self, name: str, what: str, true: Callable[[], bool]) -> None:
        """Ask again and again. Raises Failed where the container ends, or it takes too long."""
        began = time.monotonic()
        while not true():
            if not self._containers.process(name):
                raise Failed(f"the container ended before it was {what}")
            if time.monotonic() - began > READY_WITHIN_S:
                raise Failed(f"the container was not {what} after {READY_WITHIN_S:.0f} s")
            time.sleep(ASK_EVERY_S)

    def worker(self, bootstrap: str, seen: Seen) -> None:
        """A worker gets ready, answers a request that comes over the bus, and stops."""
        port, prefix, began = free_port(), f"image-{uuid.uuid4().hex[:8]}-", time.monotonic()
        variables = {
            "KAFKA_BOOTSTRAP_SERVERS": bootstrap,
            "GEARSHIFT_TOPIC_PREFIX": prefix,
            "GEARSHIFT_HTTP_PORT": str(port),
            "GEARSHIFT_SHUTDOWN_TIMEOUT_S": "60",
            "HF_HUB_OFFLINE": "1",
        }
        with self.container(seen.worker, variables) as name:
            self.until(name, "ready", lambda: answers(f"http://127.0.0.1:{port}/ready"))
            seen.worker.ready_s = time.monotonic() - began
            seen.answer = asyncio.run(ask(bootstrap, prefix))
            seen.first_answer_s = time.monotonic() - began
            said = self._containers.logs(name)
            seen.warnings = [line.strip() for line in said.splitlines() if "not found in LD_PRELOAD" in line]

    def serve(self, seen: Seen) -> None:
        """``gearshift serve`` gets healthy as the image's own check says, which says no before, and answers."""
        began = time.monotonic()
        # Where others reach it, it wants keys.
        port = str(free_port())
        variables = {"GEARSHIFT_HTTP_HOST": "127.0.0.1", "GEARSHIFT_HTTP_PORT": port, "HF_HUB_OFFLINE": "1"}
        with self.container(seen.serve, variables, "serve", "--models", "/models/models.yaml") as name:
            healthy = ("podman", "healthcheck", "run", name)
            seen.healthy_before_it_serves = self._containers.succeeds(*healthy)
            self.until(name, "healthy", lambda: self._containers.succeeds(*healthy))
            seen.healthy_s = time.monotonic() - began
            self.until(name, "ready", lambda: answers(f"http://127.0.0.1:{port}/ready"))
            seen.serve.ready_s = time.monotonic() - began
            seen.served_answer = asked(f"http://127.0.0.1:{port}/v1/chat/completions")
            seen.compiles = self._containers.succeeds("podman", "exec", name, "python", "-c", COMPILED)


def answers(address: str) -> bool:
    """Whether there is an answer of status 200."""
    try:
        with urllib.request.urlopen(address, timeout=5) as answer:  # noqa: S310 - of this machine
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def asked(address: str) -> str:
    """What the model llama answers over HTTP. Raises Failed."""
    request = urllib.request.Request(  # noqa: S310 - of this machine
        address, json.dumps(QUESTION).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=ANSWER_WITHIN_S) as answer:  # noqa: S310
            return text_of(json.load(answer))
    except OSError as error:
        raise Failed(f"the request over HTTP was not answered: {error}") from None


async def ask(bootstrap: str, prefix: str) -> str:
    """What it answers over the bus. Raises Failed."""
    async with Client(bootstrap, topic_prefix=prefix, timeout_s=ANSWER_WITHIN_S) as client:
        result = await client.result(await client.submit(QUESTION))
    if result.outcome is not Outcome.COMPLETED or result.body is None:
        raise Failed(f"the request was not answered: {result.outcome.value}: {result.error}")
    return text_of(result.body)


def text_of(body: dict[str, Any]) -> str:
    return str(body["choices"][0]["message"]["content"])


def copied_models(folder: Path) -> Path:
    """Models and their file as a container sees them in /models: its user can read them, whoever made them."""
    models = ensure_models(home() / "models")
    for alias in ("llama", "qwen"):
        shutil.copytree(models[alias], folder / alias)
    write_models_file(folder / "models.yaml", {a: Path("/models") / a for a in ("llama", "qwen")}, default="llama")
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    return folder


def show(containers: Containers, arguments: dict[str, str], seen: Seen) -> None:
    """Base, build, worker, serve; what is seen is put into ``seen`` as it comes. Raises Failed, NoBroker."""
    began = time.monotonic()
    say("the base image")
    seen.base = containers.base()
    seen.base_s = time.monotonic() - began
    say(f"of the {seen.base}, after {seen.base_s:.0f} s; the image")
    began = time.monotonic()
    containers.build(ROOT, NAME, {"DEVICE": "cpu", **arguments})
    seen.build_s = time.monotonic() - began
    seen.size_bytes = containers.size_bytes(NAME)
    say(f"built after {seen.build_s:.0f} s, {seen.size_bytes / 1e9:.2f} GB; a broker")
    seen.left_behind = left_behind(containers.own_layers(NAME))
    with tempfile.TemporaryDirectory() as folder, find_broker(say=say) as broker:
        say("models, which are made once")
        shown = Shown(containers, copied_models(Path(folder)))
        say("at work")
        shown.worker(broker.bootstrap, seen)
        say(f"ready after {seen.worker.ready_s:.0f} s; gearshift serve")
        shown.serve(seen)


def report(seen: Seen) -> None:
    worker, serve, size = seen.worker, seen.serve, f"{seen.size_bytes / 1e9:.2f} GB"
    held = f"user {worker.confined.user}, capabilities {worker.confined.capabilities:#x}"
    root = "read-only" if worker.confined.root_read_only else "WRITABLE"
    times = f"ready after {worker.ready_s:.1f} s, first answer after {seen.first_answer_s:.1f} s"
    print(f"base of the {seen.base}: {seen.base_s:.0f} s; build: {seen.build_s:.0f} s; size: {size}")
    print(f"worker: {times}, stopped in {worker.stop_s:.1f} s with {worker.exit_code}")
    times = f"healthy after {seen.healthy_s:.1f} s, ready after {serve.ready_s:.1f} s"
    print(f"serve: {times}, stopped in {serve.stop_s:.1f} s with {serve.exit_code}")
    print(f"{held}, root {root}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="image", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE too")
    parser.add_argument("--folder", type=Path, default=home() / "image", help="for images and containers: some 25 GB")
    parser.add_argument("--keep", action="store_true", help="leave the image and its layers in --folder")
    parser.add_argument("--build-arg", action="append", default=[], metavar="NAME=VALUE", help="of the Dockerfile")
    chosen = parser.parse_args()
    if lack := missing():
        print(f"image: {lack}", file=sys.stderr)
        return 2
    seen, containers, reason, code = Seen(), Containers(chosen.folder.absolute() / "containers"), "", 0
    try:
        show(containers, dict(each.split("=", 1) for each in chosen.build_arg), seen)
    except NoBroker as error:
        reason, code = str(error), 2
    except Failed as error:
        reason, code = str(error), 1
    finally:
        if not chosen.keep:
            containers.clear()
    found = [reason] if reason else failures(seen)
    report(seen)
    if chosen.json:
        chosen.json.write_text(json.dumps({**asdict(seen), "failures": found}, indent=2) + "\n")
    for failure in found:
        print(f"image: {failure}", file=sys.stderr)
    return code or int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
