"""What this server can be asked: ``/openapi.json``, and ``/docs``, a page of it that needs nothing from elsewhere.

Endpoints of models are described by vLLM's own server; what is ours, by the table here.
"""

from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from schemas.requests import PATHS
from service.http.batches import BatchBody
from service.http.models import SwitchBody
from service.http.openai_routes import JSON, REALTIME
from service.http.operating import (
    COLLECTIVE_RPC,
    LOAD_LORA,
    SERVER_INFO,
    TOKENIZER_INFO,
    UNLOAD_LORA,
    LoadLora,
    UnloadLora,
)
from service.http.replies import Json
from service.http.worker_view import WorkerView

_REFERENCE = "#/components/schemas/{model}"
_BODIES: Mapping[str, type[BaseModel]] = {
    "/v1/models/switch": SwitchBody,
    "/v1/batches": BatchBody,
    LOAD_LORA: LoadLora,
    UNLOAD_LORA: UnloadLora,
}
_RPC = {
    "type": "object",
    "required": ["method"],
    "properties": {
        "method": {"type": "string", "description": "A method of vLLM's workers"},
        "args": {"type": "array", "items": {"type": "string"}, "default": []},
        "kwargs": {"type": "object", "additionalProperties": {"type": "string"}, "default": {}},
        "timeout": {"type": "number", "description": "Seconds"},
    },
}
"""What vLLM's server takes there; it has no model of that."""
_MODEL = "An alias of models.yaml"
_ALL = ("model", f"{_MODEL}; all models without it")
_ONE = ("model", f"{_MODEL}; the active one without it")
_STREAMED = (("stream", "true: as a stream"), ("starting_after", "The number of the last event that is not wanted"))
_SUMMARIES: Mapping[str, tuple[str, tuple[tuple[str, str], ...]]] = {
    REALTIME: ("Not served: 501 to whoever asks for vLLM's transcription over a WebSocket", ()),
    "/v1/models": ("Every alias and every adapter, active or not", ()),
    "/v1/models/{name}": ("One of them", ()),
    "/v1/models/switch": ("Make a model active; answers when that is done", ()),
    "/v1/responses/{id}": ("A durable response as it is now, or its end (DELETE)", _STREAMED),
    "/v1/responses/{id}/cancel": ("End a response that is not finished", ()),
    "/v1/calls/{id}": ("The answer of any durable call, 202 while there is none, or its end (DELETE)", _STREAMED),
    "/v1/calls/{id}/cancel": ("End a durable call that is not finished", ()),
    "/v1/files": ("The files that are kept; or another one (POST, multipart/form-data)", ()),
    "/v1/files/{id}": ("What is known of a file, or its end (DELETE)", ()),
    "/v1/files/{id}/content": ("A file itself", ()),
    "/v1/batches": ("The batches that are kept; or another one (POST)", ()),
    "/v1/batches/{id}": ("A batch as it is now", ()),
    "/v1/batches/{id}/cancel": ("Ask nothing more of a batch", ()),
    "/requests/{id}/cancel": ("End a request, however it came", ()),
    "/health": ("Whether the process is alive: 503 where it should be started again", ()),
    "/ready": ("Whether it takes part in serving now", ()),
    "/version": ("The versions of this server and of vLLM", ()),
    "/metrics": ("Prometheus' metrics", ()),
    "/": ("The status page", ()),
    "/state": ("What the status page shows, as JSON", ()),
    "/docs": ("This document as a page", ()),
    "/playground": ("A page to ask models from", ()),
    "/openapi.json": ("This document", ()),
    "/ping": ("Whether it answers at all, as SageMaker asks", ()),
    "/load": ("How many requests wait and run", ()),
    "/is_sleeping": ("Whether a model sleeps", (("model", f"{_MODEL}; any without it"),)),
    "/is_paused": ("Whether new requests wait for resume", (("model", f"{_MODEL}; whether all do without it"),)),
    "/sleep": (
        "Give a model's memory back; what runs of it is aborted",
        (_ALL, ("level", "1: weights go to the host; 2: they are forgotten"), ("mode", "abort")),
    ),
    "/wake_up": ("Bring a sleeping model back", (_ALL,)),
    "/pause": ("Let new requests wait until resume; what runs goes on", (_ALL,)),
    "/resume": ("Go on after pause", (_ALL,)),
    "/reset_prefix_cache": ("Forget what prompts have left in the cache", (_ALL,)),
    "/reset_mm_cache": ("The same, of pictures and recordings", (_ALL,)),
    "/reset_encoder_cache": ("The same, of encoders", (_ALL,)),
    "/start_profile": ("Begin a profile of what the engine does, with a model's profiler", (_ONE,)),
    "/stop_profile": ("End it, and write it", (("model", f"{_MODEL}; every one that is profiled without it"),)),
    SERVER_INFO: ("How a model's server is configured, and on what it runs", (_ONE, ("config_format", "text or json"))),
    TOKENIZER_INFO: ("How a model's tokenizer is configured, with its chat template", (_ONE,)),
    COLLECTIVE_RPC: ("Call a method of each of a model's workers", (_ONE,)),
    LOAD_LORA: ("Load an adapter; its name then works as a model", ()),
    UNLOAD_LORA: ("Forget an adapter", ()),
}
"""What each route of ours does, and the names in its query with what they mean."""


async def document(worker: WorkerView, routes: Sequence[BaseRoute], *, keys: bool) -> Response:
    """OpenAPI's document of ``routes``; ``keys``: whether they ask for one."""
    theirs = {} if worker.openapi is None else await worker.openapi()
    described: Mapping[str, Any] = theirs.get("paths", {})
    _, bodies = models_json_schema([(body, "validation") for body in _BODIES.values()], ref_template=_REFERENCE)
    paths: dict[str, dict[str, Any]] = {}
    for path, methods in _paths(routes):
        canonical = PATHS.get(path, path)
        if canonical in described:
            paths[path] = described[canonical]
        elif canonical in _SUMMARIES:
            paths[path] = {method: _operation(canonical, method) for method in methods}
    components = {"schemas": {**theirs.get("components", {}).get("schemas", {}), **bodies.get("$defs", {})}}
    found: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "Gearshift", "version": version("gearshift")},
        "paths": paths,
        "components": components,
    }
    if keys:
        as_anthropics = {"type": "apiKey", "in": "header", "name": "x-api-key"}
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}, "x-api-key": as_anthropics}
        found["security"] = [{"key": []}, {"x-api-key": []}]
    return Json(found)


def _paths(routes: Sequence[BaseRoute]) -> Iterable[tuple[str, list[str]]]:
    for route in routes:
        if isinstance(route, Route):
            methods = sorted(method.lower() for method in route.methods or () if method != "HEAD")
            yield route.path_format, methods


def _operation(path: str, method: str) -> dict[str, Any]:
    summary, query = _SUMMARIES[path]
    operation: dict[str, Any] = {
        "summary": summary,
        "tags": ["gearshift"],
        "operationId": "_".join(filter(None, [method, *path.replace("{", "").replace("}", "").split("/")])),
        "responses": {"200": {"description": "Done"}},
    }
    named = [part[1:-1] for part in path.split("/") if part.startswith("{")]
    where = [(name, "path", "") for name in named] + [(name, "query", said) for name, said in query]
    if where:
        operation["parameters"] = [
            {"name": name, "in": place, "required": place == "path", "description": said, "schema": {"type": "string"}}
            for name, place, said in where
        ]
    if path in _BODIES or path == COLLECTIVE_RPC:
        named_schema = _BODIES.get(path)
        schema = _RPC if named_schema is None else {"$ref": _REFERENCE.format(model=named_schema.__name__)}
        operation["requestBody"] = {"required": True, "content": {JSON: {"schema": schema}}}
    return operation
