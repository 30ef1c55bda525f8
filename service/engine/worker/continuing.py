"""In a worker: model runner V1 is told only the prompt of a new request, and finds in its parameters what it had said.

V2 is given both by the scheduler, and draws by seed and position. On a CPU V1's generators are made
ones that can be rewound.
"""

from collections.abc import Callable
from typing import Any

from service.engine.versions import vllm_progress
from service.engine.worker.seeds import RewindableGenerator
from service.platforms import current


def remember(original: Callable[..., Any], self: Any) -> None:
    """CachedRequestState.__post_init__: its outputs are there before the batch takes it in, its generator past them."""
    original(self)
    if self.generator is not None and not current().seeds_rewind:
        self.generator = RewindableGenerator(self.generator)
    said = vllm_progress.said_of(self.sampling_params)
    if said and not self.output_token_ids:
        self.output_token_ids = list(said)
        if self.generator is not None:
            vllm_progress.advance(self.generator, len(said))
