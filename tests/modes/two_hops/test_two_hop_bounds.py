"""Overwritten handles: no rank reads or writes out of bounds, none hangs, and all continue afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import deep_ep_py as deep_ep
from cases import Case
from deep_ep_py.modes.normal.handles import record_of
from deep_ep_py.testing import run_ranks
from elastic import ElasticTrial, round_trip
from harness import Trial, dispatch_arguments, make_buffer

CASE = Case("2x2", 4, (41, 3, 13, 25), hidden=8, topk=3, experts=8, ranks_per_node=2)
TRIAL, ELASTIC = Trial.of(CASE), ElasticTrial.of(CASE)
PARTS = (
    *("node_row", "sent", "sent_token", "sent_ranks", "sent_marks"),
    *("rows_to_rank", "forwarded", "node_rows", "rank_prefix", "table"),
)
VALUES = {"huge": 2**30, "negative": -7, "next": None}
"""The value stored into every element; None increments each element."""
NO_ROW = {("node_row", "negative"), ("table", "negative"), ("sent_ranks", "huge")}
"""Combinations that mean "no row" and are within bounds."""
HOLDERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "huge": lambda holders: torch.full_like(holders, 2**30),
    "negative": lambda holders: torch.full_like(holders, -7),
    "another": lambda holders: torch.where(holders >= 0, 1 - holders, holders),
}
"""Changes of the ranks that hold choices; the last one names the other rank of the node, which may have no row."""
WRONG = 1
"""The rank whose handle is overwritten."""


def write_over(tensor: torch.Tensor, value: int | None) -> None:
    """Change all elements; the tensors of a handle must not share memory with anything else."""
    if value is None:
        tensor.add_(1)
    else:
        tensor.fill_(value)


@pytest.mark.parametrize("arena", [True, False], ids=["seen", "unseen"])
@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("part", PARTS)
def test_a_plan_written_over(part: str, value: str, arena: bool) -> None:
    """Each part of it, on one rank, with outputs that the other ranks of its node see and with none. Values that are
    out of bounds are reported or make no difference.
    """

    def call(buffer: deep_ep.Buffer, step: str, handle: Any) -> bool:
        """Use the handle; return False if that fails or gives a wrong result."""
        rank = buffer.rank
        try:
            if step == "cached":
                TRIAL.check_cached(rank, buffer.dispatch(TRIAL.work.x[rank], handle=handle))
            else:
                TRIAL.check_combine(rank, TRIAL.combine(buffer, rank, handle))
        except AssertionError:
            return False
        return True

    def on_each_rank(group: Any) -> dict[str, str]:
        options: dict[str, Any] = {} if arena else {"arena_bytes": 0}
        buffer = make_buffer(group, CASE, "ibgda", timeout=5.0, **options)
        rank, ends = buffer.rank, {}
        for step in ("cached", "combine"):
            handle = buffer.dispatch(**dispatch_arguments(TRIAL.work, rank))[4]
            group.barrier()  # a failure also ends calls that a slower rank is still in
            if rank == WRONG:
                write_over(getattr(record_of(handle).plan, part), VALUES[value])
            try:
                ends[step] = "right" if call(buffer, step, handle) else "wrong"
            except deep_ep.DeepEPError:
                ends[step] = "raised"
            group.barrier()
            buffer.recover()
            results = buffer.dispatch(**dispatch_arguments(TRIAL.work, rank))
            TRIAL.check_dispatch(rank, results)
            TRIAL.check_combine(rank, TRIAL.combine(buffer, rank, results[4]))
        return ends

    ends = run_ranks(CASE.ranks, on_each_rank, seed=1)
    if value == "next" or (part, value) in NO_ROW:
        return
    for step in ("cached", "combine"):
        of_ranks = [each[step] for each in ends]
        assert "wrong" not in of_ranks or "raised" in of_ranks, (step, of_ranks)


@pytest.mark.parametrize("arena", [True, False], ids=["seen", "unseen"])
@pytest.mark.parametrize("change", HOLDERS)
def test_holders_written_over(change: str, arena: bool) -> None:
    """A combine takes weights from the ranks that they name, so it must not end well if they hold no such choice."""

    def on_each_rank(group: Any) -> str:
        options: dict[str, Any] = {} if arena else {"arena_bytes": 0}
        with ELASTIC.make_buffer(group, "ibgda", num_gpu_timeout_secs=5, **options) as buffer:
            rank = buffer.rank_idx
            results = ELASTIC.dispatch(buffer, rank)
            group.barrier()
            if rank == WRONG:
                holders = record_of(results.handle.dispatched).plan.holders
                holders.copy_(HOLDERS[change](holders))
            said = ""
            try:
                ELASTIC.combine(buffer, rank, results.handle, weights=results.recv_topk_weights)
            except deep_ep.DeepEPError as error:
                said = str(error)
            group.barrier()
            buffer.recover()
            round_trip(buffer, ELASTIC, 2, expanded=False, exact=True)
            return said

    said = run_ranks(CASE.ranks, on_each_rank, seed=1)[WRONG]
    assert "a size or offset of its rows" in said, said
