"""Plans: where the rows of a dispatch go and come from, in one hop and in two."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

import torch

from deep_ep_py.base.carriers import alias_of
from deep_ep_py.base.native import C

if TYPE_CHECKING:
    from deep_ep_py.transport.topology.topology import Topology

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

    @cached_property
    def _tensors(self) -> tuple[torch.Tensor, ...]:
        return tuple(getattr(self, name) for name in self.shapes(self.topology, 0))

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Return all tensors of the plan, the first with a row for each token."""
        return self._tensors


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
    rank_begin, rank_end : torch.Tensor or None
        int32 [ranks, 1] and [ranks]: where each source's rows begin and end among those that this rank receives. None
        if all ranks are on one node.
    token_node, tokens_to_node : torch.Tensor or None
        int32 [tokens, nodes] and [nodes, 1]: index of a token among this rank's tokens for that node, or -1, and their
        number. None unless there are several nodes of several ranks.
    """

    topology: Topology
    token_row: torch.Tensor
    row_token: torch.Tensor
    rank_prefix: torch.Tensor
    source_tokens: torch.Tensor
    rows_to_rank: torch.Tensor
    rank_begin: torch.Tensor | None = None
    rank_end: torch.Tensor | None = None
    token_node: torch.Tensor | None = None
    tokens_to_node: torch.Tensor | None = None

    calls = C.normal
    """The native calls for such plans."""
    kernels = ("notify", "counts", "dispatch", "combine")

    @staticmethod
    def shapes(topology: Topology, tokens: int) -> Shapes:
        """Return the shapes of a plan's tensors."""
        ranks, nodes = topology.ranks, topology.nodes
        shapes: Shapes = {
            "token_row": (tokens, ranks),
            "row_token": (ranks, tokens),
            "rank_prefix": (ranks, ranks),
            "source_tokens": (ranks,),
            "rows_to_rank": (ranks, 1),
        }
        if nodes > 1:
            shapes |= {"rank_begin": (ranks, 1), "rank_end": (ranks,)}
        if 1 < nodes < ranks:
            shapes |= {"token_node": (tokens, nodes), "tokens_to_node": (nodes, 1)}
        return shapes

    def in_rank(self) -> torch.Tensor:
        """Return bool [tokens, ranks]: the ranks that tokens go to."""
        return self.token_row >= 0

    def ends(self) -> torch.Tensor:
        """Return int32 [ranks]: where each source's rows end among those that this rank receives."""
        if self.rank_end is not None:
            return self.rank_end
        return self.rank_prefix[:, self.topology.rank].clone(memory_format=torch.contiguous_format)

    def received(self) -> torch.Tensor:
        """Return int32 []: the number of rows that this rank receives."""
        return self.rank_prefix[-1, self.topology.rank]

    @property
    def carrier(self) -> int:
        """The index of the element in which a handle keeps its record."""
        return 2 if self.topology.nodes == 1 else 3

    @staticmethod
    def sources(topology: Topology, rows: int) -> tuple[int, ...]:
        """Return the shape of the tensor of row sources: tokens and, if a handle has them, indices."""
        return (rows,) if topology.nodes == 1 else (rows, 2)

    def with_table(self, call: C.Call, worst: int, held_topk: int) -> OneHopPlan:
        """Return the plan with the tensors whose sizes depend on the counts: none."""
        return self

    @property
    def native(self) -> C.normal.Plan:
        """The addresses in the form that kernels take, read anew: storages of a handle's elements may have moved."""
        return C.normal.Plan(*(tensor.data_ptr() for tensor in self.tensors()))

    def elements(
        self, is_token_in_rank: torch.Tensor, source: torch.Tensor, zeros: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Return the elements of the handle; `zeros` is int32 [ranks, 1]."""
        nodes, per_node = self.topology.nodes, self.topology.ranks_per_node
        if self.rank_begin is None or self.rank_end is None:
            return self.rank_prefix, self.rows_to_rank, zeros, source, is_token_in_rank, self.token_row
        head, to_node = self.token_node, self.tokens_to_node
        if head is None or to_node is None:  # each rank is a node
            head, to_node = self.token_row, self.rows_to_rank
        return (
            is_token_in_rank,
            to_node,
            self.rows_to_rank,
            zeros[:nodes],
            alias_of(zeros[:nodes].view(nodes)),
            self.rank_begin,
            self.rank_end,
            source.view(torch.uint8),
            head,
            zeros.new_empty(0, per_node),
        )


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
    node_forwarded, rank_begin : torch.Tensor
        int32 [nodes, 1] and [ranks, 1]: number of node rows that this rank forwards from each node, and where each
        source's rows begin among those that it receives. Only callers read them.
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
    node_forwarded: torch.Tensor
    rank_begin: torch.Tensor
    table: torch.Tensor
    holders: torch.Tensor

    calls = C.two_hops
    """The native calls for such plans."""
    kernels = ("two_hops_notify", "two_hops_counts", "two_hops_dispatch", "two_hops_combine")
    carrier = 3
    """The index of the element in which a handle keeps its record."""

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
            "node_forwarded": (nodes, 1),
            "rank_begin": (ranks, 1),
            "table": (None, per_node),
            "holders": (None, 0),  # none, unless `with_table` adds them
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
    def sources(topology: Topology, rows: int) -> tuple[int, ...]:
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

    @property
    def native(self) -> C.two_hops.Plan:
        """The addresses in the form that kernels take, read anew: storages of a handle's elements may have moved."""
        addresses: dict[str, Any] = {name: getattr(self, name).data_ptr() for name in self.shapes(self.topology, 0)}
        return C.two_hops.Plan(**addresses, table_rows=self.table.shape[0])

    def elements(
        self, is_token_in_rank: torch.Tensor, source: torch.Tensor, zeros: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Return the elements of the handle; `zeros` is int32 [ranks, 1]."""
        return (
            is_token_in_rank,
            self.sent,
            self.rows_to_rank,
            self.node_forwarded,
            self.forwarded[: self.topology.nodes],
            self.rank_begin,
            self.rank_prefix,
            source.view(torch.uint8),
            self.node_row,
            self.table,
        )


Plan = OneHopPlan | TwoHopPlan


def way_of(topology: Topology) -> type[OneHopPlan] | type[TwoHopPlan]:
    """Return the class of plan for a Buffer's operations."""
    return OneHopPlan if topology.hops == 1 else TwoHopPlan
