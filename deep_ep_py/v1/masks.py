"""Going on without ranks that do not answer, as `deep_ep.Buffer(enable_shrink=True)` of DeepEP 1.2 does."""

from __future__ import annotations

from typing import Any

import torch

from deep_ep_py.core import arguments
from deep_ep_py.errors import DeepEPError
from deep_ep_py.session.recovery import ranks_of

_RECOVER = "ranks that were masked come back by no call: recover() goes on without them"


class MaskSurface:
    """The calls of a Buffer that are about masked ranks."""

    rank: int
    group_size: int
    enable_shrink: bool
    device: torch.device
    _engine: Any

    def low_latency_update_mask_buffer(self, rank_to_mask: int, mask: bool = False) -> None:
        """Go on without a rank, on all ranks: it is neither sent to nor waited for any more. Local.

        That rank is told, and its calls raise; the others learn of it before long, in the middle of a call too. What
        has come from it by then counts, or none of it.

        Parameters
        ----------
        rank_to_mask : int
            Another rank.
        mask : bool
            Must be True: a rank that was masked comes back by no call.

        Raises
        ------
        TypeError, ValueError
            Naming the argument.
        DeepEPError
            The calling rank has failed, or is masked itself.
        """
        self._check_shrinks("low_latency_update_mask_buffer")
        arguments.integer("rank_to_mask", rank_to_mask, 0, self.group_size - 1)
        if not arguments.flag("mask", mask):
            raise ValueError(f"mask=False: expected True, {_RECOVER}")
        if rank_to_mask == self.rank:
            raise ValueError(f"rank_to_mask={rank_to_mask}: expected another rank than the calling one")
        self._engine.check_usable()
        if not self._engine.runtime.mask(rank_to_mask):
            raise DeepEPError(f"rank {self.rank}: low_latency_update_mask_buffer: this rank has failed, and masks none")

    def low_latency_query_mask_buffer(self, mask_status: torch.Tensor) -> None:
        """Tell which ranks are masked, or left out since the Buffer recovered, as far as this one knows. Local.

        Parameters
        ----------
        mask_status : torch.Tensor
            int32 [ranks]: gets 1 for each of them, 0 for the others.

        Raises
        ------
        TypeError, ValueError
            Naming the argument.
        """
        self._check_shrinks("low_latency_query_mask_buffer")
        arguments.tensor("mask_status", mask_status, torch.int32, (self.group_size,), self.device)
        self._engine.check_usable()
        masked = self.masked_ranks
        mask_status.copy_(torch.tensor([int(rank in masked) for rank in range(self.group_size)]))

    def low_latency_clean_mask_buffer(self) -> None:
        """Do nothing where no rank is masked, as far as this one knows, and raise where one is. Local.

        Callers of V1 clean before they try again after any fault, also one that has masked no rank.

        Raises
        ------
        ValueError
            A rank is masked, and does not come back: `recover` goes on without it, and a new Buffer has all ranks
            again. Or the Buffer was made without `enable_shrink`.
        """
        self._check_shrinks("low_latency_clean_mask_buffer")
        self._engine.check_usable()
        if masked := self.masked_ranks:
            raise ValueError(f"low_latency_clean_mask_buffer: ranks {masked} are masked, {_RECOVER}")

    @property
    def masked_ranks(self) -> list[int]:
        """Ranks that are left out since the Buffer recovered, and with `enable_shrink` those masked since."""
        return sorted({*ranks_of(self._engine.mask), *self._engine.masked()})

    def _check_shrinks(self, name: str) -> None:
        if not self.enable_shrink:
            raise ValueError(f"{name}: expected a Buffer that was made with enable_shrink=True")
