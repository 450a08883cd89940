"""A mixture-of-experts layer for inference, written with direct calls of the Buffer that can be timed.

Start reading at `ExpertParallelMoE.forward`: gate, layout, dispatch, experts, combine. `deep_ep_py.moe.MoELayer` is a
shorter layer with gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch

from deep_ep_py.tools.bench.routing import generator, limit_to_groups

if TYPE_CHECKING:
    from deep_ep_py import Buffer
    from deep_ep_py.moe import Experts

T = TypeVar("T")


class Phase(Protocol):
    """A callable that runs a step of the layer and may time it."""

    def __call__(self, name: str, call: Callable[[], T]) -> T:
        """Return the result of the call."""


def _just_call(name: str, call: Callable[[], T]) -> T:
    del name
    return call()


class Gate:
    """DeepSeek-V3's gate: sigmoid scores, a bias only for the choice, group-limited top-k, normalized weights.

    Parameters
    ----------
    hidden, experts, topk
        Sizes.
    groups, top_groups
        The number of groups of experts; a token chooses experts from its best `top_groups` groups.
    scaling
        The sum of a token's weights.
    seed
        Seed of the parameters.
    """

    def __init__(
        self,
        hidden: int,
        experts: int,
        topk: int,
        groups: int = 8,
        top_groups: int = 4,
        scaling: float = 2.5,
        seed: int = 0,
    ) -> None:
        random = generator(seed, 0)
        self.weight = torch.randn(experts, hidden, generator=random) / hidden**0.5
        self.bias = torch.randn(experts, generator=random) * 0.01
        self.topk, self.groups, self.top_groups, self.scaling = topk, groups, top_groups, scaling

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return int64 expert ids and float32 weights, both [tokens, topk]."""
        with torch.autocast(x.device.type, enabled=False):  # scores in bfloat16 would often tie
            scores = (x.float() @ self.weight.t()).sigmoid()
        eligible = limit_to_groups(scores + self.bias, self.topk, self.groups, self.top_groups)
        topk_idx = eligible.topk(self.topk, dim=1).indices
        weights = scores.gather(1, topk_idx)
        return topk_idx, weights * (self.scaling / weights.sum(dim=1, keepdim=True))


class ExpertParallelMoE:
    """A mixture-of-experts layer in which every rank has its own tokens and its own share of the experts.

    Parameters
    ----------
    buffer
        The `deep_ep_py.Buffer` of the ranks. One buffer serves all layers of a model.
    gate
        The gate, the same on every rank.
    experts
        This rank's experts: rank r of R holds the r-th of R equal shares.
    num_experts
        Number of experts on all ranks together.
    """

    def __init__(self, buffer: Buffer, gate: Gate, experts: Experts, num_experts: int) -> None:
        self.buffer, self.gate, self.experts, self.num_experts = buffer, gate, experts, num_experts
        self.rows_received = 0
        """Number of rows that arrived at this rank in the last call: one for each token with an expert here."""
        self.rows_sent = 0
        """Number of rows that this rank sent in the last call: for each token, one to every rank with its experts."""

    def forward(self, x: torch.Tensor, phase: Phase = _just_call) -> torch.Tensor:
        """Run the layer on this rank's tokens. Collective.

        Parameters
        ----------
        x
            BF16 [tokens, hidden].
        phase
            Called as `phase(name, call)` for each step. The default just calls; the demo times the steps with it.

        Returns
        -------
        torch.Tensor
            BF16 [tokens, hidden].
        """
        # Each token chooses its experts, on any rank.
        topk_idx, topk_weights = phase("gate", lambda: self.gate(x))

        # Count the tokens for each rank and each expert, and find out which ranks each token goes to.
        num_tokens_per_rank, _, num_tokens_per_expert, is_token_in_rank, _ = phase(
            "layout", lambda: self.buffer.get_dispatch_layout(topk_idx, self.num_experts)
        )

        # Send each token once to every rank that holds one of its experts. Received rows are sorted by source rank,
        # then token; expert ids are local, -1 for experts of other ranks.
        recv_x, recv_topk_idx, recv_topk_weights, _, handle, _ = phase(
            "dispatch",
            lambda: self.buffer.dispatch(
                x,
                topk_idx=topk_idx,
                topk_weights=topk_weights,
                num_tokens_per_rank=num_tokens_per_rank,
                is_token_in_rank=is_token_in_rank,
                num_tokens_per_expert=num_tokens_per_expert,
            ),
        )
        self.rows_received, self.rows_sent = recv_x.size(0), int(num_tokens_per_rank.sum())

        # combine sums without weights, so the gate's weights are applied here.
        expert_out = phase("experts", lambda: self.experts(recv_x, recv_topk_idx, recv_topk_weights).to(x.dtype))

        # Return the rows to the tokens' owners, and sum the ranks' results for each token.
        combined_x, _, _ = phase("combine", lambda: self.buffer.combine(expert_out, handle))
        return combined_x
