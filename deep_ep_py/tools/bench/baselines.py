"""Baselines: plain copies, and the same exchange over torch.distributed's gloo."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
import torch.distributed as dist

from deep_ep_py.tools.bench.config import BenchConfig
from deep_ep_py.tools.bench.inputs import Inputs
from deep_ep_py.tools.bench.ours import Ours

# The scope of each baseline's calls, for the report.
BASELINE_NOTES = {
    "memcpy": "The same rows to the same destinations, row by row in token order, addresses computed beforehand. "
    "dispatch: from x into the peers' received tensors in shared memory. combine: from there into one row per (token, "
    "destination) of the owner, without the sum. The faster of memcpy and of streaming stores.",
    "gloo_bare": "Only all_to_all_single of the already packed rows, into warm memory; combine: the same in reverse.",
    "gloo": "The exchange as a framework writes it. dispatch: permute by destination, exchange counts, all_to_all of "
    "rows, expert ids and weights, localize the ids. combine: all_to_all back of an expert output, index_add into the "
    "tokens. Large tensors are warm and reused.",
}


class Workspace:
    """Warm, ordinary memory that the baselines share.

    Parameters
    ----------
    config
        The run.
    inputs
        The inputs, which give the maximum numbers of rows sent and received.
    """

    def __init__(self, config: BenchConfig, inputs: Inputs) -> None:
        words = config.row_bytes // 2
        self.packed = torch.zeros(inputs.max_sent, words, dtype=torch.bfloat16)
        self.received = torch.zeros(inputs.max_received, words, dtype=torch.bfloat16)
        self.combined = torch.zeros(inputs.tokens, words, dtype=torch.bfloat16)


class Baseline(ABC):
    """Another implementation of the same work, measured next to ours."""

    variants: tuple[str, ...] = ("",)
    """Variants of the baseline: all are timed, and the fastest is reported."""

    @abstractmethod
    def prepare(self, ours: Ours) -> None:
        """Do the untimed preparation for this iteration; our received tensor exists by then."""

    @abstractmethod
    def dispatch(self, variant: str) -> None:
        """Send this rank's rows."""

    @abstractmethod
    def combine(self, variant: str) -> None:
        """Bring the rows back."""

    @abstractmethod
    def received(self) -> torch.Tensor:
        """Return the tensor in which the dispatched rows arrived, in our order."""


class Memcpy(Baseline):
    """Copies with known addresses through the memory that our ranks share.

    Parameters
    ----------
    config, inputs, workspace, group
        The run, this rank's inputs, scratch memory, all ranks.
    """

    variants = ("memcpy", "streaming")

    def __init__(self, config: BenchConfig, inputs: Inputs, workspace: Workspace, group: dist.ProcessGroup) -> None:
        self._config, self._inputs, self._workspace, self._group = config, inputs, workspace, group

    def prepare(self, ours: Ours) -> None:
        """Compute the addresses of all rows."""
        self._ours = ours
        runtime, ranks, row_bytes = ours.buffer.runtime, self._config.ranks, self._config.row_bytes
        offset = torch.tensor([runtime.heap_offset(ours.recv_x.data_ptr())])
        offsets = [torch.empty_like(offset) for _ in range(ranks)]
        dist.all_gather(offsets, offset, group=self._group)
        outputs = torch.tensor([runtime.peer_base(rank) for rank in range(ranks)]) + torch.cat(offsets)
        in_rank = self._inputs.in_rank
        begins = self._inputs.counts[self._inputs.step, : self._inputs.rank].sum(dim=0)
        row_at_destination = in_rank.cumsum(dim=0) - 1 + begins
        token, destination = in_rank.nonzero().unbind(dim=1)
        self._x_rows = self._inputs.x.data_ptr() + token * row_bytes
        self._remote_rows = outputs[destination] + row_at_destination[token, destination] * row_bytes
        self._own_rows = self._workspace.packed.data_ptr() + torch.arange(token.numel()) * row_bytes

    def dispatch(self, variant: str) -> None:
        """Copy from x to the peers."""
        self._copy(self._remote_rows, self._x_rows, variant)

    def combine(self, variant: str) -> None:
        """Copy from the peers into this rank's slots."""
        self._copy(self._own_rows, self._remote_rows, variant)

    def received(self) -> torch.Tensor:
        """Return our received tensor, which the peers' copies overwrite."""
        return self._ours.recv_x

    def _copy(self, destinations: torch.Tensor, sources: torch.Tensor, variant: str) -> None:
        from deep_ep_py.base.native import C

        streaming = variant == "streaming"
        row_bytes = self._config.row_bytes
        C.copy_rows(destinations.data_ptr(), sources.data_ptr(), destinations.numel(), row_bytes, streaming)


class GlooBare(Baseline):
    """The collective alone.

    Parameters
    ----------
    config, inputs, workspace, group
        The run, this rank's inputs, scratch memory, all ranks.
    """

    def __init__(self, config: BenchConfig, inputs: Inputs, workspace: Workspace, group: dist.ProcessGroup) -> None:
        self._inputs, self._workspace, self._group = inputs, workspace, group

    def prepare(self, ours: Ours) -> None:
        """Pack the rows by destination."""
        counts = self._inputs.counts[self._inputs.step]
        self._sent: list[int] = counts[self._inputs.rank].tolist()
        self._got: list[int] = counts[:, self._inputs.rank].tolist()
        tokens = self._inputs.in_rank.t().nonzero()[:, 1]
        torch.index_select(self._inputs.words, 0, tokens, out=self._packed())

    def dispatch(self, variant: str) -> None:
        """Exchange the packed rows."""
        dist.all_to_all_single(self.received(), self._packed(), self._got, self._sent, group=self._group)

    def combine(self, variant: str) -> None:
        """Send an expert output the way back."""
        source = self._inputs.expert_out
        dist.all_to_all_single(self._packed(), source, self._sent, self._got, group=self._group)

    def received(self) -> torch.Tensor:
        """Return the received rows."""
        return self._workspace.received[: sum(self._got)]

    def _packed(self) -> torch.Tensor:
        return self._workspace.packed[: sum(self._sent)]


class Gloo(Baseline):
    """A layer's whole exchange.

    Parameters
    ----------
    config, inputs, workspace, group
        The run, this rank's inputs, scratch memory, all ranks.
    """

    def __init__(self, config: BenchConfig, inputs: Inputs, workspace: Workspace, group: dist.ProcessGroup) -> None:
        self._config, self._inputs, self._workspace, self._group = config, inputs, workspace, group
        self._local_experts = config.experts // config.ranks

    def prepare(self, ours: Ours) -> None:
        """Do nothing: a layer starts with x, ids and weights."""

    def dispatch(self, variant: str) -> None:
        """Permute, exchange counts, then exchange rows, ids and weights."""
        ranks, inputs = self._config.ranks, self._inputs
        in_rank = torch.zeros(inputs.tokens, ranks, dtype=torch.bool)
        in_rank.scatter_(1, inputs.topk_idx // self._local_experts, True)
        counts = in_rank.sum(dim=0)
        received_counts = torch.empty_like(counts)
        dist.all_to_all_single(received_counts, counts, group=self._group)
        self._sent, self._got = counts.tolist(), received_counts.tolist()
        self._tokens = in_rank.t().nonzero()[:, 1]
        packed = self._workspace.packed[: sum(self._sent)]
        torch.index_select(inputs.words, 0, self._tokens, out=packed)
        self._exchange(self.received(), packed)
        topk_idx = inputs.topk_idx.new_empty(sum(self._got), self._config.topk)
        topk_weights = inputs.topk_weights.new_empty(topk_idx.shape)
        self._exchange(topk_idx, inputs.topk_idx[self._tokens])
        self._exchange(topk_weights, inputs.topk_weights[self._tokens])
        topk_idx -= inputs.rank * self._local_experts
        elsewhere = (topk_idx < 0) | (topk_idx >= self._local_experts)
        topk_idx.masked_fill_(elsewhere, -1)
        topk_weights.masked_fill_(elsewhere, 0)

    def combine(self, variant: str) -> None:
        """Exchange back and sum."""
        packed = self._workspace.packed[: sum(self._sent)]
        dist.all_to_all_single(packed, self._inputs.expert_out, self._sent, self._got, group=self._group)
        self._workspace.combined.zero_().index_add_(0, self._tokens, packed)

    def received(self) -> torch.Tensor:
        """Return the received rows."""
        return self._workspace.received[: sum(self._got)]

    def _exchange(self, received: torch.Tensor, sent: torch.Tensor) -> None:
        dist.all_to_all_single(received, sent, self._got, self._sent, group=self._group)


def make_baselines(config: BenchConfig, inputs: Inputs, group: dist.ProcessGroup) -> dict[str, Baseline]:
    """Return the baselines that the run asks for, by name."""
    kinds: dict[str, Callable[..., Baseline]] = {"memcpy": Memcpy, "gloo_bare": GlooBare, "gloo": Gloo}
    if not config.baselines:
        return {}
    workspace = Workspace(config, inputs)
    return {name: kinds[name](config, inputs, workspace, group) for name in config.baselines}
