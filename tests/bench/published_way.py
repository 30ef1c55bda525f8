"""The published way of switching, on vLLM's stock CPU worker: what vllm-gaudi's reconfigure does, step by step.

Drain, sleep, stash the runner, collect garbage, restore the other runner, a new KV cache of the same size, a new
structured-output manager, scheduler and block hasher. No sleeps to poll. Beside it: ``EngineCore.__init__`` run again
over the live executor. Prints a line of JSON.
"""

import argparse
import gc
import json
import statistics
import time
from typing import Any

from tests.bench.switch import arguments


class Published:
    """An in-process engine core that switches as published."""

    def __init__(self, paths: list[str]) -> None:
        from pathlib import Path

        from vllm.v1.engine.core import EngineCore
        from vllm.v1.executor import Executor

        self.configs = [arguments(Path(path)).create_engine_config() for path in paths]
        for config in self.configs:
            config.parallel_config.distributed_executor_backend = "uni"
        self.core = EngineCore(self.configs[0], Executor.get_class(self.configs[0]), False)
        self.worker = self.core.model_executor.driver_worker.worker
        self.stash: dict[int, Any] = {0: self.worker.model_runner}
        self.stash[1] = self._load(self.configs[1])
        self.active = 1

    def _load(self, config: Any) -> Any:
        from vllm.config import set_current_vllm_config

        self._configure(config)
        with set_current_vllm_config(config):
            self.worker.model_runner = type(self.worker.model_runner)(config, self.worker.device)
        self.worker.load_model()
        return self.worker.model_runner

    def _configure(self, config: Any) -> None:
        for owner in (self.worker, self.core.model_executor):
            owner.vllm_config = config
            for name in ("model_config", "cache_config", "load_config", "scheduler_config", "compilation_config"):
                setattr(owner, name, getattr(config, name))
        self.core.model_executor.driver_worker.vllm_config = config

    def switch(self) -> float:
        """To the other model; milliseconds."""
        from vllm.v1.core.sched.interface import PauseState
        from vllm.v1.structured_output import StructuredOutputManager

        core, target = self.core, 1 - self.active
        started = time.perf_counter()
        core.pause_scheduler(mode="abort", clear_cache=True)
        core.model_executor.collective_rpc("sleep", kwargs={"level": 1})
        self.stash[self.active] = self.worker.model_runner
        self.worker.model_runner = None
        gc.collect()
        config = self.configs[target]
        self._configure(config)
        self.worker.model_runner = self.stash[target]
        self._forget_kv_cache()
        core.vllm_config = config
        kv_cache_config = core._initialize_kv_caches(config)
        core.structured_output_manager = StructuredOutputManager(config)
        core.scheduler = self._scheduler(config, kv_cache_config)
        core.scheduler.set_pause_state(PauseState.UNPAUSED)
        self.active = target
        return (time.perf_counter() - started) * 1e3

    def _forget_kv_cache(self) -> None:
        """vLLM's own runner takes a new KV cache only where it has none; Gaudi's replaces it."""
        runner = self.worker.model_runner
        runner.attn_groups.clear()
        runner.kv_caches.clear()

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

        self._forget_kv_cache()
        bare, executor = object.__new__(EngineCore), self.core.model_executor
        started = time.perf_counter()
        EngineCore.__init__(bare, self.configs[self.active], lambda _: executor, False)
        return (time.perf_counter() - started) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs=2)
    parser.add_argument("--quick", action="store_true")
    chosen = parser.parse_args()
    published = Published(chosen.models)
    published.switch()
    published.switch()
    took = [published.switch() for _ in range(10 if chosen.quick else 30)]
    reruns = [published.rerun() for _ in range(5)]
    print(
        json.dumps(
            {
                "published_way_p50_ms": round(statistics.median(took), 3),
                "core_init_rerun_ms": round(statistics.median(reruns), 3),
            }
        )
    )


if __name__ == "__main__":
    main()
