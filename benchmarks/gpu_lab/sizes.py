"""The sizes of the benchmarks: those of DeepSeek's layers, as in the figures that others publish."""

from __future__ import annotations

RANKS = 8
HIDDEN, TOPK, EXPERTS = 7168, 8, 256
NORMAL_TOKENS, LOW_LATENCY_TOKENS = 4096, 128
NORMAL_BLOCKS, BLOCKS_PER_GPU = 16, 24  # of each of 8 ranks that share a GPU, and of a rank that has one
NORMAL_ITERATIONS, LOW_LATENCY_ITERATIONS = 10, 20
SHAPE = (f"--hidden={HIDDEN}", f"--topk={TOPK}", f"--experts={EXPERTS}")
"""The same as options of `python -m deep_ep_py bench`."""
