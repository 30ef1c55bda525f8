"""What the engine asks of a device, with the answers that hold where a device does not know better."""

import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar

from service.platforms.kv_blocks import Region, content, copied_back, copied_out

WEIGHTS, KV_CACHE = "weights", "kv_cache"
"""vLLM's own tags for what sleeps and wakes."""


@dataclass(slots=True)
class Asleep:
    """What a parked model has given back, and where its weights are meanwhile.

    ``host`` outlives the waking: weights do not change, so they are copied to the host once; slots of adapters do, and
    are copied each time. Its keys are the platform's.
    """

    kv: list[tuple[Any, int]] = field(default_factory=list)
    weights: list[tuple[Any, int]] = field(default_factory=list)
    host: dict[Any, Any] = field(default_factory=dict)
    away: set[Any] = field(default_factory=set)
    """What has to be brought back, where the device's memory does not tell; the platform's keys."""
    regions: tuple[Region, ...] = ()
    """Where the blocks of the KV cache lie; said before the first are kept."""
    blocks: tuple[int, ...] = ()
    """The blocks of the KV cache whose content is kept, by their ids."""
    kept: list[Any] = field(default_factory=list)
    """Copies of them; none where they stay in their place."""
    beside: dict[int, Any] = field(default_factory=dict)
    """Copies of what lies beside the KV cache in its memory, by address, where the platform has such."""
    in_place: int = 0
    """Bytes of the KV cache that stay where they are."""

    @property
    def host_bytes(self) -> int:
        """What the copies take of the host."""
        return self.copies_bytes + _taken(self.kept) + _taken(self.beside.values())

    @property
    def copies_bytes(self) -> int:
        """Those of the weights."""
        return _taken(self.host.values())

    @property
    def kept_bytes(self) -> int:
        """What the blocks take that are kept."""
        return self.in_place + _taken(self.kept)

    def forget_blocks(self) -> None:
        self.blocks, self.kept, self.in_place = (), [], 0


def _taken(copies: Iterable[Any]) -> int:
    """Bytes of host memory that copies take: torch's allocator of pinned memory gives powers of two."""
    return sum(pinned_bytes(copy.nbytes) if copy.is_pinned() else copy.nbytes for copy in copies)


def pinned_bytes(size: int) -> int:
    """What torch's allocator of pinned memory gives: a power of two."""
    return 1 << (size - 1).bit_length() if size else 0


class Platform(ABC):
    """A device as the engine sees it, in each of its processes. One object per process."""

    weights_move: ClassVar[bool] = True
    """Whether parked weights leave the device; not where host and device are one."""
    imports_only: ClassVar[bool] = True
    """Whether importing vLLM leaves the device unopened, so that a process that has done so can be forked."""
    idle_threads: ClassVar[str] = "jemalloc_bg_thd"
    """A pattern for the names of threads that imports may start: a process can be forked beside them.

    jemalloc, which some libraries bring along, starts its own anew in a child.
    """
    own_preloads: ClassVar[bool] = False
    """Whether vLLM writes ``LD_PRELOAD`` for the processes that it starts, which one that is forked does without."""
    worker_modules: ClassVar[tuple[str, ...]] = ()
    """What the platform's worker imports, beside what every worker does."""
    continues: ClassVar[bool] = True
    """Whether its model runner takes a new request that has outputs already."""
    seeds_rewind: ClassVar[bool] = True
    """Whether a seeded generator has an offset, which can be set without drawing."""
    module_variables: ClassVar[tuple[tuple[str, str], ...]] = ()
    """Variables of a worker process's modules that belong to one model, beyond vLLM's own; None before it made its."""
    environment: ClassVar[tuple[str, ...]] = ()
    """Environment variables that belong to one model: read while it is built, or later."""

    warm_up_s: ClassVar[float] = 0.0
    """How long warming a model up may take at the most, where that is not a part of loading it.

    A core that is stuck in a warm-up is noticed after so long; one that has not begun with it, after a load's time.
    """

    def __init__(self) -> None:
        self.at_start = {name: os.environ.get(name) for name in self.environment}
        """Those variables before any model was built here."""

    def imported(self) -> None:
        """Called in a process that has imported vLLM for those that are forked from it.

        What vLLM's configuration says by variables, to modules that a new interpreter would import afterwards, is said
        to those that are there.
        """

    def prepare(self) -> None:
        """Called once in each of vLLM's processes, before a model is built there."""

    def arrange(self, config: Any) -> None:
        """Make a model's VllmConfig one that lives beside others; called where configurations are made."""

    # --- a model's worker comes, sits and goes --------------------------------------------------------------------

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Surrounds the building of a further model; what the process held for the others is put aside already."""
        yield

    def random_state(self) -> Any:
        """Where the device's own generator is; None where it has none."""
        return None

    def set_random_state(self, state: Any) -> None:
        """Put the device's generator where it was."""

    def local_rank(self, worker: Any) -> int:
        """The place on this host that a worker's device was chosen by; another model's worker gets the same."""
        rank: int = worker.local_rank
        return rank

    def init_device(self, worker: Any) -> None:
        """Give a further worker its device and its runner.

        vLLM's initialization of the distributed environment does nothing the second time.
        """
        worker.init_device()

    def leave(self, worker: Any) -> None:
        """A model is about to be taken out of the wrapper."""

    def enter(self, worker: Any) -> None:
        """A model was put into the wrapper; its module variables and its environment are in place."""

    def release(self, worker: Any) -> None:
        """Cut what holds a dropped model's tensors."""
        worker.model_runner = None

    def collected(self) -> None:
        """Called when nothing holds the tensors any more of models that were released or emptied."""

    # --- parking and waking; the model sits in the wrapper meanwhile ----------------------------------------------

    def park(self, worker: Any, asleep: Asleep, blocks: Sequence[int] = ()) -> None:
        """Give a model's KV cache back and move its weights to the host.

        Tensors stay the objects they are, so that whatever refers to them (graphs, layers, views) is right after
        waking. The content of ``blocks`` of the cache is kept on the host, and is there again after waking. Of a model
        that is parked already ``blocks`` are kept ones, or none: then nothing is kept any more.
        """
        self.keep_blocks(worker, asleep, blocks)
        for storage in storages(kv_tensors(worker)):
            if storage.nbytes():
                asleep.kv.append((storage, storage.nbytes()))
                storage.resize_(0)
        if self.weights_move:
            self._move_weights(worker, asleep)

    def keep_blocks(self, worker: Any, asleep: Asleep, blocks: Sequence[int]) -> None:
        """Copy blocks of the KV cache to the host, which ``asleep`` has from then on."""
        if not blocks:
            asleep.forget_blocks()
        elif not asleep.blocks:
            (storage,) = storages(kv_tensors(worker))
            kept = copied_out(storage, asleep.regions, blocks, self.pinned)
            self.synchronize()
            asleep.kept, asleep.blocks = kept, tuple(blocks)

    def return_blocks(self, worker: Any, asleep: Asleep) -> None:
        """Put the kept blocks of a KV cache that is on the device again where they were."""
        if asleep.blocks:
            (storage,) = storages(kv_tensors(worker))
            copied_back(storage, asleep.regions, asleep.blocks, asleep.kept)
            self.synchronize()
            asleep.forget_blocks()

    def _move_weights(self, worker: Any, asleep: Asleep) -> None:
        changing = {id(storage) for storage in storages(changing_tensors(worker))}
        for storage in storages(model_tensors(worker)):
            if not storage.nbytes():
                continue
            if id(storage) not in asleep.host:
                asleep.host[id(storage)] = self.to_host(storage)
            elif id(storage) in changing:
                asleep.host[id(storage)].untyped_storage().copy_(storage)
            asleep.weights.append((storage, storage.nbytes()))
            storage.resize_(0)

    def to_host(self, storage: Any) -> Any:
        """A copy of a storage in pinned host memory."""
        import torch

        copy = self.pinned(storage.nbytes(), torch.uint8)
        copy.untyped_storage().copy_(storage)
        return copy

    def pinned(self, shape: Any, dtype: Any) -> Any:
        """Pinned host memory."""
        import torch

        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def wake(self, worker: Any, asleep: Asleep, tags: frozenset[str]) -> None:
        """Bring back what ``tags`` name. Of a KV cache what was kept; the rest is zeroed as it was when it was new.

        What fails half-way can be tried again, and parked again.
        """
        if WEIGHTS in tags:
            while asleep.weights:
                storage, size = asleep.weights[-1]
                storage.resize_(size)
                content(storage).copy_(asleep.host[id(storage)], non_blocking=True)
                asleep.weights.pop()
        if KV_CACHE in tags:
            while asleep.kv:
                storage, size = asleep.kv[-1]
                storage.resize_(size)
                content(storage).zero_()
                asleep.kv.pop()
            self.return_blocks(worker, asleep)
        self.synchronize()

    wakes_aside: ClassVar[bool] = True
    """Whether ``wake`` may run in a thread of its own while another model's steps run.

    Where it may not, a model that is brought back beside them comes by ``ahead``, and ``wake`` does the rest.
    """

    def ahead(self, worker: Any, asleep: Asleep) -> Iterator[None]:  # noqa: ARG002 - a device may need it
        """Bring a parked model back as far as that goes while another one's steps run, a piece between two of them."""
        yield from ()

    slices: ClassVar[bool] = False
    """Whether a model may be loaded in slices, in another thread than the main one, while another model's steps run."""

    @contextmanager
    def aside(self, worker: Any) -> Iterator[None]:  # noqa: ARG002 - a device may need it
        """Surrounds what is done in a thread of its own, on the device of ``worker``; it is done once this is left."""
        yield

    def synchronize(self) -> None:
        """Wait for copies under way."""

    def empty(self, worker: Any, asleep: Asleep) -> None:
        """Let go of weights and KV cache for good. The runner stays: it is told of requests that end meanwhile."""
        for storage in storages(kv_tensors(worker)):
            if storage.resizable():
                storage.resize_(0)
        asleep.kv, asleep.weights, asleep.host = [], [], {}
        asleep.forget_blocks()
        worker.model_runner.model = None

    # --- KV caches that are lent ----------------------------------------------------------------------------------

    @property
    def lends(self) -> bool:
        """Whether memory of single blocks of a KV cache can be given back and taken again, at addresses that stay."""
        return False

    def kv_memory(self, *, lent: bool) -> AbstractContextManager[object]:  # noqa: ARG002 - a device may need it
        """Surrounds the making of a KV cache. One that is ``lent`` takes no memory before it is written to."""
        return nullcontext()

    def give_back(self, worker: Any, regions: Sequence[Region], blocks: Sequence[int]) -> None:
        """Give back what a KV cache has beside ``blocks``. Raises OSError."""

    # --- figures --------------------------------------------------------------------------------------------------

    def device_budget(self, share: float | None) -> int | None:  # noqa: ARG002 - a device may need it
        """Bytes of one device that contexts may take: ``share`` of it, or as much as is sensible where nobody says.

        Asked in the frontend's process; None where that can't be known there.
        """
        return None

    def parks(self, worker: Any) -> bool:  # noqa: ARG002 - a device may need it
        """Whether a model can be parked; one that can't is dropped."""
        return True

    def block_bytes(self, regions: Sequence[Region]) -> int:
        """What a block of the KV cache takes of the host where it is kept; 0 where that can't be."""
        return sum(region.layers * region.page for region in regions)

    @abstractmethod
    def memory_used(self) -> int:
        """Bytes in use on this process's device."""

    def weights_bytes(self, worker: Any) -> int:
        """Bytes of a model's tensors, each storage counted once."""
        return sum(storage.nbytes() for storage in storages(model_tensors(worker)))

    def copies_bytes(self, worker: Any, asleep: Asleep) -> int:
        """Bytes that a model's copies take of the host once it is parked: those that are there, and those to come."""
        if not self.weights_move:
            return 0
        coming = [each for each in storages(model_tensors(worker)) if id(each) not in asleep.host]
        return asleep.copies_bytes + sum(pinned_bytes(each.nbytes()) for each in coming)

    def kv_bytes(self, worker: Any) -> int:
        """Bytes of a model's KV cache."""
        return sum(storage.nbytes() for storage in storages(kv_tensors(worker)))


def model_tensors(worker: Any) -> Iterator[Any]:
    """Every tensor of a worker's model and of its drafter: parameters, buffers, and what modules have beside them.

    Those are scales, and the slots of adapters. The KV cache, which layers hold too, is none of it.
    """
    cache = {storage.data_ptr() for storage in storages(kv_tensors(worker))}
    for module in _modules(worker):
        for tensor in flatten(list(vars(module).values())):
            if tensor.untyped_storage().data_ptr() not in cache:
                yield tensor


def changing_tensors(worker: Any) -> Iterator[Any]:
    """Those that requests change: the slots of adapters, which are neither parameters nor buffers."""
    if getattr(worker, "lora_config", None) is not None:
        for module in _modules(worker):
            others = [value for name, value in vars(module).items() if name not in {"_parameters", "_buffers"}]
            yield from flatten(others)


def _modules(worker: Any) -> Iterator[Any]:
    runner = worker.model_runner
    for owner in (runner, getattr(runner, "drafter", None)):
        model: Any = getattr(owner, "model", None)
        if hasattr(model, "modules"):
            yield from model.modules()


def kv_tensors(worker: Any) -> Iterator[Any]:
    """Every tensor of a worker's KV cache, however the runner nests them."""
    yield from flatten(getattr(worker.model_runner, "kv_caches", None))


def flatten(value: Any) -> Iterator[Any]:
    """The tensors in nested lists, tuples and mappings."""
    import torch

    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from flatten(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from flatten(part)


def storages(tensors: Iterator[Any]) -> list[Any]:
    """The distinct storages of ``tensors``."""
    return list({tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}.values())
