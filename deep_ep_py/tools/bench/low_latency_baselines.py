"""Baselines of low-latency mode. Each moves one row per selection, since that is the shape of the result."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from deep_ep_py.tools.bench.config import BenchConfig
from deep_ep_py.tools.bench.inputs import Inputs
from deep_ep_py.tools.bench.low_latency_oracle import Selections

if TYPE_CHECKING:
    from deep_ep_py import Buffer

# The scope of each baseline's calls, for the report.
BASELINE_NOTES = {
    "memcpy": "One row per selection, addresses computed beforehand. dispatch: from x to its place in the "
    "peers' received tensors in shared memory. combine: from there into one row per selection of the owner, without "
    "the sum. The faster of memcpy and of streaming stores. With FP8 the same BF16 rows, into memory of the rank.",
    "gloo_bare": "all_to_all_single of one row per selection, already packed, into warm memory; combine: the same "
    "in reverse.",
    "normal": "Normal mode of the same Buffer: layout, dispatch, and the rows permuted to experts; back: the weighted "
    "sum of each row's results, and combine.",
    "barrier": "A gloo barrier for each of dispatch and combine.",
}


class SelectionBaseline(ABC):
    """Another implementation of the same work, measured next to ours."""

    variants: tuple[str, ...] = ("",)
    """Variants of the baseline: all are timed, and the fastest is reported."""

    def __init__(self, config: BenchConfig, inputs: Inputs, group: dist.ProcessGroup) -> None:
        self._config, self._inputs, self._group = config, inputs, group

    def prepare(self, buffer: Buffer, packed: torch.Tensor, selections: Selections) -> None:
        """Do the untimed preparation for this iteration; our received tensor exists by then."""
        del buffer, packed, selections

    @abstractmethod
    def dispatch(self, variant: str) -> None:
        """Send this rank's rows."""

    @abstractmethod
    def combine(self, variant: str) -> None:
        """Bring the rows back."""

    def check(self) -> str | None:
        """Return what is wrong with the result of the dispatch, or None."""
        return None


class Memcpy(SelectionBaseline):
    """Copies with known addresses through the memory that our ranks share."""

    variants = ("memcpy", "streaming")

    def prepare(self, buffer: Buffer, packed: torch.Tensor, selections: Selections) -> None:
        """Compute the addresses of all rows."""
        runtime, inputs, ranks = buffer.runtime, self._inputs, self._config.ranks
        row_bytes = 2 * self._config.hidden
        tokens, topk = inputs.topk_idx.shape
        self._selections, self._packed = selections, packed
        if self._config.dtype == "fp8":
            self._elsewhere = torch.zeros((tokens * topk, self._config.hidden), dtype=torch.bfloat16)
            self._places = self._elsewhere.data_ptr() + torch.arange(tokens * topk) * row_bytes
        else:
            offset = torch.tensor([runtime.heap_offset(packed.data_ptr())])
            offsets = [torch.empty_like(offset) for _ in range(ranks)]
            dist.all_gather(offsets, offset, group=self._group)
            bases = torch.tensor([runtime.peer_base(rank) for rank in range(ranks)]) + torch.cat(offsets)
            local = self._config.experts // ranks
            owner, expert = inputs.topk_idx // local, inputs.topk_idx % local
            places = bases[owner] + (expert * packed.shape[1] + selections.rows) * row_bytes
            self._places = places.flatten().contiguous()
        self._x = (inputs.x.data_ptr() + torch.arange(tokens).repeat_interleave(topk) * row_bytes).contiguous()
        self._own = torch.empty((tokens * topk, self._config.hidden), dtype=torch.bfloat16)
        self._own_rows = self._own.data_ptr() + torch.arange(tokens * topk) * row_bytes
        self._own.zero_()

    def dispatch(self, variant: str) -> None:
        """Copy from x to the peers."""
        self._copy(self._places, self._x, variant)

    def combine(self, variant: str) -> None:
        """Copy from the peers into this rank's memory."""
        self._copy(self._own_rows, self._places, variant)

    def _copy(self, destinations: torch.Tensor, sources: torch.Tensor, variant: str) -> None:
        from deep_ep_py.base.native import C

        row_bytes, streaming = 2 * self._config.hidden, variant == "streaming"
        C.copy_rows(destinations.data_ptr(), sources.data_ptr(), destinations.numel(), row_bytes, streaming)

    def check(self) -> str | None:
        """Check the rows, which are in the same place as ours and must be the same."""
        if self._config.dtype == "fp8":
            return None
        wanted = self._selections.received(0)
        same = torch.equal(self._packed[0, : len(wanted)].view(torch.int16), wanted)
        return None if same else "memcpy: rows of the first expert differ"


class GlooBare(SelectionBaseline):
    """The collective alone."""

    def prepare(self, buffer: Buffer, packed: torch.Tensor, selections: Selections) -> None:
        """Pack the rows by destination."""
        config, inputs = self._config, self._inputs
        local = config.experts // config.ranks

        def per_rank(topk_idx: torch.Tensor) -> torch.Tensor:
            return torch.bincount((topk_idx // local).flatten(), minlength=config.ranks)

        counts = torch.stack([per_rank(topk_idx) for topk_idx, _ in selections.routes])
        self._sent, self._got = counts[inputs.rank].tolist(), counts[:, inputs.rank].tolist()
        order = (inputs.topk_idx // local).flatten().argsort(stable=True)
        self._rows = inputs.words[order // config.topk]
        self._received = torch.zeros((sum(self._got), config.hidden), dtype=torch.bfloat16)

    def dispatch(self, variant: str) -> None:
        """Exchange the packed rows."""
        dist.all_to_all_single(self._received, self._rows, self._got, self._sent, group=self._group)

    def combine(self, variant: str) -> None:
        """Send the rows back."""
        dist.all_to_all_single(self._rows, self._received, self._sent, self._got, group=self._group)


class Normal(SelectionBaseline):
    """Normal mode plus the steps that make its results those of low-latency mode."""

    def prepare(self, buffer: Buffer, packed: torch.Tensor, selections: Selections) -> None:
        """Store the Buffer."""
        self._buffer = buffer

    def dispatch(self, variant: str) -> None:
        """Compute the layout, dispatch, and sort rows by expert."""
        from deep_ep_py.moe.permute import permute, sort_by_expert

        inputs, config = self._inputs, self._config
        per_rank, _, per_expert, in_rank, _ = self._buffer.get_dispatch_layout(inputs.topk_idx, config.experts)
        received, recv_topk_idx, self._weights, _, self._handle, _ = self._buffer.dispatch(
            inputs.x,
            topk_idx=inputs.topk_idx,
            topk_weights=inputs.topk_weights,
            num_tokens_per_rank=per_rank,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
        )
        self._permutation = sort_by_expert(recv_topk_idx, config.experts // config.ranks)
        self._rows = permute(received, self._permutation)

    def combine(self, variant: str) -> None:
        """Compute the weighted sum of each row's results, and combine."""
        from deep_ep_py.moe.permute import unpermute

        self._buffer.combine(unpermute(self._rows, self._weights, self._permutation), self._handle)


class Barrier(SelectionBaseline):
    """The cost of a barrier of all ranks."""

    def dispatch(self, variant: str) -> None:
        """Wait for all ranks."""
        dist.barrier(group=self._group)

    def combine(self, variant: str) -> None:
        """Wait for all ranks again."""
        dist.barrier(group=self._group)


KINDS: dict[str, type[SelectionBaseline]] = {
    "memcpy": Memcpy,
    "gloo_bare": GlooBare,
    "normal": Normal,
    "barrier": Barrier,
}


def make_baselines(config: BenchConfig, inputs: Inputs, group: dist.ProcessGroup) -> dict[str, SelectionBaseline]:
    """Return the baselines that the run asks for, by name."""
    return {name: KINDS[name](config, inputs, group) for name in config.baselines}
