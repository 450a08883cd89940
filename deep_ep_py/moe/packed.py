"""Experts for rows as packed by low-latency dispatch: an array for each expert, whose first rows are valid."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from deep_ep_py.base.arguments import describe, shaped
from deep_ep_py.device.rowwise.fp8 import per_token_cast_back
from deep_ep_py.moe.layer import Experts


def swiglu(x: Tensor, scales: Tensor | None, gate_and_up: Tensor, down: Tensor) -> Tensor:
    """Apply an expert's MLP to its rows [rows, hidden], or a batch of experts, in the dtype of the weights."""
    if scales is None:
        rows = x.to(down.dtype)
    else:
        rows = per_token_cast_back(x.flatten(0, -2), scales.flatten(0, -2), down.dtype).view(x.shape)
    gate, up = (rows @ gate_and_up.mT).chunk(2, dim=-1)
    return (functional.silu(gate) * up) @ down.mT


@torch.library.custom_op(
    "deep_ep::packed_swiglu",
    mutates_args=("out",),
    schema="(Tensor x, Tensor? scales, Tensor counts, Tensor gate_and_up, Tensor down, Tensor(a!) out) -> ()",
)
def _packed_swiglu(
    x: Tensor, scales: Tensor | None, counts: Tensor, gate_and_up: Tensor, down: Tensor, out: Tensor
) -> None:
    if counts.device.type != "cpu":
        # Reading the counts would make the host wait, which graph capture forbids. So all rows are computed: no row
        # depends on another, and results of invalid rows are never read.
        out.copy_(swiglu(x, scales, gate_and_up, down))
        return
    for expert, count in enumerate(counts.tolist()):
        own = (expert, slice(count))
        own_scales = None if scales is None else scales[own]
        out[own] = swiglu(x[own], own_scales, gate_and_up[expert], down[expert]).to(out.dtype)


@_packed_swiglu.register_fake
def _(x: Tensor, scales: Tensor | None, counts: Tensor, gate_and_up: Tensor, down: Tensor, out: Tensor) -> None:
    return None


class PackedExperts(nn.Module):
    """The experts of an `Experts`, sharing its weights, for packed rows. It has no gradients.

    On a CPU, each expert multiplies only its valid rows. On a GPU, one batched product covers all row slots, so that
    the host does not wait and a graph can capture it. An engine with a masked grouped GEMM should derive from this
    class and override `forward`.

    Parameters
    ----------
    experts : Experts
        The experts of this rank, whose weights are used.

    Attributes
    ----------
    count, hidden : int
        Number of experts, and elements per row.
    """

    def __init__(self, experts: Experts) -> None:
        super().__init__()
        if not isinstance(experts, Experts):
            raise TypeError(f"experts={type(experts).__name__}: expected deep_ep_py.moe.Experts")
        self.experts = experts
        self.count, self.hidden = experts.down.shape[:2]

    def forward(self, x: Tensor, scales: Tensor | None, counts: Tensor, out: Tensor | None = None) -> Tensor:
        """Apply each expert to its rows.

        Parameters
        ----------
        x : torch.Tensor
            bfloat16 [experts, rows, hidden], contiguous; or float8_e4m3fn, with scales.
        scales : torch.Tensor or None
            For float8_e4m3fn rows: float32 [experts, rows, hidden / 128] or int32 [experts, rows, hidden / 512], with
            any strides.
        counts : torch.Tensor
            int32 [experts]: number of valid rows of each; these come first.
        out : torch.Tensor, optional
            bfloat16 [experts, rows, hidden]: receives the results.

        Returns
        -------
        torch.Tensor
            bfloat16 [experts, rows, hidden]; `out` if given. Contents after an expert's valid rows are undefined.

        Raises
        ------
        TypeError, ValueError
            The message names the argument.
        """
        device, shape = self.experts.down.device, (self.count, None, self.hidden)
        x = shaped("x", x, torch.bfloat16, shape, device, torch.float8_e4m3fn)
        if (scales is None) != (x.dtype == torch.bfloat16):
            given = "None" if scales is None else describe(scales)
            raise ValueError(f"scales={given}: expected scales with float8_e4m3fn rows and no others, x={describe(x)}")
        counts = shaped("counts", counts, torch.int32, (self.count,), device)
        if out is None:
            out = torch.empty(x.shape, dtype=torch.bfloat16, device=device)
        else:
            out = shaped("out", out, torch.bfloat16, (self.count, x.shape[1], self.hidden), device)
        _packed_swiglu(x, scales, counts, self.experts.gate_and_up.detach(), self.experts.down.detach(), out)
        return out
