"""The asynchronous engine: one AsyncLLM per model, in the caller's event loop."""
