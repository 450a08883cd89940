"""Placements, moves and sums on the ranks that are left once a Buffer has recovered without the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import deep_ep_py as deep_ep
from cases import AMPLE, Case
from deep_ep_py import eplb
from deep_ep_py.eplb import moving, replicas
from deep_ep_py.testing import run_ranks
from harness import make_buffer

RANKS, LOCAL, LOST = 4, 2, 1
ONE_NODE = Case("lost", RANKS, (0,) * RANKS, num_nvl_bytes=AMPLE)
TWO_NODES = Case("lost_2x2", RANKS, (0,) * RANKS, num_nvl_bytes=AMPLE, ranks_per_node=2)


def placed(held: list[list[int]]) -> eplb.Placement:
    """Return the placement in which each rank holds the given experts."""
    physical = torch.tensor(held).flatten()
    places = [(physical == expert).nonzero().flatten() for expert in range(int(physical.max()) + 1)]
    count = torch.tensor([[len(of_expert) for of_expert in places]])
    padded = nn.utils.rnn.pad_sequence(places, batch_first=True, padding_value=-1)
    return eplb.Placement(physical.unsqueeze(0), padded.unsqueeze(0), count, len(held))


# The lost rank holds the first replica of an expert, the second of another, and no expert alone, before and after.
OLD = placed([[0, 1], [1, 2], [3, 3], [0, 2]])
NEW = placed([[2, 1], [3, 0], [2, 0], [1, 3]])
ALONE = placed([[0, 1], [1, 2], [3, 3], [0, 0]])
"""Only the lost rank holds expert 2."""

Check = Callable[[deep_ep.Buffer, eplb.Move, eplb.ReplicaSums], None]


def without_the_lost_rank(check: Check, case: Case = ONE_NODE) -> None:
    """Run a check on the ranks that are left, with a move that they have begun before, and sums."""

    def on_each_rank(group: Any) -> None:
        with make_buffer(group, case, "ibgda" if case.two_hops else "weak") as buffer:
            begun = eplb.Move(buffer, [torch.zeros(LOCAL, 3)], OLD, NEW)
            sums = eplb.ReplicaSums(buffer, OLD)
            group.barrier()
            if buffer.rank != LOST:
                buffer.recover([LOST])
                check(buffer, begun, sums)

    run_ranks(RANKS, on_each_rank, seed=1)


def held(by: eplb.Placement, rank: int) -> list[int]:
    of_rank: list[int] = by.physical_to_logical_map.view(RANKS, LOCAL)[rank].tolist()
    return of_rank


def weights(experts: list[int]) -> Tensor:
    return torch.tensor(experts).view(-1, 1) * 1000 + torch.arange(700)


def check_moves(buffer: deep_ep.Buffer, begun: eplb.Move, sums: eplb.ReplicaSums) -> None:
    for call in (begun.step, begun.finish):
        with pytest.raises(deep_ep.DeepEPError, match="has recovered since this move began"):
            call()
    tensor = weights(held(OLD, buffer.rank))
    loads = torch.tensor([1.0, 5.0, 1.0, 1.0])
    planned = eplb.plan(loads, num_physical_experts=8, num_ranks=RANKS, masked_ranks=buffer.masked_ranks)
    for old, new in ((OLD, NEW), (NEW, OLD), (OLD.without([LOST]), NEW), (NEW, planned), (planned, OLD)):
        (tensor,) = eplb.Move(buffer, [tensor], old, new).finish()
        assert torch.equal(tensor, weights(held(new, buffer.rank)))


def check_sums(buffer: deep_ep.Buffer, begun: eplb.Move, sums: eplb.ReplicaSums) -> None:
    # A number for each place, so that a sum shows whose it is.
    numbers = [2.0**place for place in range(RANKS * LOCAL)]
    physical = OLD.physical_to_logical_map[0].tolist()
    wanted = [
        sum(numbers[place] for place, other in enumerate(physical) if other == expert and place // LOCAL != LOST)
        for expert in held(OLD, buffer.rank)
    ]
    for each in (sums, eplb.ReplicaSums(buffer, OLD), eplb.ReplicaSums(buffer, OLD.without([LOST]))):
        given = torch.tensor(numbers).view(RANKS, LOCAL, 1)[buffer.rank].repeat(1, 5)
        each.sum_([given])
        assert torch.equal(given, torch.tensor(wanted).view(LOCAL, 1).expand(-1, 5))


def check_agreement(buffer: deep_ep.Buffer, begun: eplb.Move, sums: eplb.ReplicaSums) -> None:
    """Rank 3, the third of those that are left, alone passes something else."""
    wrong, given = buffer.rank == 3, torch.zeros(LOCAL, 3)
    with pytest.raises(ValueError, match=r"ranks \[0, 2\] passed other" if wrong else r"ranks \[3\] passed other"):
        eplb.Move(buffer, [given[:, :2].contiguous() if wrong else given], OLD, NEW)
    with pytest.raises((TypeError, ValueError), match="tensors=None" if wrong else r"ranks \[3\] have refused"):
        sums.sum_(None if wrong else [given])  # type: ignore[arg-type]
    # What a placement says of the lost rank makes no difference.
    eplb.Move(buffer, [given], OLD.without([LOST]) if wrong else OLD, NEW).finish()


@pytest.mark.parametrize("case", [ONE_NODE, TWO_NODES], ids=["one_node", "two_nodes"])
@pytest.mark.parametrize("check", [check_moves, check_sums, check_agreement])
def test_on_the_ranks_that_are_left(check: Check, case: Case) -> None:
    without_the_lost_rank(check, case)


def as_if_all_were_there(held: list[list[int]], buffer: deep_ep.Buffer) -> list[list[int]]:
    return held


@pytest.mark.once
@pytest.mark.parametrize(
    ("owner", "name", "bug", "check"),
    [
        (moving, "on_ranks_left", as_if_all_were_there, check_moves),
        (replicas, "on_ranks_left", as_if_all_were_there, check_sums),
        (deep_ep.Buffer, "masked_ranks", property(lambda buffer: []), check_agreement),
    ],
    ids=["sources", "sums", "agreement"],
)
def test_planted_ignorance_of_lost_ranks_shows(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, bug: Any, check: Check
) -> None:
    monkeypatch.setattr(owner, name, bug)
    with pytest.raises((AssertionError, RuntimeError, StopIteration, ValueError)):
        without_the_lost_rank(check)


@pytest.mark.once
def test_experts_that_only_lost_ranks_hold_are_named() -> None:
    def check(buffer: deep_ep.Buffer, begun: eplb.Move, sums: eplb.ReplicaSums) -> None:
        given = torch.zeros(LOCAL, 3)
        for name, old, new in (("old", ALONE, NEW), ("new", OLD, ALONE)):
            with pytest.raises(ValueError, match=rf"{name}: experts \[2\] have no replica on a rank other than \[1\]"):
                eplb.Move(buffer, [given], old, new)
        eplb.ReplicaSums(buffer, ALONE).sum_([given])  # of the other experts
        eplb.Move(buffer, [given], OLD, NEW).finish()

    without_the_lost_rank(check)


@pytest.mark.once
def test_a_rank_is_emptied_before_it_leaves() -> None:
    """Its experts move away, and its gradients are those of no expert."""

    def on_each_rank(group: Any) -> None:
        with make_buffer(group, ONE_NODE, "peer") as buffer:
            rank, emptied = buffer.rank, NEW.without([LOST])
            (moved,) = eplb.Move(buffer, [weights(held(OLD, rank)).float()], OLD, emptied).finish()
            wanted = torch.zeros(LOCAL, 700) if rank == LOST else weights(held(NEW, rank)).float()
            assert torch.equal(moved, wanted)
            eplb.ReplicaSums(buffer, emptied).sum_([moved])
            assert rank != LOST or not moved.any()

    run_ranks(RANKS, on_each_rank, seed=1)
