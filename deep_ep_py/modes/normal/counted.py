"""What V2's calls have besides V1's: counts of received rows on the device, and sums in the order of the choices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from deep_ep_py.base.native import C

if TYPE_CHECKING:
    from deep_ep_py.session.engine import Engine


@dataclass(frozen=True)
class ReceivedCounts:
    """Where a dispatch stores how many rows arrive, all int32; by default nowhere.

    Attributes
    ----------
    rank_sums : torch.Tensor or None
        [ranks], or with two hops [ranks per node]: running sums of the rows from each rank; with two hops, from all
        ranks with the same local index.
    expert_sums : torch.Tensor or None
        [local experts]: running sums of the rows of each local expert, each rounded up to `alignment`; with `expanded`
        an expert's own rows are not rounded up in its own element.
    expert_rows : torch.Tensor or None
        [local experts]: rows of each local expert.
    statistics : torch.Tensor or None
        [local experts]: the same are added to it.
    alignment : int
        See `expert_sums`.
    expanded : bool
        See `expert_sums`.
    """

    rank_sums: torch.Tensor | None = None
    expert_sums: torch.Tensor | None = None
    expert_rows: torch.Tensor | None = None
    statistics: torch.Tensor | None = None
    alignment: int = 1
    expanded: bool = False

    @staticmethod
    def of(
        engine: Engine, experts: int, alignment: int, *, expanded: bool, statistics: torch.Tensor | None = None
    ) -> ReceivedCounts:
        """Allocate all of them for this many experts on all ranks."""
        topology, where, here = engine.topology, engine.device.torch_device, experts // engine.ranks
        width = topology.ranks if topology.hops == 1 else topology.ranks_per_node
        sums, expert_sums, expert_rows = (
            torch.empty(size, dtype=torch.int32, device=where) for size in (width, here, here)
        )
        return ReceivedCounts(sums, expert_sums, expert_rows, statistics, alignment, expanded)

    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        """Return the tensors that kernels write."""
        return self.rank_sums, self.expert_sums, self.expert_rows, self.statistics

    def native(self, starts: bool = False) -> C.normal.CountTensors:
        """Return the addresses in the form that kernels take.

        `starts`: find where each source's rows begin in the expanded layout, for sources that put them there.
        """
        native = C.normal.CountTensors()
        native.starts = starts
        for name in ("rank_sums", "expert_sums", "expert_rows", "statistics"):
            tensor = getattr(self, name)
            setattr(native, name, 0 if tensor is None else tensor.data_ptr())
        native.alignment, native.expanded = self.alignment, self.expanded
        return native


@dataclass(frozen=True)
class Choices:
    """The choices of this rank's tokens, in whose order a combine in one hop sums.

    Attributes
    ----------
    topk_idx : torch.Tensor
        int32 or int64 [tokens, top-k]: expert ids, -1 for none.
    experts : int
        Number of experts on all ranks.
    """

    topk_idx: torch.Tensor
    experts: int

    def fill(self, tensors: C.normal.CombineTensors) -> None:
        """Add them to the arguments of a combine."""
        tensors.topk_idx, tensors.id_bytes = self.topk_idx.data_ptr(), self.topk_idx.element_size()
        tensors.choices, tensors.experts = self.topk_idx.shape[1], self.experts
