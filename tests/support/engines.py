"""Engines of one test's own models."""

import gc
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from service.settings import EngineSettings


async def open_engine(
    folder: Path,
    entries: dict[str, dict[str, Any]],
    settings: EngineSettings | None = None,
    *,
    default: str | None = None,
    **further: Any,
) -> Any:
    """The engine of a models.yaml with ``entries``, written into ``folder``; ``further`` goes to VllmEngine.open.

    The first alias is the default unless another is named.
    """
    from service.engine import VllmEngine
    from service.engine.answering import arguments
    from service.models_file import load_models

    settings = settings or EngineSettings()
    path = folder / "models.yaml"
    path.write_text(json.dumps({"default_model": default or next(iter(entries)), "models": entries}))
    names = {"engine_keys": arguments.engine_arg_names(), "frontend_keys": arguments.frontend_arg_names()}
    return await VllmEngine.open(load_models(path, settings, **names), settings, **further)


@contextmanager
def core_here(*, heap_is_the_callers: bool = False) -> Iterator[None]:
    """Core and worker of an engine that is opened inside are in this process.

    What was imported is not searched for garbage, as in an engine's own processes, unless the heap is to be taken for a
    caller's: then each load and each drop takes a fifth of a second more.
    """
    import vllm.envs
    import vllm.v1.engine.llm_engine

    cores = os.sched_getaffinity(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        if not heap_is_the_callers:
            gc.freeze()
            for name in ("freeze", "unfreeze"):
                patch.setattr(gc, name, lambda: None)
        yield
    # A core in this process bound it to cores, and kept its environment in a cache.
    os.sched_setaffinity(0, cores)
    vllm.envs.disable_envs_cache()
