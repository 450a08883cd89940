"""What a dispatch leaves behind for its combine and for cached dispatches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from .native import C


@dataclass(frozen=True)
class Plan:
    """Where this rank's rows go and where the others' rows come from.

    Attributes
    ----------
    token_row : torch.Tensor
        int32 [tokens, ranks]: index of a token among this rank's tokens for that rank, or -1.
    row_token : torch.Tensor
        int32 [ranks, tokens]: the inverse.
    rank_prefix : torch.Tensor
        int32 [ranks, ranks]: `[i][j]` rows that ranks <= i send to rank j.
    source_tokens : torch.Tensor
        int32 [ranks]: tokens of each rank.
    rows_to_rank : torch.Tensor
        int32 [ranks, 1]: rows this rank sends to each.
    """

    token_row: torch.Tensor
    row_token: torch.Tensor
    rank_prefix: torch.Tensor
    source_tokens: torch.Tensor
    rows_to_rank: torch.Tensor

    @staticmethod
    def empty(tokens: int, ranks: int, device: torch.device) -> Plan:
        """Make a plan for notify to fill."""

        def tensor(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=torch.int32, device=device)

        return Plan(tensor(tokens, ranks), tensor(ranks, tokens), tensor(ranks, ranks), tensor(ranks), tensor(ranks, 1))

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Return all of it."""
        return self.token_row, self.row_token, self.rank_prefix, self.source_tokens, self.rows_to_rank

    def native(self) -> Any:
        """Return the addresses, as kernels take them."""
        tensors = (self.token_row, self.row_token, self.rank_prefix, self.source_tokens)
        return C.Plan(*(tensor.data_ptr() for tensor in tensors))


class DispatchHandle(tuple[torch.Tensor, ...]):
    """V1's intranode handle, with one channel, that also knows its Buffer and operation.

    Elements: rank_prefix_matrix int32 [ranks, ranks]; channel_prefix_matrix int32 [ranks, 1];
    recv_channel_prefix_matrix int32 [ranks, 1]; recv_src_idx int32 [rows]; is_token_in_rank bool [tokens, ranks];
    send_head int32 [tokens, ranks].

    Attributes
    ----------
    owner : object
        Whose operation it was: a handle serves no other Buffer.
    tokens, rows : int
        Tokens this rank sent, rows it received.
    topk : int
        Experts per token, 0 where the dispatch carried none.
    operation : int
        The how-manieth operation of its Buffer's generation it was; the same on all ranks.
    generation : int
        In which generation of its Buffer it was: recovering begins another.
    """

    owner: object
    plan: Plan
    tokens: int
    rows: int
    topk: int
    operation: int
    generation: int

    @staticmethod
    def make(
        owner: object,
        plan: Plan,
        is_token_in_rank: torch.Tensor,
        recv_src_idx: torch.Tensor,
        topk: int,
        operation: int,
    ) -> DispatchHandle:
        """Make the handle of an operation whose kernels are launched."""
        handle = DispatchHandle(
            (
                plan.rank_prefix,
                plan.rows_to_rank,
                torch.zeros_like(plan.rows_to_rank),
                recv_src_idx,
                is_token_in_rank,
                plan.token_row,
            )
        )
        handle.owner, handle.plan, handle.topk, handle.operation = owner, plan, topk, operation
        handle.tokens, handle.rows = is_token_in_rank.shape[0], recv_src_idx.shape[0]
        return handle

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Return all that kernels read."""
        return *self.plan.tensors(), self.recv_src_idx

    @property
    def recv_src_idx(self) -> torch.Tensor:
        """int32 [rows]: each received row's token index at its source."""
        return self[3]
