"""A KV cache by its blocks: where each of them lies, and copies of some of them on the host."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

_PIECE = 32 << 20
"""Bytes that are gathered on the device at a time, and copied as one."""


@dataclass(frozen=True, slots=True)
class Region:
    """Where layers of one shape have their pages: layer ``l`` of block ``b`` has ``page`` bytes from
    ``offset + l * layer_stride + b * block_stride`` on. The other bounds are counts.
    """

    offset: int
    blocks: int
    layers: int
    block_stride: int
    layer_stride: int
    page: int

    def pages(self, storage: Any) -> Any:
        """A storage's pages as a tensor [block, layer, word]."""
        import torch

        strides = self.block_stride, self.layer_stride
        word = torch.int64 if not any(each % 8 for each in (self.offset, self.page, *strides)) else torch.uint8
        words = content(storage)[: storage.nbytes() // word.itemsize * word.itemsize].view(word)
        block, layer = (stride // word.itemsize for stride in strides)
        shape = self.blocks, self.layers, self.page // word.itemsize
        return words.as_strided(shape, (block, layer, 1), self.offset // word.itemsize)

    def starts(self, blocks: Sequence[int]) -> Any:
        """The first byte of each page of some blocks."""
        import numpy as np

        layers = np.arange(self.layers, dtype=np.int64)[:, None] * self.layer_stride
        return (self.offset + layers + np.asarray(blocks, dtype=np.int64) * self.block_stride).ravel()


def content(storage: Any) -> Any:
    """A storage's bytes as a tensor: its operations let other threads run, a storage's own do not."""
    import torch

    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def copied_out(
    storage: Any, regions: Sequence[Region], blocks: Sequence[int], empty: Callable[[Any, Any], Any]
) -> list[Any]:
    """Copies of some blocks on the host, gathered piece by piece. They may be under way still.

    ``empty`` gives memory of the host for a shape and a type.
    """
    copies = []
    for pages, some in _pieces(storage, regions, blocks):
        gathered = pages.index_select(0, some)
        copies.append(empty(gathered.shape, gathered.dtype).copy_(gathered, non_blocking=True))
    return copies


def copied_back(storage: Any, regions: Sequence[Region], blocks: Sequence[int], copies: Sequence[Any]) -> None:
    """Put what ``copied_out`` gave for the same blocks where it was. It may be under way still."""
    for (pages, some), copy in zip(_pieces(storage, regions, blocks), copies, strict=True):
        pages.index_copy_(0, some, copy.to(storage.device, non_blocking=True))


def _pieces(storage: Any, regions: Sequence[Region], blocks: Sequence[int]) -> Iterator[tuple[Any, Any]]:
    """Each region's pages, and ids of blocks that make a piece of it."""
    import torch

    for region in regions:
        many = max(1, _PIECE // (region.layers * region.page))
        for first in range(0, len(blocks), many):
            yield region.pages(storage), torch.tensor(blocks[first : first + many], device=storage.device)
