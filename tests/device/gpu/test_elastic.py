"""`ElasticBuffer` on a GPU that all ranks share."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import oracle
from cases import BY_NAME
from deep_ep_py.testing import run_ranks
from elastic import ElasticTrial, round_trip

NAMES = ("two_ranks", "uniform", "unrouted_selections", "several_experts_on_one_rank", "topk_8_of_8_ranks")


def make_warm(group: Any, trial: ElasticTrial, fabric: str = "peer", **options: Any) -> Any:
    """Make a Buffer that has nothing left to load. Inputs then go to its device, which a stand-in has on the CPU."""
    buffer = trial.make_buffer(group, fabric, device="cuda", num_gpu_timeout_secs=20, **options)
    buffer.warmup(trial.case.hidden, trial.case.topk)
    return buffer


@pytest.mark.parametrize("name", NAMES)
def test_case(name: str) -> None:
    trial = ElasticTrial.of(BY_NAME[name], alignment=8)

    def on_each_rank(group: Any) -> None:
        with make_warm(group, trial) as buffer:
            for blocks, (expanded, exact) in enumerate([(False, True), (True, True), (False, False), (True, False)], 1):
                round_trip(buffer, trial.on(buffer.device), blocks, expanded=expanded, exact=exact)

    run_ranks(trial.case.ranks, on_each_rank, device="cuda")


@pytest.mark.parametrize("fabric", ["ibgda", "proxy"])
@pytest.mark.parametrize("name", ["2x1_uniform", "2x2_uniform"])
def test_case_between_nodes(name: str, fabric: str) -> None:
    trial = ElasticTrial.of(BY_NAME[name], alignment=8)

    def on_each_rank(group: Any) -> None:
        with make_warm(group, trial, fabric) as buffer:
            for expanded, exact in ((False, False), (True, True)):
                round_trip(buffer, trial.on(buffer.device), 2, expanded=expanded, exact=exact)

    run_ranks(trial.case.ranks, on_each_rank, device="cuda")


def test_events_and_streams() -> None:
    cpu_trial = ElasticTrial.of(BY_NAME["uniform"], alignment=8)

    def on_each_rank(group: Any) -> None:
        with make_warm(group, cpu_trial) as buffer:
            trial, rank, before = cpu_trial.on(buffer.device), buffer.rank_idx, buffer.capture()
            options = {"async_with_compute_stream": True, "allocate_on_comm_stream": True}
            received = trial.dispatch(buffer, rank, do_expand=True, previous_event=before, **options)
            combined = trial.combine(buffer, rank, received.handle, 2, previous_event=received.event, **options)
            combined.event.current_stream_wait()
            buffer.barrier()
            trial.check(rank, received, expanded=True, exact=True)
            trial.check_combine(rank, combined, 2)

    run_ranks(cpu_trial.case.ranks, on_each_rank, device="cuda")


def test_a_graph_without_a_host_wait() -> None:
    """A dispatch into the expanded layout and its combine, replayed on other tokens with other choices."""
    on_cpu = [ElasticTrial.of(BY_NAME["uniform"], alignment=8, seed=seed) for seed in (1, 2, 3)]

    def on_each_rank(group: Any) -> None:
        with make_warm(group, on_cpu[0]) as buffer:
            trials, rank = [trial.on(buffer.device) for trial in on_cpu], buffer.rank_idx
            first = trials[0]
            x, ids = first.inputs.x[rank].clone(), first.inputs.topk_idx[rank].clone()
            weights, graph = first.inputs.topk_weights[rank].clone(), torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                received = buffer.dispatch(
                    x, ids, weights, num_experts=first.work.num_experts, expert_alignment=8, do_expand=True,
                    do_cpu_sync=False
                )  # fmt: skip
                combined = buffer.combine(received.recv_x, received.handle, received.recv_topk_weights)
            for trial in trials:
                x.copy_(trial.inputs.x[rank])
                ids.copy_(trial.inputs.topk_idx[rank])
                weights.copy_(trial.inputs.topk_weights[rank])
                graph.replay()
                torch.cuda.synchronize()
                buffer.check()
                layout = trial.layouts[rank]
                ends = [begin + len(rows) for begin, rows in zip(layout.begins, layout.rows, strict=True)]
                assert received.handle.psum_num_recv_tokens_per_expert.tolist() == ends
                for begin, rows in zip(layout.begins, layout.rows, strict=True):
                    got = received.recv_x[begin : begin + len(rows)].cpu()
                    assert oracle.same_bits(got, trial.received[rank].x[rows])
                assert oracle.same_bits(combined[1].cpu(), trial.work.topk_weights[rank])

    run_ranks(on_cpu[0].case.ranks, on_each_rank, device="cuda")
