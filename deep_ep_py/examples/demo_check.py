"""A reference for the demo's layer in one process, and the error bound for the distributed layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from deep_ep_py.examples.moe_layer import Gate
from deep_ep_py.moe import Experts


@dataclass(frozen=True)
class Check:
    """Comparison of the distributed layer's output with the reference."""

    max_abs_error: float
    max_rel_error: float
    """Relative to the largest element of the exact output."""
    calc_diff: float
    """1 - 2 sum(xy) / sum(x^2 + y^2) in float64, the measure that DeepEP's tests use."""
    of_bound: float
    """The largest error as a fraction of its bound; the check passes up to 1."""

    @property
    def passed(self) -> bool:
        """Whether every element is within its bound."""
        return self.of_bound <= 1


@torch.no_grad()
def reference(
    tokens_of_ranks: list[torch.Tensor], gate: Gate, num_experts: int, intermediate: int, seed: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the layer for all tokens with all experts, without any communication.

    Parameters
    ----------
    tokens_of_ranks
        Each rank's tokens.
    gate
        The layer's gate.
    num_experts, intermediate, seed
        The sizes and the seed of the experts.

    Returns
    -------
    exact : torch.Tensor
        float64 [all tokens, hidden].
    magnitude : torch.Tensor
        The sum over ranks of the absolute value of each rank's contribution, which the bound needs.
    """
    x = torch.cat(tokens_of_ranks)
    # Computed rank by rank, as the ranks do: a product of another shape may round differently and flip a close choice.
    choices = [gate(part) for part in tokens_of_ranks]
    topk_idx, topk_weights = (torch.cat(parts) for parts in zip(*choices, strict=True))
    exact = torch.zeros(x.shape, dtype=torch.float64)
    magnitude = torch.zeros_like(exact)
    local_experts = num_experts // len(tokens_of_ranks)
    for first in range(0, num_experts, local_experts):
        experts = Experts(first, local_experts, x.size(1), intermediate, seed)
        contribution = experts(x, topk_idx - first, topk_weights).to(torch.float64)
        exact += contribution
        magnitude += contribution.abs_()
    return exact, magnitude


def compare(got: torch.Tensor, exact: torch.Tensor, magnitude: torch.Tensor) -> Check:
    """Compare all elements, each with a bound of its own.

    The bound of |got - exact| is 2^-8 (|exact| + S) + 2^-16 (the largest S of the token's elements), where S is the sum
    over ranks of |the contribution of its experts|. A rank's contribution is rounded to BF16 before it is sent, and the
    sum is rounded once more, each by at most 2^-8. The last term allows for float32 sums in another order, and for the
    product of the two roundings.

    Parameters
    ----------
    got
        The distributed layer's BF16 output for all tokens.
    exact, magnitude
        From `reference`.

    Returns
    -------
    Check
    """
    values = got.to(torch.float64)
    error = (values - exact).abs()
    bound = (exact.abs() + magnitude) * 2.0**-8 + magnitude.amax(dim=1, keepdim=True) * 2.0**-16
    diff = 1 - 2 * (values * exact).sum() / (values.square() + exact.square()).sum()
    # A token without any contribution has an error of 0 and a bound of 0. A NaN in `got` must not pass.
    of_bound = torch.where(error == 0, 0.0, error / bound).nan_to_num(nan=float("inf"))
    return Check(
        max_abs_error=float(error.max()),
        max_rel_error=float(error.max() / exact.abs().max()),
        calc_diff=float(diff),
        of_bound=float(of_bound.max()),
    )
