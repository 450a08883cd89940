"""Experts for rows as low-latency dispatch packs them: a block for each expert, of which the first rows are there."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from deep_ep_py.core.arguments import describe, tensor
from deep_ep_py.moe.fp8 import per_token_cast_back
from deep_ep_py.moe.layer import Experts


def swiglu(x: Tensor, scales: Tensor | None, gate_and_up: Tensor, down: Tensor) -> Tensor:
    """Return an expert's MLP of its rows [rows, hidden], in the dtype of its weights; or of a batch of experts."""
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
        # The host would have to wait for the counts, which a graph's capture forbids. No row depends on another, and
        # what is made of rows that are not there is never read.
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
    """The same experts as an `Experts`, with its weights, for packed rows. No gradients.

    On a CPU each expert multiplies the rows that it has. On a GPU it is one batched product over all rows there is room
    for, so that the host waits for nothing and a graph can hold it; an engine that has a masked grouped GEMM derives
    from this class and overrides `forward`.

    Parameters
    ----------
    experts : Experts
        Whose weights to use: those of this rank.

    Attributes
    ----------
    count, hidden : int
        Experts, and elements of a row.
    """

    def __init__(self, experts: Experts) -> None:
        super().__init__()
        if not isinstance(experts, Experts):
            raise TypeError(f"experts={type(experts).__name__}: expected deep_ep_py.moe.Experts")
        self.experts = experts
        self.count, self.hidden = experts.down.shape[:2]

    def forward(self, x: Tensor, scales: Tensor | None, counts: Tensor, out: Tensor | None = None) -> Tensor:
        """Return what each expert makes of its rows.

        Parameters
        ----------
        x : torch.Tensor
            bfloat16 [experts, rows, hidden], contiguous; or float8_e4m3fn, with scales.
        scales : torch.Tensor or None
            Of float8_e4m3fn rows: float32 [experts, rows, hidden / 128] or int32 [experts, rows, hidden / 512], with
            any strides.
        counts : torch.Tensor
            int32 [experts]: so many rows of each are there, at the beginning.
        out : torch.Tensor, optional
            bfloat16 [experts, rows, hidden]: where to put the results.

        Returns
        -------
        torch.Tensor
            bfloat16 [experts, rows, hidden], `out` if that is given. What stands behind an expert's rows is undefined.

        Raises
        ------
        TypeError, ValueError
            Naming the argument.
        """
        device, shape = self.experts.down.device, (self.count, None, self.hidden)
        x = tensor("x", x, torch.bfloat16, shape, device, torch.float8_e4m3fn)
        if (scales is None) != (x.dtype == torch.bfloat16):
            given = "None" if scales is None else describe(scales)
            raise ValueError(f"scales={given}: expected scales with float8_e4m3fn rows alone, x={describe(x)}")
        counts = tensor("counts", counts, torch.int32, (self.count,), device)
        if out is None:
            out = torch.empty(x.shape, dtype=torch.bfloat16, device=device)
        else:
            out = tensor("out", out, torch.bfloat16, (self.count, x.shape[1], self.hidden), device)
        _packed_swiglu(x, scales, counts, self.experts.gate_and_up.detach(), self.experts.down.detach(), out)
        return out
