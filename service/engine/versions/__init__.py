"""Everything that differs between the vLLM versions this engine runs on, 0.26 and 0.32. No other package asks."""
