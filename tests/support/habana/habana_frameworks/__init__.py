"""A stand-in for the vendor's library that maps Gaudi's device onto the CPU, for tests without a card.

vllm-gaudi's own platform, workers and model runner run on it unchanged. It can't show: device memory apart from host
memory, tensors that move, captured graphs and warm-up, fused kernels, collectives between cards, or times.
"""
