"""What models must have in common, by name and reason; executors on which they can't be switched."""

from types import SimpleNamespace
from typing import Any

import pytest

from service.engine.models.compatibility import require_compatible
from service.errors import ConfigError

RAY_V2 = "VLLM_USE_RAY_V2_EXECUTOR_BACKEND"


def config(backend: str) -> Any:
    parallel = SimpleNamespace(distributed_executor_backend=backend, data_parallel_size=1)
    return SimpleNamespace(parallel_config=parallel, scheduler_config=None, model_config=SimpleNamespace(is_moe=False))


def required(backend: str) -> None:
    require_compatible(config(backend), config(backend), first_alias="a", alias="a")


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
