"""Several Kafka brokers on this machine that share one cluster: equals, each of them broker and controller."""

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

from deploy.local.broker import Closing, LocalBroker, Node, free_port, new_cluster_id

HEAP_MB = 320
"""Java's heap per broker: three of them fit where one with its usual heap and a few workers do."""
_SESSION_MS = "9000"
"""How long the others wait for one that is silent before they lead its partitions."""


class LocalCluster(Closing):
    """``size`` brokers. Of three or more, three have a replica of every topic, and two must have what is acknowledged.

    ``brokers`` may be stopped, killed and started one by one; ``bootstrap`` names them all. Data goes with ``close``.
    """

    def __init__(
        self, size: int = 3, settings: Mapping[str, str] | None = None, *, say: Callable[[str], None] = print
    ) -> None:
        cluster, numbers = new_cluster_id(), range(1, size + 1)
        voters = {number: free_port() for number in numbers}
        given = {"broker.session.timeout.ms": _SESSION_MS, **replication(size), **(settings or {})}
        nodes = [Node(number, cluster, free_port(), voters) for number in numbers]
        self.brokers = tuple(LocalBroker(given, node=node, heap_mb=HEAP_MB, say=say) for node in nodes)
        self.bootstrap = ",".join(broker.bootstrap for broker in self.brokers)

    def start(self) -> None:
        """Start them together: none is ready before most are. Raises NoBroker."""
        try:
            with ThreadPoolExecutor(len(self.brokers)) as starting:
                list(starting.map(LocalBroker.start, self.brokers))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End them all and remove their data. Nobody says goodbye: the last ones would wait for a quorum."""
        for broker in self.brokers:
            broker.kill()
        for broker in self.brokers:
            broker.close()


def replication(size: int) -> dict[str, str]:
    """The properties that replicate all topics, Kafka's own too, as far as there are brokers for it."""
    replicas, in_sync = str(min(size, 3)), str(max(1, min(size, 3) - 1))
    return {
        "default.replication.factor": replicas,
        "min.insync.replicas": in_sync,
        "offsets.topic.replication.factor": replicas,
        "transaction.state.log.replication.factor": replicas,
        "transaction.state.log.min.isr": in_sync,
        "share.coordinator.state.topic.replication.factor": replicas,
        "share.coordinator.state.topic.min.isr": in_sync,
    }
