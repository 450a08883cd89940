"""Runs over the stand-in for the driver: V2's calls without a host wait, captured as a step forward and backward."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

import host_waits
import oracle
import pretend_gpu
from cases import BY_NAME
from deep_ep_py import ops
from deep_ep_py.session.engine import Engine
from deep_ep_py.testing import run_ranks
from elastic import ElasticTrial, summed, summed_one_by_one

ALIGNMENT = 8


def driver_calls() -> str:
    """Return the stand-in's log of calls so far, of all ranks."""
    return Path(os.environ["DOUBLE_LOG"]).read_text()


class Watched(threading.local):
    """What one thread has allocated in a capture."""

    def __init__(self) -> None:
        self.now: Memory | None = None


@dataclass
class Memory:
    """Tensors that torch would fill in a captured graph, and everything that kernels use."""

    filled: list[torch.Tensor] = field(default_factory=list)
    kept: list[Any] = field(default_factory=list)


_watched = Watched()


@contextmanager
def watching() -> Iterator[Memory]:
    _watched.now = Memory()
    try:
        yield _watched.now
    finally:
        _watched.now = None


def watch() -> None:
    """Let `watching` see what all threads allocate."""
    zeros = torch.zeros

    def filling(*args: Any, **options: Any) -> torch.Tensor:
        tensor = zeros(*args, **options)
        if _watched.now is not None:
            _watched.now.filled.append(tensor)
        return tensor

    def keeping(method: Any) -> Any:
        def keeps(engine: Engine, *args: Any) -> Any:
            if _watched.now is not None:
                _watched.now.kept.append(args)
            return method(engine, *args)

        return keeps

    torch.zeros = filling
    for name in ("opening", "hold", "launch_alone"):
        setattr(Engine, name, keeping(getattr(Engine, name)))


class Step:
    """A dispatch and its combine, then the same for the gradients: a combine's is a dispatch, and the reverse.

    The stand-in captures kernels of this library alone. What torch would fill in a captured graph is filled again
    before each replay, and all memory that kernels use is kept, as the graph's pool would keep it.
    """

    def __init__(self, buffer: Any, trial: ElasticTrial, expanded: bool) -> None:
        rank, inputs = buffer.rank_idx, trial.inputs
        self.x, self.ids = inputs.x[rank].clone(), inputs.topk_idx[rank].clone()
        self.weights = inputs.topk_weights[rank].clone()
        self.graph, self.expanded = pretend_gpu.Graph(), expanded
        self.one_by_one = expanded and not buffer.allow_multiple_reduction
        with watching() as self.watched, self.graph.capture():
            options = {"num_experts": trial.work.num_experts, "expert_alignment": ALIGNMENT, "do_expand": expanded}
            self.received = buffer.dispatch(
                self.x, self.ids, self.weights, do_cpu_sync=False, do_handle_copy=False, **options
            )
            handle = self.received.handle
            self.combined = buffer.combine(self.received.recv_x, handle, self.received.recv_topk_weights)
            self.gradients = buffer.dispatch(
                self.combined.combined_x, handle=handle, do_expand=expanded, do_zero_padding=expanded
            )
            self.of_x = buffer.combine(self.gradients.recv_x, handle)

    def check(self, trial: ElasticTrial, rank: int) -> None:
        """Replay on other tokens with other choices, and check all results."""
        self.x.copy_(trial.inputs.x[rank])
        self.ids.copy_(trial.inputs.topk_idx[rank])
        self.weights.copy_(trial.inputs.topk_weights[rank])
        for tensor in self.watched.filled:
            tensor.zero_()
        self.graph.replay()
        trial.check(rank, self.received, expanded=self.expanded, exact=False)
        assert oracle.same_bits(self.combined.combined_topk_weights, trial.work.topk_weights[rank])
        assert oracle.same_bits(self.combined.combined_x, self.expected(trial, rank))

    def expected(self, trial: ElasticTrial, rank: int) -> torch.Tensor:
        """Return the sums of the rows that were dispatched."""
        work, received, layouts = trial.work, trial.received, trial.layouts
        rows = [part.x for part in received]
        if self.one_by_one:
            copies = [x.new_zeros(layout.size, x.shape[1]) for x, layout in zip(rows, layouts, strict=True)]
            for copy, x, layout in zip(copies, rows, layouts, strict=True):
                for begin, of_expert in zip(layout.begins, layout.rows, strict=True):
                    copy[begin : begin + len(of_expert)] = x[of_expert]
            return summed_one_by_one(work, received, layouts, copies, rank, ())
        if self.expanded:  # a rank returns the sum of its copies of a row, rounded
            rows = [
                (part.x.float() * (part.topk_idx >= 0).sum(1, keepdim=True)).to(torch.bfloat16) for part in received
            ]
        return summed(work, received, rows, rank, ())


def ops_in_a_step(buffer: Any, trial: ElasticTrial) -> None:
    """Capture the torch ops of the expanded layout, forward and backward: 4 operations, and the host reads no tensor.

    Torch's own kernels run at once over the stand-in, on memory that no captured kernel has written: results are those
    of the same ops on a CPU, elsewhere.
    """
    rank, inputs = buffer.rank_idx, trial.inputs
    name, operations = ops.register(buffer, f"rank {buffer.rank_idx}"), buffer.stats()["operations"]
    x, weights = (given[rank].clone().requires_grad_() for given in (inputs.x, inputs.topk_weights))
    most = max(len(rows) for rows in inputs.x)
    with watching() as kept, pretend_gpu.Graph().capture():
        got = ops.dispatch_expanded(x, inputs.topk_idx[rank], weights, trial.work.num_experts, name, ALIGNMENT, most)
        rows = got.x * got.topk_weights.bfloat16().unsqueeze(1)
        ops.combine_expanded(rows, got.routes, name).sum().backward()
    assert kept.kept and x.grad.shape == x.shape and weights.grad.shape == weights.shape
    assert buffer.stats()["operations"] == operations + 4


def replays(group: Any, fabric: str, expanded: bool, **options: Any) -> None:
    trials = [ElasticTrial.of(BY_NAME["uniform"], ALIGNMENT, seed) for seed in (1, 2, 3)]
    buffer = trials[0].make_buffer(group, fabric, device="cuda", num_gpu_timeout_secs=20, **options)
    buffer.warmup(trials[0].case.hidden, trials[0].case.topk)
    group.barrier()
    before = driver_calls()
    group.barrier()
    with host_waits.refused():
        step = Step(buffer, trials[0], expanded)
        if expanded:
            ops_in_a_step(buffer, trials[0])
    group.barrier()
    new = {line.split()[0] for line in driver_calls()[len(before) :].splitlines() if line.strip()}
    assert "cuLaunchKernelEx" in new, new
    assert not [call for call in new if any(part in call for part in ("Sync", "Query", "Memcpy", "Wait"))], new
    for trial in (trials[0], trials[2], trials[1], trials[0]):
        step.check(trial, buffer.rank_idx)
        buffer.check()
    group.barrier()


def main() -> None:
    pretend_gpu.install(compile_kernels=False)
    watch()
    host_waits.install()
    for fabric in ("peer", "proxy"):
        for expanded in (False, True):
            run_ranks(4, replays, fabric, expanded, device="cuda")
            print(fabric, "expanded" if expanded else "rows")
    run_ranks(4, partial(replays, allow_multiple_reduction=False), "peer", True, device="cuda")
    print("peer one by one")


if __name__ == "__main__":
    main()
