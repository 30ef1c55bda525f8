"""The engine: models as contexts of one vLLM engine core, switched between two of its steps."""
