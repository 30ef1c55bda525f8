"""How long tests wait; and what each asyncio task waits for when one runs out of time, which no traceback has."""

import asyncio
from collections.abc import Iterator
from typing import Any

PATIENCE_S = 240.0
"""How long a test waits for what has to come, in seconds: on a machine that is shared, that may be long."""
LOOKS = 10
"""So often a request is asked that may have ended before it is met: a core goes on while this process stands still."""

_TASKS = ("_all_tasks", "_scheduled_tasks", "_eager_tasks")
"""Where Python has them: the first before 3.12, the others since."""
_NEXT = ("cr_await", "ag_await", "gi_yieldfrom")
_FRAME = ("cr_frame", "ag_frame", "gi_frame")


def told() -> str:
    """A line for each task that has not ended, of whatever loop: from its own coroutine down to what it awaits."""
    found = [task for name in _TASKS for task in list(getattr(asyncio.tasks, name, ()))]
    waiting = [task for task in found if not task.done()]
    return "\n".join(f"{task.get_name()}: {' > '.join(_chain(task.get_coro()))}" for task in waiting)


def _chain(awaited: Any) -> Iterator[str]:
    while awaited is not None:
        frame = _first(awaited, _FRAME)
        if frame is None:
            yield repr(awaited)[:100]
            return
        yield f"{frame.f_code.co_qualname} ({frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno})"
        awaited = _first(awaited, _NEXT)


def _first(found: Any, names: tuple[str, ...]) -> Any:
    return next((value for name in names if (value := getattr(found, name, None)) is not None), None)
