"""Each route of vLLM's server is served here, or is one of those that "Coming from vLLM" says are not."""

import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, get_args

import pytest

from schemas.requests import Endpoint
from service import settings as settings_module
from service.engine.versions import vllm_frontend
from service.http.server import HttpServer

NOT_SERVED = {
    "pages that /docs and /openapi.json stand for": "/redoc|/docs/oauth2-redirect",
    "WebSockets": "/v1/realtime",
    "renders without an answer": "/v1/.*/(de)?render",
    "generates from tokens alone": "/inference/v1/generate",
    "aborts by id": "(/inference/v1)?/abort_requests",
    "SageMaker's invocations": "/invocations",
    "embeds in Cohere's words": "/v2/embed",
    "several chats at once": "/v1/chat/completions/batch",
    "scores by what would be generated": "/generative_scoring|/v1/systemone",
    "responses that are kept, where there is no broker": "/v1/responses/{response_id}(/cancel)?",
    "updates weights": "/.*weight.*|/get_world_size",
    "gives KV memory away, or tells of its events": "/release_kv_cache_memory|/kv_event_sources",
    "scales experts, or is mended while it runs": "/(is_)?scal(e|ing)_elastic_ep|/fault_tolerance/.*",
}


def _tasks(alias: Any) -> Iterator[str]:
    for each in get_args(alias):
        yield from (each,) if isinstance(each, str) else _tasks(each)


@pytest.fixture
def theirs(monkeypatch: pytest.MonkeyPatch) -> set[tuple[str, str]]:
    """What vLLM's server serves for models of all kinds, in the development mode, with everything that a flag adds."""
    from vllm.tasks import SupportedTask
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    parser = vllm_frontend.make_arg_parser()(FlexibleArgumentParser())
    arguments = parser.parse_args(["--enable-tokenizer-info-endpoint"])
    model: Any = SimpleNamespace(get_pooling_task=lambda tasks: "classify", hf_config=SimpleNamespace(num_labels=1))
    app = vllm_frontend.build_app()(arguments, tuple(dict.fromkeys(_tasks(SupportedTask))), model)
    return {(method, route.path) for route in app.routes for method in getattr(route, "methods", None) or ()}


def test_every_route_of_vllms_server_is_here_or_is_said_not_to_be(theirs: set[tuple[str, str]]) -> None:
    server = HttpServer(settings_module.load(worker_id="w1", http_port=0, dev_mode=True))
    server._socket.close()
    ours = {(method, route.path) for route in server._routes for method in route.methods or {"GET", "HEAD"}}
    assert theirs & ours >= {("POST", endpoint.value) for endpoint in Endpoint}
    missing = {path for _, path in theirs - ours}
    assert {path for path in missing if not any(re.fullmatch(known, path) for known in NOT_SERVED.values())} == set()
    unneeded = [why for why, known in NOT_SERVED.items() if any(re.fullmatch(known, path) for _, path in theirs & ours)]
    assert not unneeded
