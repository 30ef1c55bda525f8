"""What the engine asks of a device, with the answers that hold where a device does not know better."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Platform:
    """A device as the engine sees it, in each of its processes."""

    def leave(self, worker: Any) -> None:
        """A model is about to be taken out of the wrapper."""

    def enter(self, worker: Any) -> None:
        """A model was put into the wrapper."""

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Surrounds the building of a further model: the other models' random state is not touched by it."""
        import torch

        state = torch.get_rng_state()
        try:
            yield
        finally:
            torch.set_rng_state(state)

    def init_device(self, worker: Any) -> None:
        """Give a further worker its device and its runner.

        vLLM's initialization of the distributed environment does nothing the second time.
        """
        worker.init_device()

    def release(self, worker: Any) -> None:
        """Cut what holds a dropped model's tensors."""
        worker.model_runner = None

    def memory_used(self) -> int:
        """Bytes in use on this process's device."""
        raise NotImplementedError

    def weights_bytes(self, worker: Any) -> int:
        """Bytes of a model's parameters and buffers, each storage counted once."""
        return sum(storage.nbytes() for storage in storages(model_tensors(worker)))

    def kv_bytes(self, worker: Any) -> int:
        """Bytes of a model's KV cache."""
        return sum(storage.nbytes() for storage in storages(kv_tensors(worker)))


def model_tensors(worker: Any) -> Iterator[Any]:
    """Every parameter and buffer of a worker's model."""
    model = worker.model_runner.get_model() if worker.model_runner is not None else None
    if model is not None:
        yield from model.parameters()
        yield from model.buffers()


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
