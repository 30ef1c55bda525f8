"""Memory of the CPU that a KV cache takes page by page, and gives back page by page."""

import ctypes
import math
import mmap
from collections.abc import Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from service.platforms.kv_blocks import Region

_LIBC = ctypes.CDLL(None, use_errno=True)
_UNRESERVED = getattr(mmap, "MAP_NORESERVE", 0x4000)


class Untouched(TorchFunctionMode):
    """The bytes that are asked for as zeros inside, in this thread, are pages that the system gives at the first write.

    torch itself writes its zeros, all of them. Such memory can't be resized. With ``small_pages`` its pages can be
    given back one by one; a large one would first be divided.
    """

    def __init__(self, *, small_pages: bool) -> None:
        super().__init__()
        self._small_pages = small_pages

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.zeros and kwargs.get("dtype") is torch.int8 and args:
            size = args[0] if isinstance(args[0], int) else math.prod(args[0])
            return untouched(size, small_pages=self._small_pages)
        return func(*args, **kwargs)


def untouched(size: int, *, small_pages: bool) -> torch.Tensor:
    """So many bytes, all zero, none of them there yet: int8 [size]."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _UNRESERVED)
    if small_pages and hasattr(mmap, "MADV_NOHUGEPAGE"):
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.int8)


def give_back(storage: Any, regions: Sequence[Region], blocks: Sequence[int]) -> int:
    """Give the system all whole pages of a storage in which nothing of ``blocks`` is; bytes of the others that have
    some. Raises OSError, and ValueError where nobody says where these blocks lie: all of them would be given back.
    """
    import numpy as np

    if blocks and not regions:
        raise ValueError("blocks of a KV cache are to be kept, and its layout is not known")

    skew = storage.data_ptr() % mmap.PAGESIZE
    end = (skew + storage.nbytes()) // mmap.PAGESIZE
    edges = np.zeros(end + 2, dtype=np.int32)
    for region in regions if blocks else ():
        starts = region.starts(blocks) + skew
        np.add.at(edges, starts // mmap.PAGESIZE, 1)
        np.add.at(edges, (starts + region.page - 1) // mmap.PAGESIZE + 1, -1)
    kept = np.cumsum(edges[:-1]) > 0
    given = ~kept
    given[: -(-skew // mmap.PAGESIZE)] = given[end:] = False  # the first and the last page have other things, too
    for first, last in np.flatnonzero(np.diff(given, prepend=False, append=False)).reshape(-1, 2).tolist():
        address = storage.data_ptr() - skew + first * mmap.PAGESIZE
        size = (last - first) * mmap.PAGESIZE
        if _LIBC.madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), mmap.MADV_DONTNEED):
            raise OSError(ctypes.get_errno(), "a part of the KV cache can't be given back to the system")
    return int(kept.sum()) * mmap.PAGESIZE
