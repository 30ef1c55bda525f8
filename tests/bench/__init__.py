"""Measurements: ``python -m tests.bench.NAME``."""
