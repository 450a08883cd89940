"""Stand-in for `deep_ep.utils`: the helpers of tests and benchmarks of DeepEP 1.2 and 2, and the events of 1.2."""

from . import envs, event, gate, math, refs, testing
from .envs import init_dist
from .event import EventHandle, EventOverlap
from .math import (
    calc_diff,
    create_grouped_scores,
    hash_tensor,
    inplace_unique,
    per_token_cast_back,
    per_token_cast_to_fp8,
)
from .testing import bench, bench_kineto

__all__ = [
    "EventHandle",
    "EventOverlap",
    "bench",
    "bench_kineto",
    "calc_diff",
    "create_grouped_scores",
    "envs",
    "event",
    "gate",
    "hash_tensor",
    "init_dist",
    "inplace_unique",
    "math",
    "per_token_cast_back",
    "per_token_cast_to_fp8",
    "refs",
    "testing",
]
