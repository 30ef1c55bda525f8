"""What differs between the vLLM versions about a worker: its caches, its groups, what a dropped model leaves."""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from copy import copy
from typing import Any

from service.engine.versions import vllm_kv
from service.platforms import current
from service.platforms.base import kv_tensors, storages
from service.platforms.kv_blocks import Region


def mm_receiver_cache(config: Any) -> Any:
    """The worker's side of a model's multimodal cache; None where the model has none."""
    try:
        from vllm.multimodal.cache import worker_receiver_cache_from_config
    except ImportError:  # 0.26
        from vllm.multimodal import MULTIMODAL_REGISTRY

        return MULTIMODAL_REGISTRY.worker_receiver_cache_from_config(config, threading.Lock())
    return worker_receiver_cache_from_config(config, threading.Lock())


def keep_lora(worker: Any, lora_id: int) -> None:
    """In a worker: never drop an adapter that it has loaded from the host's memory.

    vLLM's own pin takes a place on the device, too, of which its scheduler knows nothing: the next step whose adapters
    need that place ends the engine. So the places are left to whoever runs, and are filled from memory.
    """
    worker.model_runner.lora_manager._adapter_manager._pin_lora_in_cpu_cache(lora_id)


def kv_cache_config(worker: Any) -> Any:
    """The layout of a worker's KV cache, as it was given to it; None before it was.

    vLLM's workers leave it to their runner, whose own has the layers of an encoder as well: they keep nothing, and it
    adds them each time.
    """
    if (own := getattr(worker, "kv_cache_config", None)) is not None:
        return own
    if (found := getattr(worker.model_runner, "kv_cache_config", None)) is None:
        return None
    from vllm.v1.kv_cache_interface import EncoderOnlyAttentionSpec

    given = copy(found)  # with what else is known of it, such as what it may lend
    given.kv_cache_groups = [
        group for group in found.kv_cache_groups if not isinstance(group.kv_cache_spec, EncoderOnlyAttentionSpec)
    ]
    return given


def making_kv_cache(config: Any) -> AbstractContextManager[object]:
    """Surrounds the making of a KV cache of this layout."""
    return current().kv_memory(lent=vllm_kv.floor_of(config) is not None)


def initialize_from_config(original: Callable[..., None], self: Any, configs: Any) -> None:
    """Replaces the worker wrapper's."""
    with making_kv_cache(configs[self.global_rank]):
        original(self, configs)


def kv_regions(worker: Any) -> tuple[Region, ...]:
    """Where the blocks of a worker's KV cache lie; () where that isn't known, as in 0.26, which has one tensor a layer.

    In 0.32 all layers are in one allocation, attention, latent attention and Mamba alike. Groups overlay each other:
    a block is one group's at a time.
    """
    if len(storages(kv_tensors(worker))) != 1 or not vllm_kv.is_one_allocation(config := kv_cache_config(worker)):
        return ()
    return tuple(
        dict.fromkeys(
            Region(
                offset=each.offset,
                blocks=config.num_blocks,
                layers=len(each.layers),
                block_stride=each.block_stride,
                layer_stride=each.layer_stride,
                page=min(each.block_stride, each.layer_stride),
            )
            for each in config.kv_cache_tensors
        )
    )


def fresh(config: Any) -> Any:
    """The configuration of a loaded model with which it can be built again: without the layers it registered."""
    config.compilation_config.static_forward_context = {}
    for name in ("static_all_moe_layers", "static_all_attention_layers"):
        if hasattr(config.compilation_config, name):
            setattr(config.compilation_config, name, [])
    return config


def forget_step(worker: Any) -> set[str]:
    """Undo what a step left in a runner that failed half-way. Answers with the ids of the requests that it knows.

    Its encoder outputs go, too: the scheduler takes all those for computed that it had asked for.
    """
    runner = worker.model_runner
    runner.execute_model_state = None
    batch = getattr(runner, "input_batch", None)
    for name in ("prev_sampled_token_ids", "prev_req_id_to_index"):
        if hasattr(batch, name):
            setattr(batch, name, None)
    if hasattr(runner, "reset_encoder_cache"):
        runner.reset_encoder_cache()
    states = getattr(runner, "req_states", None)  # of 0.32's second runner
    return set(runner.requests if states is None else states.req_id_to_index)


def end_transfers(worker: Any) -> None:
    """End what the worker of the seated model has towards others: its KV connector, its encoder's, a trainer."""
    from vllm.distributed.ec_transfer import ensure_ec_transfer_shutdown
    from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown

    ensure_kv_transfer_shutdown()
    ensure_ec_transfer_shutdown()
    if (trainer := getattr(worker, "weight_transfer_engine", None)) is not None:
        trainer.shutdown()


def make_expert_groups(config: Any) -> None:
    """The process groups that a mixture of experts wants, which vLLM makes only where the first model is one.

    They are the process's, made once and never swapped. Every rank must make them, in one order. ``config`` is the
    current configuration. Raises ValueError for elastic expert parallelism, whose groups are made in another way.
    """
    import torch
    from vllm.distributed import parallel_state

    parallel = config.parallel_config
    if not config.model_config.is_moe:
        return
    wanted: dict[str, dict[str, Any]] = {"_EP": {"group_name": "ep"}}
    if hasattr(parallel, "use_all2all"):  # 0.32
        wanted["_EP"]["use_all2all"] = parallel.use_all2all
    if parallel.enable_eplb:
        wanted["_EPLB"] = {"group_name": "eplb"}
    missing = {name: how for name, how in wanted.items() if getattr(parallel_state, name) is None}
    if not missing:
        return
    if getattr(parallel, "enable_elastic_ep", False):
        raise ValueError("a model with elastic expert parallelism must be the first one of its engine")
    world = parallel_state.get_world_group()
    backend = torch.distributed.get_backend(world.device_group)
    for name, how in missing.items():
        group = parallel_state.init_model_parallel_group(_expert_ranks(parallel), world.local_rank, backend, **how)
        setattr(parallel_state, name, group)


def _expert_ranks(parallel: Any) -> list[list[int]]:
    """Ranks by expert group: those of one pipeline stage, over data, context and tensor parallelism."""
    import torch

    width = parallel.prefill_context_parallel_size * parallel.tensor_parallel_size
    ranks = torch.arange(torch.distributed.get_world_size())
    stages = ranks.reshape(-1, parallel.data_parallel_size, parallel.pipeline_parallel_size, width).transpose(1, 2)
    grouped: list[list[int]] = stages.reshape(-1, parallel.data_parallel_size * width).tolist()
    return grouped
