"""Buffers and layers in the modes of torch: inference mode, another default device, gradients that are tracked."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils import _device

import deep_ep_py as deep_ep
import low_latency
from cases import BY_NAME
from decode import make_layer, routed
from deep_ep_py import eplb, moe, ops
from deep_ep_py.base import arguments
from deep_ep_py.testing import run_ranks
from harness import Trial, dispatch_arguments, make_buffer, round_trip
from low_latency import Sizes, Work
from places import ROOT

TRIAL = Trial.of(BY_NAME["two_ranks"])
SIZES = Sizes("modes", 2, (5, 3), 8, 128, 2, 4)
WORK = Work.of(SIZES)
PROGRAMS = ("compat/utils", "examples", "tools/bench", "tools/doctor", "tools/profile")
"""What makes tensors on the default device, as programs do."""


# --- inference mode -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("zero_copy", [False, True], ids=["copied", "zero_copy"])
def test_a_decode_layer_that_first_runs_in_inference_mode(zero_copy: bool) -> None:
    """Also a micro-batch of which one step is taken in inference mode, and the next is not."""

    def on_each_rank(group: Any) -> None:
        with low_latency.make_buffer(group, SIZES, "peer") as buffer:
            layer, given = make_layer(buffer, SIZES, zero_copy=zero_copy), routed(WORK, buffer.rank)
            with torch.inference_mode():
                outs = [layer(*given)]
                begun = layer.begin(*given)
            assert outs[0].is_inference(), "a result has the mode of its caller"
            begun.receive()
            begun.run_experts()
            with torch.no_grad():
                outs.append(begun.finish())
                outs += [layer(*given) for _ in range(3)]
            outs.append(layer(*given))
            assert not outs[-1].is_inference()
            assert all(torch.equal(out, outs[0]) for out in outs)

    run_ranks(2, on_each_rank, seed=1)


def test_memory_of_a_buffer_is_written_outside_inference_mode() -> None:
    def on_each_rank(group: Any) -> None:
        with low_latency.make_buffer(group, SIZES, "peer") as buffer:
            with torch.inference_mode():
                memory = buffer.get_local_buffer_tensor(torch.int32, torch.Size([2, 3]), offset=8)
                handle = low_latency.dispatch(buffer, WORK)[2]
                view = buffer.get_next_low_latency_combine_buffer(handle)
            for kept in (memory, view):
                assert not kept.is_inference()
                kept[0].fill_(1)

    run_ranks(2, on_each_rank, seed=1)


def test_experts_that_begin_to_move_in_inference_mode() -> None:
    """A server that collects statistics there may begin a move of weights that are trained later."""
    placements = [
        eplb.plan(torch.tensor(loads), num_physical_experts=4, num_ranks=2) for loads in ([9.0, 1, 1], [1.0, 1, 9])
    ]
    everything = torch.randn(3, 40)

    def on_each_rank(group: Any) -> None:
        with make_buffer(group, TRIAL.case, "peer") as buffer:
            held = [placement.physical_to_logical_map.view(2, 2)[buffer.rank] for placement in placements]
            with torch.inference_mode():
                move = eplb.Move(buffer, [everything[held[0]]], *placements)
                move.step()
            (moved,) = move.finish()
            assert torch.equal(moved, everything[held[1]])
            torch.nn.Parameter(moved).sum().backward()

    run_ranks(2, on_each_rank, seed=1)


# --- the default device ---------------------------------------------------------------------------------------


@pytest.mark.once
def test_internal_tensors_name_their_device() -> None:
    """Otherwise torch would make them on its default device, such as "meta" while a model is made."""
    sources, unnamed = ROOT / "deep_ep_py", []
    # torch's own list, whose names have a prefix where they are not in torch itself.
    makers = {maker.__name__ for maker in _device._device_constructors()}
    for path in sorted(sources.rglob("*.py")):
        name = path.relative_to(sources)
        if any(name.is_relative_to(programs) for programs in PROGRAMS):
            continue
        tree = ast.parse(path.read_text())
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        parameters = {part for call in calls if _called(call) == "nn.Parameter" for part in ast.walk(call)}
        for call in calls:
            where = [keyword for keyword in call.keywords if keyword.arg in ("device", None)]
            makes = _called(call).startswith("torch.") and _called(call).removeprefix("torch.") in makers
            if makes and not where and call not in parameters:  # those are the model's
                unnamed.append(f"{name}:{call.lineno}: {ast.unparse(call)}")
    assert not unnamed


def _called(call: ast.Call) -> str:
    return ast.unparse(call.func)


def test_everything_with_another_default_device() -> None:
    """As in the constructor of a model that is made on "meta" and filled afterwards."""
    loads = torch.tensor([9.0, 1, 1, 1])
    case, experts = TRIAL.case, torch.zeros(3, 5)
    status, ones = torch.zeros(2, dtype=torch.int32), torch.ones(2, dtype=torch.int32)

    def of_normal_mode(group: Any) -> None:
        with make_buffer(group, case, "peer") as buffer:
            round_trip(buffer, buffer.rank, TRIAL, 2)
            old = eplb.plan(loads, num_physical_experts=6, num_ranks=2)
            eplb.Move(buffer, [experts], old, eplb.plan(loads.flip(0), num_physical_experts=6, num_ranks=2)).finish()
            eplb.ReplicaSums(buffer, old).sum_([experts.clone()])
            name = ops.register(buffer, f"meta of rank {buffer.rank}")
            layer = moe.MoELayer(moe.Gate(64, 4, 2), moe.Experts(2 * buffer.rank, 2, 64, 8), 4, name)
            assert all(parameter.is_meta for parameter in layer.parameters())

    def of_low_latency_mode(group: Any) -> None:
        with low_latency.make_buffer(group, SIZES, "peer") as buffer:
            low_latency.check_combine(
                WORK, buffer.rank, low_latency.combine(buffer, WORK, low_latency.dispatch(buffer, WORK)[2])[0]
            )
        with low_latency.make_buffer(group, SIZES, "peer", enable_shrink=True) as buffer:
            buffer.clean_low_latency_buffer(SIZES.max_tokens, SIZES.hidden, SIZES.experts)
            mine = ones.clone()
            buffer.low_latency_query_mask_buffer(mine)
            assert torch.equal(mine, status)

    def of_v2(group: Any) -> None:
        for summed in (True, False):
            with deep_ep.ElasticBuffer(
                group, num_max_tokens_per_rank=8, hidden=128, num_topk=2, allow_multiple_reduction=summed
            ) as buffer:
                rank = group.rank()
                got = buffer.dispatch(
                    WORK.x[rank],
                    topk_idx=WORK.topk_idx[rank],
                    topk_weights=WORK.weights[rank],
                    num_experts=SIZES.experts,
                    do_expand=True,
                )
                assert got.handle.recv_src_metadata.shape[0] == got.handle.num_recv_tokens
                buffer.combine(got.recv_x, got.handle)
                buffer.barrier()

    def on_each_rank(group: Any) -> None:
        with torch.device("meta"):
            of_normal_mode(group)
            of_low_latency_mode(group)
            of_v2(group)

    run_ranks(2, on_each_rank, seed=1)


# --- gradients ------------------------------------------------------------------------------------------------


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[str]]]:
    """Return what returns the warnings of gradients, as if nothing had been said in this process."""
    arguments._say_that_gradients_end.cache_clear()
    yield lambda: [line for line in caplog.messages if "gradient" in line]
    arguments._say_that_gradients_end.cache_clear()


def leaf(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().requires_grad_()


def dispatches(buffer: deep_ep.Buffer, **options: Any) -> Any:
    return buffer.dispatch(**dispatch_arguments(TRIAL.work, buffer.rank, **options))


def combines(buffer: deep_ep.Buffer, **options: Any) -> None:
    with torch.no_grad():
        got = dispatches(buffer)
        rows = got.recv_x.clone()
    buffer.combine(**{"x": rows, "handle": got.handle, **options})


def low_latency_combines(buffer: deep_ep.Buffer, weights: torch.Tensor) -> None:
    handle = low_latency.dispatch(buffer, WORK)[2]
    buffer.low_latency_combine(WORK.results[buffer.rank], WORK.topk_idx[buffer.rank], weights, handle)


NORMAL = {
    "dispatch x": ("x", lambda b: dispatches(b, x=leaf(TRIAL.work.x[b.rank]))),
    "dispatch topk_weights": (
        "topk_weights",
        lambda b: dispatches(b, topk_weights=leaf(TRIAL.work.topk_weights[b.rank]) * 2),
    ),
    "dispatch scales": (r"x\[1\]", lambda b: dispatches(b, x=scaled(b.rank))),
    "cached dispatch": ("x", lambda b: b.dispatch(leaf(TRIAL.work.x[b.rank]), handle=dispatches(b).handle)),
    "combine x": ("x", lambda b: combines(b, x=leaf(dispatches(b).recv_x))),
    "combine bias": ("bias", lambda b: combines(b, bias=leaf(TRIAL.work.x[b.rank]))),
}
LOW_LATENCY = {
    "dispatch": (
        "x",
        lambda b: b.low_latency_dispatch(
            leaf(WORK.x[b.rank]), WORK.topk_idx[b.rank], SIZES.max_tokens, SIZES.experts, use_fp8=False
        ),
    ),
    "combine": ("topk_weights", lambda b: low_latency_combines(b, leaf(WORK.weights[b.rank]))),
}


def scaled(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    rows = TRIAL.work.x[rank]
    return rows.to(torch.float8_e4m3fn), torch.ones(len(rows), 1, requires_grad=True)


@pytest.mark.parametrize("call", [*(("normal", name) for name in NORMAL), *(("low", name) for name in LOW_LATENCY)])
def test_a_call_that_ends_gradients_says_so_once(call: tuple[str, str], said: Callable[[], list[str]]) -> None:
    mode, name = call
    argument, make = (NORMAL if mode == "normal" else LOW_LATENCY)[name]

    def on_each_rank(group: Any, tracked: bool) -> None:
        made = make_buffer(group, TRIAL.case, "peer") if mode == "normal" else None
        with made or low_latency.make_buffer(group, SIZES, "peer") as buffer, torch.set_grad_enabled(tracked):
            for _ in range(2):
                make(buffer)

    run_ranks(2, on_each_rank, False, seed=1)
    assert not said(), "without gradients there is nothing to say"
    run_ranks(2, on_each_rank, True, seed=1)
    (line,) = said()
    assert re.match(rf"{argument} requires a gradient.*deep_ep_py\.ops", line), line


def test_a_call_of_v2_that_ends_gradients_says_so(said: Callable[[], list[str]]) -> None:
    def on_each_rank(group: Any, what: str) -> None:
        rank = group.rank()
        given = {"x": WORK.x[rank], "topk_weights": WORK.weights[rank]}
        if what in given:
            given[what] = leaf(given[what])
        with deep_ep.ElasticBuffer(group, num_max_tokens_per_rank=8, hidden=128, num_topk=2) as buffer:
            got = buffer.dispatch(**given, topk_idx=WORK.topk_idx[rank], num_experts=SIZES.experts)
            buffer.combine(leaf(got.recv_x) if what == "combine" else got.recv_x, got.handle)

    for what in ("x", "topk_weights", "combine"):
        arguments._say_that_gradients_end.cache_clear()
        before = len(said())
        run_ranks(2, on_each_rank, what, seed=1)
        assert len(said()) == before + 1, what


def test_ops_and_autograd_functions_end_no_gradients(said: Callable[[], list[str]]) -> None:
    """What they pass to a Buffer may require gradients, which they return."""

    class Dispatch(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, buffer: deep_ep.Buffer) -> torch.Tensor:
            assert x.requires_grad
            ctx.buffer, got = buffer, dispatches(buffer, x=x)
            ctx.handle = got.handle
            return got.recv_x

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> Any:
            return ctx.buffer.combine(gradient.contiguous(), ctx.handle).combined_x, None

    def on_each_rank(group: Any) -> None:
        with make_buffer(group, TRIAL.case, "peer") as buffer:
            work, rank = TRIAL.work, buffer.rank
            name = ops.register(buffer, f"gradients of rank {rank}")
            x, weights = leaf(work.x[rank]), leaf(work.topk_weights[rank])
            Dispatch.apply(x, buffer).float().sum().backward()
            given = (x, work.topk_idx[rank], weights, work.num_experts, name)
            for got in (ops.dispatch(*given), ops.dispatch(*given, num_worst_tokens=64)):
                again = ops.dispatch_again(x, got.routes, name)
                (ops.combine(got.x + again, got.routes, name).float().sum() + got.topk_weights.sum()).backward()
            expanded = ops.dispatch_expanded(*given)
            out = ops.combine_expanded(expanded.x, expanded.routes, name)
            (out.float().sum() + expanded.topk_weights.sum()).backward()
            assert x.grad.any() and weights.grad.any()
        with low_latency.make_buffer(group, SIZES, "peer") as buffer:
            name = ops.register(buffer, f"no gradients of rank {rank}")
            x, topk_idx, weights = leaf(WORK.x[rank]), WORK.topk_idx[rank], leaf(WORK.weights[rank])
            got = ops.low_latency_dispatch(x, topk_idx, SIZES.max_tokens, SIZES.experts, name)
            ops.low_latency_combine(got.x, topk_idx, weights, got.routes, name)

    run_ranks(2, on_each_rank, seed=1)
    assert not said()
