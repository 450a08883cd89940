"""Layouts of a dispatch's outputs other than one row per token, with the scales of each row beside each other.

Kernels of the same operation bring the rows into these layouts after they have arrived, and sum them again before a
combine sends them. Only the rank itself is involved, except that senders that reach an expanded layout by loads and
stores put each row into its first place there.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from deep_ep_py.base.native import C
from deep_ep_py.modes.normal.rows import Received, Rows

if TYPE_CHECKING:
    from deep_ep_py.session.engine import Engine

_ANY_SLOT = 0xFFFFFFFF
"""Rows of a layout that is not limited."""
COLUMN_ALIGNMENT = 4
"""Columns of scales begin at multiples of this many scales: 16 bytes, which TMA requires."""


@dataclass(frozen=True)
class Expanded:
    """The expanded layout of a dispatch: a row for each choice of a local expert, contiguous per expert.

    The rows of an expert are in the order of the rows that are not expanded: by source rank, then token. Each expert's
    rows begin at a multiple of `alignment`.

    Attributes
    ----------
    slots : torch.Tensor
        int32 [rows, top-k]: the index of each choice's row, -1 for choices of experts elsewhere.
    expert_rows : torch.Tensor
        int32 [local experts]: rows of each local expert.
    received : torch.Tensor
        int32 []: the number of rows that are not expanded.
    alignment : int
        In rows.
    expanded_rows : int
        Rows of the layout, with padding; without a host wait, an upper bound on them.
    """

    slots: torch.Tensor
    expert_rows: torch.Tensor
    received: torch.Tensor
    alignment: int
    expanded_rows: int

    @property
    def topk(self) -> int:
        """Experts per token."""
        return self.slots.shape[1]

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Return the tensors that kernels read."""
        return self.slots, self.expert_rows, self.received

    def native(self) -> C.expand.Layout:
        """Return the layout in the form that kernels take."""
        return C.expand.Layout(
            expert_rows=self.expert_rows.data_ptr(),
            slots=self.slots.data_ptr(),
            experts=self.expert_rows.shape[0],
            alignment=self.alignment,
            rows=self.slots.shape[0],
            expanded_rows=self.expanded_rows,
        )

    def folded(
        self, engine: Engine, rows: int, x: torch.Tensor, weights: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Allocate rows that are not expanded, for `fold` to write and for peers to read."""
        folded_x = engine.empty((rows, x.shape[1]), x.dtype)
        return folded_x, None if weights is None else engine.empty((rows, self.topk), torch.float32)

    def fold(
        self,
        engine: Engine,
        call: C.Call,
        expanded: tuple[torch.Tensor, torch.Tensor | None],
        folded: tuple[torch.Tensor, torch.Tensor | None],
        blocks: int,
    ) -> None:
        """Launch the sum of each token's rows, in the order of its choices; `expanded` and `folded`: x and weights."""
        tensors = C.expand.Tensors()
        tensors.expanded_x, tensors.x = expanded[0].data_ptr(), folded[0].data_ptr()
        if expanded[1] is not None and folded[1] is not None:
            tensors.expanded_weights, tensors.topk_weights = expanded[1].data_ptr(), folded[1].data_ptr()
        sizes = C.normal.Sizes(0, Rows(expanded[0]).row_bytes, self.topk, 0)
        C.expand.fold(engine.runtime, call, sizes, self.native(), tensors, blocks=blocks)


class ScaleColumns:
    """A placement: the scales of consecutive rows beside each other, as TMA loads of a grouped GEMM read them."""

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Return the tensors that kernels use besides the outputs: none."""
        return ()

    def prepare(self, engine: Engine, sizes: C.normal.Sizes) -> None:
        """Prepare the kernels."""
        engine.prepare(sizes.row_bytes, sizes.topk, "scale_columns")

    def allocate(self, engine: Engine, arrived: Received, counts: list[int]) -> Received:
        """Allocate the outputs, given those in which rows arrive."""
        del engine, counts
        scales = arrived.rows.scales
        if scales is None or scales.dim() == 1:
            return arrived
        return Received(
            Rows(arrived.rows.x, _empty_scales(scales, scales.shape[0], True)), arrived.topk_idx, arrived.topk_weights
        )

    def launch(
        self, engine: Engine, call: C.Call, sizes: C.normal.Sizes, arrived: Received, outputs: Received, blocks: int
    ) -> None:
        """Launch the copy of the scales."""
        scales, columns = arrived.rows.scales, outputs.rows.scales
        if scales is None or columns is None or columns is scales:
            return
        C.expand.copy_scales(
            engine.runtime,
            call,
            sizes,
            rows=columns.shape[0],
            scales=scales.data_ptr(),
            columns=columns.data_ptr(),
            column_stride=columns.stride(1),
            blocks=blocks,
        )


@dataclass(frozen=True)
class OwnChoices:
    """The numbers of a rank's own choices among its choices of the same expert.

    Attributes
    ----------
    topk_idx : torch.Tensor
        [tokens, top-k]: expert ids.
    ordinals : torch.Tensor
        int32 [tokens, top-k]: their numbers.
    counts : torch.Tensor
        For the kernels' use.
    """

    topk_idx: torch.Tensor
    ordinals: torch.Tensor
    counts: torch.Tensor

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Return the tensors that kernels use."""
        return self.topk_idx, self.ordinals, self.counts

    def launch(self, engine: Engine, call: C.Call, sizes: C.normal.Sizes, blocks: int) -> None:
        """Launch the numbering, before the dispatch kernel."""
        own = C.expand.Layout(
            expert_rows=0,
            slots=self.ordinals.data_ptr(),
            experts=self.counts.shape[1],
            alignment=1,
            rows=self.topk_idx.shape[0],
            expanded_rows=_ANY_SLOT,
        )
        addresses = {"topk_idx": self.topk_idx.data_ptr(), "received": 0, "counts": self.counts.data_ptr()}
        C.expand.number(engine.runtime, call, sizes, own, blocks=blocks, **addresses)


@dataclass
class Expand:
    """A placement: the expanded layout.

    Attributes
    ----------
    expert_rows : torch.Tensor
        int32 [local experts]: rows of each local expert, which the dispatch stores before.
    received : torch.Tensor
        int32 []: the number of rows received, likewise.
    alignment : int
        Each expert's rows begin at a multiple of this.
    topk : int
        Experts per token.
    max_rows : int
        Rows of the layout if the host does not know how many arrive.
    zero_padding : bool
        Whether rows between those of two experts become zero.
    columns : bool
        Whether scales of consecutive rows are beside each other.
    layout : Expanded or None
        The layout: that of an earlier dispatch with the same handle, otherwise None until `allocate` has made it.
    """

    expert_rows: torch.Tensor
    received: torch.Tensor
    alignment: int
    topk: int
    max_rows: int = 0
    zero_padding: bool = False
    columns: bool = False
    layout: Expanded | None = None
    _numbers: bool = field(init=False, repr=False)
    _by_senders: bool = field(default=False, init=False, repr=False)
    _counts: torch.Tensor | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        self._numbers = self.layout is None

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Return the tensors that kernels use besides the outputs."""
        used = (self.expert_rows, self.received) if self.layout is None else self.layout.tensors()
        return used if self._counts is None else (*used, self._counts)

    def prepare(self, engine: Engine, sizes: C.normal.Sizes) -> None:
        """Prepare the kernels."""
        engine.prepare(sizes.row_bytes, self.topk, *(("expand_slots",) if self._numbers else ()), "expand_rows")

    @staticmethod
    def by_senders(engine: Engine) -> bool:
        """Return whether senders may put rows into layouts: the same on all ranks."""
        return engine.topology.hops == 1 and engine.senders_expand and not engine.topology.networks

    def own_choices(self, engine: Engine, topk_idx: torch.Tensor, experts: int) -> OwnChoices | None:
        """Allocate what this rank needs to find its rows' places in other ranks' layouts.

        Returns
        -------
        OwnChoices or None
            None if no rank offers its layout: those that are reached by NICs alone, or if the host does not wait for
            counts.
        """
        if not self._numbers or not self.by_senders(engine):
            return None
        return OwnChoices(topk_idx, torch.empty_like(topk_idx, dtype=torch.int32), _counts(topk_idx, experts))

    def take_directly(
        self,
        engine: Engine,
        sent: Rows,
        count: int,
        counts: list[int],
        others: tuple[torch.Tensor | None, ...],
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Let senders store rows into the layout itself, if all of them can; the receiver then makes only the copies.

        Parameters
        ----------
        engine : Engine
            The engine.
        sent : Rows
            Rows like those that arrive.
        count : int
            The number of rows that arrive.
        counts : list of int
            The rows of each local expert, rounded up; empty if they are unknown.
        others : tuple of torch.Tensor or None
            The other outputs in which rows arrive.

        Returns
        -------
        tuple of torch.Tensor or None
            The layout's rows, and int32 [rows, top-k] for their slots. None if peers cannot reach all outputs, or too
            little of the memory that they reach would be left.
        """
        possible = self._numbers and self.by_senders(engine) and all(engine.topology.mapped)
        if not possible or not counts or not count or not engine.peers_reach(*others):
            return None
        # The layout stays as long as the caller keeps it. Rows that only pass through, of later dispatches and of
        # combines, must still find room in the same memory: otherwise they would go in rounds.
        passing = 2 * count * sent.row_bytes
        if engine.shared_bytes_left() < sum(counts) * sent.row_bytes + passing:
            return None
        x = engine.shared((sum(counts), sent.hidden), sent.x.dtype)
        slots = None if x is None else engine.shared((count, self.topk), torch.int32)
        if x is None or slots is None:
            return None
        self._by_senders = True
        self.layout = Expanded(slots, self.expert_rows, self.received, self.alignment, x.shape[0])
        return x, slots

    def allocate(self, engine: Engine, arrived: Received, counts: list[int]) -> Received:
        """Allocate the outputs, given those in which rows arrive.

        `counts`: the rows of each local expert, rounded up; empty if they are unknown.
        """
        rows, where = arrived.rows, arrived.rows.x.device
        if self.layout is None:
            slots = torch.empty((rows.x.shape[0], self.topk), dtype=torch.int32, device=where)
            expanded_rows = sum(counts) if counts else self.max_rows
            self.layout = Expanded(slots, self.expert_rows, self.received, self.alignment, expanded_rows)
        size = self.layout.expanded_rows
        x = rows.x
        if not self._by_senders:
            (x,) = engine.empty_private(((size, rows.hidden), rows.x.dtype))
            if self._numbers and arrived.topk_idx is not None:
                self._counts = _counts(arrived.topk_idx, self.expert_rows.shape[0])
        scales = None if rows.scales is None else _empty_scales(rows.scales, size, self.columns)
        # Rows that no choice has get weight 0: callers multiply all rows by their weights.
        weights = None if arrived.topk_weights is None else torch.zeros(size, dtype=torch.float32, device=where)
        return Received(Rows(x, scales), None, weights)

    def launch(
        self, engine: Engine, call: C.Call, sizes: C.normal.Sizes, arrived: Received, outputs: Received, blocks: int
    ) -> None:
        """Launch the copies of the rows."""
        assert self.layout is not None
        rows, idx, native = arrived.rows, arrived.topk_idx, self.layout.native()
        id_bytes = torch.int64.itemsize if idx is None else idx.element_size()
        sizes = C.normal.Sizes(0, sizes.row_bytes, self.topk, 0, id_bytes=id_bytes, scales=rows.scales_per_row)
        if self._numbers and not self._by_senders:
            assert idx is not None
            assert self._counts is not None
            addresses = {"topk_idx": idx.data_ptr(), "received": self.received.data_ptr()}
            addresses["counts"] = self._counts.data_ptr()
            C.expand.number(engine.runtime, call, sizes, native, blocks=blocks, **addresses)
        tensors = C.expand.Tensors()
        tensors.x = 0 if self._by_senders else rows.x.data_ptr()
        tensors.expanded_x = outputs.rows.x.data_ptr()
        if rows.scales is not None and outputs.rows.scales is not None:
            tensors.scales, tensors.expanded_scales = rows.scales.data_ptr(), outputs.rows.scales.data_ptr()
            tensors.scales_stride = outputs.rows.strides
        if arrived.topk_weights is not None and outputs.topk_weights is not None:
            tensors.topk_weights = arrived.topk_weights.data_ptr()
            tensors.expanded_weights = outputs.topk_weights.data_ptr()
        C.expand.copy(engine.runtime, call, sizes, native, tensors, zero_padding=self.zero_padding, blocks=blocks)


Placement = Expand | ScaleColumns


def _counts(like: torch.Tensor, experts: int) -> torch.Tensor:
    """Allocate what kernels need to number the choices of `experts`."""
    return torch.empty((C.expand.CHOICE_CHUNKS, experts), dtype=torch.int32, device=like.device)


def _empty_scales(like: torch.Tensor, rows: int, columns: bool) -> torch.Tensor:
    """Allocate scales for this number of rows, as wide as `like`."""
    if not columns or like.dim() == 1:
        return torch.empty((rows, *like.shape[1:]), dtype=like.dtype, device=like.device)
    stride = -(-rows // COLUMN_ALIGNMENT) * COLUMN_ALIGNMENT
    return torch.empty_strided((rows, like.shape[1]), (1, stride), dtype=like.dtype, device=like.device)
