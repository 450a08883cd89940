"""A mixture-of-experts layer over `deep_ep_py.ops`, and what it is made of: gate, permutation, experts, FP8 casts."""

from deep_ep_py.moe.fp8 import per_token_cast_back, per_token_cast_to_fp8
from deep_ep_py.moe.grouped import grouped_linear
from deep_ep_py.moe.layer import Experts, Gate, MoELayer
from deep_ep_py.moe.permute import Permutation, permute, sort_by_expert, unpermute

__all__ = [
    "Experts",
    "Gate",
    "MoELayer",
    "Permutation",
    "grouped_linear",
    "per_token_cast_back",
    "per_token_cast_to_fp8",
    "permute",
    "sort_by_expert",
    "unpermute",
]
