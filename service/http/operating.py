"""The routes with which operators of vLLM's server sleep, wake, pause, reset, profile and adapt; per model here.

``?model=ALIAS`` names one; without it, what means the whole engine there means all models, and what means its one model
means the active one. Each is a control event that this worker is asked, and is answered when it is done.
"""

from collections.abc import Callable, Collection
from functools import partial
from typing import Any, Literal, TypeVar
from urllib.parse import urlencode

from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from schemas.control import Cache, Control, LoraAdd, LoraRemove, Pause, Profile, ResetCache, Resume, Sleep, Wake
from schemas.errors import nearest
from schemas.status import QueueInfo, Status, StatusState
from service.errors import Unavailable, UnknownModel
from service.http import errors
from service.http.errors import Refused
from service.http.openai_routes import JSON, content_type, read_body
from service.http.worker_view import Commands, WorkerView
from service.ports import Inquiry

SERVER_INFO, TOKENIZER_INFO, COLLECTIVE_RPC = "/server_info", "/tokenizer_info", "/collective_rpc"
LOAD_LORA, UNLOAD_LORA = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
START_PROFILE = "/start_profile"
_BODY_BYTES = 64 << 10
_CODES = {StatusState.REJECTED: 404, StatusState.FAILED: 500, StatusState.ROLLED_BACK: 500}
Live = Callable[[], WorkerView]
"""The worker; raises Unavailable while it is not up."""


Body = TypeVar("Body", bound=BaseModel)


class LoadLora(BaseModel):
    """What vLLM's ``/v1/load_lora_adapter`` takes; ``model`` is the alias that it adapts, the active one by default."""

    model_config = ConfigDict(extra="forbid")

    lora_name: str = Field(min_length=1)
    lora_path: str = Field(min_length=1)
    load_inplace: Literal[False] = False
    """Replacing an adapter under its name is two requests here; vLLM's own form has this and the next as well."""
    is_3d_lora_weight: Literal[False] = False
    model: str | None = None


class StartProfile(BaseModel):
    """What vLLM's ``/start_profile`` takes."""

    profile_prefix: str | None = None
    delay_iterations: int | None = None
    max_iterations: int | None = None


class UnloadLora(BaseModel):
    """What vLLM's ``/v1/unload_lora_adapter`` takes. Without ``model``, the one that has the adapter."""

    model_config = ConfigDict(extra="forbid")

    lora_name: str = Field(min_length=1)
    lora_int_id: int | None = None
    """Known to vLLM's interface; the name says which."""
    model: str | None = None


def looking(live: Live) -> list[Route]:
    """What changes nothing."""
    return [
        Route("/ping", partial(_ping, live), methods=["GET", "POST"]),
        Route("/load", partial(_load, live)),
        Route("/is_sleeping", partial(_is_sleeping, live)),
        Route("/is_paused", partial(_is_paused, live)),
    ]


def operating(live: Live, commands: Commands) -> list[Route]:
    """What does."""
    return [
        *(Route(path, partial(_ask, live, commands, event), methods=["POST"]) for path, event in _EVENTS.items()),
        Route(START_PROFILE, partial(_start_profile, live, commands), methods=["POST"]),
        Route(LOAD_LORA, partial(_load_lora, live, commands), methods=["POST"]),
        Route(UNLOAD_LORA, partial(_unload_lora, live, commands), methods=["POST"]),
    ]


def inquiring(live: Live, *, dev_mode: bool) -> list[Route]:
    """What tells of the inside of a model's server, in its words; as there, some of it in the development mode only."""
    ask = partial(_inquire, live)
    return [
        Route(TOKENIZER_INFO, ask),
        *([Route(SERVER_INFO, ask), Route(COLLECTIVE_RPC, ask, methods=["POST"])] if dev_mode else []),
    ]


class _Wrong(Exception):
    """What was asked means nothing here."""


async def _ask(live: Live, commands: Commands, event: Callable[[Request], Control], request: Request) -> Response:
    worker = live()
    try:
        with errors.of_what_was_sent():
            asked = event(request)
    except _Wrong as wrong:
        return errors.error(400, str(wrong))
    status = await commands.ask(worker, asked)
    said = None if status.state in _CODES else _said(asked, status, request)
    return _answered(status) if said is None else JSONResponse(said)


def _said(asked: Control, status: Status, request: Request) -> dict[str, Any] | None:
    """What vLLM answers there, where it answers with more than nothing."""
    match asked:
        case Pause() | Resume():
            return {"status": "paused" if isinstance(asked, Pause) else "resumed"}
        case Sleep():
            return {"status": "sleeping", "level": asked.level}
        case Wake():
            return {"status": "awake", "tags": request.query_params.getlist("tags") or None}
        case ResetCache(cache="prefix"):
            return status.answer
        case _:
            return None


def _model(request: Request) -> str | None:
    return request.query_params.get("model")


def _sleep(request: Request) -> Control:
    if (mode := request.query_params.get("mode", "abort")) != "abort":
        raise _Wrong(f"mode: {mode!r} is not known to this server; what runs is aborted")
    return Sleep.model_validate({"level": int(_digits(request, "level", "1")), "model": _model(request)})


def _wake(request: Request) -> Control:
    tags = request.query_params.getlist("tags")
    if tags and set(tags) != {"weights", "kv_cache"}:
        raise _Wrong("tags: a model is woken whole here; leave them out")
    return Wake(model=_model(request))


def _reset(cache: Cache, request: Request) -> Control:
    wanted = {name: request.query_params.get(name, "false") for name in ("reset_running_requests", "reset_external")}
    return ResetCache.model_validate({"model": _model(request), "cache": cache, **wanted})


def _paused(kind: type[Pause | Resume], request: Request) -> Control:
    """A pause lets what runs end; whoever wants another one is not given this one instead."""
    if "mode" in request.query_params:
        raise _Wrong("mode: what runs goes on to its end here, and what is new waits; leave it out")
    return kind(model=_model(request))


def _profile(action: Literal["start", "stop"], request: Request) -> Control:
    return Profile(action=action, model=_model(request))


def _digits(request: Request, name: str, otherwise: str) -> str:
    given = request.query_params.get(name, otherwise)
    if not given.isdecimal() or len(given) > 3:
        raise _Wrong(f"{name}: must be a number, not {given[:40]!r}")
    return given


_EVENTS: dict[str, Callable[[Request], Control]] = {
    "/sleep": _sleep,
    "/wake_up": _wake,
    "/pause": partial(_paused, Pause),
    "/resume": partial(_paused, Resume),
    "/reset_prefix_cache": partial(_reset, "prefix"),
    "/reset_mm_cache": partial(_reset, "mm"),
    "/reset_encoder_cache": partial(_reset, "encoder"),
    "/stop_profile": partial(_profile, "stop"),
}
PATHS = frozenset({*_EVENTS, START_PROFILE, LOAD_LORA, UNLOAD_LORA, SERVER_INFO, TOKENIZER_INFO, COLLECTIVE_RPC})
"""Those that change something, or show what only an operator is to see."""


async def _ping(live: Live, _request: Request) -> Response:
    live()
    return Response()


async def _load(live: Live, _request: Request) -> Response:
    queues = live().presence().queues.values()
    return JSONResponse({"server_load": sum(queue.waiting + queue.running for queue in queues)})


async def _is_sleeping(live: Live, request: Request) -> Response:
    chosen = _chosen(live, request)
    return JSONResponse({"is_sleeping": any(one.asleep for one in live().presence().contexts if one.alias in chosen)})


async def _is_paused(live: Live, request: Request) -> Response:
    """Whether it holds for the one that is named; without a name, for all."""
    queues, none = live().presence().queues, QueueInfo()
    return JSONResponse({"is_paused": all(queues.get(alias, none).paused for alias in _chosen(live, request))})


def _chosen(live: Live, request: Request) -> Collection[str]:
    """The model that is named, or all. Raises Refused for an unknown one."""
    aliases, model = [context.alias for context in live().presence().contexts], _model(request)
    if model is not None and model not in aliases:
        message = f"unknown model {model!r}{nearest(model, aliases)}"
        raise Refused(errors.error(404, message, param="model"))
    return aliases if model is None else (model,)


async def _start_profile(live: Live, commands: Commands, request: Request) -> Response:
    """vLLM's form may say how this one profile is to be; here a model's ``profiler_config`` says it of all."""
    if raw := (await read_body(request, _BODY_BYTES)).strip():
        with errors.of_what_was_sent():
            given = StartProfile.model_validate_json(raw).model_dump(exclude_none=True)
        if (name := next(iter(given), None)) is not None:
            return errors.error(400, f"{name}: is the model's profiler_config's here; leave it out", param=name)
    return await _ask(live, commands, partial(_profile, "start"), request)


async def _load_lora(live: Live, commands: Commands, request: Request) -> Response:
    worker = live()
    body = await _body(request, LoadLora)
    if isinstance(body, Response):
        return body
    presence = worker.presence()
    model = body.model or presence.active or ""
    if any(body.lora_name in context.loras for context in presence.contexts):
        message = f"The lora adapter '{body.lora_name}' has already been loaded."
        return errors.error(400, message, kind="InvalidUserInput", param="lora_name")
    with errors.of_what_was_sent():
        event = LoraAdd(model=model, name=body.lora_name, path=body.lora_path)
    status = await commands.ask(worker, event)
    if status.state is StatusState.REJECTED and model in {context.alias for context in presence.contexts}:
        return errors.error(400, status.reason or "It was refused", kind="InvalidUserInput")
    return _answered(status, f"Success: LoRA adapter '{body.lora_name}' added successfully.")


async def _unload_lora(live: Live, commands: Commands, request: Request) -> Response:
    worker = live()
    body = await _body(request, UnloadLora)
    if isinstance(body, Response):
        return body
    having = [context.alias for context in worker.presence().contexts if body.lora_name in context.loras]
    if not having or body.model not in {None, *having}:
        message = f"The lora adapter '{body.lora_name}' cannot be found."
        return errors.error(404, message, kind="NotFoundError", param="lora_name")
    with errors.of_what_was_sent():
        event = LoraRemove(model=body.model or having[0], name=body.lora_name)
    status = await commands.ask(worker, event)
    return _answered(status, f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


async def _inquire(live: Live, request: Request) -> Response:
    """Of the model that ``?model=`` names, or the active one."""
    worker = live()
    if worker.inquire is None:
        raise Unavailable("the worker is not up yet")
    posted = request.method == "POST"
    if posted and content_type(request) != JSON:
        return errors.error(415, f"Send {JSON}")
    query = urlencode([pair for pair in request.query_params.multi_items() if pair[0] != "model"])
    body = await read_body(request, _BODY_BYTES) if posted else b""
    alias = _model(request) or worker.presence().active or ""
    try:
        reply = await worker.inquire(alias, Inquiry(request.method, request.url.path, query, body))
    except UnknownModel as unknown:
        return errors.error(404, str(unknown), kind="NotFoundError", param="model")
    return Response(reply.content, reply.status, media_type=reply.media_type)


async def _body(request: Request, form: type[Body]) -> Body | Response:
    """Only JSON: a page of another site can't send that without asking first."""
    if content_type(request) != JSON:
        return errors.error(415, f"Send {JSON}")
    with errors.of_what_was_sent():
        return form.model_validate_json(await read_body(request, _BODY_BYTES))


def _answered(status: Status, said: str = "") -> Response:
    """vLLM answers with nothing, or with a line."""
    code = _CODES.get(status.state)
    if code is not None:
        return errors.error(code, status.reason or "It did not work")
    return PlainTextResponse(said) if said else Response()
