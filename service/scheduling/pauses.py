"""Models whose requests are not started until an operator says so: paused ones, and those that sleep."""

from collections.abc import Callable, Collection


class Pauses:
    """What the operator's latest words come to; a word about all models ends what was said of single ones."""

    def __init__(self, asleep: Callable[[], Collection[str]] = tuple) -> None:
        """``asleep`` tells the models that only a wake, or a load anew, brings back, whatever is said of pauses."""
        self.asleep = asleep
        self._all = False
        self._others: set[str] = set()
        """Models for which it is the other way round."""

    def __contains__(self, alias: object) -> bool:
        return alias in self.asleep() or self.paused(alias)

    def paused(self, alias: object) -> bool:
        """Whether it was said of a model."""
        return self._all != (alias in self._others)

    def say(self, alias: str | None, *, paused: bool) -> None:
        """Of one model, or of all."""
        if alias is None:
            self._all, self._others = paused, set()
        elif paused == self._all:
            self._others.discard(alias)
        else:
            self._others.add(alias)
