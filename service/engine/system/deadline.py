"""A deadline for what runs in a process's main thread: it is interrupted there, and can put things right itself."""

import ctypes
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

_AGAIN_S = 5.0


class Overdue(BaseException):
    """Not an Exception: what retries on errors must not retry on this one."""


@contextmanager
def deadline(seconds: float | None) -> Iterator[None]:
    """Raises TimeoutError out of the block when it runs for longer than ``seconds``; None: however long it takes.

    Python code is interrupted, and the system calls that it waits in; a library's own code first returns. In another
    thread than the main one nothing can be interrupted, and nothing is raised.
    """
    if seconds is None or threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(_signal: int, _frame: FrameType | None) -> NoReturn:
        raise Overdue

    before = signal.signal(signal.SIGALRM, interrupt)
    # Again and again: the first one may come where exceptions are swallowed, in a destructor.
    remaining, interval = signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-3), _AGAIN_S)
    try:
        yield
    except Overdue:
        raise TimeoutError(f"it took longer than {seconds:.3g} s") from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        if remaining:
            signal.setitimer(signal.ITIMER_REAL, remaining, interval)


def interrupt(thread: threading.Thread) -> None:
    """Raise Overdue in the Python code of another thread; a system call or a lock that it waits in ends first."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(Overdue))
