"""Sums of rows that a combine has returned one by one, each to a choice of a token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from deep_ep_py.base.native import C
from deep_ep_py.modes.normal.rows import Rows

if TYPE_CHECKING:
    from deep_ep_py.session.engine import Engine


@dataclass(frozen=True)
class ChoiceSums:
    """The sum of each token's choices, after a combine in which choice k of token t was token `t * top-k + k`.

    Attributes
    ----------
    slots : torch.Tensor
        int32 [tokens, top-k]: those numbers, on the device.
    """

    slots: torch.Tensor

    @staticmethod
    def of(tokens: int, topk: int, device: torch.device) -> ChoiceSums:
        """Make them for the tokens of this rank."""
        return ChoiceSums(torch.arange(tokens * topk, dtype=torch.int32, device=device).view(tokens, topk))

    @property
    def tokens(self) -> int:
        """Tokens of this rank."""
        return self.slots.shape[0]

    def prepare(self, engine: Engine, row_bytes: int) -> None:
        """Prepare the kernel."""
        engine.prepare(row_bytes, self.slots.shape[1], "fold")

    def launch(
        self,
        engine: Engine,
        call: C.Call,
        x: torch.Tensor,
        summed: torch.Tensor,
        biases: tuple[torch.Tensor, ...],
        blocks: int,
    ) -> None:
        """Launch the sum of the biases, then the choices' rows in order, in fp32, rounded once."""
        tensors = C.expand.Tensors()
        tensors.expanded_x, tensors.x = x.data_ptr(), summed.data_ptr()
        tensors.bias = [*(bias.data_ptr() for bias in biases), 0, 0][:2]
        layout = C.expand.Layout(
            expert_rows=0,
            slots=self.slots.data_ptr(),
            experts=0,
            alignment=1,
            rows=self.tokens,
            expanded_rows=x.shape[0],
        )
        sizes = C.normal.Sizes(0, Rows(x).row_bytes, self.slots.shape[1], 0)
        C.expand.fold(engine.runtime, call, sizes, layout, tensors, blocks=blocks)
