"""The published way of switching, on vLLM's stock CPU worker: what vllm-gaudi's reconfigure does, step by step.

Drain, sleep, stash the runner, collect garbage, restore the other runner, a new KV cache of the same size, a new
structured-output manager, scheduler and block hasher. No sleeps to poll, no frontend to rebuild, one collection where
vllm-gaudi has three. Beside it: ``EngineCore.__init__`` run again over the live executor. Both once with the worker in
a process of its own, as vLLM runs it on a CPU, and once in the core's. Prints a line of JSON.

``python -m tests.bench.published_way MODEL MODEL [--quick]``
"""

import argparse
import gc
import json
import statistics
import time
from pathlib import Path
from typing import Any

from tests.bench.setting import arguments

_STASH = "published_stash"
_CONFIGS = ("model_config", "cache_config", "load_config", "scheduler_config", "compilation_config")


def unload(wrapper: Any, key: int) -> None:
    """Runs in the worker: stash its runner with the configuration that it was built for."""
    worker = wrapper.worker
    vars(wrapper).setdefault(_STASH, {})[key] = (worker.model_runner, worker.vllm_config)
    worker.model_runner = None
    gc.collect()


def load(wrapper: Any, key: int, config: Any) -> float:
    """Runs in the worker: restore a stashed runner, or build one for ``config`` and load its weights; milliseconds."""
    from vllm.config import set_current_vllm_config

    started, worker = time.perf_counter(), wrapper.worker
    runner, config = vars(wrapper)[_STASH].get(key, (None, config))
    configure(config, worker, wrapper)
    if runner is not None:
        worker.model_runner = runner
        # vLLM's own runner takes a new KV cache only where it has none; Gaudi's replaces it.
        forget_kv_cache(wrapper)
        return (time.perf_counter() - started) * 1e3
    with set_current_vllm_config(config):
        worker.model_runner = type(vars(wrapper)[_STASH][1 - key][0])(config, worker.device)
    worker.load_model()
    return (time.perf_counter() - started) * 1e3


def forget_kv_cache(wrapper: Any) -> None:
    """Runs in the worker."""
    runner = wrapper.worker.model_runner
    runner.attn_groups.clear()
    runner.kv_caches.clear()


def configure(config: Any, *owners: Any) -> None:
    for owner in owners:
        owner.vllm_config = config
        for name in _CONFIGS:
            setattr(owner, name, getattr(config, name))


class Published:
    """An engine core that switches as published between two models."""

    def __init__(self, paths: list[Path], *, executor: str) -> None:
        from vllm.v1.engine.core import EngineCore
        from vllm.v1.executor import Executor

        self.configs = [arguments(path).create_engine_config() for path in paths]
        for config in self.configs:
            config.parallel_config.distributed_executor_backend = executor
        self.core = EngineCore(self.configs[0], Executor.get_class(self.configs[0]), False)
        self.active = 0
        self.loads: list[float] = []
        """What loading weights and building a runner, or restoring them, took in the worker; milliseconds."""

    def switch(self) -> float:
        """To the other model; milliseconds."""
        from vllm.v1.core.sched.interface import PauseState
        from vllm.v1.structured_output import StructuredOutputManager

        core, target = self.core, 1 - self.active
        started = time.perf_counter()
        config = self.configs[target]
        core.pause_scheduler(mode="abort", clear_cache=True)
        core.model_executor.collective_rpc("sleep", kwargs={"level": 1})
        core.model_executor.collective_rpc(unload, args=(self.active,))
        self.loads += core.model_executor.collective_rpc(load, args=(target, config))
        core.vllm_config = config
        configure(config, core.model_executor)
        kv_cache_config = core._initialize_kv_caches(config)
        core.structured_output_manager = StructuredOutputManager(config)
        core.scheduler = self._scheduler(config, kv_cache_config)
        core.scheduler.set_pause_state(PauseState.UNPAUSED)
        self.active = target
        return (time.perf_counter() - started) * 1e3

    def _scheduler(self, config: Any, kv_cache_config: Any) -> Any:
        from vllm.utils.hashing import get_hash_fn_by_name
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash, resolve_kv_cache_block_sizes

        block_size, hash_block_size = resolve_kv_cache_block_sizes(kv_cache_config, config)
        hashing = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
        init_none_hash(hashing)
        self.core.request_block_hasher = get_request_block_hasher(hash_block_size, hashing)
        return config.scheduler_config.get_scheduler_cls()(
            vllm_config=config,
            kv_cache_config=kv_cache_config,
            structured_output_manager=self.core.structured_output_manager,
            include_finished_set=False,
            log_stats=False,
            block_size=block_size,
            hash_block_size=hash_block_size,
        )

    def rerun(self) -> float:
        """``EngineCore.__init__`` again, over the live executor; milliseconds."""
        from vllm.v1.engine.core import EngineCore

        bare, executor = object.__new__(EngineCore), self.core.model_executor
        started = time.perf_counter()
        executor.collective_rpc(forget_kv_cache)
        EngineCore.__init__(bare, self.configs[self.active], lambda _: executor, False)
        return (time.perf_counter() - started) * 1e3


def measure(paths: list[Path], *, executor: str, times: int) -> tuple[float, float, float]:
    """Medians of the published way and of the rerun, and the second model's first load in the worker: milliseconds."""
    published = Published(paths, executor=executor)
    try:
        for _ in range(3):  # both models loaded, and the first restored once
            published.switch()
        took = [published.switch() for _ in range(times)]
        reruns = [published.rerun() for _ in range(5)]
    finally:
        published.core.shutdown()
    return statistics.median(took), statistics.median(reruns), published.loads[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs=2, type=Path)
    parser.add_argument("--quick", action="store_true")
    chosen = parser.parse_args()
    times = 10 if chosen.quick else 30
    took, rerun, stock_load = measure(chosen.models, executor="mp", times=times)
    took_in_core, rerun_in_core, _ = measure(chosen.models, executor="uni", times=times)
    figures = {
        "published_way_p50_ms": took,
        "core_init_rerun_ms": rerun,
        "stock_load_ms": stock_load,
        "published_way_one_process_p50_ms": took_in_core,
        "core_init_rerun_one_process_ms": rerun_in_core,
    }
    print(json.dumps({name: round(value, 3) for name, value in figures.items()}))


if __name__ == "__main__":
    main()
