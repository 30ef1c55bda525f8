"""Calls answered by vLLM's own OpenAI handlers on the asynchronous engine."""
