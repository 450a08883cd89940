"""Behavior of low-latency mode that only a GPU can show. All ranks share one GPU, each on its own stream, unless a test
says otherwise.
"""

from __future__ import annotations

import gc
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

import deep_ep_py as deep_ep
from deep_ep_py.testing import run_ranks
from launches import torchrun
from low_latency import BF16, CASTS, Cast, Sizes, Work, check_combine, check_dispatch, combine, dispatch, round_trip
from low_latency_gpu import BY_NAME, CASES, TIMEOUT, WATCHED, CapturedPair, Matmul, Works, on_each_rank, warm_buffer

LAPS = 5
# For tests whose subject does not depend on the size: they share its kernels.
SIZES = Sizes("shared", 4, (9, 40, 0, 12), 40, 128, 4, 8)
SLOW_CYCLES = 50_000_000
"""How long a stream is kept busy: longer than a small call takes."""
LATE_RANK, LATE_SECONDS = 1, 0.5


@pytest.fixture(scope="module", autouse=True)
def loaded() -> None:
    """Have torch load the kernels of the tests: with one rank, no kernel of another rank can be waiting meanwhile."""

    def alone(group: Any, works: Works) -> None:
        torch.cuda._sleep(1)
        on_each_rank(group, works)

    run_ranks(1, alone, Works.of(BY_NAME["low_latency_one_rank"]), device="cuda")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_case(case: Sizes) -> None:
    run_ranks(case.ranks, on_each_rank, Works.of(case), device="cuda")


@pytest.mark.parametrize("name", WATCHED)
def test_case_in_one_launch(name: str) -> None:
    """The way in which tools that observe kernels run them."""
    case = BY_NAME[name]
    run_ranks(case.ranks, on_each_rank, Works.of(case), device="cuda", one_launch=True)


@pytest.mark.parametrize("fabric", ["ibgda", "proxy"])
@pytest.mark.parametrize("ranks_per_node", [1, 2])
def test_case_between_nodes(ranks_per_node: int, fabric: str) -> None:
    """Rows and results go through host threads: software NICs or proxies."""
    case = BY_NAME["low_latency_several_units"]
    run_ranks(case.ranks, on_each_rank, Works.of(case), fabric, ranks_per_node=ranks_per_node, device="cuda")


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_random_routings(ranks: int) -> None:
    """Experts that a token names twice and choices of -1, in other places every time."""
    sizes = Sizes("random", ranks, tuple(5 + 7 * rank for rank in range(ranks)), 60, 256, 4, 4 * ranks)
    works = [Work.of(sizes, seed, skipped=0.3, twice=0.3) for seed in range(LAPS)]

    def on_each(group: Any) -> None:
        with warm_buffer(group, sizes) as buffer:
            for lap, work in enumerate(works):
                round_trip(buffer, work, [*CASTS.values()][lap % len(CASTS)], hooks=lap % 2 == 1)

    run_ranks(ranks, on_each, device="cuda")


def test_the_sending_half_waits_for_no_peer() -> None:
    """The sending half of one rank ends before another rank has begun."""
    work = Work.of(SIZES)

    def on_each(group: Any) -> None:
        with warm_buffer(group, SIZES) as buffer:
            round_trip(buffer, work)  # a half waits until the last use of its region has ended on all ranks
            round_trip(buffer, work)
            for first in range(SIZES.ranks):
                group.barrier()
                if buffer.rank == first:
                    results = dispatch(buffer, work, return_recv_hook=True)
                    torch.cuda.current_stream().synchronize()
                group.barrier()
                if buffer.rank != first:
                    results = dispatch(buffer, work, return_recv_hook=True)
                results[4]()
                check_dispatch(work, buffer.rank, BF16, results)

    run_ranks(SIZES.ranks, on_each, device="cuda")


def test_a_matmul_between_the_halves() -> None:
    """Two micro-batches take turns: while the rows or results of one are in flight, the caller computes."""
    both = [Work.of(SIZES, seed) for seed in (1, 2)]

    def on_each(group: Any) -> None:
        with warm_buffer(group, SIZES) as buffer:
            matmul = Matmul(buffer.device)
            group.barrier()
            for lap in range(LAPS):
                order = (0, 1) if lap % 2 == 0 else (1, 0)
                sent = [dispatch(buffer, work, CASTS["fp8"], return_recv_hook=True) for work in both]
                products = [matmul.run()]
                for i in order:
                    sent[i][4]()
                    check_dispatch(both[i], buffer.rank, CASTS["fp8"], sent[i])
                returned = [combine(buffer, both[i], sent[i][2], return_recv_hook=True) for i in order]
                products.append(matmul.run())
                for i, (combined, _, hook) in zip(order, returned, strict=True):
                    hook()
                    check_combine(both[i], buffer.rank, combined)
                for product in products:
                    matmul.check(product)

    run_ranks(SIZES.ranks, on_each, device="cuda")


def test_a_hook_that_is_called_where_another_stream_is_current() -> None:
    """The received data is ready for the stream of the call, no matter how busy the other stream is."""
    both = [Work.of(SIZES, seed) for seed in (1, 2)]

    def on_each(group: Any) -> None:
        other = torch.cuda.Stream()
        with warm_buffer(group, SIZES) as buffer:
            for lap in range(2 * LAPS):
                work = both[lap % 2]  # leftovers of the previous lap would be wrong in this one

                def call(hook: Any) -> None:
                    with torch.cuda.stream(other):
                        torch.cuda._sleep(SLOW_CYCLES)
                        hook()

                results = dispatch(buffer, work, return_recv_hook=True)
                call(results[4])
                check_dispatch(work, buffer.rank, BF16, results)
                combined, _, hook = combine(buffer, work, results[2], return_recv_hook=True)
                call(hook)
                check_combine(work, buffer.rank, combined)
                other.synchronize()

    run_ranks(SIZES.ranks, on_each, device="cuda")


def test_async_calls() -> None:
    """With events after calls, and inputs that are produced on the GPU just before."""
    works = [Work.of(SIZES, seed) for seed in (1, 2)]

    def on_each(group: Any) -> None:
        with warm_buffer(group, SIZES) as buffer:
            rank = buffer.rank
            for lap in range(2 * LAPS):
                work = works[lap % 2]
                given = work.x[rank].to(buffer.device)
                # Slow work, then the rows: kernels that did not wait would read zeros.
                x = torch.zeros_like(given)
                torch.cuda._sleep(1_000_000)
                x.copy_(given)
                topk_idx = work.topk_idx[rank].to(buffer.device)
                sizes = (SIZES.max_tokens, SIZES.experts)
                results = buffer.low_latency_dispatch(x, topk_idx, *sizes, async_finish=True, **BF16.options)
                del x
                results[3].current_stream_wait()
                check_dispatch(work, rank, BF16, results)
                combined, event, _ = combine(buffer, work, results[2], async_finish=True)
                event.current_stream_wait()
                check_combine(work, rank, combined)

    run_ranks(SIZES.ranks, on_each, device="cuda")


def test_statistics() -> None:
    work = Work.of(SIZES)

    def on_each(group: Any) -> None:
        with warm_buffer(group, SIZES) as buffer:
            rows = torch.ones(SIZES.local, dtype=torch.int32, device=buffer.device)
            waited = torch.zeros(SIZES.ranks, dtype=torch.int64, device=buffer.device)
            group.barrier()
            if buffer.rank == LATE_RANK:
                time.sleep(LATE_SECONDS)
            results = dispatch(
                buffer, work, cumulative_local_expert_recv_stats=rows, dispatch_wait_recv_cost_stats=waited
            )
            assert torch.equal(rows.cpu(), 1 + results[1].cpu())
            seconds = waited.cpu() / 1e9
            assert (seconds >= 0).all() and (seconds < TIMEOUT).all(), seconds
            if buffer.rank != LATE_RANK:
                assert seconds.argmax() == LATE_RANK, seconds

    run_ranks(SIZES.ranks, on_each, device="cuda")


def capture(buffer: deep_ep.Buffer, work: Work, cast: Cast, hooks: bool) -> CapturedPair:
    graph = torch.cuda.CUDAGraph()

    def captured() -> Any:
        # Ranks are threads: the capture of one must not block the work of the others.
        return torch.cuda.graph(graph, stream=torch.cuda.Stream(), capture_error_mode="thread_local")

    return CapturedPair(buffer, work, cast, hooks, captured, graph.replay)


@pytest.mark.parametrize(("cast", "fabric"), [("bf16", "peer"), ("fp8", "peer"), ("fp8", "proxy")])
def test_graphs(cast: str, fabric: str) -> None:
    """Graphs of pairs, complete and in halves, are replayed between eager calls in any order, each time with other
    routings.
    """
    works = [Work.of(SIZES, seed, twice=0.2) for seed in (1, 2, 3)]

    def on_each(group: Any) -> None:
        with warm_buffer(group, SIZES, fabric) as buffer:
            graphs = []
            for hooks in (False, True):
                for rank in range(group.size()):  # torch captures one graph at a time
                    graphs += [capture(buffer, works[0], CASTS[cast], hooks)] if rank == group.rank() else []
                    group.barrier()
            for which, seed in ((0, 1), (1, 2), (1, 0), (0, 0), (0, 2)):
                graphs[which].replay(works[seed])
                round_trip(buffer, works[(seed + 1) % 3], CASTS[cast], hooks=which == 0)

    run_ranks(SIZES.ranks, on_each, device="cuda")


@pytest.mark.parametrize("hooks", [False, True])
def test_a_graph_keeps_the_handle_that_it_combines_by(hooks: bool) -> None:
    """A handle from a dispatch outside of the capture."""
    work = Work.of(SIZES)

    def on_each(group: Any) -> None:
        with warm_buffer(group, SIZES) as buffer:
            rank, device = buffer.rank, buffer.device
            handle = dispatch(buffer, work)[2]
            kept = weakref.ref(handle[0])
            given = [values[rank].to(device) for values in (work.results, work.topk_idx, work.weights)]
            for capturing in range(group.size()):
                if capturing == rank:
                    graph = torch.cuda.CUDAGraph()
                    stream = torch.cuda.Stream()
                    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                        combined, _, hook = buffer.low_latency_combine(*given, handle, return_recv_hook=hooks)
                        if hook is not None:
                            hook()
                group.barrier()
            del handle, hook
            gc.collect()
            assert kept() is not None
            round_trip(buffer, Work.of(SIZES, seed=2))
            graph.replay()
            check_combine(work, rank, combined)

    run_ranks(SIZES.ranks, on_each, device="cuda")


@pytest.mark.parametrize("hooks", [False, True])
def test_a_failure_is_raised_by_the_next_call(hooks: bool) -> None:
    """The context survives the failure: another Buffer works at once."""
    work = Work.of(SIZES)

    def on_each(group: Any) -> None:
        with warm_buffer(group, SIZES, timeout=1.0) as buffer:
            if buffer.rank == 0:
                results = dispatch(buffer, work, return_recv_hook=hooks)  # the others do not come
                if hooks:
                    results[4]()
                torch.cuda.current_stream().synchronize()
                with pytest.raises(deep_ep.DeepEPTimeout, match="rank [123]"):
                    dispatch(buffer, work)
        with warm_buffer(group, SIZES) as another:
            round_trip(another, work)

    run_ranks(SIZES.ranks, on_each, device="cuda")


@pytest.mark.parametrize("device", ["cuda:0", "cuda:local"])
def test_processes(workers: Path, device: str) -> None:
    """Processes that share a GPU, where their kernels take turns, slow but correct; and with a GPU each."""
    gpus = torch.cuda.device_count()
    if device == "cuda:local" and gpus < 2:
        pytest.skip("needs 2 GPUs")
    ranks = 2 if device == "cuda:0" else min(8, gpus)
    done = torchrun(workers / "low_latency_layers.py", ranks, "--fabric=peer", f"--device={device}", timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
