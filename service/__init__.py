"""Gearshift: event-driven inference, many models on one vLLM engine."""
