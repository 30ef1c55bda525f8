"""What a process holds outside of any object of a model's: a flat snapshot of its module state, path by path.

``take`` runs inside the core and the workers. A snapshot keeps no reference to what it saw: objects are their kind and
their identity. Not seen are what lies deeper than ``DEPTH``, more than ``ITEMS`` of a container, and what libraries
keep outside of Python.
"""

import collections
import enum
import functools
import gc
import hashlib
import logging
import os
import re
import sys
import threading
import types
import weakref
from typing import Any

DEPTH, ITEMS, TEXT = 3, 400, 120
"""How deep containers and objects are looked into, how many items of each, how long a value's text is."""

Snapshot = dict[str, str]
_SCALAR = (bool, int, float, complex, str, bytes, type(None), enum.Enum, range)
_LOCKS = (type(threading.Lock()), type(threading.RLock()), threading.Condition, threading.Event, threading.local)
_SKIPPED = (types.ModuleType, logging.Logger, *_LOCKS, weakref.ref, types.BuiltinFunctionType)
_REMEMBERING = type(functools.lru_cache(lambda: 0))
_CONTAINER = (dict, list, tuple, set, frozenset, collections.deque, types.MappingProxyType)
_COMPILERS = re.compile(r"__(compiled_fn_\d+(_[0-9a-f_]{36})?|builtins_dict___\d+)")
"""The names that torch's compiler gives to what it makes of a module's function, in that module: a new one each time,
so that none replaces another, and run under guards of all that it depends on."""
_met: list[str] = []
"""Modules in the order in which they were first met: paths stay the same when more are loaded."""


def take(_worker: Any = None) -> Snapshot:
    """The state of this process now."""
    gc.collect()
    return {**_process(), **walked("vllm", "vllm_gaudi")}


def walked(*packages: str) -> Snapshot:
    """What the modules of these packages hold now."""
    walk = _Walk(packages)
    walk.modules()
    return walk.found


def changed(before: Snapshot, after: Snapshot) -> dict[str, tuple[str | None, str | None]]:
    """Paths whose values differ; a module that is new in ``after`` is not looked at."""
    known = {path.partition(":")[0] for path in before}
    return {
        path: (before.get(path), after.get(path))
        for path in before.keys() | after.keys()
        if path.partition(":")[0] in known and before.get(path) != after.get(path)
    }


def name_of(path: str) -> str:
    """Whose part a path is: a variable of a module, or of a class in it."""
    found = re.match(r"[^:]+:[\w.]+", path)
    return found.group() if found else path


def _short(value: Any) -> str:
    """One value without looking into it."""
    import torch

    if isinstance(value, _SCALAR):
        text = repr(value)
        return text if len(text) <= TEXT else f"{text[:TEXT]}~{_digest(text.encode())}"
    if isinstance(value, torch.dtype | torch.device):
        return str(value)
    if isinstance(value, type):
        return f"class {value.__module__}.{value.__qualname__}"
    if isinstance(value, types.FunctionType):
        return f"function {value.__module__}.{value.__qualname__}@{id(value)}"
    if isinstance(value, torch.Tensor):
        return f"tensor {value.dtype} {tuple(value.shape)}@{id(value)}"
    return f"{type(value).__module__}.{type(value).__qualname__}@{id(value)}"


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:12]


class _Walk:
    def __init__(self, packages: tuple[str, ...]) -> None:
        self.found: Snapshot = {}
        self._seen: set[int] = set()
        self._packages = packages

    def modules(self) -> None:
        known = set(_met)
        _met.extend(name for name in sorted(sys.modules) if name not in known and self._ours(name))
        for name in _met:
            module = sys.modules.get(name)
            if isinstance(module, types.ModuleType):
                for attribute, value in list(vars(module).items()):
                    if not (_dunder(attribute) or _COMPILERS.fullmatch(attribute)):
                        self._value(f"{name}:{attribute}", value, name)

    def _ours(self, module: str | None) -> bool:
        return (module or "").partition(".")[0] in self._packages

    def _value(self, path: str, value: Any, module: str, depth: int = 0) -> None:
        if isinstance(value, _SKIPPED) or (isinstance(value, type) and not self._ours(value.__module__)):
            return
        self.found[path] = _short(value)
        if isinstance(value, _SCALAR) or id(value) in self._seen:
            return
        if isinstance(value, type):
            if value.__module__ == module and depth <= 1:
                self._class(path, value, module, depth)
        elif isinstance(value, _REMEMBERING):
            self._seen.add(id(value))
            path, module, depth = _home(value) or (path, module, depth)
            self._remembered(path, value)
            self._function(path, module, depth, value.__wrapped__)
        elif isinstance(value, types.FunctionType):
            if value.__module__ == module or self._ours(value.__module__):
                self._function(*(_home(value) or (path, module, depth)), value)
        elif isinstance(value, _CONTAINER) or depth < DEPTH:
            self._seen.add(id(value))
            ours = depth == 0 and self._ours(type(value).__module__)
            self._inside(*((ours and _home(value)) or (path, module, depth)), value)

    def _class(self, path: str, value: type, module: str, depth: int) -> None:
        self._seen.add(id(value))
        for name, part in list(vars(value).items()):
            if _dunder(name):  # pydantic's hold addresses
                continue
            inner = part.__func__ if isinstance(part, staticmethod | classmethod) else part
            self._value(f"{path}.{name}", inner.fget if isinstance(inner, property) else inner, module, depth + 1)

    def _remembered(self, path: str, function: Any) -> None:
        self.found[f"{path}(currsize)"] = str(function.cache_info().currsize)
        for held in gc.get_referents(function):
            if isinstance(held, dict):
                for key in list(held)[:ITEMS]:
                    text = ", ".join(map(_short, key)) if isinstance(key, tuple | list) else _short(key)
                    self.found[f"{path}(cached){{{text}}}"] = "there"

    def _function(self, path: str, module: str, depth: int, function: Any) -> None:
        if id(function) in self._seen or not isinstance(function, types.FunctionType):
            return
        self._seen.add(id(function))
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            try:
                self._value(f"{path}<{name}>", cell.cell_contents, module, depth + 1)
            except ValueError:  # an empty cell
                continue
        for name, part in list(vars(function).items()):
            self._value(f"{path}/{name}", part, module, depth + 1)
        for part in function.__defaults__ or ():
            if isinstance(part, dict | list | set):
                self._value(f"{path}(default)", part, module, depth + 1)

    def _inside(self, path: str, module: str, depth: int, value: Any) -> None:
        import torch

        if isinstance(value, torch.Tensor):
            if value.device.type == "cpu" and 0 < value.numel() <= 1 << 16 and value.layout == torch.strided:
                content = value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
                self.found[f"{path}(content)"] = _digest(content)
        elif isinstance(value, _CONTAINER):
            self.found[f"{path}(len)"] = str(len(value))
            if isinstance(value, dict | types.MappingProxyType):
                for key, part in list(value.items())[:ITEMS]:
                    self._value(f"{path}[{_short(key)}]", part, module, depth + 1)
            elif isinstance(value, set | frozenset):
                self.found |= {f"{path}{{{_short(part)}}}": "there" for part in list(value)[:ITEMS]}
            else:
                for index, part in enumerate(list(value)[:ITEMS]):
                    self._value(f"{path}[{index}]", part, module, depth + 1)
        else:
            if isinstance(value, functools.partial):
                self._value(f"{path}(partial)", value.func, module, depth + 1)
            for name, part in list(_attributes(value).items())[:ITEMS]:
                self._value(f"{path}/{name}", part, module, depth + 1)


def _home(of: Any) -> tuple[str, str, int] | None:
    """Path, module and depth of a function, or of an object of a class, in the module that defines it, whichever
    importer was met first; None for others.
    """
    module = getattr(of, "__module__", None)
    for name, value in list(vars(sys.modules.get(str(module), object)).items()):
        if value is of and not _dunder(name):
            return f"{module}:{name}", str(module), 0
    return None


def _dunder(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def _attributes(value: Any) -> dict[str, Any]:
    found = dict(getattr(value, "__dict__", None) or {})
    for kind in type(value).__mro__:
        for name in vars(kind).get("__slots__", ()):
            try:
                found[name] = object.__getattribute__(value, name)
            except AttributeError:
                continue
    return found


def _process() -> Snapshot:
    """What a process has beside modules: its environment, and the state of torch, numpy and Python."""
    import random

    import numpy as np
    import torch

    numpys = np.random.get_state()
    found = {f"environ:{name}": _short(value) for name, value in os.environ.items() if "LAUNCH_KEY" not in name}
    state: dict[str, Any] = {
        "torch:rng": _digest(torch.get_rng_state().numpy().tobytes()),
        "torch:initial_seed": torch.initial_seed(),
        "torch:default_dtype": torch.get_default_dtype(),
        "torch:default_device": torch.get_default_device(),
        "torch:threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "torch:deterministic": (
            torch.are_deterministic_algorithms_enabled(),
            torch.get_deterministic_debug_mode(),
            torch.utils.deterministic.fill_uninitialized_memory,
        ),
        "torch:matmul_precision": torch.get_float32_matmul_precision(),
        "torch:grad": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "torch:autocast": (torch.is_autocast_enabled("cpu"), str(torch.get_autocast_dtype("cpu"))),
        "torch:mkldnn": torch.backends.mkldnn.enabled,
        "torch:tf32": (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32),
        "numpy:random": _digest(numpys[1].tobytes() + str(numpys[2]).encode()),
        "numpy:errors": np.geterr(),
        "random:state": _digest(repr(random.getstate()).encode()),
        "process:affinity": sorted(os.sched_getaffinity(0)),
        "process:directory": os.getcwd(),  # noqa: PTH109
        "process:gc": (gc.isenabled(), gc.get_threshold()),
        "process:path": sys.path,
        "process:recursion": sys.getrecursionlimit(),
    }
    found |= {name: str(value) for name, value in state.items()}
    for name in ("torch._dynamo.config", "torch._inductor.config", "torch._functorch.config"):
        if name in sys.modules:
            config: Any = sys.modules[name]
            found |= {
                f"{name}:{key}": re.sub(r"@\d+", "", _short(value)) for key, value in config.get_config_copy().items()
            }
    frames: Any = sys.modules.get("torch._dynamo.convert_frame")
    if frames is not None:
        found["torch._dynamo:bytecode_hooks"] = str(len(frames._bytecode_hooks))
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        for group, name in torch.distributed.distributed_c10d._world.pg_names.items():
            found[f"torch.distributed:groups[{name}]"] = f"{type(group).__name__}@{id(group)}"
    return found
