"""The generator of a seeded request on a CPU is put back by what was drawn since it was last kept."""

from types import SimpleNamespace

import torch
from hypothesis import given
from hypothesis import strategies as st

from service.engine.worker.seeds import RewindableGenerator, keep


def draw(generator: torch.Generator) -> int:
    return int(torch.randint(0, 2**31, (1,), generator=generator))


@given(st.integers(0, 2**32), st.integers(0, 5), st.lists(st.booleans(), max_size=30))
def test_what_was_given_back_is_drawn_again_and_nothing_else(seed: int, before: int, kept: list[bool]) -> None:
    plain = torch.Generator().manual_seed(seed)
    for _ in range(before):
        draw(plain)
    rewindable = RewindableGenerator(plain)
    batch = SimpleNamespace(generators={0: torch.Generator(), 3: rewindable})
    found = []
    for stays in kept:
        assert keep(lambda given: given is batch, batch)
        drawn = draw(rewindable)
        if stays:
            found.append(drawn)
        else:
            rewindable.set_offset(rewindable.get_offset() - 4)
    assert found == [draw(plain) for _ in found]
