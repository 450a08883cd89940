"""Runs under torchrun: low-latency calls that do not match, after some that did. Ranks that are late for them, or still
in the call before, say as well what differs."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

import deep_ep_py as deep_ep

HIDDEN, LATE, ODD = 256, 0, 1
SAID = r"num_max_dispatch_tokens_per_rank \(16 on rank.*; 8 on rank 1\), num_experts \(12 on rank.*; 6 on rank 1\)"


def main() -> None:
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    x, ids = torch.zeros(4, HIDDEN, dtype=torch.bfloat16), torch.arange(8).view(4, 2) % 6
    num_bytes = deep_ep.Buffer.get_low_latency_rdma_size_hint(16, HIDDEN, ranks, 12)
    with deep_ep.Buffer(dist.group.WORLD, 0, num_bytes, low_latency_mode=True, timeout=20.0) as buffer:
        for late in (True, False):
            for _ in range(5):
                with pytest.raises(deep_ep.DeepEPError, match=SAID):
                    for _ in range(3):
                        buffer.low_latency_dispatch(x, ids, 16, 12, use_fp8=False)
                    if late:
                        dist.barrier()  # a mismatch also ends calls that a slower rank has not finished
                        time.sleep(0.3 if rank == LATE else 0.0)
                    buffer.low_latency_dispatch(x, ids, *((8, 6) if rank == ODD else (16, 12)), use_fp8=False)
                buffer.recover()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
