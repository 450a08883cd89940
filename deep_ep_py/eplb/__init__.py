"""Placement of redundant experts, by the method of DeepSeek's Expert Parallelism Load Balancer (EPLB).

Ranks that hold experts with many tokens delay all others, so such experts are held more than once. A *logical expert*
is an expert of the model: a router chooses it by its id. A *physical expert* is a place for an expert's weights on a
rank: dispatch takes its id, and rank r of R holds the r-th of R equal shares. The physical experts that hold the same
logical expert are its *replicas*.

`plan` computes a `Placement` from the tokens that each logical expert has received, `logical_to_physical` applies it to
a router's choices, and `physical_to_logical` turns the counts of a dispatch into the loads of the next plan. `Move`
brings weights, and in training optimizer state, from the ranks of one placement to those of the next; `ReplicaSums`
sums the gradients of replicas.
"""

from deep_ep_py.eplb.loads import RankLoads, physical_to_logical, rank_loads
from deep_ep_py.eplb.moving import Move
from deep_ep_py.eplb.placement import Placement
from deep_ep_py.eplb.planning import plan
from deep_ep_py.eplb.replicas import ReplicaSums
from deep_ep_py.eplb.routing import logical_to_physical

__all__ = [
    "Move",
    "Placement",
    "RankLoads",
    "ReplicaSums",
    "logical_to_physical",
    "physical_to_logical",
    "plan",
    "rank_loads",
]
