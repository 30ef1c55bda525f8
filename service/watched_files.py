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

    def _look(self) -> tuple[tuple[int, ...] | None, ...]:
        return tuple(_stamp(path) for path in self._paths)


def _stamp(path: Path) -> tuple[int, ...] | None:
    """None where it can't be looked at. Who may read it is a part of it: one that could not be read may be now."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino
