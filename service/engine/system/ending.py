"""How a process of the engine ends: with its parent, and without a last search for garbage."""

import os
import select
import signal
import threading
import time
from contextlib import suppress

_STOPPED_WITHIN_S = 10.0

forked_for: int | None = None
"""Whose process this is, where it was forked from a fork server, which is its parent to the system."""


def end_with(parent: int) -> None:
    """Stop this process when ``parent`` is gone, however it went: nothing else would. Workers end with the core.

    It is killed where it is not stopped in time: while vLLM loads a model it puts SIGTERM off, and waits minutes for
    a frontend that is gone.
    """

    def wait() -> None:
        with suppress(ProcessLookupError):  # it was gone before anybody could watch it
            select.select([os.pidfd_open(parent)], [], [])
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(_STOPPED_WITHIN_S)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait, name="gearshift-parent-watch", daemon=True).start()
