"""vllm-gaudi's worker as one of several in its process. Imported in worker processes only: it needs vllm-gaudi."""

import math
import os
from collections.abc import Mapping
from typing import Any

import torch
from vllm.utils.torch_utils import get_dtype_size
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec
from vllm_gaudi.v1.worker import hpu_model_runner
from vllm_gaudi.v1.worker.hpu_worker import HPUWorker

_NO_LIMIT = 1 << 20
_MIB = 1 << 20


class ContextWorker(HPUWorker):
    """One model's worker. What it changes holds for one model as for many."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # torch.compile counts the variants of a piece of code, and models of one architecture share their code; its
        # limit would be what one model's buckets need, and beyond it code runs uncompiled. Buckets bound them anyway.
        torch._dynamo.config.cache_size_limit = _NO_LIMIT
        torch._dynamo.config.accumulated_cache_size_limit = _NO_LIMIT

    def determine_available_memory(self) -> int:
        """Bytes for the KV cache: ``kv_cache_memory_bytes`` where that is set, which HPUWorker does not look at.

        Raises ValueError where the device has not so much left.
        """
        available: int = super().determine_available_memory()
        wanted = self.cache_config.kv_cache_memory_bytes
        if wanted is None:
            return available
        free, _ = torch.hpu.mem_get_info()
        if wanted > free:
            raise ValueError(
                f"a KV cache of {wanted // _MIB} MiB does not fit: {free // _MIB} MiB of the device are free"
            )
        compact = os.environ.get("VLLM_COMPACT_GDN", "0").strip().lower() in {"1", "true"}
        return int(wanted * planned_share(self.get_kv_cache_spec(), compact=compact))

    def execute_model(self, scheduler_output: Any) -> Any:
        """A step, before which requests that were preempted between two steps leave the batch.

        HPUModelRunner takes it for granted that a resumed request left it in a step of its own; the block table of
        one that is still there would go on from its old blocks (vLLM's GPU runner minds this).
        """
        batch = self.model_runner.input_batch
        resumed = scheduler_output.scheduled_cached_reqs.resumed_req_ids & batch.req_id_to_index.keys()
        if resumed:
            rows = [batch.remove_request(request_id) for request_id in sorted(resumed)]
            batch.condense(sorted(rows, reverse=True))
            for request_id in resumed:
                (batch.prev_req_id_to_index or {}).pop(request_id, None)
        return super().execute_model(scheduler_output)

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        if self.model_runner.mem_margin is None:
            # A runner that is built anew for a known KV cache was not profiled, and its warm-up wants what that finds.
            self.determine_available_memory()
        super().initialize_from_config(kv_cache_config)

    def compile_or_warm_up_model(self) -> Any:
        """Warm up, after which the compiler checks its guards as before.

        With ``VLLM_FULL_WARMUP`` the runner has the whole process skip them. A further model's code would then be what
        was compiled for the first one, if it is of its architecture, or could not be compiled at all.
        """
        try:
            return super().compile_or_warm_up_model()
        finally:
            torch.compiler.set_stance(skip_guard_eval_unsafe=False)

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Wake up, and warm the defragmenter: a new KV cache gets a new one, and its first swap must not compile.

        It is made anew afterwards as the runner does after its own warm-up, for accuracy's sake.
        """
        slept = self.kv_cache_sleeping
        super().wake_up(tags)
        runner = self.model_runner
        if not slept or self.kv_cache_sleeping or runner.skip_warmup or self.model_config.enforce_eager:
            return
        runner.defragmenter.warmup()
        runner.defragmenter = type(runner.defragmenter)(runner.kv_caches, runner.block_size)

    def shutdown(self) -> None:
        """Finish this model's calibration, if it is in one.

        HPUWorker does that once per process, and with what its module had imported when the process started.
        """
        runner = self.model_runner
        if runner is not None and getattr(runner, "inc_initialized_successfully", False):
            from neural_compressor.torch.quantization import finalize_calibration

            hpu_model_runner.shutdown_inc_called = False
            runner.shutdown_inc(finalize_calibration=finalize_calibration)
        super().shutdown()


def planned_share(specs: Mapping[str, Any], *, compact: bool) -> float:
    """How much of a KV cache's bytes vLLM may plan with. Mixed models get their state beside their pages on HPU.

    vLLM plans as if attention and state took turns in one buffer; HPUWorker allocates both, unless the state is
    ``compact``. These are the ratios by which it lowers what it found itself.
    """
    attention = next((spec for spec in specs.values() if isinstance(spec, FullAttentionSpec)), None)
    state = next((spec for spec in specs.values() if isinstance(spec, MambaSpec)), None)
    if attention is None or state is None:
        return 1.0
    state_bytes = sum(
        math.prod(shape) * get_dtype_size(dtype) for shape, dtype in zip(state.shapes, state.dtypes, strict=True)
    )
    if state.mamba_type not in hpu_model_runner._GDN_MAMBA_TYPES:
        return attention.page_size_bytes / (attention.page_size_bytes + state_bytes)
    if compact:
        return 1.0
    page = next(iter(specs.values())).page_size_bytes
    return min(1.0, page / (attention.real_page_size_bytes + state_bytes))
