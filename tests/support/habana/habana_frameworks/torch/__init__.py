"""habana_frameworks.torch: importing it makes the device "hpu" an alias of the CPU in this process."""

import contextlib
import functools
import os
import sys
import types
from pathlib import Path

import torch
from torch._dynamo.backends.registry import register_backend
from torch.overrides import TorchFunctionMode

TOTAL = int(os.environ.get("HPU_STANDIN_BYTES", str(8 << 30)))
_BY_INDEX = {
    torch.Tensor.index_select,
    torch.index_select,
    torch.Tensor.index_copy_,
    torch.Tensor.index_copy,
    torch.Tensor.index_fill_,
}


def _is_hpu(device):
    if isinstance(device, torch.device):
        return device.type == "hpu"
    return isinstance(device, str) and (device == "hpu" or device.startswith("hpu:"))


class HpuIsCpu(TorchFunctionMode):
    """Whatever names the device "hpu" gets the CPU."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if _is_hpu(kwargs.get("device")):
            kwargs["device"] = torch.device("cpu")
        args = tuple(torch.device("cpu") if _is_hpu(arg) else arg for arg in args)
        # The card's kernels take indices that are out of range (those of padding) where the CPU's raise.
        if func in _BY_INDEX and len(args) >= 3:
            size = args[0].shape[args[1]]
            args = (*args[:2], args[2].remainder(size) if size else args[2], *args[3:])
        elif func is torch.nn.functional.embedding:
            args = (args[0].remainder(args[1].shape[0]), *args[1:])
        return func(*args, **kwargs)


HpuIsCpu().__enter__()
# A vLLM for the card has no kernels of its own; the CPU's are for processors that this one may not be.
sys.modules["vllm._C"] = None


class Stream:
    def __init__(self, *_, **__): ...
    def wait_stream(self, *_): ...
    def wait_event(self, *_): ...
    def synchronize(self): ...
    def record_event(self, *_):
        return Event()


class Event:
    def __init__(self, *_, **__): ...
    def record(self, *_): ...
    def synchronize(self): ...
    def wait(self, *_): ...
    def query(self):
        return True


@functools.cache
def _resident_before():
    return _resident()


def _resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def mem_get_info(*_):
    """The device's memory in use: what this process has grown by since it was first asked."""
    used = max(_resident() - _resident_before(), 0)
    return max(TOTAL - used, 0), TOTAL


def _module(name, **members):
    module = types.ModuleType(name)
    vars(module).update(members)
    sys.modules[name] = module
    return module


random = _module(
    "torch.hpu.random",
    manual_seed=torch.manual_seed,
    manual_seed_all=torch.manual_seed,
    get_rng_state=lambda *_: torch.get_rng_state(),
    set_rng_state=lambda state, *_: torch.set_rng_state(state),
)
torch.hpu = _module(
    "torch.hpu",
    random=random,
    manual_seed=torch.manual_seed,
    manual_seed_all=torch.manual_seed,
    get_rng_state=random.get_rng_state,
    set_rng_state=random.set_rng_state,
    synchronize=lambda *_, **__: None,
    empty_cache=lambda: None,
    mem_get_info=mem_get_info,
    memory_allocated=lambda *_: 0,
    init=lambda: None,
    is_available=lambda: True,
    is_initialized=lambda: True,
    device_count=lambda: 1,
    current_device=lambda: 0,
    set_device=lambda *_: None,
    get_device_name=lambda *_: "stand-in",
    get_device_properties=lambda *_: types.SimpleNamespace(name="stand-in", total_memory=TOTAL),
    Stream=Stream,
    Event=Event,
    current_stream=lambda *_: Stream(),
    stream=contextlib.nullcontext,
    _is_in_bad_fork=lambda: False,
)

from . import core, hpex, hpu, internal, utils  # noqa: E402, F401 - they need torch.hpu

torch.hpu.wrap_in_hpu_graph = hpu.wrap_in_hpu_graph
torch.hpu.metrics = hpu.metrics


@register_backend(name="hpu_backend")
def hpu_backend(module, _inputs, **_):
    return module.forward
