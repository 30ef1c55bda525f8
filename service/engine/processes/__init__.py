"""The engine's processes: started and ended here, and taught about contexts by vLLM's plugin entry point."""
