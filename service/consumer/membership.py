"""Being a member of the workers' consumer group: how one joins, and how one leaves."""

from aiokafka.errors import KafkaError

from service.consumer.assignor import Placement
from service.kafka.connection import close_consumer
from service.kafka.records import Consumer
from service.settings import Settings

_FETCH_WAIT_MS = 250
"""A partition that is resumed waits for the fetch under way; so fetches must not be long."""
_FETCH_BYTES = 32 << 20
_METADATA_AGE_MS = 30_000
"""Added partitions are noticed within this time."""
_UNREADABLE_KEPT = 1000
"""Until the worker takes them, to say so."""


def new_member(settings: Settings, assignor: Placement) -> Consumer:
    """A consumer that joins under its worker's id, commits nothing, and resets no position by itself."""
    worker = settings.worker
    return Consumer(
        settings.kafka,
        unreadable_kept=_UNREADABLE_KEPT,
        group_id=worker.group_id,
        group_instance_id=worker.worker_id,
        enable_auto_commit=False,
        isolation_level="read_committed",
        auto_offset_reset="none",
        partition_assignment_strategy=(assignor,),
        session_timeout_ms=round(worker.session_timeout_s * 1000),
        heartbeat_interval_ms=round(min(3.0, worker.session_timeout_s / 10) * 1000),
        rebalance_timeout_ms=round(worker.rebalance_timeout_s * 1000),
        max_poll_interval_ms=round(worker.rebalance_timeout_s * 1000),
        fetch_max_wait_ms=_FETCH_WAIT_MS,
        fetch_max_bytes=_FETCH_BYTES,
        metadata_max_age_ms=_METADATA_AGE_MS,
    )


def joins_again(consumer: Consumer, error: KafkaError) -> bool:
    """Whether an error that a poll raised is one of a group that can be joined again; then that is under way.

    A coordinator whose log has no quorum answers "unknown" to whatever it is asked, until it has one or another broker
    takes over. aiokafka makes a bare KafkaError of it, stops its heartbeats, and is to be polled on.
    """
    coordinator = consumer._coordinator
    if type(error) is not KafkaError or coordinator._coordination_task.done():
        return False
    coordinator.request_rejoin()
    return True


async def leave(consumer: Consumer) -> None:
    """Leave the group now: the partitions need not wait for the session to time out."""
    coordinator = consumer._coordinator
    if coordinator is not None:
        coordinator._group_instance_id = None  # aiokafka never lets a static member leave
    await close_consumer(consumer)
