"""What a core tells whoever connects to it: it settled that with its first model."""

from types import SimpleNamespace
from typing import Any

from service.engine.versions.vllm_frontend import greeted_apart


def test_what_a_core_greets_with_is_not_the_models_own() -> None:
    config = SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=131_072), cache_config=SimpleNamespace(num_gpu_blocks=None)
    )

    def connect(*, vllm_config: Any, index: int) -> Any:
        """As vLLM's client applies its core's answer."""
        vllm_config.model_config.max_model_len = min(vllm_config.model_config.max_model_len, 2048)
        vllm_config.cache_config.num_gpu_blocks = 7
        return SimpleNamespace(vllm_config=vllm_config, index=index, _kv_event_sources={0: "of the first model"})

    client = greeted_apart(connect)(vllm_config=config, index=3)
    assert (client.index, client.vllm_config, client._kv_event_sources) == (3, config, {})
    assert config.model_config.max_model_len == 131_072
    assert config.cache_config.num_gpu_blocks is None
