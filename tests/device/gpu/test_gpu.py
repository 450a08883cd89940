"""Behavior that only a GPU can show. All ranks share one GPU, each on its own stream, unless a test says otherwise."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import deep_ep_py as deep_ep
import oracle
from cases import BY_NAME, CASES, Case
from deep_ep_py.compat.utils import bench, bench_kineto
from deep_ep_py.device.cuda import CudaDevice
from deep_ep_py.device.hardware_queues import QUEUES
from deep_ep_py.testing import run_ranks
from fp8 import KINDS, Fp8Trial
from gpu_ranks import (
    BETWEEN_NODES,
    FABRICS,
    check_what_a_failing_link_says,
    link_that_fails,
    make_warm,
    on_each_node,
    on_each_rank,
)
from graphs import Captured
from harness import Trial, dispatch_arguments, round_trip
from launches import torchrun
from places import python_path

WATCHED = ("one_rank_alone", "two_ranks", "uniform", "topk_8_of_8_ranks", "rounds_of_few_rows", "rounds_without_arena")
WIDE = Case("wide", ranks=8, tokens=64, hidden=7168, topk=8, experts=64, num_nvl_bytes=64 << 20)


def arguments_of(trial: Trial, rank: int, **options: Any) -> dict[str, Any]:
    """Return the arguments of a dispatch, on the GPU."""
    given = dispatch_arguments(trial.work, rank)
    return {name: value.to("cuda") for name, value in given.items()} | options


@pytest.mark.parametrize(
    "case", [case for case in (*CASES, WIDE) if case.fabric in (None, "peer")], ids=lambda case: case.name
)
def test_case(case: Case) -> None:
    one_launch = case.ranks > QUEUES
    run_ranks(case.ranks, on_each_rank, Trial.of(case).on("cuda"), device="cuda", one_launch=one_launch)


@pytest.mark.parametrize("name", WATCHED)
def test_case_in_one_launch(name: str) -> None:
    """The way in which tools that observe kernels run them."""
    case = BY_NAME[name]
    run_ranks(case.ranks, on_each_rank, Trial.of(case).on("cuda"), device="cuda", one_launch=True)


@pytest.mark.parametrize("fabric", FABRICS)
@pytest.mark.parametrize("case", BETWEEN_NODES, ids=lambda case: case.name)
def test_case_between_nodes(case: Case, fabric: str) -> None:
    run_ranks(case.ranks, on_each_node, Trial.of(case).on("cuda"), fabric, device="cuda")


@pytest.mark.parametrize("fabric", FABRICS)
def test_a_link_that_fails_is_heard_of_everywhere(fabric: str) -> None:
    trial = Trial.of(BY_NAME["uniform"])
    said = run_ranks(trial.case.ranks, link_that_fails, trial, fabric, device="cuda")
    check_what_a_failing_link_says(said, fabric)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_random_routings(ranks: int) -> None:
    case = Case("random", ranks, tuple(5 + 7 * r for r in range(ranks)), hidden=264, topk=4, experts=4 * ranks)
    for seed in range(5):
        run_ranks(ranks, on_each_rank, Trial.of(case, seed).on("cuda"), device="cuda")


@pytest.mark.parametrize("kind", KINDS)
def test_fp8_rows(kind: str) -> None:
    case = BY_NAME["uneven_tokens"]
    trial = Fp8Trial.of(case, kind, (torch.int32, torch.int64)[KINDS.index(kind) % 2])

    def on_each_rank(group: Any) -> None:
        buffer = make_warm(group, case)
        buffer.warmup(2 * case.hidden, case.topk, fp8=True)
        trial.round_trip(buffer, "cuda")

    run_ranks(case.ranks, on_each_rank, device="cuda")


def test_a_wrong_id_is_told_by_the_next_call() -> None:
    case = BY_NAME["two_ranks"]

    def on_each_rank(group: Any) -> None:
        buffer = make_warm(group, case)
        buffer.get_dispatch_layout(torch.tensor([[0, case.experts]], device="cuda"), case.experts)
        torch.cuda.synchronize()
        with pytest.raises(ValueError, match=f"topk_idx.*the id {case.experts}, expected"):
            buffer.get_dispatch_layout(torch.tensor([[0, 1]], device="cuda"), case.experts)

    run_ranks(case.ranks, on_each_rank, device="cuda")


def test_twenty_repeats_have_the_same_bits() -> None:
    trial = Trial.of(BY_NAME["uniform"]).on("cuda")
    for seed in range(20):
        run_ranks(trial.case.ranks, on_each_rank, trial, seed=seed, device="cuda")


def test_outputs_of_a_known_size() -> None:
    trial = Trial.of(BY_NAME["uneven_tokens"])
    rows = trial.max_rows + 5

    def on_each_rank(group: Any) -> None:
        buffer = make_warm(group, trial.case)
        results = buffer.dispatch(**arguments_of(trial, buffer.rank, num_worst_tokens=rows))
        trial.check_worst(buffer.rank, results, rows)
        expert = {name: value.to("cuda") for name, value in trial.padded(buffer.rank, rows).items()}
        trial.check_combine(buffer.rank, buffer.combine(handle=results[4], **expert))

    run_ranks(trial.case.ranks, on_each_rank, device="cuda")


@pytest.mark.parametrize("on_comm_stream", [False, True])
def test_async_calls(on_comm_stream: bool) -> None:
    """With events between calls, and inputs that are produced on the GPU just before."""
    trial = Trial.of(BY_NAME["uniform"])

    def on_each_rank(group: Any) -> None:
        buffer = make_warm(group, trial.case)
        rank = buffer.rank
        given = arguments_of(trial, rank)
        for _ in range(20):
            # Slow work, then the inputs: kernels that did not wait would read zeros.
            x = torch.zeros_like(given["x"])
            torch.cuda._sleep(1_000_000)
            x.copy_(given["x"])
            event = deep_ep.Buffer.capture()
            streams = {
                "previous_event": event,
                "async_finish": True,
                "allocate_on_comm_stream": on_comm_stream,
            }
            results = buffer.dispatch(**{**given, "x": x}, **streams)
            del x
            results[-1].current_stream_wait()
            trial.check_dispatch(rank, results)
            expert = trial.expert.x[rank].to("cuda")
            combined = buffer.combine(expert, results[4], topk_weights=trial.expert.topk_weights[rank].to("cuda"))
            trial.check_combine(rank, combined)

    run_ranks(trial.case.ranks, on_each_rank, device="cuda")


def test_what_callers_of_deep_ep_look_into() -> None:
    """Times of one rank from events and from the profiler, which sees a whole process; its handle and the memory of
    its Buffer."""
    trial = Trial.of(BY_NAME["one_rank_alone"])

    def on_each_rank(group: Any) -> None:
        buffer = make_warm(group, trial.case)
        given = arguments_of(trial, buffer.rank)
        handle = buffer.dispatch(**given)[4]
        prefix, channel, recv_channel, src_idx, in_rank, send_head = handle
        assert prefix.tolist() == channel.tolist() == [[len(src_idx)]] and recv_channel.tolist() == [[0]]
        assert all(element.is_cuda for element in (prefix, channel, recv_channel, src_idx, in_rank, send_head))

        def cached() -> None:
            buffer.dispatch(given["x"], handle=handle)

        mean, shortest, longest = bench(cached, num_warmups=3, num_tests=6)
        assert 0 < shortest <= mean <= longest < 1
        times = bench_kineto(cached, ("dispatch", "notify"), num_tests=6, suppress_kineto_output=True)
        assert len(times) == 2 and all(0 < seconds < 1 for seconds in times)

        memory = buffer.get_local_buffer_tensor(torch.int16, torch.Size((64, 32)), offset=256)
        assert memory.is_cuda and memory.shape == (64, 32)
        before = memory.clone()
        memory.fill_(7)
        assert (buffer.get_local_buffer_tensor(torch.int16, offset=256)[: 64 * 32] == 7).all()
        memory.copy_(before)
        torch.cuda.synchronize()
        trial.check_dispatch(buffer.rank, buffer.dispatch(**given))

    run_ranks(1, on_each_rank, device="cuda")


def test_a_recorded_stream_keeps_an_output() -> None:
    """An output is dropped while another stream still reads it; the next dispatch must not overwrite it early."""
    trials = [Trial.of(BY_NAME["uniform"], seed) for seed in (1, 2)]

    def on_each_rank(group: Any) -> None:
        buffer = make_warm(group, trials[0].case)
        rank = buffer.rank
        side = torch.cuda.Stream()
        for _ in range(10):
            recv_x = buffer.dispatch(**arguments_of(trials[0], rank))[0]
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                torch.cuda._sleep(5_000_000)
                kept = recv_x.clone()
            recv_x.record_stream(side)
            del recv_x
            gc.collect()
            trials[1].check_dispatch(rank, buffer.dispatch(**arguments_of(trials[1], rank)))
            side.synchronize()
            assert oracle.difference("recv_x", kept.cpu(), trials[0].received[rank].x) is None

    run_ranks(trials[0].case.ranks, on_each_rank, device="cuda")


def test_an_arena_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    """An output that does not fit enlarges the arena while kernels of other ranks wait for those of this rank. The next
    dispatch goes straight into the new memory.
    """
    monkeypatch.setattr(CudaDevice, "first_arena_bytes", 0)
    trials = [Trial.of(WIDE, seed) for seed in (1, 2)]

    def on_each_rank(group: Any) -> None:
        buffer, kept, direct = make_warm(group, WIDE), [], [0]
        for turn in range(8):
            trial = trials[turn % 2]
            kept.append((trial, buffer.dispatch(**arguments_of(trial, buffer.rank))))
            direct.append(buffer.stats()["direct"])
        assert direct[:3] == [0, 0, 1] and all(after > before for before, after in zip(direct, direct[2:]))
        assert buffer.stats()["arena_growths"] > 1
        for trial, results in kept:
            trial.check_dispatch(buffer.rank, results)
        buffer.destroy()
        del buffer
        gc.collect()
        for trial, results in kept:
            trial.check_dispatch(group.rank(), results)

    run_ranks(WIDE.ranks, on_each_rank, device="cuda")


def test_outputs_outlive_the_buffer() -> None:
    trial = Trial.of(BY_NAME["uniform"])

    def on_each_rank(group: Any) -> None:
        buffer = make_warm(group, trial.case)
        results = buffer.dispatch(**arguments_of(trial, buffer.rank))
        assert buffer.runtime.arena_contains(results[0].data_ptr(), results[0].nbytes)
        buffer.destroy()
        del buffer
        gc.collect()
        trial.check_dispatch(group.rank(), results)

    run_ranks(trial.case.ranks, on_each_rank, device="cuda")


def capture(buffer: deep_ep.Buffer, trials: list[Trial]) -> Captured:
    graph = torch.cuda.CUDAGraph()

    def captured() -> Any:
        # Ranks are threads: the capture of one must not block the work of the others.
        return torch.cuda.graph(graph, stream=torch.cuda.Stream(), capture_error_mode="thread_local")

    return Captured(buffer, trials, captured, graph.replay, "cuda")


@pytest.mark.parametrize("fabric", ["peer", "proxy"])
def test_graphs(fabric: str) -> None:
    """Graphs of two batch sizes are replayed between eager calls in any order, each time with other routings."""
    kinds = [[Trial.of(BY_NAME[name], seed) for seed in (1, 2, 3)] for name in ("uneven_tokens", "uniform")]

    def on_each_rank(group: Any) -> None:
        buffer = make_warm(group, kinds[0][0].case, fabric)
        graphs = []
        for trials in kinds:
            for rank in range(group.size()):  # torch captures one graph at a time
                graphs += [capture(buffer, trials)] if rank == group.rank() else []
                group.barrier()
        for which, seed in ((0, 1), (1, 2), (1, 0), (0, 0), (0, 2)):
            graphs[which].replay(kinds[which][seed])
            eager = kinds[1 - which][seed]
            trial = eager.on("cuda")
            round_trip(buffer, buffer.rank, trial, blocks=2)
        group.barrier()

    run_ranks(kinds[0][0].case.ranks, on_each_rank, device="cuda")


def test_a_failure_is_raised_by_the_next_call() -> None:
    """The context survives the failure: another Buffer works at once."""
    trial = Trial.of(BY_NAME["two_ranks"])

    def on_each_rank(group: Any) -> None:
        buffer = make_warm(group, trial.case, timeout=1.0)
        given = arguments_of(trial, buffer.rank, num_worst_tokens=trial.max_rows)
        if buffer.rank == 0:
            buffer.dispatch(**given)  # rank 1 does not come
            torch.cuda.current_stream().synchronize()
            with pytest.raises(deep_ep.DeepEPTimeout, match="rank 1"):
                buffer.dispatch(**given)
        group.barrier()
        buffer.destroy()
        another = make_warm(group, trial.case)
        trial.check_dispatch(another.rank, another.dispatch(**arguments_of(trial, another.rank)))

    run_ranks(2, on_each_rank, device="cuda")


def test_processes_that_share_a_gpu(workers: Path) -> None:
    """Their kernels take turns: slow but correct."""
    done = torchrun(workers / "round_trip.py", 2, "--device=cuda:0")
    assert done.returncode == 0, done.stdout + done.stderr


def test_an_arena_grows_between_processes(workers: Path) -> None:
    done = torchrun(workers / "round_trip.py", 2, "--device=cuda:0", "--growing")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
@pytest.mark.parametrize("arguments", [(), ("--growing",)], ids=["at_once", "growing"])
def test_processes_with_a_gpu_each(workers: Path, arguments: tuple[str, ...]) -> None:
    ranks = min(8, torch.cuda.device_count())
    done = torchrun(workers / "round_trip.py", ranks, "--device=cuda:local", *arguments)
    assert done.returncode == 0, done.stdout + done.stderr


def test_nothing_on_a_cpu_touches_the_gpu() -> None:
    program = """
import torch, deep_ep_py
from deep_ep_py.testing import run_ranks
def on_each_rank(group):
    buffer = deep_ep_py.Buffer(group, 1 << 20)
    buffer.get_dispatch_layout(torch.zeros(3, 2, dtype=torch.int64), 4)
run_ranks(2, on_each_rank)
assert not torch.cuda.is_initialized()
"""
    environment = {**os.environ, "PYTHONPATH": python_path()}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True, timeout=120)
