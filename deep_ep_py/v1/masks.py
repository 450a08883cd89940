"""Continuing without ranks that do not answer, as DeepEP 1.2's `deep_ep.Buffer(enable_shrink=True)` does."""

from __future__ import annotations

from typing import Any

import torch

from deep_ep_py.base import arguments
from deep_ep_py.errors import DeepEPError
from deep_ep_py.session.recovery import ranks_of

_RECOVER = "a masked rank cannot be unmasked; recover() continues without it"


class MaskSurface:
    """The calls of a Buffer that mask ranks."""

    rank: int
    group_size: int
    enable_shrink: bool
    device: torch.device
    _engine: Any

    def low_latency_update_mask_buffer(self, rank_to_mask: int, mask: bool = False) -> None:
        """Mask a rank, on all ranks: it is neither sent to nor waited for any longer. Local.

        The masked rank is notified, and its calls raise; the other ranks learn of it soon, even in the middle of a
        call. Either all of what has arrived from it by then counts, or none of it.

        Parameters
        ----------
        rank_to_mask : int
            A rank other than the calling one.
        mask : bool
            Must be True: a masked rank cannot be unmasked.

        Raises
        ------
        TypeError, ValueError
            The message names the argument.
        DeepEPError
            The calling rank has failed, or is masked itself.
        """
        self._check_shrinks("low_latency_update_mask_buffer")
        arguments.integer("rank_to_mask", rank_to_mask, 0, self.group_size - 1)
        if not arguments.flag("mask", mask):
            raise ValueError(f"mask=False: expected True: {_RECOVER}")
        if rank_to_mask == self.rank:
            raise ValueError(f"rank_to_mask={rank_to_mask}: expected a rank other than the calling one")
        self._engine.check_usable()
        if not self._engine.runtime.mask(rank_to_mask):
            raise DeepEPError(
                f"rank {self.rank}: low_latency_update_mask_buffer: this rank has failed and cannot mask others"
            )

    def low_latency_query_mask_buffer(self, mask_status: torch.Tensor) -> None:
        """Report which ranks are masked, or left out since the Buffer recovered, as far as this one knows. Local.

        Parameters
        ----------
        mask_status : torch.Tensor
            int32 [ranks]: set to 1 for each of these ranks, 0 for the others.

        Raises
        ------
        TypeError, ValueError
            The message names the argument.
        """
        self._check_shrinks("low_latency_query_mask_buffer")
        arguments.tensor("mask_status", mask_status, torch.int32, (self.group_size,), self.device)
        self._engine.check_usable()
        masked = self.masked_ranks
        status = [int(rank in masked) for rank in range(self.group_size)]
        mask_status.copy_(torch.tensor(status, device="cpu"))

    def low_latency_clean_mask_buffer(self) -> None:
        """Do nothing if no rank is masked, as far as this one knows; raise otherwise. Local.

        Callers of V1 clean before they retry after any fault, including one that has masked no rank.

        Raises
        ------
        ValueError
            A rank is masked and cannot be unmasked: `recover` continues without it, and only a new Buffer has all ranks
            again. Also raised if the Buffer was made without `enable_shrink`.
        """
        self._check_shrinks("low_latency_clean_mask_buffer")
        self._engine.check_usable()
        if masked := self.masked_ranks:
            raise ValueError(f"low_latency_clean_mask_buffer: ranks {masked} are masked: {_RECOVER}")

    @property
    def masked_ranks(self) -> list[int]:
        """Ranks left out when the Buffer recovered and, with `enable_shrink`, those masked since."""
        return sorted({*ranks_of(self._engine.mask), *self._engine.masked()})

    def _check_shrinks(self, name: str) -> None:
        if not self.enable_shrink:
            raise ValueError(f"{name}: expected a Buffer that was made with enable_shrink=True")
