"""Runs over the stand-in for the driver: a whole layer, forward and backward, as a graph that is replayed."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional

import pretend_gpu
import tape
from deep_ep_py import ElasticBuffer, moe, ops
from deep_ep_py.moe import grouped
from deep_ep_py.testing import run_ranks
from host_waits import HostWaitError
from tape import Tape

RANKS, TOKENS, HIDDEN, EXPERTS, TOPK = 4, 12, 128, 8, 3


def step(layer: torch.nn.Module, x: Tensor) -> list[Tensor]:
    """Return the output, and the gradients of the tokens and all weights."""
    out = layer(x)
    return [out, *torch.autograd.grad(out.square().sum(), [x, *layer.parameters()])]


def make_layer(name: str, rank: int, fp8: bool) -> torch.nn.Module:
    torch.manual_seed(5)
    share = EXPERTS // RANKS
    experts = moe.Experts(rank * share, share, HIDDEN, 16, seed=3).bfloat16()
    gate = moe.Gate(HIDDEN, EXPERTS, TOPK)
    return moe.ExpandedMoELayer(gate, experts, EXPERTS, name, expert_alignment=8, num_max_tokens=TOKENS, fp8=fp8)


def replays(group: Any, fp8: bool) -> None:
    sizes = {"num_max_tokens_per_rank": TOKENS, "hidden": HIDDEN, "num_topk": TOPK}
    buffer = ElasticBuffer(group, **sizes, device="cuda", fabric="peer", num_gpu_timeout_secs=20)
    rank, random = buffer.rank_idx, torch.Generator().manual_seed(7 + buffer.rank_idx)
    buffer.warmup(HIDDEN, TOPK, fp8)
    layer = make_layer(ops.register(buffer, f"rank {rank}"), rank, fp8)
    batches = [torch.randn(TOKENS, HIDDEN, generator=random) for _ in range(3)]
    wanted = [[one.clone() for one in step(layer, batch.clone().requires_grad_())] for batch in batches]
    group.barrier()

    x, graph = torch.zeros(TOKENS, HIDDEN, requires_grad=True), Tape()
    with graph.record():
        found = step(layer, x)
    for turn in (0, 2, 1, 0):
        with torch.no_grad():
            x.copy_(batches[turn])
        group.barrier()
        graph.replay()
        buffer.check()
        for again, once in zip(found, wanted[turn], strict=True):
            assert torch.equal(again, once)
    group.barrier()


def a_layer_that_reads_counts(group: Any) -> None:
    """Where the host reads how many rows an expert has, as before sm_90, a capture is refused."""
    buffer = ElasticBuffer(group, num_max_tokens_per_rank=TOKENS, hidden=HIDDEN, device="cuda", fabric="peer")
    layer = make_layer(ops.register(buffer, f"rank {buffer.rank_idx}"), buffer.rank_idx, False)
    try:
        with Tape().record():
            layer(torch.zeros(TOKENS, HIDDEN))
    except HostWaitError as error:
        assert "tolist" in str(error)
    else:
        raise AssertionError("the counts have been read")


def main() -> None:
    pretend_gpu.install(compile_kernels=False)
    tape.install()
    assert hasattr(functional, "grouped_mm"), "torch 2.10 or later has it, on a CPU too"
    with patch.object(grouped, "_without_host_wait", lambda *_: True):
        for fp8 in (False, True):
            run_ranks(RANKS, replays, fp8, device="cuda")
            print("fp8" if fp8 else "bf16")
    run_ranks(RANKS, a_layer_that_reads_counts, device="cuda")
    print("refused")


if __name__ == "__main__":
    main()
