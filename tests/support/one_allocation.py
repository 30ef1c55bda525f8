"""Where one allocation holds the keys and values of all layers, blocks of it can be lent, or kept while it is away."""

import pytest
import vllm

HAS_ONE = not vllm.__version__.startswith("0.26")
ONE_ALLOCATION = pytest.mark.skipif(
    not HAS_ONE, reason="0.26 has a tensor for each layer, of which nothing can be lent or kept"
)
