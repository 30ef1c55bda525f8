"""Gaudi, by vllm-gaudi's HPUWorker: written for its release v0.26.0, and run with it on a stand-in for the card.

What two models of a worker process would share there, and what is done about it:

| shared | is |
|---|---|
| bucketing manager in use (``HPUBucketingManager._active_instance``) | set at each switch |
| runtime configuration (``RUNTIME_CONFIG``): features by model type, such as a float32 softmax | a model's own |
| ``QUANT_CONFIG`` and the hybrid-cache variables, read while a runner is built and later | a model's own |
| ``ops.USING_INC``, read from ``QUANT_CONFIG`` at import | set at each switch |
| rotary embeddings, which the worker's own sleep would move under the other models | never shared |
| one calibration per process, and only if it started with ``QUANT_CONFIG`` | finished per model (hpu_worker) |
| the compiler's limit of variants, made for one model's buckets | lifted (hpu_worker) |
| the compiler's leave to run code without its guards (``VLLM_FULL_WARMUP``) | not given (hpu_worker) |

Sleeping flags, KV-cache layout, buckets, captured graphs, defragmenter and profilers are the worker's or its
runner's, and a model keeps its own worker and runner as long as it is loaded: nothing is warmed up twice.

A model goes to the host as its worker's own sleep takes it, by its parameters and buffers. What else it has on the card
(scales of a quantized one, slots of adapters, a drafter, graphs) stays there while it is parked, as its overhead in the
budgets. In lazy mode with graphs a model can't leave its addresses: it is dropped where another one would be parked.
The KV cache is made anew by the worker's waking, so no block of it is kept: its requests are prefilled again.

Beside another model's steps its parameters come back as copies that the card fetches from pinned memory while it
computes, so many bytes between two steps that the inputs of the next one wait for no more than a few milliseconds. What
the worker's waking does beyond that, to make a new KV cache above all, is done in two pieces behind them. Nothing of it
uses a second thread. On a card none of this was run: not what a copy delays, and not what the two pieces take.

Its v0.27.0rc0 was tagged before v0.26.0 and lacks the latter's alignment of mixed models. It does not load beside vLLM
0.27.0 (``fused_moe.layer`` has no ``FusedMoE`` there); beside vLLM 0.26.0 it does.
"""

import functools
import itertools
import logging
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from service.platforms.base import KV_CACHE, WEIGHTS, Asleep, Platform, pinned_bytes, storages
from service.platforms.kv_blocks import Region

log = logging.getLogger(__name__)

_ITS_WORKER = "vllm_gaudi.v1.worker.hpu_worker.HPUWorker"
_OUR_WORKER = "service.platforms.hpu_worker.ContextWorker"
_MIB = 1 << 20
PIECE = 256 * _MIB
"""Bytes that may be on their way to the card beside another model's steps: five milliseconds of a Gaudi 3's link."""
ARRIVAL_S = 0.1
"""How long they are waited for at the most: in lazy mode a card may say nothing before it has more to do."""


class HpuPlatform(Platform):
    """vLLM's HPU worker."""

    imports_only = False  # they open the card, and read QUANT_CONFIG
    wakes_aside = False  # its waking collects garbage, looks at the environment, and waits for the device
    continues = False  # its runner has request states of its own
    warm_up_s = 4 * 3600.0
    module_variables = (("vllm_gaudi.extension.runtime", "RUNTIME_CONFIG"),)
    environment = (
        "QUANT_CONFIG",
        "VLLM_USE_HYBRID_CACHE",
        "VLLM_USE_NAIVE_MAMBA_CACHE_SHARING",
        "VLLM_COMPACT_GDN",
    )

    def prepare(self) -> None:
        """Give requests what HPUAsyncScheduler asks them for, and vLLM 0.26's have not: nothing is to be discarded."""
        from vllm.v1.request import Request

        if not hasattr(Request, "discard_latest_async_tokens"):
            Request.discard_latest_async_tokens = False

    def arrange(self, config: Any) -> None:
        """Let its worker be one that minds budgets; a worker class that was chosen by hand stays."""
        if config.parallel_config.worker_cls == _ITS_WORKER:
            config.parallel_config.worker_cls = _OUR_WORKER

    @contextmanager
    def loading(self) -> Iterator[None]:
        _say_whether_quantized()
        yield

    def random_state(self) -> Any:
        import torch

        return torch.hpu.random.get_rng_state()

    def set_random_state(self, state: Any) -> None:
        import torch

        torch.hpu.random.set_rng_state(state)

    def leave(self, worker: Any) -> None:
        if (manager := _bucketing_manager(worker)) is not None:
            type(manager).deactivate()

    def enter(self, worker: Any) -> None:
        _say_whether_quantized()
        if (manager := _bucketing_manager(worker)) is not None:
            manager.activate()

    def release(self, worker: Any) -> None:
        try:
            worker.shutdown()
        finally:
            super().release(worker)

    def parks(self, worker: Any) -> bool:
        from habana_frameworks.torch.utils.internal import is_lazy

        return bool(worker.model_config.enforce_eager or not is_lazy())

    def park(self, worker: Any, asleep: Asleep, blocks: Sequence[int] = ()) -> None:  # noqa: ARG002 - none is kept
        """The worker's own sleep, which moves every tensor to the host each time: it finds the parameters there, copied
        to pinned memory the first time. What a waking that failed had brought back goes again, too.

        Where it fails, the worker takes itself for asleep, so that its waking brings back what had gone.
        """
        model = worker.model_runner.model
        try:
            for name, parameter in model.named_parameters():
                if name not in asleep.host:
                    asleep.host[name] = _to_host(parameter.data)
                parameter.data = asleep.host[name]
            if worker.model_sleeping:
                model.to("cpu")
            if worker.kv_cache_sleeping:
                _discard_kv_cache(worker)
            worker.sleep(1)
        except BaseException:
            worker.model_sleeping = True
            worker.kv_cache_sleeping = worker.kv_cache_sleeping or not worker.model_runner.kv_caches
            raise

    def wake(self, worker: Any, asleep: Asleep, tags: frozenset[str]) -> None:  # noqa: ARG002 - the host copies stay
        """The worker's own waking of what sleeps."""
        asked = [WEIGHTS] if WEIGHTS in tags and worker.model_sleeping else []
        if KV_CACHE in tags and worker.kv_cache_sleeping:
            if worker.kv_cache_config.kv_cache_tensors:
                asked.append(KV_CACHE)
            else:  # an encoder has none, and its waking takes one for granted
                worker.kv_cache_sleeping = False
        if asked:
            worker.wake_up(asked)

    def ahead(self, worker: Any, asleep: Asleep) -> Iterator[None]:  # noqa: ARG002 - the host copies stay
        """Its parameters. None is fetched before those of the piece before it have arrived, as far as the card says."""
        import torch

        device, on_the_way = worker.vllm_config.device_config.device, 0
        for parameter in worker.model_runner.model.parameters():
            if parameter.device.type != "cpu":
                continue
            parameter.data = parameter.data.to(device, non_blocking=True)
            on_the_way += parameter.nbytes
            if on_the_way >= PIECE:
                arrived, on_the_way, by = torch.hpu.Event(), 0, time.monotonic() + ARRIVAL_S
                arrived.record()
                yield
                while not arrived.query() and time.monotonic() < by:
                    yield

    def empty(self, worker: Any, asleep: Asleep) -> None:
        worker.model_runner.model = None
        _discard_kv_cache(worker)
        worker.kv_cache_sleeping = True
        asleep.host = {}

    def block_bytes(self, regions: Sequence[Region]) -> int:  # noqa: ARG002 - wherever they lie
        return 0

    def device_budget(self, share: float | None) -> int | None:
        """Of nine tenths of a card, or what ``share`` says, what HPUWorker does not keep for its graphs.

        The driver's tool is asked: torch would take the card for the process that asks.
        """
        tool = shutil.which("hl-smi")
        if tool is None:
            return None
        asked = [tool, "-Q", "memory.total", "-f", "csv,noheader,nounits"]
        said = subprocess.run(asked, capture_output=True, text=True, check=True).stdout  # noqa: S603
        card = min(int(line.split()[0]) for line in said.splitlines() if line.strip()) * _MIB
        return int(card * (share or 0.9) * (1 - _kept_for_graphs()))

    def weights_bytes(self, worker: Any) -> int:
        """Of what moves to the host; the rest of a model is its overhead."""
        model = worker.model_runner.model
        moving = () if model is None else itertools.chain(model.parameters(), model.buffers())
        return sum(storage.nbytes() for storage in storages(iter(moving)))

    def copies_bytes(self, worker: Any, asleep: Asleep) -> int:
        """Of its parameters, each in pinned memory of its own, and of its buffers, which go there each time."""
        model = worker.model_runner.model
        if model is None:
            return 0
        coming = [parameter for name, parameter in model.named_parameters() if name not in asleep.host]
        there = asleep.copies_bytes + sum(buffer.nbytes for buffer in model.buffers())
        return there + sum(pinned_bytes(parameter.nbytes) for parameter in coming)

    def kv_bytes(self, worker: Any) -> int:
        """What was allocated, or planned: in lazy mode storages may not tell."""
        if worker.kv_cache_sleeping or worker.kv_cache_config is None:
            return super().kv_bytes(worker)
        planned = sum(tensor.size for tensor in worker.kv_cache_config.kv_cache_tensors)
        return max(super().kv_bytes(worker), planned)

    def memory_used(self) -> int:
        import torch

        free, total = torch.hpu.mem_get_info()
        return total - free


def _discard_kv_cache(worker: Any) -> None:
    """What the worker's own sleep does about it, which some modes refuse."""
    worker.model_runner.defragmenter = None
    worker.model_runner.kv_caches = []
    for layer in worker.vllm_config.compilation_config.static_forward_context.values():
        layer.kv_cache = None


def _to_host(tensor: Any) -> Any:
    """A copy in memory that the card fetches from by itself; in the host's other where there is none to be had."""
    copy = tensor.to("cpu")
    try:
        return copy.pin_memory()
    except RuntimeError as error:
        _say_unpinned(str(error))
        return copy


@functools.cache
def _say_unpinned(why: str) -> None:
    log.warning("Parked weights are in memory that the card can't fetch from while it computes: %s", why)


def _bucketing_manager(worker: Any) -> Any:
    return getattr(worker.model_runner, "bucketing_manager", None)


def _kept_for_graphs() -> float:
    """The share of the memory that HPUWorker leaves to captured graphs, by the variable that it reads it from."""
    try:
        return float(os.environ.get("VLLM_GRAPH_RESERVED_MEM", "0.1"))
    except ValueError:
        return 0.1


def _say_whether_quantized() -> None:
    from vllm_gaudi.extension import ops

    ops.USING_INC = "QUANT_CONFIG" in os.environ
