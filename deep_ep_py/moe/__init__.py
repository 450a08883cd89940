"""Mixture-of-experts layers over `deep_ep_py.ops`, and their parts: gate, permutation, experts, FP8 casts."""

from deep_ep_py.device.rowwise.fp8 import per_token_cast_back, per_token_cast_to_fp8
from deep_ep_py.moe.decode import DecodeLayer, MicroBatch, run_two
from deep_ep_py.moe.expanded_layer import ExpandedMoELayer
from deep_ep_py.moe.grouped import grouped_linear
from deep_ep_py.moe.layer import Experts, Gate, MoELayer
from deep_ep_py.moe.packed import PackedExperts
from deep_ep_py.moe.permute import Permutation, permute, sort_by_expert, unpermute

__all__ = [
    "DecodeLayer",
    "Experts",
    "ExpandedMoELayer",
    "Gate",
    "MicroBatch",
    "MoELayer",
    "PackedExperts",
    "Permutation",
    "grouped_linear",
    "per_token_cast_back",
    "per_token_cast_to_fp8",
    "permute",
    "run_two",
    "sort_by_expert",
    "unpermute",
]
