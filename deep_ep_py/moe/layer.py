"""A mixture-of-experts layer whose experts are distributed over ranks. Start reading at `MoELayer.forward`."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from deep_ep_py import ops
from deep_ep_py.base.arguments import MAX_EXPERTS, describe
from deep_ep_py.moe.grouped import grouped_linear
from deep_ep_py.moe.permute import permute, sort_by_expert, unpermute
from deep_ep_py.ops.registry import buffer_of


class Gate(nn.Module):
    """A gate: softmax over all experts, then top-k, with weights normalized to sum to 1.

    It computes in float32, also under `torch.autocast`.

    Parameters
    ----------
    hidden, num_experts, topk : int
        Sizes. Every rank must have the same gate.
    """

    def __init__(self, hidden: int, num_experts: int, topk: int) -> None:
        super().__init__()
        if not 1 <= topk <= num_experts:
            raise ValueError(f"topk={topk}: expected 1 to num_experts ({num_experts})")
        self.topk = topk
        self.weight = nn.Parameter(torch.randn(num_experts, hidden) / hidden**0.5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Choose experts for tokens.

        Parameters
        ----------
        x : torch.Tensor
            [tokens, hidden].

        Returns
        -------
        topk_idx : torch.Tensor
            int64 [tokens, top-k].
        topk_weights : torch.Tensor
            float32 [tokens, top-k].
        """
        with torch.autocast(x.device.type, enabled=False):  # scores in bfloat16 would often tie
            scores = functional.linear(x.float(), self.weight.float()).softmax(dim=1)
        weights, topk_idx = scores.topk(self.topk, dim=1)
        return topk_idx, weights / weights.sum(dim=1, keepdim=True)


class Experts(nn.Module):
    """A share of a layer's experts, each a SwiGLU MLP that computes in the dtype of its weights.

    Parameters
    ----------
    first, count : int
        This module holds the experts [first, first + count) of the layer.
    hidden, intermediate : int
        Sizes of the MLPs.
    seed : int
        Seed of the weights. An expert's weights do not depend on the rank that holds it. Use a different seed for each
        layer.
    """

    def __init__(self, first: int, count: int, hidden: int, intermediate: int, seed: int = 0) -> None:
        super().__init__()
        self.gate_and_up = nn.Parameter(torch.empty(count, 2 * intermediate, hidden))
        self.down = nn.Parameter(torch.empty(count, hidden, intermediate))
        with torch.no_grad():
            for expert, weights in enumerate(zip(self.gate_and_up, self.down), first):
                random = torch.Generator("cpu").manual_seed(seed * MAX_EXPERTS + expert)
                for weight in weights:
                    # Drawn on the CPU, whatever the default device, so that the weights are the same everywhere.
                    drawn = torch.empty(weight.shape, device="cpu").normal_(
                        std=weight.shape[1] ** -0.5, generator=random
                    )
                    weight.copy_(drawn)

    def forward(self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> Tensor:
        """Return each row's weighted sum over those of its experts that are in this module.

        Parameters
        ----------
        x : torch.Tensor
            [rows, hidden].
        topk_idx : torch.Tensor
            Integers [rows, top-k], relative to the first of these experts; values out of range mean experts elsewhere.
        topk_weights : torch.Tensor
            float32 [rows, top-k].

        Returns
        -------
        torch.Tensor
            [rows, hidden] in the dtype of the weights.
        """
        permutation = sort_by_expert(topk_idx, self.down.shape[0])
        return unpermute(self.on_groups(permute(x, permutation), permutation.ends), topk_weights, permutation)

    def on_groups(self, x: Tensor, ends: Tensor) -> Tensor:
        """Return each row's result, unweighted, for rows that are grouped by expert.

        Parameters
        ----------
        x : torch.Tensor
            [rows, hidden].
        ends : torch.Tensor
            Integers [experts]: where each expert's rows end, and the next expert's begin.

        Returns
        -------
        torch.Tensor
            [rows, hidden] in the dtype of the weights; uninitialized after the last expert's rows.
        """
        gate, up = grouped_linear(x.to(self.down.dtype), self.gate_and_up, ends).chunk(2, dim=1)
        return grouped_linear(functional.silu(gate) * up, self.down, ends)


def check_share(experts: nn.Module, num_experts: int, group: str) -> None:
    """Check that experts are a rank's share of a layer's: others would be left out without an error."""
    ranks = buffer_of(group).group_size
    if not isinstance(experts, nn.Module):
        raise TypeError(f"experts={describe(experts)}: expected a torch.nn.Module")
    if num_experts % ranks:
        raise ValueError(f"num_experts={num_experts}: expected a multiple of {ranks}, the number of ranks")
    if isinstance(experts, Experts) and experts.down.shape[0] * ranks != num_experts:
        raise ValueError(
            f"experts: {experts.down.shape[0]} experts, expected {num_experts // ranks}, this rank's share of "
            f"num_experts={num_experts} on {ranks} ranks"
        )


class MoELayer(nn.Module):
    """A mixture-of-experts layer in which every rank has its own tokens and its own share of the experts.

    All ranks of the group must make the same calls in the same order, for the backward too. Experts receive the
    gradients of all ranks' rows: divide the loss by the number of ranks, and sum the gradients of parameters that all
    ranks have.

    Parameters
    ----------
    gate : torch.nn.Module
        Maps tokens to expert ids and weights, like `Gate`.
    experts : torch.nn.Module
        This rank's share, like `Experts`: rank r of R holds the r-th of R equal shares.
    num_experts : int
        Number of experts on all ranks together.
    group : str
        The name of the Buffer, from `deep_ep_py.ops.register`. One Buffer serves all layers of a model.
    num_worst_tokens : int
        As in `deep_ep_py.ops.dispatch`.
    fp8 : bool
        Whether rows travel to the experts as FP8, as in `deep_ep_py.ops.dispatch`. Results and gradients travel in
        bfloat16.

    Raises
    ------
    ValueError
        `experts` has another number of experts than a rank's share, or `group` is not registered.
    """

    def __init__(
        self,
        gate: nn.Module,
        experts: nn.Module,
        num_experts: int,
        group: str,
        num_worst_tokens: int = 0,
        fp8: bool = False,
    ) -> None:
        super().__init__()
        check_share(experts, num_experts, group)
        self.gate, self.experts = gate, experts
        self.num_experts, self.group = num_experts, group
        self.num_worst_tokens, self.fp8 = num_worst_tokens, fp8

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
        # Each token chooses its experts on any rank, and goes once to every rank that holds one of them.
        topk_idx, topk_weights = self.gate(tokens)
        received = ops.dispatch(
            tokens.bfloat16(), topk_idx, topk_weights, self.num_experts, self.group, self.num_worst_tokens, self.fp8
        )
        # combine sums without weights, so the gate's weights are applied here.
        rows = self.experts(received.x, received.topk_idx, received.topk_weights).bfloat16()
        # The results for a token are returned to its owner and summed.
        return ops.combine(rows, received.routes, self.group).to(x.dtype).view(x.shape)
