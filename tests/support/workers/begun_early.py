"""Under torchrun, 4 processes as 2 nodes: one begins a call with a hook, and waits for the others outside the library
before they begin theirs. The rows that it must forward are forwarded meanwhile."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from low_latency import BF16, Sizes, Work, check_dispatch, dispatch, make_buffer, summed_by_node

SIZES = Sizes("early", 4, (20, 7, 0, 31), 31, 128, 4, 8)


def main() -> None:
    dist.init_process_group("gloo")
    rank, work = dist.get_rank(), Work.of(SIZES)
    weights, x, ids = work.weights[rank], work.results[rank], work.topk_idx[rank]
    options = {"ranks_per_node": 2, "once_per_node": True, "forward_sms": 1, "timeout": 20.0}
    with make_buffer(dist.group.WORLD, SIZES, "ibgda", **options) as buffer:
        for first in range(4):
            early = rank == first

            def end(hook: Callable[[], None], early: bool = early) -> None:
                if early:
                    dist.barrier()  # the others begin
                    dist.barrier()  # and end, which needs this rank to forward
                hook()
                if not early:
                    dist.barrier()

            if not early:
                dist.barrier()
            results = dispatch(buffer, work, topk_weights=weights, return_recv_hook=True)
            end(results[4])
            check_dispatch(work, rank, BF16, results)
            if not early:
                dist.barrier()
            combined, _, hook = buffer.low_latency_combine(x, ids, None, results[2], return_recv_hook=True)
            end(hook)
            assert torch.equal(combined, summed_by_node(work, rank, 2))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
