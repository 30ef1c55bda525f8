"""The synchronous engine: one LLMEngine per model, whose steps the caller runs."""
