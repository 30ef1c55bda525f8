"""The workers' half: a whole vLLM worker per model in each worker process."""
