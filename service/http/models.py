"""``/v1/models`` and ``/v1/models/switch``, as users of vllm-gaudi's multi-model server know them."""

import time
import uuid
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from schemas.contexts import ContextInfo, Leftover, SwitchMode, SwitchReport
from schemas.control import Hold, Switch, one_of_three
from schemas.status import Status, StatusState
from service.http import errors
from service.http.openai_routes import JSON, content_type, read_body
from service.http.worker_view import Commands, WorkerView
from service.models_file import ModelsFile

_BODY_BYTES = 64 << 10
_STATUS_OF = {StatusState.REJECTED: 404, StatusState.FAILED: 500, StatusState.ROLLED_BACK: 500}


def listed(worker: WorkerView) -> dict[str, Any]:
    """Every alias and every LoRA adapter, active or not, in the form of OpenAI's list."""
    presence, file = worker.presence(), worker.models()
    cards = [_card(context, file) for context in presence.contexts]
    loras = [_lora_card(name, context.alias, file) for context in presence.contexts for name in context.loras]
    return {"object": "list", "data": cards + loras}


def found(worker: WorkerView, name: str) -> JSONResponse:
    """One of them, or OpenAI's 404."""
    for card in listed(worker)["data"]:
        if card["id"] == name:
            return JSONResponse(card)
    return errors.error(404, f"The model `{name}` does not exist.", kind="NotFoundError", param="model")


def _card(context: ContextInfo, file: ModelsFile) -> dict[str, Any]:
    spec = file.models.get(context.alias)
    arguments = {} if spec is None else spec.engine_args
    return {
        **_common(context.alias, str(arguments.get("model", context.alias))),
        "parent": None,
        "max_model_len": context.max_model_len,
        "active": context.active,
        "tier": context.tier,
    }


def _lora_card(name: str, alias: str, file: ModelsFile) -> dict[str, Any]:
    spec = file.models.get(alias)
    path = name if spec is None else spec.scheduling.loras.get(name, name)
    return {**_common(name, path), "parent": alias, "max_model_len": None}


def _common(name: str, root: str) -> dict[str, Any]:
    now = int(time.time())
    permission = {
        "id": f"modelperm-{uuid.uuid4().hex}",
        "object": "model_permission",
        "created": now,
        "allow_create_engine": False,
        "allow_sampling": True,
        "allow_logprobs": True,
        "allow_search_indices": False,
        "allow_view": True,
        "allow_fine_tuning": False,
        "organization": "*",
        "group": None,
        "is_blocking": False,
    }
    return {"id": name, "object": "model", "created": now, "owned_by": "vllm", "root": root, "permission": [permission]}


class SwitchBody(BaseModel):
    """What may be asked. The Gaudi server knows ``model`` and ``drain_timeout``, and always drains."""

    model_config = ConfigDict(extra="forbid")

    model: str = Field(description="An alias of models.yaml")
    drain_timeout: float = Field(default=60, ge=0, description="Seconds for which running requests may go on at most")
    mode: SwitchMode = Field(default=SwitchMode.DRAIN, description="What becomes of running requests")
    leftover: Leftover = Field(default=Leftover.ABORT, description="What becomes of those that a drain did not finish")
    hold: Hold | None = Field(default=None, description="For how long it stays: seconds, drained or forever")
    _one_complaint = field_validator("hold", mode="wrap")(one_of_three)


async def switch(request: Request, worker: WorkerView, commands: Commands) -> Response:
    """Make a model active and say what that did; returns when it is done.

    Only for JSON: a page of another site can't send that without asking first.
    """
    if content_type(request) != JSON:
        return errors.error(415, f"Send {JSON}")
    raw = await read_body(request, _BODY_BYTES)
    with errors.of_what_was_sent():
        event = Switch(**SwitchBody.model_validate_json(raw).model_dump())
    status = await commands.ask(worker, event)
    return _answer(status)


def _answer(status: Status) -> JSONResponse:
    report = status.switch
    if status.state in _STATUS_OF or report is None:
        code = _STATUS_OF.get(status.state, 500)
        if code == 404:
            return errors.error(404, "Model not found")
        return errors.error(500, status.reason or "The switch failed", kind="InternalServerError")
    return JSONResponse(_gaudi(report))


def _gaudi(report: SwitchReport) -> dict[str, Any]:
    """The fields of the Gaudi server's answer."""
    return {
        "previous_model": report.from_model,
        "current_model": report.to_model,
        "switched": report.switched,
        "duration_ms": report.ms,
        "reconfigure_ms": report.reconfigure_s * 1000,
        "memory_before_mb": report.memory_before_mb,
        "memory_after_unload_mb": report.memory_after_unload_mb,
        "freed_memory_mb": report.freed_memory_mb,
        "stash_memory_after_mb": report.stash_memory_after_mb,
    }
