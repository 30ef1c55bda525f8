"""Images without a daemon: buildah builds, podman and runc run, in a folder that holds all of it and can go.

Where no registry answers, the base comes from Debian's packages, by mmdebstrap. It needs root, as a daemon would.
"""

import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

TOOLS = ("buildah", "podman", "runc", "mmdebstrap", "iptables")
BASE = "docker.io/library/python:3.11-slim-bookworm"
"""What the Dockerfile's FROM resolves to, for the CPU and for CUDA."""
DEBIAN = "bookworm"
STAND_IN = ("ca-certificates", "python3", "python3-venv", "python-is-python3", "libpython3.11-dev")
"""Debian's packages with what the real base has of Python: its headers too, which compiled code is built with."""
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
PULL_WITHIN_S = 600.0


class Failed(Exception):
    """A command did not do its work; the message has the command and the end of what it said."""


@dataclass
class Confined:
    """How the kernel holds a container's first process."""

    user: int = 0
    capabilities: int = -1
    no_new_privileges: bool = False
    root_read_only: bool = False

    @classmethod
    def of(cls, process: int) -> "Confined":
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
        status = {key: value.split() for key, _, value in (line.partition(":") for line in lines)}
        mounts = [line.split() for line in Path(f"/proc/{process}/mounts").read_text().splitlines()]
        options = next(mount[3].split(",") for mount in mounts if mount[1] == "/")
        return cls(
            user=int(status["Uid"][1]),
            capabilities=int(status["CapEff"][0], 16) | int(status["CapBnd"][0], 16),
            no_new_privileges=status["NoNewPrivs"] == ["1"],
            root_read_only="ro" in options,
        )


def missing(found: Callable[[str], str | None] = shutil.which, user: int | None = None) -> str | None:
    """What has to be done on this machine before an image can be built; None: nothing."""
    lacking = [tool for tool in TOOLS if found(tool) is None]
    if lacking:
        return f"{', '.join(lacking)} not found. On Debian: apt-get install --no-install-recommends {' '.join(TOOLS)}"
    if (os.geteuid() if user is None else user) != 0:
        return "building and running containers here needs root"
    return None


def limits() -> list[str]:
    """The limits of open files and processes, as podman has them said.

    By itself it wants more files than we may open, which not every root may set. It bounds its own processes by the
    highest process id; what it starts may have no more.
    """
    files, (soft, hard) = resource.getrlimit(resource.RLIMIT_NOFILE), resource.getrlimit(resource.RLIMIT_NPROC)
    most = int(Path("/proc/sys/kernel/pid_max").read_text())
    processes = [most if limit == resource.RLIM_INFINITY else min(limit, most) for limit in (soft, hard)]
    return [f"nofile={files[0]}:{files[1]}", f"nproc={processes[0]}:{processes[1]}"]


class Containers:
    """Images and containers below ``folder``; nothing of the machine's own configuration or storage is touched."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._scratch = folder / "scratch"
        self._scratch.mkdir(parents=True, exist_ok=True)
        settings, storage = folder / "containers.conf", folder / "storage.conf"
        # crun refuses some cgroups, systemd and its journal are not everywhere.
        settings.write_text(
            '[engine]\ncgroup_manager = "cgroupfs"\nruntime = "runc"\nevents_logger = "file"\n'
            f'[containers]\nlog_driver = "k8s-file"\ndefault_ulimits = {json.dumps(limits())}\n'
        )
        storage.write_text(
            f'[storage]\ndriver = "overlay"\ngraphroot = "{folder / "storage"}"\nrunroot = "{folder / "run"}"\n'
        )
        self._variables = {
            **os.environ,
            "CONTAINERS_CONF": str(settings),
            "CONTAINERS_STORAGE_CONF": str(storage),
            "TMPDIR": str(self._scratch),
        }
        self._variables.pop("LD_PRELOAD", None)

    def run(self, *command: object, within_s: float | None = None) -> str:
        """What a command says. Raises Failed."""
        words = [str(word) for word in command]
        try:
            done = subprocess.run(
                words, env=self._variables, capture_output=True, text=True, check=False, timeout=within_s
            )
        except subprocess.TimeoutExpired:
            raise Failed(f"{' '.join(words[:3])}: no end after {within_s:.0f} s") from None
        if done.returncode:
            raise Failed(f"{' '.join(words)} ended with {done.returncode}:\n{done.stderr[-3000:]}")
        return done.stdout.strip()

    def succeeds(self, *command: object) -> bool:
        try:
            self.run(*command)
        except Failed:
            return False
        return True

    def base(self) -> str:
        """Have the base image; where it is from: ``registry`` or ``packages``. Raises Failed."""
        if self.succeeds("buildah", "inspect", "--type", "image", BASE):
            return (
                self.run("buildah", "inspect", "--type", "image", "--format", "{{.OCIv1.Author}}", BASE) or "registry"
            )
        try:
            self.run("buildah", "pull", BASE, within_s=PULL_WITHIN_S)
        except Failed:
            self._stand_in()
            return "packages"
        return "registry"

    def _stand_in(self) -> None:
        archive = self.folder / "base.tar"
        self.run("mmdebstrap", "--variant=minbase", f"--include={','.join(STAND_IN)}", DEBIAN, archive)
        container = self.run("buildah", "from", "scratch")
        self.run("buildah", "add", container, archive, "/")
        self.run("buildah", "config", "--author", "packages", container)
        self.run("buildah", "commit", "--quiet", "--rm", container, BASE)
        archive.unlink()

    def build(self, context: Path, name: str, arguments: Mapping[str, str]) -> None:
        """Build ``context``'s Dockerfile as ``name``; what it says goes to stderr. Raises Failed.

        This machine's certificates are seen while it builds, and are not in the image.
        """
        command = ["buildah", "bud", "--format", "docker", "--layers", "--isolation", "chroot", "--network", "host"]
        command += ["--pull=never", "--tag", name]
        given = {"SSL_CERT_FILE": str(CERTIFICATES), **arguments} if CERTIFICATES.is_file() else dict(arguments)
        for key, value in given.items():
            command += ["--build-arg", f"{key}={value}"]
        if CERTIFICATES.is_file():
            command += ["--volume", f"{CERTIFICATES}:{CERTIFICATES}:ro"]
        done = subprocess.run([*command, context], env=self._variables, stdout=sys.stderr, check=False)
        if done.returncode:
            raise Failed(f"the build ended with {done.returncode}; its reason stands above")

    def size_bytes(self, image: str) -> int:
        return int(self.run("podman", "image", "inspect", "--format", "{{.Size}}", image))

    def layers(self, image: str) -> Iterator[Path]:
        """Each layer's own files, uppermost first: what a later layer removes is in an earlier one still."""
        kept = json.loads(self.run("podman", "image", "inspect", "--format", "{{json .GraphDriver.Data}}", image))
        yield from map(Path, [kept["UpperDir"], *filter(None, kept.get("LowerDir", "").split(":"))])

    def own_layers(self, image: str) -> list[Path]:
        """The layers that an image has beyond those of the base."""
        theirs = set(self.layers(BASE))
        return [layer for layer in self.layers(image) if layer not in theirs]

    def start(self, name: str, image: str, options: Sequence[str], command: Sequence[str]) -> None:
        self.run("podman", "run", "--detach", "--name", name, *options, image, *command)

    def process(self, name: str) -> int:
        """The id, on this machine, of a container's first process; 0: it does not run."""
        return int(self.run("podman", "inspect", "--format", "{{.State.Pid}}", name))

    def exit_code(self, name: str) -> int:
        return int(self.run("podman", "wait", name))

    def logs(self, name: str) -> str:
        done = subprocess.run(
            ["podman", "logs", name],
            env=self._variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        return done.stdout

    def remove(self, name: str) -> None:
        """End a container, if there is one of that name, and remove it."""
        self.run("podman", "rm", "--force", "--time", "0", "--ignore", name)

    def clear(self) -> None:
        """Remove all of it, images too."""
        self.run("buildah", "rm", "--all")
        self.run("podman", "rm", "--all", "--force", "--time", "0")
        self.run("podman", "rmi", "--all", "--force")
        shutil.rmtree(self.folder)
