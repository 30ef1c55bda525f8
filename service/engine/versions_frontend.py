"""Where the OpenAI server's parts are in each vLLM version, and what is read of its frontend's state."""

from collections.abc import Callable
from importlib import import_module
from typing import Any


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


def generated(llm: Any, request_id: str) -> int:
    """Tokens that the unfinished engine requests under an external id have generated."""
    processor = llm.output_processor
    states = (processor.request_states.get(each) for each in processor.external_req_ids.get(request_id, ()))
    return sum(state.detokenizer.num_output_tokens() for state in states if state is not None and state.detokenizer)


def first_token_latency(output: Any) -> float | None:
    """Seconds until a request's first token, where vLLM keeps statistics."""
    return getattr(output.metrics, "first_token_latency", None) or None


def aborted_output(request_id: str, prompt: Any, sampling_params: Any) -> Any:
    """The final output of a request that was aborted before the engine had it."""
    from vllm.outputs import CompletionOutput, RequestOutput

    inner = prompt.get("decoder_prompt", prompt)
    completions = [
        CompletionOutput(
            index=index,
            text="",
            token_ids=[],
            cumulative_logprob=0.0,
            logprobs=None if sampling_params.logprobs is None else [],
            finish_reason="abort",
        )
        for index in range(sampling_params.n)
    ]
    return RequestOutput(
        request_id=request_id,
        prompt=inner.get("prompt"),
        prompt_token_ids=list(inner.get("prompt_token_ids") or ()),
        prompt_logprobs=None,
        outputs=completions,
        finished=True,
        num_cached_tokens=0,
    )


PRIVATE_FIELDS = frozenset({"request_id", "kv_transfer_params", "ec_transfer_params"})
"""Fields of vLLM's request models that must not come from outside."""

LAST_EVENTS = frozenset({"response.completed", "response.incomplete", "response.failed"})
"""Events of a streamed response that carry the whole of it."""


def is_event_stream(response: Any) -> bool:
    return getattr(response, "media_type", None) == "text/event-stream" and hasattr(response, "body_iterator")


def is_engine_dead(error: BaseException) -> bool:
    from vllm.v1.engine.exceptions import EngineDeadError

    return isinstance(error, EngineDeadError)


def lora_request(name: str) -> type:
    """The request models of the LoRA registry."""
    return _first(("vllm.entrypoints.serve.lora.protocol", name))
