"""Python's search for garbage in the processes of an engine: among what models have, not in all that was imported.

vLLM freezes the whole heap behind each load, so that no search goes over it while steps run, and thaws it when a model
ends. Of several models one that is dropped would be frozen among those that stay; to find it, everything had to be
thawed and searched, vLLM's own 740,000 objects too, for a second in which the active model stood still. In a process
of vLLM's engine that is spawned, or forked by our fork server, only what is there before the first model is frozen, and
stays so. In a caller's own process, whose heap is not ours, and in one that vLLM forks, it is as vLLM has it.
"""

import gc
import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager

_ENGINES = ("EngineCore", "VllmWorker")
"""How vLLM names the processes of its engine."""
_SELDOM = 1000
"""Searches of the middle generation before the oldest one is searched unasked; Python's own are ten."""
_freeze = gc.freeze
_kept = False
"""Whether only what was imported is frozen."""


@contextmanager
def importing() -> Iterator[None]:
    """Imports, of which nothing is garbage: nothing looks for any meanwhile, which takes a tenth of vLLM's import."""
    searched = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if searched:
            gc.enable()


def keep_imports() -> None:
    """Freeze what was imported, if this is a process of vLLM's engine; no later call of vLLM's freezes or thaws."""
    global _kept
    if _kept or not multiprocessing.current_process().name.startswith(_ENGINES):
        return
    _freeze()
    for name in ("freeze", "unfreeze"):
        setattr(gc, name, _nothing)
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, _SELDOM)
    _kept = True


def collect() -> None:
    """Let go of a model or an engine that has ended, where the heap is frozen; what is left is frozen again."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()


def leave_heap() -> None:
    """Let nothing search this process's heap for garbage any more: it ends, and the system takes the heap back at once.

    vLLM thaws and collects it several times over as it shuts down. With the objects of some models that takes
    seconds, in which the core loses patience with its workers and kills them, and their shared memory is left behind.
    """
    _freeze()
    for name in ("unfreeze", "collect"):
        setattr(gc, name, _nothing)


def _nothing(*_: object) -> int:
    return 0
