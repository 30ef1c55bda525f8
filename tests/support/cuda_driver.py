"""CUDA's driver and runtime as far as parking calls them, over this machine's memory: under vLLM's own allocator.

What it can't show: physical memory, times, streams, and that a real driver's calls do what these do.
"""

import ctypes
import weakref
from typing import Any

import pytest

UNMAPPED, FRESH = 0xDD, 0xEE
"""What memory is full of that is not mapped, and that was mapped just now."""
STREAM = 7
"""The stream of what is on its way."""


class Failed(RuntimeError):
    """The call that was to fail did."""


class Driver:
    """Memory at fixed addresses that comes and goes. ``fails_in`` counts calls down to one that raises Failed."""

    def __init__(self) -> None:
        self._buffers: dict[int, Any] = {}
        self.mapped: set[int] = set()
        self.maps = self.copied_out = self.calls = 0
        self.fails_in: int | None = None
        self._copies: list[tuple[int, int, int]] = []

    def make(self, size: int, filled: int) -> tuple[int, int, int, int]:
        """Mapped memory, as a handle of vLLM's allocator."""
        buffer = ctypes.create_string_buffer(bytes([filled]) * size, size)
        address = ctypes.addressof(buffer)
        self._buffers[address] = buffer
        self.mapped.add(address)
        return (0, size, address, 0)

    @property
    def used(self) -> int:
        return sum(len(self._buffers[address]) for address in self.mapped)

    def content(self) -> dict[int, bytes]:
        return {address: self._buffers[address].raw for address in sorted(self.mapped)}

    def _called(self) -> None:
        self.calls += 1
        if self.fails_in is not None:
            self.fails_in -= 1
            if self.fails_in < 0:
                self.fails_in = None
                raise Failed("the device says no")

    def create_and_map(self, handle: tuple[int, int, int, int]) -> None:
        self._called()
        assert handle[2] not in self.mapped, "mapped twice"
        self.maps += 1
        self.mapped.add(handle[2])
        ctypes.memset(handle[2], FRESH, handle[1])

    def unmap_and_release(self, handle: tuple[int, int, int, int]) -> None:
        self._called()
        assert handle[2] in self.mapped, "unmapped twice"
        self.mapped.discard(handle[2])
        ctypes.memset(handle[2], UNMAPPED, handle[1])

    def cudaMemcpy(self, to: int, source: int, size: int) -> None:
        self._called()
        self._at(source, size)
        self.copied_out += 1
        ctypes.memmove(to, source, size)

    @property
    def lib(self) -> "Driver":
        """The library itself, whose calls answer with a code."""
        return self

    def CUDART_CHECK(self, code: int) -> None:
        assert code == 0

    def cudaMemcpyAsync(self, to: Any, source: Any, size: Any, kind: int, stream: Any) -> int:
        assert (kind, stream.value) == (4, STREAM)
        self._copies.append((self._at(to.value, size.value), source.value, size.value))
        return self._asked()

    def cudaMemsetAsync(self, address: Any, value: int, size: Any, stream: Any) -> int:
        assert stream.value == STREAM
        self._copies.append((self._at(address.value, size.value), value, size.value))
        return self._asked()

    def _asked(self) -> int:
        """Where it fails nothing was begun."""
        try:
            self._called()
        except Failed:
            self._copies.pop()
            raise
        return 0

    def synchronize(self) -> None:
        """Only now does what was sent along the stream arrive."""
        copies, self._copies = self._copies, []
        for to, source, size in copies:
            self._at(to, size)
            if source < 256:
                ctypes.memset(to, source, size)
            else:
                ctypes.memmove(to, source, size)

    def _at(self, address: int, size: int) -> int:
        """An address, if all of it is mapped."""
        buffers = ((start, len(self._buffers[start])) for start in self.mapped)
        assert any(start <= address and address + size <= start + many for start, many in buffers), (
            "memory is touched that is not mapped"
        )
        return address

    def pinned(self, torch_empty: Any, *size: int, pin_memory: bool = False, **kwargs: Any) -> Any:
        """torch.empty, whose pinned memory is plain, has something in it, and can be refused."""
        if not pin_memory:
            return torch_empty(*size, **kwargs)
        self._called()
        return torch_empty(*size, **kwargs).fill_(FRESH)


class Pool:
    """torch's pool of one tag. Its tensors are there for as long as somebody holds ``holder``."""

    def __init__(self, addresses: list[int]) -> None:
        self._addresses = addresses
        self.holder: weakref.ref[Any] = weakref.ref(type("Nobody", (), {})())

    def snapshot(self) -> list[dict[str, int]]:
        used = int(self.holder() is not None)
        return [{"address": address, "allocated_size": used} for address in self._addresses]


class Device:
    """vLLM's own allocator over a driver; models take memory from it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import functools

        import torch
        from vllm.device_allocator import cumem

        self.driver = Driver()
        for name in ("create_and_map", "unmap_and_release"):
            monkeypatch.setattr(cumem, name, getattr(self.driver, name))
        monkeypatch.setattr(cumem, "libcudart", self.driver)
        self.allocator = cumem.CuMemAllocator()
        monkeypatch.setattr(cumem.CuMemAllocator, "get_instance", lambda: self.allocator)
        for name in ("synchronize", "empty_cache"):
            monkeypatch.setattr(torch.cuda, name, lambda *_: None)
        stream = type("Stream", (), {"cuda_stream": STREAM, "synchronize": lambda _: self.driver.synchronize()})
        monkeypatch.setattr(torch.cuda, "Stream", stream)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1000 - self.driver.used, 1000))
        monkeypatch.setattr(torch, "empty", functools.partial(self.driver.pinned, torch.empty))

    def take(self, tag: str) -> None:
        """A tag's memory is gone."""
        books = self.allocator.pointer_to_data
        for address in [at for at, data in books.items() if data.tag == tag]:
            del books[address]
            self.driver.mapped.discard(address)

    def held_by(self, tag: str, holder: Any) -> None:
        """What keeps the tensors of a tag."""
        for pool, _ in self.allocator.allocator_and_pools[tag]:
            pool.holder = weakref.ref(holder)

    def tensor(self, address: int, size: int) -> Any:
        """Some of the memory as a tensor of bytes."""
        import torch

        return torch.frombuffer((ctypes.c_char * size).from_address(address), dtype=torch.uint8)

    def give(self, tag: str, *sizes: int, filled: int) -> list[int]:
        """Memory of a tag; its addresses."""
        from vllm.device_allocator import AllocationData

        handles = [self.driver.make(size, filled) for size in sizes]
        for handle in handles:
            self.allocator.pointer_to_data[handle[2]] = AllocationData(handle, tag)
        addresses = [handle[2] for handle in handles]
        self.allocator.allocator_and_pools.setdefault(tag, []).append((Pool(addresses), None))
        return addresses
