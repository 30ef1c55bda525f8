"""The core's client slots: each model has one, and the free ones have clients that wait."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from service.engine.frontend.frontend import close_client

Connect = Callable[[int], Any]
"""Makes the client of a slot."""


class Slots:
    """The core's client slots: which model has which, and the clients that wait for one, new or left behind."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._taken: dict[str, int] = {}
        self._left: dict[int, Any] = {}

    @contextmanager
    def taken(self, alias: str, connect: Connect) -> Iterator[tuple[int, Any]]:
        """A slot's key for a model, the first one's 0, and the client there, the one that waits or a new one.

        After an error the client waits in the slot: the core greets only once. Raises RuntimeError where none is left.
        """
        self.require(1)
        key = next(key for key in range(self._count) if key not in self._taken.values())
        if key not in self._left:
            self._left[key] = connect(key)
        yield key, self._left[key]
        self._taken[alias] = key
        del self._left[key]

    def fill(self, connect: Connect) -> None:
        """Give each free slot a client that waits for its model.

        The core would never cease to call one that is not there.
        """
        for key in set(range(self._count)) - set(self._taken.values()) - self._left.keys():
            self._left[key] = connect(key)

    def require(self, more: int) -> None:
        """Raises RuntimeError where there are not so many slots left."""
        if len(self._taken) + more > self._count:
            raise RuntimeError(
                f"the engine was started with room for {self._count} models, has {len(self._taken)}, and can't take "
                f"{more} more; remove some, or start it anew"
            )

    def leave(self, alias: str, client: Any) -> None:
        """A model is gone; its client waits for the next one in its slot."""
        self._left[self._taken.pop(alias)] = client

    def close(self) -> None:
        """Close the clients that no model has."""
        for client in self._left.values():
            close_client(client)
        self._left.clear()
