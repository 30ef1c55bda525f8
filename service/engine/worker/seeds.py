"""In a worker on a CPU: the generator of a seeded request, which runner V1 rewinds.

A piece of a prefill that is not its last is sampled like any other row, and what it drew is given back afterwards, by
the generator's offset. A CPU's generator (a Mersenne twister) has none, and vLLM's step fails, with all requests in it.
So the state is kept before each sampling, 5 KB in less than a microsecond, and put back where the offset is set.
"""

from collections.abc import Callable
from typing import Any

import torch


class RewindableGenerator(torch.Generator):
    """A CPU's generator that can be put back to where it was before the last sampling, and nowhere else."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.set_state(generator.get_state())
        self._kept = self.get_state()

    def __new__(cls, generator: torch.Generator) -> "RewindableGenerator":
        return super().__new__(cls, device=generator.device)

    def keep(self) -> None:
        self._kept = self.get_state()

    def get_offset(self) -> int:
        """As counted from where it was last kept: vLLM sets the offset to less than this."""
        return 0

    def set_offset(self, offset: int) -> None:
        """Back to before the last sampling."""
        assert offset < 0, "what was drawn is given back, nothing else"
        self.set_state(self._kept)


def keep(original: Callable[..., Any], batch: Any) -> Any:
    """InputBatch.update_async_output_token_ids, which the runner calls before it samples."""
    for generator in batch.generators.values():
        if isinstance(generator, RewindableGenerator):
            generator.keep()
    return original(batch)
