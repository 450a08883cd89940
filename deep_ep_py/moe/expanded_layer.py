"""A mixture-of-experts layer whose rows arrive grouped by expert: no permutation between dispatch and the experts."""

from __future__ import annotations

from torch import Tensor, nn

from deep_ep_py import ops
from deep_ep_py.moe.layer import Experts, check_share


class ExpandedMoELayer(nn.Module):
    """Like `MoELayer`, over `deep_ep_py.ops.dispatch_expanded`.

    A token's row travels once to each rank. There it is copied to each chosen expert, and the results are summed before
    they return.

    Parameters
    ----------
    gate, num_experts, group
        As in `MoELayer`.
    experts : Experts
        This rank's share, or a class derived from `Experts` that overrides `on_groups`.
    expert_alignment, num_max_tokens : int
        As in `deep_ep_py.ops.dispatch_expanded`. A grouped GEMM may demand that each expert's rows are aligned.
    fp8 : bool
        As in `MoELayer`.

    Raises
    ------
    ValueError
        As `MoELayer`.
    """

    def __init__(
        self,
        gate: nn.Module,
        experts: Experts,
        num_experts: int,
        group: str,
        expert_alignment: int = 1,
        num_max_tokens: int = 0,
        fp8: bool = False,
    ) -> None:
        super().__init__()
        check_share(experts, num_experts, group)
        self.gate, self.experts = gate, experts
        self.num_experts, self.group = num_experts, group
        self.expert_alignment, self.num_max_tokens, self.fp8 = expert_alignment, num_max_tokens, fp8

    def forward(self, x: Tensor) -> Tensor:
        """Run the layer on this rank's tokens.

        Parameters
        ----------
        x : torch.Tensor
            [..., hidden] of a floating-point dtype; rows travel in bfloat16, or FP8.

        Returns
        -------
        torch.Tensor
            Of the shape and dtype of x.
        """
        tokens = x.reshape(-1, x.shape[-1])
        topk_idx, topk_weights = self.gate(tokens)
        received = ops.dispatch_expanded(
            tokens.bfloat16(),
            topk_idx,
            topk_weights,
            self.num_experts,
            self.group,
            self.expert_alignment,
            self.num_max_tokens,
            self.fp8,
        )
        # An expert's padding belongs to it: these rows are 0, and no token has them.
        ends = (received.ends + self.expert_alignment - 1) // self.expert_alignment * self.expert_alignment
        rows = self.experts.on_groups(received.x, ends)
        # combine sums without weights, so the gate's weights are applied here, in fp32.
        weighted = (rows.float() * received.topk_weights.unsqueeze(1)).bfloat16()
        return ops.combine_expanded(weighted, received.routes, self.group).to(x.dtype).view(x.shape)
