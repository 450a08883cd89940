"""State cached from one call for the next of the same sizes: it hides no mistake and keeps no Buffer alive."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

from deep_ep_py.testing import run_ranks
from low_latency import CASTS, Sizes, Work, dispatch, make_buffer, round_trip

pytestmark = pytest.mark.once

ONE = Sizes("one", 1, (1,), 1, 128, 1, 1)
"""Every number that the caller passes is 1, which equals True and 1.0."""
FARTHEST = torch.iinfo(torch.int64)


@pytest.mark.parametrize("name", ["num_max_dispatch_tokens_per_rank", "num_experts"])
@pytest.mark.parametrize("equal", [True, 1.0])
def test_what_equals_an_argument_of_an_earlier_call_is_still_refused(name: str, equal: Any) -> None:
    work = Work.of(ONE)

    def on_each_rank(group: Any) -> None:
        good = {
            "x": work.x[0],
            "topk_idx": work.topk_idx[0],
            "num_max_dispatch_tokens_per_rank": 1,
            "num_experts": 1,
            "use_fp8": False,
        }
        with make_buffer(group, ONE, "peer") as buffer:
            buffer.low_latency_dispatch(**good)
            with pytest.raises(TypeError, match=f"{name}={equal}: expected an int"):
                buffer.low_latency_dispatch(**{**good, name: equal})
            with pytest.raises(TypeError, match=r"use_fp8=0\.0: expected a bool"):
                buffer.low_latency_dispatch(**{**good, "use_fp8": 0.0})
            buffer.low_latency_dispatch(**good)

    run_ranks(1, on_each_rank, seed=1)


@pytest.mark.parametrize("wrong", [-2, 4, FARTHEST.min, FARTHEST.max])
def test_ids_are_looked_at_in_every_call(wrong: int) -> None:
    sizes = Sizes("one", 1, (3,), 4, 128, 2, 4)
    work = Work.of(sizes)

    def on_each_rank(group: Any) -> None:
        with make_buffer(group, sizes, "peer") as buffer:
            dispatch(buffer, work)
            ids = work.topk_idx[0].clone()
            ids[1, 1] = wrong
            with pytest.raises(ValueError, match=f"topk_idx: ids from .*{wrong}.*, expected -1 to 3 with 4 experts"):
                buffer.low_latency_dispatch(work.x[0], ids, 4, 4, use_fp8=False)
            dispatch(buffer, work)

    run_ranks(1, on_each_rank, seed=1)


def test_calls_of_many_kinds_take_turns() -> None:
    kinds = [(Sizes("two", 2, (3, 5), most, 128, 2, 4), cast) for most in (5, 8) for cast in CASTS.values()]
    kinds = [(sizes, cast) for sizes, cast in kinds for _ in range(2)]
    largest = Sizes("two", 2, (3, 5), 8, 128, 2, 4)

    def on_each_rank(group: Any) -> None:
        with make_buffer(group, largest, "peer") as buffer:
            for seed, (sizes, cast) in enumerate(kinds):
                round_trip(buffer, Work.of(sizes, seed=seed), cast)

    run_ranks(2, on_each_rank, seed=1)


def test_a_buffer_still_goes_with_its_last_reference() -> None:
    def on_each_rank(group: Any) -> None:
        buffer = make_buffer(group, ONE, "peer")
        dispatch(buffer, Work.of(ONE))
        gone = weakref.ref(buffer._engine)
        gc.disable()
        try:
            del buffer
            assert gone() is None, "something cached for later calls refers to itself"
        finally:
            gc.enable()

    run_ranks(1, on_each_rank, seed=1)
