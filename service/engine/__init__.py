"""The engine: models as contexts of one vLLM engine core, switched between two of its steps.

``from service.engine import MultiModelEngine``: what users need is found here, and imported when it is asked for.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from service.engine.system.garbage import importing

if TYPE_CHECKING:
    from service.engine.answering.service import VllmEngine
    from service.engine.frontend.multi_model import MultiModelEngine
    from service.engine.sync.multi_model_llm import MultiModelLLM

__all__ = ["MultiModelEngine", "MultiModelLLM", "VllmEngine"]

_PLACES = {
    "MultiModelEngine": "service.engine.frontend.multi_model",
    "MultiModelLLM": "service.engine.sync.multi_model_llm",
    "VllmEngine": "service.engine.answering.service",
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with importing():
        return getattr(import_module(_PLACES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
