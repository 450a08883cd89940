"""The arguments of low-latency calls: what they accept, how much memory they need, and what they refuse."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import deep_ep_py as deep_ep
from deep_ep_py.testing import run_ranks
from low_latency import BF16, CASTS, Sizes, Work, combine, dispatch, make_buffer

hint = deep_ep.Buffer.get_low_latency_rdma_size_hint
SMALL = Sizes("small", 2, (3, 2), 4, 128, 2, 4)
V1_HINT = 2_146_961_792
"""The result of DeepEP's formula for 128 tokens of 7168 elements and 288 experts, for any number of ranks."""


@pytest.mark.once
def test_the_hint_is_a_quarter_of_v1s() -> None:
    assert hint(128, 7168, 8, 288) <= V1_HINT / 4
    assert hint(128, 7168, 8, 288, num_topk=8) < hint(128, 7168, 8, 288)
    assert hint(128, 7168, 8, 288, regions=4) == 2 * hint(128, 7168, 8, 288)
    assert hint(128, 7168, 8, 288) % 128 == 0


@pytest.mark.parametrize("fabric", ["peer", "ibgda"])
def test_the_hint_suffices(fabric: str) -> None:
    def on_each_rank(group: Any) -> None:
        work = Work.of(SMALL)
        with make_buffer(group, SMALL, fabric) as buffer:
            results = dispatch(buffer, work)
            combine(buffer, work, results[2])
        too_small = 2048
        with (
            deep_ep.Buffer(group, 0, too_small, low_latency_mode=True, fabric=fabric) as buffer,
            pytest.raises(ValueError, match="num_rdma_bytes: the Buffer has .* expected at least"),
        ):
            dispatch(buffer, work)

    run_ranks(2, on_each_rank, seed=1)


def refused(**changes: Any) -> str:
    """Return the error with which a dispatch of one rank is refused."""
    said = []

    def on_each_rank(group: Any) -> None:
        size = Sizes("one", 1, (3,), 4, 128, 2, 4)
        work = Work.of(size)
        arguments = {
            "x": work.x[0],
            "topk_idx": work.topk_idx[0],
            "num_max_dispatch_tokens_per_rank": 4,
            "num_experts": 4,
            "use_fp8": False,
            **changes,
        }
        with make_buffer(group, size, "peer") as buffer:
            with pytest.raises((ValueError, TypeError)) as raised:
                buffer.low_latency_dispatch(**arguments)
            said.append(str(raised.value))
            dispatch(buffer, work)  # the Buffer is unchanged

    run_ranks(1, on_each_rank, seed=1)
    return said[0]


@pytest.mark.once
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": torch.zeros(3, 128)}, "x=float32.*expected bfloat16"),
        ({"x": torch.zeros(3, 4, dtype=torch.bfloat16)}, "x=.*multiple of 16 bytes"),
        ({"x": torch.zeros(5, 128, dtype=torch.bfloat16), "topk_idx": torch.zeros(5, 2, dtype=torch.int64)}, "at most"),
        ({"topk_idx": torch.full((3, 2), 4)}, "topk_idx: ids from 4 to 4, expected -1 to 3"),
        ({"topk_idx": torch.zeros(2, 2, dtype=torch.int64)}, r"topk_idx=.*expected int64 or int32\[3, any\]"),
        ({"num_max_dispatch_tokens_per_rank": 0}, "num_max_dispatch_tokens_per_rank=0: expected"),
        ({"num_experts": 0}, "num_experts=0: expected"),
        ({"num_experts": "4"}, "num_experts='4': expected an int"),
        ({"use_fp8": None}, "use_fp8=None: expected a bool"),
        ({"use_ue8m0": True}, "use_ue8m0=True: expected together with round_scale=True"),
        (
            {"x": torch.zeros(3, 64, dtype=torch.bfloat16), "use_fp8": True},
            "multiple of 128 elements with use_fp8=True",
        ),
        ({"async_finish": True, "return_recv_hook": True}, "async_finish=True: expected False with return_recv_hook"),
        (
            {"cumulative_local_expert_recv_stats": torch.zeros(3, dtype=torch.int32)},
            r"cumulative_local_expert_recv_stats=.*expected int32\[4\]",
        ),
        (
            {"dispatch_wait_recv_cost_stats": torch.zeros(1, dtype=torch.int32)},
            r"dispatch_wait_recv_cost_stats=.*expected int64\[1\]",
        ),
    ],
)
def test_bad_arguments_of_a_dispatch(changes: dict[str, Any], message: str) -> None:
    said = refused(**changes)
    assert re.search(message, said), said


@pytest.mark.once
def test_bad_arguments_of_a_combine() -> None:
    def on_each_rank(group: Any) -> None:
        size = Sizes("one", 1, (3,), 4, 128, 2, 4)
        work = Work.of(size)
        with make_buffer(group, size, "peer") as buffer:
            handle = dispatch(buffer, work)[2]
            good = {
                "x": work.results[0],
                "topk_idx": work.topk_idx[0],
                "topk_weights": work.weights[0],
                "handle": handle,
            }
            src_info, ranges, *numbers = handle
            for changes, message in (
                ({"x": work.results[0][:, :3]}, "x=.*expected bfloat16"),
                ({"topk_idx": work.topk_idx[0][:, :1].contiguous()}, r"topk_idx=.*expected \[3, 2\], as in the"),
                ({"topk_weights": work.weights[0].double()}, "topk_weights=.*expected float32"),
                ({"out": torch.zeros(2, 128, dtype=torch.bfloat16)}, "out=.*expected bfloat16"),
                ({"handle": None}, "handle=NoneType: expected the handle"),
                ({"handle": (src_info.clone(), ranges, *numbers)}, "handle: .*a copy or another tensor"),
                ({"handle": (src_info, ranges, 8, 128, 4)}, "handle: .*from different dispatches"),
                ({"handle": (src_info[1:], ranges, *numbers)}, "handle: .*from different dispatches"),
                ({"use_logfmt": None}, "use_logfmt=None: expected a bool"),
                ({"use_logfmt": True, "zero_copy": True}, "use_logfmt=True: expected False with zero_copy=True"),
                ({"zero_copy": True}, "zero_copy=True: expected a call of get_next_low_latency_combine_buffer"),
            ):
                with pytest.raises((ValueError, TypeError), match=message):
                    buffer.low_latency_combine(**{**good, **changes})
            buffer.low_latency_combine(**good)

    run_ranks(1, on_each_rank, seed=1)


@pytest.mark.once
def test_a_buffer_without_the_mode_refuses() -> None:
    def on_each_rank(group: Any) -> None:
        work = Work.of(Sizes("one", 1, (3,), 4, 128, 2, 4))
        wanted = "low_latency_dispatch: expected a Buffer .* low_latency_mode=True"
        with deep_ep.Buffer(group, 1 << 20) as buffer, pytest.raises(ValueError, match=wanted):
            dispatch(buffer, work, BF16)

    run_ranks(1, on_each_rank, seed=1)


def test_rows_with_scales_are_no_results() -> None:
    """A dispatch returns a pair by default; the error describes its parts without printing their elements."""
    sizes = Sizes("fp8", 1, (3,), 4, 128, 2, 2)
    work = Work.of(sizes)

    def on_each_rank(group: Any) -> None:
        with make_buffer(group, sizes, "peer") as buffer:
            packed, _, handle, _, _ = dispatch(buffer, work, CASTS["fp8"])
            told = r"x=\(float8_e4m3fn\[2, 4, 128\] on cpu, float32\[2, 4, 1\] on cpu.*\): expected bfloat16"
            with pytest.raises(TypeError, match=told) as error:
                combine(buffer, work, handle, packed)
            assert len(str(error.value)) < 200

    run_ranks(1, on_each_rank)
