"""What models must have in common, by name and reason; executors on which they can't be switched."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from service.engine.models import compatibility
from service.engine.models.compatibility import require_compatible
from service.errors import ConfigError

RAY_V2 = "VLLM_USE_RAY_V2_EXECUTOR_BACKEND"


def config(backend: str) -> Any:
    parallel = SimpleNamespace(distributed_executor_backend=backend, data_parallel_size=1, enable_eplb=False)
    model = SimpleNamespace(is_moe=False, multimodal_config=None)
    return SimpleNamespace(parallel_config=parallel, scheduler_config=None, model_config=model)


def required(backend: str) -> None:
    require_compatible(config(backend), config(backend), first_alias="a", alias="a")


ONE_PER_ENGINE = {
    "tensor_parallel_size": 2,
    "pipeline_parallel_size": 2,
    "prefill_context_parallel_size": 2,
    "decode_context_parallel_size": 2,
    "data_parallel_size": 2,
    "distributed_executor_backend": "uni",
    "worker_cls": "mine.Worker",
    "worker_extension_cls": "mine.Extension",
    "disable_custom_all_reduce": True,
    "enable_elastic_ep": True,
    "async_scheduling": True,
}
"""What vLLM settles once for an engine, each with another value than the first model's."""


@pytest.mark.parametrize("name", ONE_PER_ENGINE)
def test_what_there_is_one_of_in_an_engine_is_the_first_models_or_refused_with_both_values(name: str) -> None:
    first, second = config("mp"), config("mp")
    for each in (first, second):
        each.scheduler_config = SimpleNamespace(async_scheduling=False)
        vars(each.parallel_config).update({key: 1 for key in ONE_PER_ENGINE if key.endswith("_size")})
    require_compatible(first, second, first_alias="first", alias="second")
    group = second.scheduler_config if name == "async_scheduling" else second.parallel_config
    setattr(group, name, ONE_PER_ENGINE[name])
    with pytest.raises(ConfigError, match=f"^second: {name} is {ONE_PER_ENGINE[name]!r}, but .* for first: "):
        require_compatible(first, second, first_alias="first", alias="second")


def test_a_cache_of_media_in_shared_memory_is_refused_by_name() -> None:
    first, second = config("mp"), config("mp")
    second.model_config.multimodal_config = SimpleNamespace(mm_processor_cache_type="shm")
    with pytest.raises(ConfigError, match=r"^second: mm_processor_cache_type is 'shm': "):
        require_compatible(first, second, first_alias="first", alias="second")


@pytest.mark.parametrize("moves", [False, True])
def test_experts_are_balanced_where_parking_copies_no_weights(moves: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compatibility, "current", lambda: SimpleNamespace(weights_move=moves))
    first = config("mp")
    first.parallel_config.enable_eplb = True
    with pytest.raises(ConfigError, match=r"^first: enable_eplb is True: ") if moves else nullcontext():
        require_compatible(first, first, first_alias="first", alias="first")


def test_what_is_compared_is_what_vllm_calls_so() -> None:
    """A name that vLLM drops would be compared with nothing, and never refused."""
    from vllm.config import ParallelConfig, SchedulerConfig

    known = {*ParallelConfig.__dataclass_fields__, *SchedulerConfig.__dataclass_fields__}
    assert set(ONE_PER_ENGINE) <= known
    assert {name for _, name, _ in compatibility._ONE_PER_ENGINE} == set(ONE_PER_ENGINE)


def test_a_mixture_of_experts_with_data_parallelism_is_refused_with_the_reason() -> None:
    experts = config("mp")
    experts.parallel_config.data_parallel_size = 2
    require_compatible(experts, experts, first_alias="a", alias="a")
    experts.model_config.is_moe = True
    with pytest.raises(ConfigError, match=r"^a: a mixture of experts with data parallelism steps in lockstep"):
        require_compatible(experts, experts, first_alias="a", alias="a")


def test_vllms_cpu_platform_can_not_run_ray_and_the_alias_is_refused_with_the_reason() -> None:
    from vllm.platforms import current_platform

    assert current_platform.is_cpu()
    assert current_platform.ray_device_key == ""
    with pytest.raises(ConfigError, match=r"a: distributed_executor_backend is 'ray': .*ray_device_key"):
        required("ray")
    required("mp")


def test_where_ray_is_supported_its_newer_executor_is_taken_and_the_older_one_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vllm.platforms import current_platform

    monkeypatch.setattr(type(current_platform), "ray_device_key", "GPU")
    monkeypatch.setenv(RAY_V2, "1")
    required("ray")
    monkeypatch.setenv(RAY_V2, "0")
    with pytest.raises(ConfigError, match=f"a: distributed_executor_backend is 'ray': .*{RAY_V2}=1"):
        required("ray")


def test_the_executor_that_is_taken_reaches_its_workers_by_the_queues_of_vllms_own() -> None:
    """By reading: the class needs Ray to be imported, which is not installed here."""
    import ast
    from importlib.util import find_spec
    from pathlib import Path

    spec = find_spec("vllm.v1.executor.ray_executor_v2")
    assert spec is not None
    assert spec.origin is not None
    classes = [each for each in ast.parse(Path(spec.origin).read_text()).body if isinstance(each, ast.ClassDef)]
    bases = {each.name: [ast.unparse(base) for base in each.bases] for each in classes}
    assert bases["RayExecutorV2"] == ["MultiprocExecutor"]
    assert bases["RayWorkerProc"] == ["WorkerProc"]
    (executor,) = [each for each in classes if each.name == "RayExecutorV2"]
    own = {each.name for each in executor.body if isinstance(each, ast.FunctionDef)}
    assert not own & {"collective_rpc", "execute_model", "sample_tokens"}
