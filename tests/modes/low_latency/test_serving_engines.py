"""The low-latency calls of vLLM and SGLang, in their order, on a Buffer that they import as `deep_ep.Buffer`.

An engine keeps one Buffer for all layers of a model and all batches, holds hooks while another batch computes, and
frees or reuses its tensors as soon as DeepEP allows. A library whose single calls are correct may still deadlock, mix
up batches or read freed memory, so these tests run whole sequences and check every tensor.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from builds import SANITIZED
from cases import Case
from deep_ep_py.testing import run_ranks
from harness import Trial, barrier, under_schedules
from launches import forked
from low_latency import BF16, CASTS, Sizes, Work, check_combine, check_dispatch
from names import deep_ep_names
from serving import take_turns, works_of
from serving_sglang import (
    AUTO,
    DECODE_LEAD,
    LOW_LATENCY,
    SglangDecode,
    SglangPrefill,
    SglangProcess,
    sglang_decode,
    sglang_prefill,
)
from serving_vllm import VllmBuffers, VllmLayer, vllm_run

RUNS = 1 if SANITIZED else 2
LAYERS = 3
# Ranks, and ranks per node. Between nodes there are requests to NICs, inside a node loads and stores.
PLACES = [(4, 2)] if SANITIZED else [(2, 2), (4, 4), (4, 2)]
TOKENS = {2: ((9, 4), (5, 12)), 4: ((9, 4, 1, 12), (5, 12, 0, 7))}
"""The tokens of each rank, in the first and in the second micro-batch."""
CASTS_OF_ENGINES = ("bf16", "fp8", "ue8m0")


@pytest.fixture(autouse=True)
def names(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("DEEP_EP_DEVICE", "cpu")
    with deep_ep_names():
        yield


@pytest.fixture(params=PLACES, ids=lambda place: f"{place[0]} ranks, {place[1]} a node")
def ranks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Return the number of ranks, and set the number per node."""
    count, of_a_node = request.param
    monkeypatch.setenv("DEEP_EP_RANKS_PER_NODE", str(of_a_node))
    return count


def sizes_of(ranks: int, batch: int = 0, id_dtype: torch.dtype = torch.int64) -> Sizes:
    return Sizes("engine", ranks, TOKENS[ranks][batch], 12, 512, 6, 4 * ranks, id_dtype)


def both_batches(ranks: int, id_dtype: torch.dtype = torch.int64) -> list[list[Work]]:
    """Make the work of a layer for both micro-batches; the second is padded."""
    return [works_of(sizes_of(ranks, batch, id_dtype), LAYERS, 10 * batch + 1, padding=3 * batch) for batch in (0, 1)]


# --- vLLM: prepare and finalize in each layer, micro-batches on two threads ------------------------------------------


@pytest.mark.parametrize(
    ("hooked", "in_place"),
    [(True, True), (True, False), (False, True)],
    ids=["hook, in place", "hook, to a new tensor", "no hook, in place"],
)
@pytest.mark.parametrize("cast", CASTS_OF_ENGINES)
@pytest.mark.covers
def test_vllm(cast: str, hooked: bool, in_place: bool, ranks: int) -> None:
    """One batch. Finalize waits in the call or after the shared experts, and writes to a tensor of the caller: if there
    are no shared experts, to the hidden states that were dispatched.
    """
    works = both_batches(ranks)[1:]

    def on_each_rank(group: Any) -> None:
        buffers = VllmBuffers(group)
        buffer = buffers.get(sizes_of(ranks))
        assert buffers.get(sizes_of(ranks)) is buffer
        for _ in range(2):
            vllm_run(buffer, works, CASTS[cast], hooked, in_place)
        buffer.destroy()

    under_schedules(ranks, on_each_rank, count=RUNS)


@pytest.mark.parametrize("cast", CASTS_OF_ENGINES)
@pytest.mark.covers
def test_vllm_two_micro_batches(cast: str, ranks: int) -> None:
    """Two parts of a batch take turns: one receives for the other before it sends, and both handles are alive. This
    runs on one thread; `test_between_processes` uses two.
    """
    works = both_batches(ranks)

    def on_each_rank(group: Any) -> None:
        buffer = VllmBuffers(group).get(sizes_of(ranks))
        for _ in range(2):
            vllm_run(buffer, works, CASTS[cast])
        vllm_run(buffer, works[1:], CASTS[cast])  # a batch that is too small to be split
        buffer.destroy()

    under_schedules(ranks, on_each_rank, count=RUNS)


def test_vllm_applies_weights_to_tokens(ranks: int) -> None:
    """Models with one expert per token may weight the rows that are sent; the kernel then sums with weights of one."""
    sizes = Sizes("weighted", ranks, TOKENS[ranks][0], 12, 512, 1, 2 * ranks)
    given = Work.of(sizes, results=False)
    weighted = [x * weights.to(x.dtype) for x, weights in zip(given.x, given.weights, strict=True)]
    ones = [torch.ones_like(weights) for weights in given.weights]
    work = Work.on(sizes, weighted, given.topk_idx, ones, torch.Generator().manual_seed(1))

    def on_each_rank(group: Any) -> None:
        buffer = VllmBuffers(group).get(sizes)
        layer, rank = VllmLayer(buffer, sizes, BF16), buffer.rank
        ids, weights = given.topk_idx[rank], given.weights[rank]
        for _ in range(LAYERS):
            # Only the call holds a reference to this product.
            hook, receive = layer.prepare_async(0, given.x[rank] * weights.to(torch.bfloat16), ids)
            hook()
            check_dispatch(work, rank, BF16, (*receive(), layer.handles[0]))
            out = torch.full_like(given.x[rank], torch.nan)
            hook = layer.finalize(0, out, work.results[rank].clone(), torch.ones_like(weights), ids, hooked=True)
            hook()
            check_combine(work, rank, out)
        buffer.destroy()

    under_schedules(ranks, on_each_rank, count=RUNS)


@pytest.mark.parametrize("fault_tolerance", [False, True])
def test_vllm_cleans_before_it_tries_again(fault_tolerance: bool, ranks: int) -> None:
    """After a fault of its own that has masked no rank, vLLM zeroes what it takes to be the receive buffers, cleans the
    masks, and continues with the same Buffer. With fault tolerance it queries the masks after each step.
    """
    works = both_batches(ranks)

    def on_each_rank(group: Any) -> None:
        buffer = VllmBuffers(group).get(sizes_of(ranks), fault_tolerance)
        for cast in CASTS_OF_ENGINES:
            vllm_run(buffer, works, CASTS[cast])
            if fault_tolerance:
                masked = torch.full((ranks,), 7, dtype=torch.int32)
                buffer.low_latency_query_mask_buffer(masked)
                assert not masked.any()
            barrier(group)
            buffer.get_local_buffer_tensor(dtype=torch.int8, use_rdma_buffer=True).zero_()
            if fault_tolerance:
                buffer.low_latency_clean_mask_buffer()
            barrier(group)
        vllm_run(buffer, works, BF16)
        buffer.destroy()

    under_schedules(ranks, on_each_rank, count=RUNS)


# --- SGLang: dispatchers with two stages of dispatch and two of combine ----------------------------------------------


@pytest.mark.parametrize("hooks", [True, False], ids=["hook", "event"])
@pytest.mark.parametrize("cast", CASTS_OF_ENGINES)
@pytest.mark.covers
def test_sglang(cast: str, hooks: bool, ranks: int) -> None:
    """One batch, with hooks or events. Its ids are int32 until they are passed to the library, and the inputs of a
    stage are freed before the next.
    """
    works = both_batches(ranks, torch.int32)

    def on_each_rank(group: Any) -> None:
        process = SglangProcess(group, sizes_of(ranks), LOW_LATENCY)
        stages = SglangDecode(process, CASTS[cast], hooks)
        for own in works:
            take_turns([sglang_decode(stages, own)])

    under_schedules(ranks, on_each_rank, count=RUNS)


@pytest.mark.parametrize("order", ["decode", "prefill"])
@pytest.mark.parametrize(("cast", "hooks"), [("bf16", True), ("ue8m0", True), ("fp8", False)])
@pytest.mark.covers
def test_sglang_two_batches(cast: str, hooks: bool, order: str, ranks: int) -> None:
    """Two dispatchers on one Buffer. In decoding order the first is two stages ahead; in prefill order first both
    dispatches and then both combines are in flight at once, and a layer's dispatch precedes the end of the other
    batch's combine. Libraries that allow a single call in flight deadlock there.
    """
    works = both_batches(ranks)
    lead, forward = (DECODE_LEAD, sglang_decode) if order == "decode" else (0, sglang_prefill)

    def on_each_rank(group: Any) -> None:
        process = SglangProcess(group, sizes_of(ranks), LOW_LATENCY)
        for _ in range(2):
            batches = [forward(SglangDecode(process, CASTS[cast], hooks), own) for own in works]
            take_turns(batches, lead)

    under_schedules(ranks, on_each_rank, count=RUNS)


@pytest.mark.parametrize("cast", ["bf16", "fp8"])
def test_sglang_auto(cast: str, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that prefills and decodes: one Buffer, which is cleaned when decoding follows prefill. Two batches
    overlap in both. With FP8 the Buffer is sized for rows of one byte per element, although results have two.
    `set_num_sms` applies to normal mode and must not affect the other.
    """
    from deep_ep import Buffer

    for setting in ("num_sms", "_num_sms_is_set"):  # class attributes, set below
        monkeypatch.setattr(Buffer, setting, getattr(Buffer, setting))
    how, sizes, works = CASTS[cast], sizes_of(ranks), both_batches(ranks)
    nodes_of = int(os.environ["DEEP_EP_RANKS_PER_NODE"])
    cases = [
        Case("prefill", ranks, tokens, sizes.hidden, 4, sizes.experts, "holes", ranks_per_node=nodes_of)
        for tokens in TOKENS[ranks]
    ]
    trials = [[Trial.of(case, seed) for seed in range(LAYERS)] for case in cases]

    def on_each_rank(group: Any) -> None:
        Buffer.set_num_sms(4)
        process = SglangProcess(group, sizes, AUTO, param_bytes=1 if how.use_fp8 else 2)
        prefill = [SglangPrefill(process, how) for _ in trials]
        decode = [SglangDecode(process, how, hooks=True) for _ in works]
        for _ in range(2):
            take_turns([sglang_prefill(stages, own) for stages, own in zip(prefill, trials)])
            for _ in range(2):
                take_turns([sglang_decode(stages, own) for stages, own in zip(decode, works)], DECODE_LEAD)
            take_turns([sglang_prefill(prefill[1], trials[1])])

    under_schedules(ranks, on_each_rank, count=RUNS)


COMBINE_OF_FORKS = [
    {"overlap": True, "src_signals": torch.zeros(4, dtype=torch.int32), "src_signal_expect_value": 3},
    {"overlap": False, "packed_recv_count": None, "comp_signal": None, "block_m": 64, "threshold": 0, "num_sms": 3},
]


def test_what_only_forks_of_deep_ep_take() -> None:
    """Single-batch overlap and NVFP4 rows. A call that passes such an argument is refused by name before it sends:
    ignoring it would silently give wrong results, because the caller relies on signals that are never waited for.
    """
    (work,) = works_of(sizes_of(2), 1, 1)

    def on_each_rank(group: Any) -> None:
        process = SglangProcess(group, sizes_of(2), LOW_LATENCY)
        buffer = process.buffer_for(LOW_LATENCY)
        stages, rank = SglangDecode(process, BF16, hooks=True), buffer.rank
        for options in ({"use_nvfp4": True}, {"x_global_scale": torch.ones(1)}):
            with pytest.raises(TypeError, match=f"unexpected keyword argument '{next(iter(options))}'"):
                buffer.low_latency_dispatch(work.x[rank], work.topk_idx[rank], 12, 8, use_fp8=False, **options)
        # By position, sgl-deep-ep has x_global_scale before use_fp8.
        for scale in (None, torch.ones(1)):
            with pytest.raises(TypeError, match="use_fp8=.*: expected a bool. sgl-deep-ep takes x_global_scale at"):
                buffer.low_latency_dispatch(work.x[rank], work.topk_idx[rank], 12, 8, None, None, scale, False)
        stages.dispatch_a(work)
        stages.dispatch_b(work)
        for options in COMBINE_OF_FORKS:
            with pytest.raises(TypeError, match="unexpected keyword argument 'overlap'"):
                buffer.low_latency_combine(
                    x=work.results[rank],
                    topk_idx=work.topk_idx[rank],
                    topk_weights=work.weights[rank],
                    handle=stages.handle,
                    **options,
                )
        stages.combine_a(work)
        stages.combine_b(work)

    run_ranks(2, on_each_rank, seed=1)


# --- both, as processes ----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.once
def test_between_processes(workers: Path) -> None:
    """Micro-batches of vLLM on two threads, so that hooks run on another thread than their calls; of SGLang on one."""
    done = forked(workers / "serving_engines.py", 2)
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(f"rank {rank} is done" in done.stdout for rank in range(2)), done.stdout
