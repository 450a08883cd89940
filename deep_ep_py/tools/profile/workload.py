"""The workload that is profiled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from deep_ep_py import Buffer, NicOptions
from deep_ep_py.base.native import C
from deep_ep_py.testing import run_ranks
from deep_ep_py.tools.bench.config import FP8_BLOCK
from deep_ep_py.tools.bench.posting import Pattern, Poster
from deep_ep_py.tools.bench.routing import route
from deep_ep_py.tools.profile.device import Images, interpreting

_TIMEOUT = 600.0  # seconds of the virtual clock


@dataclass(frozen=True)
class Workload:
    """A dispatch and a combine on every rank, or puts from one rank to another.

    Parameters
    ----------
    mode : str
        `normal` or `low-latency`. `posting`: each warp of the first rank puts `tokens` rows to the second one.
    architecture : str
        For example `sm_90a`.
    fabric : str
        `peer` or `ibgda`.
    ranks, tokens, hidden, topk, experts : int
        Sizes; `tokens` is per rank, `hidden` in BF16 elements.
    nodes : int
        Nodes over which the ranks are spread, which NICs join; 1: `fabric` joins all ranks.
    routing : str
        As in `deep_ep_py.tools.bench.routing.route`.
    warps, blocks : int
        Warps per block, and blocks per operation.
    seed : int
        Seed of the routing.
    dtype : str
        Of the rows that a dispatch delivers: `bf16` or `fp8`.
    zero_copy : bool
        Whether a low-latency combine reads results where experts have left them in the Buffer's memory.
    halves : bool
        Whether the sending and the receiving half of a call are launches of their own, as with a receive hook
        (low-latency mode).
    cached : bool
        Whether a dispatch along the routes of the first one follows (normal mode).
    one_gpu : bool
        Whether the ranks share a GPU.
    nic_rate : float
        GB/s that the NICs of a rank send, for predicted times; 0: any number.
    queue_pairs : int
        Queue pairs to each peer.
    """

    mode: str = "normal"
    architecture: str = "sm_90a"
    fabric: str = "peer"
    ranks: int = 8
    nodes: int = 1
    tokens: int = 64
    hidden: int = 7168
    topk: int = 8
    experts: int = 256
    routing: str = "uniform"
    warps: int = C.cuda.BLOCK_WARPS
    blocks: int = 2
    seed: int = 1
    dtype: str = "bf16"
    zero_copy: bool = False
    halves: bool = False
    cached: bool = False
    one_gpu: bool = False
    nic_rate: float = 0.0
    queue_pairs: int = 1

    @property
    def row_bytes(self) -> int:
        """Bytes of a row that a dispatch delivers."""
        return self.hidden if self.dtype == "fp8" else 2 * self.hidden

    @property
    def received_shape(self) -> tuple[int, int, int]:
        """Shape of what a rank receives in low-latency mode."""
        return self.experts // self.ranks, self.ranks * self.tokens, self.hidden


def run(workload: Workload, images: Images | None = None, only_times: bool = False) -> tuple[int, dict[str, Any]]:
    """Run a workload and count what its kernels execute.

    Parameters
    ----------
    workload
        The workload.
    images
        The source of kernels for the workload's architecture. Default: NVRTC.
    only_times
        Whether to leave out the counts, which take most of the memory.

    Returns
    -------
    rows : int
        Number of rows that all ranks have received.
    counted
        Counts by kernel symbol, as returned by `C.ptx.counted`.

    Raises
    ------
    RuntimeError
        As `interpreting`.
    CompileError, NvrtcUnavailableError, DeepEPError, ValueError
        As `compile_ptx` and `Buffer`.
    """
    call = {"normal": _normal, "low-latency": _low_latency, "posting": _posting}[workload.mode]
    with interpreting(images or Images(workload.architecture), workload.warps, workload.blocks):
        C.ptx.time(one_gpu=workload.one_gpu, counts=not only_times, nic=1e9 * workload.nic_rate)
        try:
            rows = sum(run_ranks(workload.ranks, call, workload))
            return rows, C.ptx.counted()
        finally:
            C.ptx.count(False)


def _inputs(workload: Workload, rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    chosen = (workload.routing, workload.tokens, workload.topk, workload.experts, workload.seed, rank, 0)
    topk_idx, topk_weights = route(*chosen)
    x = torch.randn(workload.tokens, workload.hidden, generator=torch.Generator().manual_seed(rank))
    return x.to(torch.bfloat16), topk_idx, topk_weights


def _normal(group: Any, workload: Workload) -> int:
    x, topk_idx, topk_weights = _inputs(workload, group.rank())
    size = Buffer.get_dispatch_config(group.size()).get_nvl_buffer_size_hint(workload.row_bytes, group.size())
    rows: Any = x
    if workload.dtype == "fp8":
        rows = x.to(torch.float8_e4m3fn), torch.ones(workload.tokens, workload.hidden // FP8_BLOCK)
    with Buffer(group, size, **_options(workload)) as buffer:
        layout = buffer.get_dispatch_layout(topk_idx, workload.experts)
        group.barrier()
        received, _, weights, _, handle, _ = buffer.dispatch(
            rows,
            topk_idx=topk_idx,
            topk_weights=topk_weights,
            num_tokens_per_rank=layout[0],
            num_tokens_per_expert=layout[2],
            is_token_in_rank=layout[3],
        )
        if workload.cached:
            group.barrier()
            buffer.dispatch(rows, handle=handle)
        group.barrier()
        if isinstance(received, tuple):
            received = received[0].to(torch.bfloat16)
        buffer.combine(received, handle, topk_weights=weights)
        return int(received.shape[0])


def _low_latency(group: Any, workload: Workload) -> int:
    x, topk_idx, topk_weights = _inputs(workload, group.rank())
    sizes = (workload.tokens, workload.hidden, group.size(), workload.experts)
    size = Buffer.get_low_latency_rdma_size_hint(*sizes)
    with Buffer(group, num_rdma_bytes=size, low_latency_mode=True, **_options(workload)) as buffer:
        received, counts, handle, _, receive = buffer.low_latency_dispatch(
            x,
            topk_idx,
            workload.tokens,
            workload.experts,
            use_fp8=workload.dtype == "fp8",
            return_recv_hook=workload.halves,
        )
        _receive(group, receive)
        if workload.zero_copy:
            results = buffer.get_next_low_latency_combine_buffer(handle)
        else:
            results = torch.zeros(workload.received_shape, dtype=torch.bfloat16)
        _, _, receive = buffer.low_latency_combine(
            results,
            topk_idx,
            topk_weights,
            handle,
            zero_copy=workload.zero_copy,
            return_recv_hook=workload.halves,
        )
        _receive(group, receive)
        return int(counts.sum())


def _posting(group: Any, workload: Workload) -> int:
    pattern = Pattern("profiled", workload.blocks, workload.warps, workload.queue_pairs)
    with Poster(group, pattern, 2 * workload.hidden, timeout=_TIMEOUT) as poster:
        if group.rank() == 0:
            poster.finish(poster.launch(workload.tokens))
        group.barrier()
        return workload.tokens * poster.posters if group.rank() == 1 and poster.has_all(workload.tokens) else 0


def _options(workload: Workload) -> dict[str, Any]:
    """Return the options of a Buffer."""
    return {
        "fabric": workload.fabric,
        "ranks_per_node": workload.ranks // workload.nodes if workload.nodes > 1 else None,
        "nic": NicOptions(queues_per_peer=workload.queue_pairs),
        "timeout": _TIMEOUT,
    }


def _receive(group: Any, hook: Callable[[], None] | None) -> None:
    """Once all ranks have come this far, start the second half of a call, if it is not a part of the first one."""
    group.barrier()
    if hook is not None:
        hook()
        group.barrier()
