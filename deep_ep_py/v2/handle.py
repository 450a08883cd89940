"""`EPHandle`: the record of a dispatch for its combine and for cached dispatches, with V2's attributes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from deep_ep_py.base import arguments
from deep_ep_py.modes.normal.counted import ReceivedCounts
from deep_ep_py.modes.normal.expanded import Expanded
from deep_ep_py.modes.normal.handles import DispatchRecord
from deep_ep_py.v2.one_by_one import OneByOne

if TYPE_CHECKING:
    from deep_ep_py.base.config import Config


class EPHandle:
    """What `ElasticBuffer.dispatch` returns for its `combine` and for later dispatches of the same routing.

    Attributes that describe rows can be assigned to, as callers do that save and restore them for autograd. Of all
    attributes, `combine` and cached dispatches read only `topk_idx` again.

    Attributes
    ----------
    do_expand : bool
        Whether the dispatch returned the expanded layout.
    num_experts : int
        Number of experts on all ranks.
    expert_alignment : int
        The rows of each local expert are rounded up to a multiple of this: in the expanded layout the rows themselves,
        otherwise only the counts.
    num_max_tokens_per_rank : int
        Most tokens of a rank.
    num_sms : int
        Thread blocks of the dispatch, also for its combine.
    topk_idx : torch.Tensor
        int64 or int32 [tokens, top-k]: the choices of this rank's tokens; a copy unless `do_handle_copy` was False.
    num_recv_tokens : int
        Rows received, one per token; without a host wait, the most that there can be.
    num_expanded_tokens : int
        Rows of the expanded layout, padding included; without a host wait, the most that there can be.
    num_recv_tokens_per_expert_list : list of int
        Rows of each local expert, rounded up; empty without a host wait.
    psum_num_recv_tokens_per_scaleup_rank : torch.Tensor
        int32 [scale-up ranks]: running sums of the rows received from each rank; where rows are forwarded in nodes,
        from all ranks with the same local index. The last element is the number of rows received.
    psum_num_recv_tokens_per_expert : torch.Tensor
        int32 [local experts]: running sums of the rows of each local expert, each rounded up. In the expanded layout,
        where the rows of an expert end: its own are not rounded up.
    num_unaligned_recv_tokens_per_expert : torch.Tensor
        int32 [local experts]: rows of each local expert.
    token_metadata_at_forward, channel_linked_list
        None: this library's combine needs no such record.
    """

    def __init__(
        self,
        dispatched: DispatchRecord,
        counts: ReceivedCounts,
        expanded: Expanded | None,
        one_by_one: OneByOne | None,
        *,
        topk_idx: torch.Tensor,
        num_experts: int,
        num_max_tokens_per_rank: int,
        num_sms: int,
        config: Config | None,
        num_expanded_tokens: int,
        num_recv_tokens_per_expert_list: list[int],
    ) -> None:
        assert counts.rank_sums is not None
        assert counts.expert_sums is not None
        assert counts.expert_rows is not None
        self.dispatched, self.expanded, self.one_by_one = dispatched, expanded, one_by_one
        self.do_expand = expanded is not None
        self.num_experts, self.expert_alignment = num_experts, counts.alignment
        self.num_max_tokens_per_rank, self.num_sms = num_max_tokens_per_rank, num_sms
        self.config = config  # for later calls; None: each chooses its own
        self.topk_idx = topk_idx
        self._ids = (tuple(topk_idx.shape), topk_idx.dtype)
        self.num_recv_tokens, self.num_expanded_tokens = dispatched.rows, num_expanded_tokens
        self.num_recv_tokens_per_expert_list = num_recv_tokens_per_expert_list
        self.psum_num_recv_tokens_per_scaleup_rank = counts.rank_sums
        self.psum_num_recv_tokens_per_expert = counts.expert_sums
        self.num_unaligned_recv_tokens_per_expert = counts.expert_rows
        self._metadata: torch.Tensor | None = None
        self._destinations: torch.Tensor | None = None
        self.token_metadata_at_forward = self.channel_linked_list = None

    def __repr__(self) -> str:
        layout = f"expanded to {self.num_expanded_tokens} rows" if self.do_expand else "not expanded"
        return (
            f"EPHandle(tokens={self._ids[0][0]}, rows={self.num_recv_tokens}, {layout}, "
            f"experts={self.num_experts}, rank={self.dispatched.owner.rank} of {self.dispatched.owner.ranks})"
        )

    def choices(self) -> torch.Tensor:
        """Return `topk_idx`; raise unless what the caller may have assigned is like the original.

        On a GPU the ids themselves are not read. Kernels treat those that are no expert's as none.
        """
        (tokens, topk), dtype = self._ids
        device = self.dispatched.recv_source.device
        ids = arguments.tensor("handle.topk_idx", self.topk_idx, dtype, (tokens, topk), device)
        return arguments.topk_idx(ids, self.num_experts, device, tokens)

    @property
    def recv_src_metadata(self) -> torch.Tensor:
        """Where each row comes from: int32 [rows, 2 + top-k], made on each access, in the caller's stream.

        Column 0 is `source rank * num_max_tokens_per_rank + token`, column 1 `source rank * top-k`. In the expanded
        layout, column 1 is that plus the index of the token's first choice here, and the others are the index of each
        choice's row, or -1; otherwise they are -1. Rows beyond those received are undefined.
        """
        if self._metadata is not None:
            return self._metadata
        record, topk = self.dispatched, self.topk_idx.shape[1]
        ends = record.plan.ends()
        rows = torch.arange(record.rows, dtype=torch.int32, device=ends.device)
        rank = torch.searchsorted(ends, rows, right=True).to(torch.int32).clamp(max=ends.shape[0] - 1)
        slots = torch.full((record.rows, topk), -1, dtype=torch.int32, device=ends.device)
        first = torch.zeros_like(rank)
        if self.expanded is not None:
            slots = self.expanded.slots
            first = (slots >= 0).int().argmax(1).int()
        token = rank * self.num_max_tokens_per_rank + record.recv_src_idx
        return torch.cat([torch.stack([token, rank * topk + first], dim=1), slots], dim=1)

    @recv_src_metadata.setter
    def recv_src_metadata(self, value: torch.Tensor) -> None:
        self._metadata = value

    @property
    def dst_buffer_slot_idx(self) -> torch.Tensor:
        """Where each choice's row goes: int32 [tokens, top-k], made on each access, in the caller's stream.

        The index of the row among those that this rank sends to the rank with the expert; -1 for no expert, and for one
        to whose rank nothing is sent.
        """
        if self._destinations is not None:
            return self._destinations
        in_rank = self.dispatched.plan.in_rank()
        index = torch.where(in_rank, in_rank.cumsum(0, dtype=torch.int32) - 1, -1)
        ids, per_rank = self.topk_idx.long(), self.num_experts // in_rank.shape[1]
        known = (ids >= 0) & (ids < self.num_experts)
        return torch.where(known, index.gather(1, torch.where(known, ids, 0) // per_rank), -1)

    @dst_buffer_slot_idx.setter
    def dst_buffer_slot_idx(self, value: torch.Tensor) -> None:
        self._destinations = value


def check_handle(handle: Any) -> EPHandle:
    """Check that a handle is one of V2."""
    if not isinstance(handle, EPHandle):
        raise TypeError(f"handle={arguments.describe(handle)}: expected the EPHandle that dispatch returned")
    return handle
