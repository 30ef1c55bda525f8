"""Faults of a device, put into the workers of a running engine by what ``collective_rpc`` calls there."""

from collections.abc import Callable
from typing import Any


def broken(step: str, *, times: int, key: int | None = None) -> Callable[[Any], None]:
    """The next ``times`` times a step of the platform does not work: for the model of context ``key``, or for any."""

    def put_in(wrapper: Any) -> None:
        from service.engine.worker.calls import contexts_of
        from service.platforms import current

        platform = current()
        whole = getattr(platform, step)
        only = None if key is None else contexts_of(wrapper).by_key[key].worker
        vars(platform)["failed"] = 0

        def fail(worker: Any, *arguments: Any) -> Any:
            if only is not None and worker is not only:
                return whole(worker, *arguments)
            vars(platform)["failed"] += 1
            if platform.failed == times:
                delattr(platform, step)
            raise MemoryError(f"no memory to {step}")

        setattr(platform, step, fail)

    return put_in


def failed(_worker: Any) -> int:
    """How often the step did not work."""
    from service.platforms import current

    return int(vars(current())["failed"])


def mended(step: str) -> Callable[[Any], None]:
    """It works again."""

    def mend(_worker: Any) -> None:
        from service.platforms import current

        vars(current()).pop(step, None)

    return mend
