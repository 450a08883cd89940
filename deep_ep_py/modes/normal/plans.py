"""Plans: where the rows of a dispatch go and come from, in one hop and in two."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

import torch

from deep_ep_py.core.native import C

if TYPE_CHECKING:
    from deep_ep_py.topology.topology import Topology

_INTRANODE, _INTERNODE = 6, 10
"""Number of elements of V1's handles."""

Shapes = dict[str, tuple[int | None, ...]]
"""Shapes of a plan's tensors, by name; None marks sizes that are known only from the counts."""


class _Plan:
    """Base of both plans: int32 tensors, which are the fields after the first, the topology."""

    topology: Topology

    @staticmethod
    def shapes(topology: Topology, tokens: int) -> Shapes:
        raise NotImplementedError

    @classmethod
    def empty(cls, topology: Topology, tokens: int, device: torch.device) -> Self:
        """Allocate a plan for notify to fill; tensors whose sizes depend on the counts are empty."""
        shapes = cls.shapes(topology, tokens).values()
        return cls.of(
            topology, [torch.empty([size or 0 for size in shape], dtype=torch.int32, device=device) for shape in shapes]
        )

    @classmethod
    def of(cls, topology: Topology, tensors: Iterable[torch.Tensor]) -> Self:
        """Return the plan with these tensors, in the order of its fields."""
        return cls(topology, *tensors)  # type: ignore[call-arg]

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Return all tensors of the plan."""
        return tuple(getattr(self, name) for name in self.shapes(self.topology, 0))


@dataclass(frozen=True)
class OneHopPlan(_Plan):
    """The plan for one hop: every row goes straight to its rank.

    Attributes
    ----------
    topology : Topology
        The topology of the operation's Buffer.
    token_row : torch.Tensor
        int32 [tokens, ranks]: index of a token among this rank's tokens for that rank, or -1.
    row_token : torch.Tensor
        int32 [ranks, tokens]: the inverse.
    rank_prefix : torch.Tensor
        int32 [ranks, ranks]: `[i][j]` is the number of rows that ranks <= i send to rank j.
    source_tokens : torch.Tensor
        int32 [ranks]: number of tokens of each rank.
    rows_to_rank : torch.Tensor
        int32 [ranks, 1]: number of rows that this rank sends to each rank.
    """

    topology: Topology
    token_row: torch.Tensor
    row_token: torch.Tensor
    rank_prefix: torch.Tensor
    source_tokens: torch.Tensor
    rows_to_rank: torch.Tensor

    calls = C.normal
    """The native calls for such plans."""
    kernels = ("notify", "counts", "dispatch", "combine")

    @staticmethod
    def shapes(topology: Topology, tokens: int) -> Shapes:
        """Return the shapes of a plan's tensors."""
        ranks = topology.ranks
        return {
            "token_row": (tokens, ranks),
            "row_token": (ranks, tokens),
            "rank_prefix": (ranks, ranks),
            "source_tokens": (ranks,),
            "rows_to_rank": (ranks, 1),
        }

    def in_rank(self) -> torch.Tensor:
        """Return bool [tokens, ranks]: the ranks that tokens go to."""
        return self.token_row >= 0

    def ends(self) -> torch.Tensor:
        """Return int32 [ranks]: where each source's rows end among those that this rank receives."""
        return self.rank_prefix[:, self.topology.rank].clone(memory_format=torch.contiguous_format)

    def received(self) -> torch.Tensor:
        """Return int32 []: the number of rows that this rank receives."""
        return self.rank_prefix[-1, self.topology.rank]

    @property
    def elements(self) -> int:
        """Number of elements of a handle."""
        return _INTRANODE if self.topology.nodes == 1 else _INTERNODE

    @staticmethod
    def sources(rows: int) -> tuple[int, ...]:
        """Return the shape of the tensor of row sources."""
        return (rows,)

    def with_table(self, call: C.Call, worst: int, held_topk: int) -> OneHopPlan:
        """Return the plan with the tensors whose sizes depend on the counts: none."""
        return self

    def native(self) -> C.normal.Plan:
        """Return the addresses in the form that kernels take."""
        return C.normal.Plan(*(tensor.data_ptr() for tensor in self.tensors()))

    def held(self, is_token_in_rank: torch.Tensor, source: torch.Tensor) -> dict[int, torch.Tensor]:
        """Return the handle's elements that the plan holds anyway, by index."""
        if self.elements == _INTERNODE:
            return {0: is_token_in_rank, 2: self.rows_to_rank}
        return {0: self.rank_prefix, 1: self.rows_to_rank, 3: source, 4: is_token_in_rank, 5: self.token_row}

    def made(self, is_token_in_rank: torch.Tensor, source: torch.Tensor) -> dict[int, torch.Tensor]:
        """Make the other elements of the handle, by index."""
        if self.elements == _INTRANODE:
            return {2: torch.zeros_like(self.rows_to_rank)}
        topology, ranks = self.topology, self.topology.ranks
        in_node = tokens_in_nodes(is_token_in_rank, topology.nodes)
        ends = self.ends()
        begins = torch.cat([ends.new_zeros(1), ends[:-1]])
        # The index of a row among those of its source takes the place of its index among those for the node.
        rows = torch.arange(source.shape[0], dtype=torch.int32, device=source.device)
        index = rows - begins[torch.searchsorted(ends, rows, right=True).clamp(max=ranks - 1)]
        return {
            1: in_node.sum(0, dtype=torch.int32).view(-1, 1),
            3: ends.new_zeros(topology.nodes, 1),
            4: ends.new_zeros(topology.nodes),
            5: begins.view(ranks, 1),
            6: ends,
            7: torch.stack([source, index], dim=1).view(torch.uint8),
            8: torch.where(in_node, in_node.cumsum(0, dtype=torch.int32) - 1, -1),
            9: ends.new_empty(0, topology.ranks_per_node),
        }


@dataclass(frozen=True)
class TwoHopPlan(_Plan):
    """The plan for two hops: a row goes once to each node and is forwarded there. For terms, see docs/two_hops.md.

    Attributes
    ----------
    topology : Topology
        The topology of the operation's Buffer.
    node_row : torch.Tensor
        int32 [tokens, nodes]: index of a token's node row, or -1.
    sent : torch.Tensor
        int32 [nodes, 1]: number of node rows that this rank sends to each node.
    sent_token, sent_ranks, sent_marks : torch.Tensor
        int32 [nodes, tokens], [nodes, tokens, words], [nodes, marks, ranks per node]: for each node row, its token and
        a bit for each rank that it is for; for every 32nd, the number of preceding rows for each rank.
    rows_to_rank : torch.Tensor
        int32 [ranks, 1]: number of rows that this rank sends to each rank.
    forwarded : torch.Tensor
        int32 [roles * nodes]: cumulative number of node rows that this rank forwards from each node and those before
        it, followed by the same for its second role, which a rank may have when others are left out.
    node_rows : torch.Tensor
        int32 [ranks]: number of node rows that each rank sends to this node.
    rank_prefix : torch.Tensor
        int32 [ranks]: cumulative number of rows that this rank receives from each rank and those before it.
    table : torch.Tensor
        int32 [forwarded node rows, ranks per node]: index of a row among those of its source for that rank, or -1. The
        dispatch writes it: 4 bytes for each node row and rank of the node.
    holders : torch.Tensor
        int32 [forwarded node rows, top-k], or empty: local index of the rank with the expert of each choice, or -1. The
        dispatch writes it. A combine then takes each weight from that rank alone; otherwise it sums those of all ranks.
    """

    topology: Topology
    node_row: torch.Tensor
    sent: torch.Tensor
    sent_token: torch.Tensor
    sent_ranks: torch.Tensor
    sent_marks: torch.Tensor
    rows_to_rank: torch.Tensor
    forwarded: torch.Tensor
    node_rows: torch.Tensor
    rank_prefix: torch.Tensor
    table: torch.Tensor
    holders: torch.Tensor

    calls = C.two_hops
    """The native calls for such plans."""
    kernels = ("two_hops_notify", "two_hops_counts", "two_hops_dispatch", "two_hops_combine")
    elements = _INTERNODE
    """Number of elements of a handle."""

    @staticmethod
    def shapes(topology: Topology, tokens: int) -> Shapes:
        """Return the shapes of a plan's tensors."""
        ranks, nodes, per_node = topology.ranks, topology.nodes, topology.ranks_per_node
        words, marks = -(-per_node // C.two_hops.SET_BITS), -(-tokens // C.two_hops.MARK_ROWS)
        return {
            "node_row": (tokens, nodes),
            "sent": (nodes, 1),
            "sent_token": (nodes, tokens),
            "sent_ranks": (nodes, tokens, words),
            "sent_marks": (nodes, marks, per_node),
            "rows_to_rank": (ranks, 1),
            "forwarded": (C.two_hops.ROLES * nodes,),
            "node_rows": (ranks,),
            "rank_prefix": (ranks,),
            "table": (None, per_node),
            "holders": (None, None),
        }

    def in_rank(self) -> torch.Tensor:
        """Return bool [tokens, ranks]: the ranks that tokens go to."""
        nodes = torch.arange(self.topology.nodes, device=self.node_row.device)
        sets = self.sent_ranks[nodes, self.node_row.clamp(min=0)]
        bits = torch.arange(C.two_hops.SET_BITS, dtype=torch.int32, device=sets.device)
        goes = (sets.unsqueeze(-1) >> bits & 1).flatten(2)[:, :, : self.topology.ranks_per_node] != 0
        return (goes & (self.node_row >= 0).unsqueeze(-1)).reshape(len(self.node_row), self.topology.ranks)

    def ends(self) -> torch.Tensor:
        """Return int32 [ranks]: where each source's rows end among those that this rank receives."""
        return self.rank_prefix

    def received(self) -> torch.Tensor:
        """Return int32 []: the number of rows that this rank receives."""
        return self.rank_prefix[-1]

    @staticmethod
    def sources(rows: int) -> tuple[int, ...]:
        """Return the shape of the tensor of row sources."""
        return rows, 2

    def with_table(self, call: C.Call, worst: int, held_topk: int) -> TwoHopPlan:
        """Return the plan with a table, whose size depends on the counts, and holders of `held_topk` choices per row.

        Both have a row for each node row that arrives or, if the host does not know how many, for the most that there
        can be with `worst` rows at each rank: a node row becomes at least one row.
        """
        per_node = self.topology.ranks_per_node
        rows = worst * per_node if worst else C.normal.forwarded_rows(call)
        table, holders = (
            torch.empty((rows, width), dtype=torch.int32, device=self.table.device) for width in (per_node, held_topk)
        )
        return replace(self, table=table, holders=holders)

    def native(self) -> C.two_hops.Plan:
        """Return the addresses in the form that kernels take."""
        addresses: dict[str, Any] = {name: getattr(self, name).data_ptr() for name in self.shapes(self.topology, 0)}
        return C.two_hops.Plan(**addresses, table_rows=self.table.shape[0])

    def held(self, is_token_in_rank: torch.Tensor, source: torch.Tensor) -> dict[int, torch.Tensor]:
        """Return the handle's elements that the plan holds anyway, by index."""
        held = {1: self.sent, 2: self.rows_to_rank, 6: self.rank_prefix, 8: self.node_row, 9: self.table}
        return {0: is_token_in_rank, 4: self.forwarded[: self.topology.nodes], **held}

    def made(self, is_token_in_rank: torch.Tensor, source: torch.Tensor) -> dict[int, torch.Tensor]:
        """Make the other elements of the handle, by index."""
        forwarded = self.forwarded[: self.topology.nodes]
        return {
            3: forwarded.diff(prepend=forwarded.new_zeros(1)).view(-1, 1),
            5: (self.rank_prefix - self.rank_prefix.diff(prepend=self.rank_prefix.new_zeros(1))).view(-1, 1),
            7: source.clone().view(torch.uint8),
        }


Plan = OneHopPlan | TwoHopPlan


def way_of(topology: Topology) -> type[OneHopPlan] | type[TwoHopPlan]:
    """Return the class of plan for a Buffer's operations."""
    return OneHopPlan if topology.hops == 1 else TwoHopPlan


def tokens_in_nodes(is_token_in_rank: torch.Tensor, nodes: int) -> torch.Tensor:
    """Return bool [tokens, nodes]: whether a token goes to any rank of the node."""
    tokens, ranks = is_token_in_rank.shape
    return is_token_in_rank.view(tokens, nodes, ranks // nodes).any(dim=2)
