"""Files that somebody else renews while we run: keys, certificates."""

from pathlib import Path


class WatchedFiles:
    """Whether any of the files is another than it was."""

    def __init__(self, *paths: Path) -> None:
        self._paths = paths
        self._seen = self._look()

    def changed(self) -> bool:
        """Since the last call, or since this was made."""
        before, self._seen = self._seen, self._look()
        return before != self._seen

    def _look(self) -> tuple[tuple[int, int, int] | None, ...]:
        return tuple(_stamp(path) for path in self._paths)


def _stamp(path: Path) -> tuple[int, int, int] | None:
    """None where it can't be looked at."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
