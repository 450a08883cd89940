"""The workload that is profiled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from deep_ep_py.base.native import C
from deep_ep_py.buffer import Buffer
from deep_ep_py.testing import run_ranks
from deep_ep_py.tools.bench.routing import route
from deep_ep_py.tools.profile.device import Images, interpreting

_TIMEOUT = 600.0  # seconds of the virtual clock


@dataclass(frozen=True)
class Workload:
    """A dispatch and a combine on every rank.

    Parameters
    ----------
    mode : str
        `normal` or `low-latency`.
    architecture : str
        For example `sm_90a`.
    fabric : str
        `peer` or `ibgda`.
    ranks, tokens, hidden, topk, experts : int
        Sizes; `tokens` is per rank, `hidden` in BF16 elements.
    routing : str
        As in `deep_ep_py.tools.bench.routing.route`.
    warps, blocks : int
        Warps per block, and blocks per operation.
    seed : int
        Seed of the routing and of the order in which threads run.
    """

    mode: str = "normal"
    architecture: str = "sm_90a"
    fabric: str = "peer"
    ranks: int = 8
    tokens: int = 64
    hidden: int = 7168
    topk: int = 8
    experts: int = 256
    routing: str = "uniform"
    warps: int = C.cuda.BLOCK_WARPS
    blocks: int = 2
    seed: int = 1

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return 2 * self.hidden


def run(workload: Workload, images: Images | None = None) -> tuple[int, dict[str, Any]]:
    """Run a workload and count what its kernels execute.

    Parameters
    ----------
    workload
        The workload.
    images
        The source of kernels for the workload's architecture. Default: NVRTC.

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
    call = {"normal": _normal, "low-latency": _low_latency}[workload.mode]
    with interpreting(images or Images(workload.architecture), workload.warps, workload.blocks):
        C.ptx.count(True)
        try:
            rows = sum(run_ranks(workload.ranks, call, workload, seed=workload.seed))
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
    with Buffer(group, size, fabric=workload.fabric, timeout=_TIMEOUT) as buffer:
        layout = buffer.get_dispatch_layout(topk_idx, workload.experts)
        received, _, weights, _, handle, _ = buffer.dispatch(
            x,
            topk_idx=topk_idx,
            topk_weights=topk_weights,
            num_tokens_per_rank=layout[0],
            num_tokens_per_expert=layout[2],
            is_token_in_rank=layout[3],
        )
        buffer.combine(received, handle, topk_weights=weights)
        return int(received.shape[0])


def _low_latency(group: Any, workload: Workload) -> int:
    x, topk_idx, topk_weights = _inputs(workload, group.rank())
    sizes = (workload.tokens, workload.hidden, group.size(), workload.experts)
    size = Buffer.get_low_latency_rdma_size_hint(*sizes)
    with Buffer(group, num_rdma_bytes=size, low_latency_mode=True, fabric=workload.fabric, timeout=_TIMEOUT) as buffer:
        received, counts, handle, _, _ = buffer.low_latency_dispatch(
            x, topk_idx, workload.tokens, workload.experts, use_fp8=False
        )
        assert isinstance(received, torch.Tensor), "rows of BF16 come without scales"
        buffer.low_latency_combine(received, topk_idx, topk_weights, handle)
        return int(counts.sum())
