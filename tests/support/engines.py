"""Engines of one test's own models."""

import json
from pathlib import Path
from typing import Any

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
