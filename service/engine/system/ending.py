"""How a process of the engine ends: with its parent, and without a last search for garbage."""

import gc
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


def leave_heap() -> None:
    """Let nothing search this process's heap for garbage any more: it ends, and the system takes the heap back at once.

    vLLM thaws and collects it several times over as it shuts down. With the objects of some models that takes
    seconds, in which the core loses patience with its workers and kills them, and their shared memory is left behind.
    """
    gc.freeze()
    for name in ("unfreeze", "collect"):
        setattr(gc, name, lambda *_: 0)
