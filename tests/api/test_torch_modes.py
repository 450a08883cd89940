"""Buffers and layers in the modes of torch: under inference mode and outside it, with another default device."""

from __future__ import annotations

import ast
from typing import Any

import pytest
import torch

import deep_ep_py as deep_ep
import low_latency
from cases import BY_NAME
from decode import make_layer, routed
from deep_ep_py import eplb, moe, ops
from deep_ep_py.testing import run_ranks
from harness import Trial, make_buffer, round_trip
from low_latency import Sizes, Work
from places import ROOT

TRIAL = Trial.of(BY_NAME["two_ranks"])
SIZES = Sizes("modes", 2, (5, 3), 8, 128, 2, 4)
WORK = Work.of(SIZES)
PROGRAMS = ("bench", "compat/utils", "doctor", "examples", "profile")
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


def test_an_element_of_a_handle_first_read_in_inference_mode_is_kept_for_a_backward() -> None:
    """The routes of an op hold no `is_token_in_rank`, so their handle makes it, and keeps it."""

    class Keep(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, *elements: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(*elements)
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
            return gradient, *[None] * len(ctx.saved_tensors)

    def on_each_rank(group: Any) -> None:
        with make_buffer(group, TRIAL.case, "peer") as buffer:
            name = ops.register(buffer, f"modes of rank {buffer.rank}")
            work, rank = TRIAL.work, buffer.rank
            routed = ops.dispatch(work.x[rank], work.topk_idx[rank], work.topk_weights[rank], work.num_experts, name)
            handle = ops.routes.to_handle(buffer, routed.routes)
            with torch.inference_mode():
                assert handle.is_token_in_rank.any()
            Keep.apply(torch.ones(1, requires_grad=True), handle.is_token_in_rank).backward()

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
    makers = {maker.__name__ for maker in torch.utils._device._device_constructors()}
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
