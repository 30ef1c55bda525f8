"""What differs between the vLLM versions about frontends: the OpenAI server, the engine classes, their outputs."""

import asyncio
import copy
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from types import FunctionType
from typing import Any, Literal

from service.engine.versions import vllm_progress


def _first(*places: tuple[str, str]) -> Any:
    for module, name in places:
        try:
            return getattr(import_module(module), name)
        except ModuleNotFoundError:
            continue
    raise ImportError(f"this vLLM has none of {places}")


CLI_ARGS_FILES = ("entrypoints/launchers/cli_args.py", "entrypoints/openai/cli_args.py")
"""The file that declares the server's arguments, in 0.32 and in 0.26, below vLLM's package."""


def make_arg_parser() -> Callable[..., Any]:
    return _first(
        ("vllm.entrypoints.launchers.cli_args", "make_arg_parser"),
        ("vllm.entrypoints.openai.cli_args", "make_arg_parser"),
    )


def frontend_args() -> type:
    return _first(
        ("vllm.entrypoints.launchers.cli_args", "FrontendArgs"), ("vllm.entrypoints.openai.cli_args", "FrontendArgs")
    )


def validate_server_arguments(namespace: Any) -> None:
    """vLLM's own checks of a server's arguments against each other. Raises TypeError, ValueError or KeyError."""
    _first(
        ("vllm.entrypoints.launchers.cli_args", "validate_parsed_serve_args"),
        ("vllm.entrypoints.openai.cli_args", "validate_parsed_serve_args"),
    )(namespace)
    _first(
        ("vllm.entrypoints.launchers.launcher", "validate_api_server_args"),
        ("vllm.entrypoints.openai.api_server", "validate_api_server_args"),
    )(namespace)


def build_app() -> Callable[..., Any]:
    return _first(("vllm.entrypoints.launchers.app", "build_app"), ("vllm.entrypoints.openai.api_server", "build_app"))


def init_app_state() -> Callable[..., Any]:
    return _first(
        ("vllm.entrypoints.launchers.api_server.app_state", "init_app_state"),
        ("vllm.entrypoints.openai.api_server", "init_app_state"),
    )


def diagnostics(app: Any) -> Any:
    """An app with the routes of vLLM's server that tell of its inside, which it has in its development mode only.

    Its own ``/server_info`` fails where there is neither pip nor uv; here only ``system_env`` says so.
    """
    from fastapi import FastAPI
    from fastapi.responses import JSONResponse
    from vllm.collect_env import get_env_info
    from vllm.entrypoints.serve.dev.rpc.api_router import router as rpc
    from vllm.entrypoints.serve.dev.server_info import api_router as server_info

    made = FastAPI(openapi_url=None, exception_handlers=app.exception_handlers)
    made.include_router(rpc)

    def system() -> dict[str, Any]:
        try:
            return dict(get_env_info()._asdict())
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"}

    @made.get("/server_info")
    async def show_server_info(config_format: Literal["text", "json"] = "text") -> Any:
        config = app.state.vllm_config
        adapter = server_info.PydanticVllmConfig
        told = str(config) if config_format == "text" else adapter.dump_python(config, mode="json", fallback=str)
        variables = server_info._get_vllm_env_vars()
        return {"vllm_config": told, "vllm_env": variables, "system_env": await asyncio.to_thread(system)}

    @made.get("/tokenizer_info")
    async def tokenizer_info() -> Any:
        found = (await app.state.serving_tokenization.get_tokenizer_info()).model_dump()
        return JSONResponse(found, found["error"]["code"] if "error" in found else 200)

    made.state = app.state
    return made


def log_stats_interval_s() -> float:
    """How often vLLM's server logs statistics: VLLM_LOG_STATS_INTERVAL."""
    from vllm import envs

    return float(envs.VLLM_LOG_STATS_INTERVAL)


def first_token_latency(output: Any) -> float | None:
    """Seconds until a request's first token, where vLLM keeps statistics."""
    return getattr(output.metrics, "first_token_latency", None) or None


def aborted_output(request_id: str, prompt: Any, params: Any) -> Any:
    """The final output of a request that was aborted before the engine had it."""
    from vllm import PoolingParams

    text, token_ids = _said(prompt)
    if isinstance(params, PoolingParams):
        return _aborted_pooling(request_id, token_ids)
    return _aborted_generation(request_id, text, token_ids, params)


def _said(prompt: Any) -> tuple[str | None, list[int]]:
    """The text and the token ids of a prompt, as far as it says either; of two prompts, the decoder's."""
    if isinstance(prompt, Mapping):
        if "decoder_prompt" in prompt:
            return _said(prompt["decoder_prompt"])
        return prompt.get("prompt"), list(prompt.get("prompt_token_ids") or ())
    if isinstance(prompt, str):
        return prompt, []
    return None, list(prompt) if isinstance(prompt, Sequence) else []  # else parts that were still to come, or none


def _aborted_pooling(request_id: str, token_ids: list[int]) -> Any:
    import torch
    from vllm.outputs import PoolingOutput, PoolingRequestOutput

    nothing = PoolingOutput(data=torch.empty(0))
    return PoolingRequestOutput(
        request_id, outputs=nothing, prompt_token_ids=token_ids, num_cached_tokens=0, finished=True
    )


def _aborted_generation(request_id: str, text: str | None, token_ids: list[int], params: Any) -> Any:
    from vllm.outputs import CompletionOutput, RequestOutput

    completions = [
        CompletionOutput(
            index=index,
            text="",
            token_ids=[],
            cumulative_logprob=0.0,
            logprobs=None if params.logprobs is None else [],
            finish_reason="abort",
        )
        for index in range(params.n)
    ]
    return RequestOutput(
        request_id=request_id,
        prompt=text,
        prompt_token_ids=token_ids,
        prompt_logprobs=None,
        outputs=completions,
        finished=True,
        num_cached_tokens=0,
    )


def streaming_input(prompt: Any, sampling_params: Any) -> Any:
    """A part of a prompt, as AsyncLLM takes one that comes in several."""
    from vllm.engine.protocol import StreamingInput

    return StreamingInput(prompt, sampling_params)


def check_streaming_input(llm: Any, sampling_params: Any) -> None:
    """vLLM's own check of what a prompt in parts may ask for. Raises its ValueError."""
    llm._validate_streaming_input_sampling_params(in_pieces(sampling_params))


def in_pieces(sampling_params: Any) -> Any:
    """The same parameters, with outputs that have what is new and nothing else."""
    from vllm.sampling_params import RequestOutputKind

    sampling_params = sampling_params.clone()
    sampling_params.output_kind = RequestOutputKind.DELTA
    return sampling_params


PRIVATE_FIELDS = frozenset({"request_id", "kv_transfer_params", "ec_transfer_params", vllm_progress.SAID})
"""Fields of vLLM's request models that must not come from outside."""


LAST_EVENTS = frozenset({"response.completed", "response.incomplete", "response.failed"})
"""Events of a streamed response that carry the whole of it."""


def wrong_cache_salt(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What is wrong with the salt of a request whose model has no such field: Anthropic's messages in 0.26."""
    salt = body.get("cache_salt")
    if salt is None or (isinstance(salt, str) and salt):
        return []
    return [
        {"type": "string_type", "loc": ("body", "cache_salt"), "msg": "Input should be a valid string", "input": salt}
    ]


def is_event_stream(response: Any) -> bool:
    return getattr(response, "media_type", None) == "text/event-stream" and hasattr(response, "body_iterator")


def is_engine_dead(error: BaseException) -> bool:
    from vllm.v1.engine.exceptions import EngineDeadError

    return isinstance(error, EngineDeadError)


def lora_request(name: str) -> type:
    """The request models of the LoRA registry."""
    return _first(("vllm.entrypoints.serve.lora.protocol", name))


def lora_room(config: Any) -> tuple[int, int]:
    """How many adapters a step may have, and how many the workers' memory has room for; none where none are taken."""
    lora = config.lora_config
    return (0, 0) if lora is None else (lora.max_loras, lora.max_cpu_loras)


def set_kv_event_sources(client: Any, sources: Mapping[int, Mapping[str, Any]]) -> None:
    """Have a core's client say where its own model's KV cache events come from, as ``settled`` has it by rank.

    0.26 tells nobody.
    """
    from vllm.config import KVEventsConfig

    if hasattr(client, "_kv_event_sources"):
        client._kv_event_sources = {rank: KVEventsConfig(**each) for rank, each in sources.items()}


_TOLD_ANEW = "gearshift_told_anew"


def tell_settled(llm: Any) -> None:
    """Have an engine class' metrics say what loading its model settled. Others' loggers hear of a start once."""
    for logger in getattr(llm.logger_manager, "stat_loggers", ()):
        if getattr(logger, _TOLD_ANEW, False):
            logger.log_engine_initialized()


def prometheus_logger() -> tuple[Any, type]:
    """A Prometheus registry, and vLLM's stat logger that writes to it rather than to the process's common one.

    So do the parts that the logger makes of classes of their own, as those for speculation and for connectors.
    """
    from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
    from vllm.v1.metrics.loggers import PrometheusStatLogger

    registry = CollectorRegistry()
    kinds = {"_gauge_cls": Gauge, "_counter_cls": Counter, "_histogram_cls": Histogram}
    bound = {name: functools.partial(kind, registry=registry) for name, kind in kinds.items()}
    parts = {
        name: type(part.__name__, (part,), {kind: bound[kind] for kind in bound if hasattr(part, kind)})
        for name, part in vars(PrometheusStatLogger).items()
        if name.endswith("_cls") and isinstance(part, type) and name not in kinds
    }
    infos: list[Gauge] = []

    def log_metrics_info(self: Any, kind: str, config: Any) -> None:
        """Anew each time that the model was loaded: vLLM says once what an engine settled at its start."""
        while infos:
            registry.unregister(infos.pop())

        def noted(*given: Any, **named: Any) -> Gauge:
            infos.append(Gauge(*given, **{**named, "registry": registry}))
            return infos[-1]

        self._gauge_cls = noted
        try:
            PrometheusStatLogger.log_metrics_info(self, kind, config)
        finally:
            del self._gauge_cls

    said = {"log_metrics_info": log_metrics_info, _TOLD_ANEW: True}
    return registry, type("ModelPrometheusLogger", (PrometheusStatLogger,), bound | parts | said)


@contextmanager
def clients_made_by(make: Callable[..., Any], module: str) -> Iterator[None]:
    """Inside, the engine class of ``module`` gets its client from ``make``; it would start an engine core itself."""
    engine_module: Any = import_module(module)
    theirs = engine_module.EngineCoreClient

    class Client:
        """Stands for the class by which vLLM's engine classes make their clients."""

        make_async_mp_client = staticmethod(make)

        @staticmethod
        def make_client(*, multiprocess_mode: bool, asyncio_mode: bool, **given: Any) -> Any:  # noqa: ARG004
            return make(**given)

    engine_module.EngineCoreClient = Client
    try:
        yield
    finally:
        engine_module.EngineCoreClient = theirs


def greeted_apart(make: Callable[..., Any]) -> Callable[..., Any]:
    """The same, of clients whose core's greeting is not for the model's own configuration.

    A core greets every client with what its first model settled and where that publishes its KV cache events, and
    loggers are made of the configuration right then.
    """

    def made(vllm_config: Any, **given: Any) -> Any:
        apart = copy.copy(vllm_config)
        for name in ("model_config", "cache_config"):
            setattr(apart, name, copy.copy(getattr(vllm_config, name)))
        client = make(vllm_config=apart, **given)
        client.vllm_config = vllm_config
        set_kv_event_sources(client, {})
        return client

    return made


def llm_engine(config: Any, make_client: Callable[..., Any], **options: Any) -> Any:
    """vLLM's LLMEngine with a client that ``make_client`` makes."""
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.executor import Executor

    with clients_made_by(greeted_apart(make_client), "vllm.v1.engine.llm_engine"):
        return LLMEngine(
            vllm_config=config, executor_class=Executor.get_class(config), multiprocess_mode=True, **options
        )


def async_client(config: Any, *, address: dict[str, Any], key: int) -> Any:
    """Client ``key`` of a running core, as AsyncLLM makes its own."""
    from vllm.v1.engine.core_client import EngineCoreClient
    from vllm.v1.executor import Executor

    return greeted_apart(EngineCoreClient.make_async_mp_client)(
        vllm_config=config,
        executor_class=Executor.get_class(config),
        log_stats=False,
        client_addresses=address,
        client_index=key,
    )


def async_llm(config: Any, *, kind: Any, client: Any, **options: Any) -> Any:
    """An AsyncLLM of this ``kind`` with a client of a running core, which may have been another model's."""
    from vllm.v1.executor import Executor

    def given(vllm_config: Any, renderer: Any = None, **_: Any) -> Any:
        client.vllm_config = vllm_config
        client._renderer = renderer
        if renderer is not None:  # 0.32
            client._start_mm_warmup()
        return client

    with clients_made_by(given, "vllm.v1.engine.async_llm"):
        return kind(vllm_config=config, executor_class=Executor.get_class(config), **options)


def has_stat_logger_plugins() -> bool:
    """Whether an installed package has stat loggers for every AsyncLLM."""
    from vllm.v1.metrics.loggers import load_stat_logger_plugin_factories

    return bool(load_stat_logger_plugin_factories())


def metrics_snapshot(registry: Any) -> list[Any]:
    """vLLM's snapshot of its metrics, of another registry than the process's common one."""
    from vllm.v1.metrics import reader

    ours = {**vars(reader), "REGISTRY": registry}
    snapshot: list[Any] = FunctionType(reader.get_metrics_snapshot.__code__, ours)()
    return snapshot
