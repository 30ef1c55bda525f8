"""Imported by the fork server: what the processes of an engine need.

None of it may start a thread or open a device. What is noted here is for ``fork_server.Report``.
"""

import gc
import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing import util
from typing import Any

from service.engine.system.environment import environment_of
from service.engine.system.garbage import importing
from service.engine.system.threads import further_threads

_BLAS_THREADS = "OPENBLAS_NUM_THREADS"
OURS = ("service.engine.processes.plugin", "service.engine.core.routing", "service.engine.worker.calls")
before = dict(os.environ)
read: set[str] = set()
"""The environment variables that were asked for."""
_offered: set[Any] = set()
"""Those that somebody looks through and has not read yet."""
written: dict[str, str | None] = {}
"""What the imports themselves wrote to the environment (None: took out of it), as they do in every process."""
missing: str | None = None
"""Why something could not be imported."""


class _Noting(type(os.environ)):  # type: ignore[misc]  # os._Environ
    """The environment, with a note of each variable that somebody asks for by its name, and not as one of all."""

    def __iter__(self) -> Iterator[str]:
        for name in super().__iter__():
            _offered.add(name)
            yield name

    def __getitem__(self, name: Any) -> Any:
        self._note(name)
        return super().__getitem__(name)

    def __contains__(self, name: object) -> bool:
        self._note(name)
        return super().__contains__(name)

    def get(self, name: Any, default: Any = None) -> Any:
        return self[name] if name in self else default  # noqa: SIM401 - this is it

    def _note(self, name: object) -> None:
        if name in _offered:
            _offered.discard(name)
        elif isinstance(name, str):
            read.add(name)


def _import_all() -> None:
    """vLLM's core and the platform's worker, with the models' common layers."""
    from service.engine.versions import vllm_core
    from service.platforms import current

    if not current().imports_only:
        raise ImportError("the platform's imports are more than that")
    began = dict(os.environ)
    for name in (*OURS, *vllm_core.CORE_MODULES, *current().worker_modules):
        importlib.import_module(name)
    ended = dict(os.environ)
    written.update({name: ended.get(name) for name in began | ended if began.get(name) != ended.get(name)})
    current().imported()


_plain = type(os.environ)
os.environ.__class__ = _Noting
try:
    # one thread, or numpy's import starts more
    with environment_of({_BLAS_THREADS: os.environ.get(_BLAS_THREADS, "1")}), importing():
        _import_all()
except Exception as error:
    missing = repr(error)
finally:
    os.environ.__class__ = _plain

after = dict(os.environ)
cpus = frozenset(os.sched_getaffinity(0))
threads = further_threads()
_torch = sys.modules.get("torch")
device_open = bool(_torch is not None and _torch.cuda.is_initialized())
if _torch is not None and hasattr(_torch, "xpu"):
    device_open = device_open or bool(_torch.xpu.is_initialized())
with suppress(ImportError):
    import setproctitle

    setproctitle.getproctitle()  # it looks for the memory of the title, which a change of the environment moves
util._flush_std_streams()  # type: ignore[attr-defined]  # or each child writes what is still in them
gc.collect()
gc.freeze()  # children share these pages for as long as no search for garbage writes to them
