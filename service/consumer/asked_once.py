"""A durable call may be written several times, by doors that do not know of each other: its first record counts."""

from collections.abc import Callable, Collection

from schemas.base import Origin
from service.kafka.calls import Calls
from service.ports import Delivery


class AskedOnce:
    """Keeps deliveries of the topic of calls back until the index has come that far, and passes repeats over.

    What stands first for an id is the same for every reader of the log, so a new owner passes over what the old one
    did. ``pass_over`` finishes an origin without a result; ``wake`` ends the turn of reading under way.
    """

    def __init__(self, *, calls: Calls, pass_over: Callable[[Origin], None], wake: Callable[[], None]) -> None:
        self._calls = calls
        self._pass_over = pass_over
        self._wake = wake
        self._held: list[Delivery] = []
        calls.watch(self._look_again)

    def sift(self, deliveries: Collection[Delivery], lost: Collection[Origin]) -> tuple[Delivery, ...]:
        """What is to be run of these and of those held back before, of which ``lost`` is another worker's now."""
        held = [delivery for delivery in self._held if delivery.record.origin not in lost]
        self._held, found = [], []
        for delivery in (*held, *deliveries):
            if delivery.record.topic != self._calls.topic:
                found.append(delivery)
                continue
            origin = delivery.record.origin
            if not self._calls.has_read(origin):
                self._held.append(delivery)
            elif self._calls.index.counts(delivery.record):
                found.append(delivery)
            else:
                self._pass_over(origin)
        return tuple(found)

    def _look_again(self) -> None:
        if self._held:
            self._wake()
