"""Weights that move between ranks, gradients of replicas, and a model that is trained through a switch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import deep_ep_py as deep_ep
from cases import AMPLE, Case
from deep_ep_py import eplb, moe, ops
from deep_ep_py.eplb.moving import Source, choose_sources
from deep_ep_py.examples.train_model import OneProcessMoE
from deep_ep_py.testing import run_ranks
from harness import make_buffer, under_schedules

RANKS, EXPERTS, PHYSICAL = 4, 8, 12
LOCAL = PHYSICAL // RANKS
ONE_NODE = Case("move", RANKS, (0,) * RANKS, num_nvl_bytes=AMPLE)
TWO_NODES = Case("move_2x2", RANKS, (0,) * RANKS, num_nvl_bytes=AMPLE, ranks_per_node=2)


def placement(seed: int, ranks: int = RANKS) -> eplb.Placement:
    loads = torch.rand(EXPERTS, generator=torch.Generator().manual_seed(seed)) ** 4
    return eplb.plan(loads, num_physical_experts=PHYSICAL, num_ranks=ranks)


def held(by: eplb.Placement, rank: int) -> Tensor:
    return by.physical_to_logical_map.view(RANKS, LOCAL)[rank]


def weights() -> list[Tensor]:
    """Return parameters of all experts: more than one row, a few bytes, one number each, and none at all."""
    random = torch.Generator().manual_seed(1)
    return [
        torch.randn(EXPERTS, 60, 77, generator=random),
        torch.randn(EXPERTS, 3, generator=random).bfloat16(),
        torch.arange(EXPERTS),
        torch.zeros(EXPERTS, 0),
    ]


@pytest.mark.parametrize("case", [ONE_NODE, TWO_NODES], ids=["one_node", "two_nodes"])
def test_moved_weights_are_those_of_the_new_placement(case: Case) -> None:
    placements, everything = [placement(seed) for seed in range(4)], weights()
    assert any(
        not torch.equal(one.physical_to_logical_map, placements[0].physical_to_logical_map) for one in placements
    )

    def on_each_rank(group: Any) -> None:
        buffer = make_buffer(group, case, "ibgda" if case.two_hops else "weak")
        rank = buffer.rank
        tensors = [given[held(placements[0], rank)] for given in everything]
        for old, new in zip(placements, placements[1:], strict=False):
            before = [given.clone() for given in tensors]
            move = eplb.Move(buffer, tensors, old, new)
            steps = [move.step() for _ in range(2)]
            assert steps == [LOCAL - 1, LOCAL - 2]
            assert all(map(torch.equal, tensors, before)), "the old weights must serve meanwhile"
            tensors = move.finish()
            assert move.remaining == 0
            for moved, given in zip(tensors, everything, strict=True):
                assert moved.dtype == given.dtype and torch.equal(moved, given[held(new, rank)])

    under_schedules(RANKS, on_each_rank)


def test_weights_of_a_move_that_has_failed_are_not_returned() -> None:
    """As on a GPU, where the failure of a step is known only after the step has returned."""
    old, new, given = placement(0), placement(1), torch.zeros(LOCAL, 4)

    def on_each_rank(group: Any) -> None:
        buffer = make_buffer(group, ONE_NODE, "peer")
        move = eplb.Move(buffer, [given], old, new)
        while move.remaining:
            move.step()
        group.barrier()
        if buffer.rank == 1:
            buffer._engine.break_off("the last step has given up")
        group.barrier()
        with pytest.raises(deep_ep.DeepEPError):
            move.finish()
        group.barrier()
        buffer.recover()
        with pytest.raises(deep_ep.DeepEPError, match="has recovered since this move began"):
            move.finish()
        assert eplb.Move(buffer, [given], old, new).finish()[0].shape == given.shape

    run_ranks(RANKS, on_each_rank)


def test_steps_between_the_calls_of_a_model() -> None:
    case = Case("beside", RANKS, (3,) * RANKS, hidden=16, topk=2, experts=EXPERTS, num_nvl_bytes=AMPLE)
    old, new, (given, *_) = placement(0), placement(1), weights()

    def on_each_rank(group: Any) -> None:
        buffer = make_buffer(group, case, "weak")
        rank, name = buffer.rank, ops.register(buffer, f"rank {buffer.rank}")
        x, gates = torch.full((3, 16), rank + 1.0).bfloat16(), torch.ones(3, 2)
        ids = torch.tensor([[0, 7], [3, 4], [5, 6]])
        move = eplb.Move(buffer, [given[held(old, rank)]], old, new)
        while move.remaining:
            received = ops.dispatch(x, ids, gates, EXPERTS, name)
            move.step()
            assert torch.equal(ops.combine(received.x, received.routes, name), x * 2)
        assert torch.equal(move.finish()[0], given[held(new, rank)])
        with pytest.raises(ValueError, match="the move is complete"):
            move.step()

    under_schedules(RANKS, on_each_rank)


def test_sources_are_near_and_share_the_work() -> None:
    old = [[0, 1], [0, 2], [0, 3], [1, 4]]
    steps = choose_sources(old, [[0, 4], [1, 0], [1, 0], [0, 0]], ranks_per_node=2)
    assert [*steps[0].values()] == [Source(0, 0), Source(0, 1), Source(3, 0), Source(2, 0)], "its own, then of the node"
    assert [*steps[1].values()] == [Source(3, 1), Source(1, 0), Source(2, 0), Source(2, 0)]
    many = choose_sources([[0], [0], [1], [1]], [[1], [1], [1], [0]], ranks_per_node=4)
    assert [*many[0].values()] == [Source(2, 0), Source(3, 0), Source(2, 0), Source(0, 0)], "in turn"
    without = choose_sources([[0], [-1], [1], [0]], [[1], [-1], [1], [0]], ranks_per_node=4)
    assert without == [{0: Source(2, 0), 2: Source(2, 0), 3: Source(3, 0)}], "a place without an expert has no source"
    with pytest.raises(ValueError, match="expert 9 is in no place"):
        choose_sources(old, [[9, 0]], ranks_per_node=1)


def test_sums_of_replicas() -> None:
    loads = torch.tensor([90.0, 1, 1, 1, 20, 1, 1, 1])
    by = eplb.plan(loads, num_physical_experts=PHYSICAL, num_ranks=RANKS)
    assert int(by.expert_count.max()) > 2, "a sum of two is the same in BF16"
    random = torch.Generator().manual_seed(2)
    grads = [torch.randn(PHYSICAL, 40, 30, generator=random), torch.randn(PHYSICAL, 5, generator=random).bfloat16()]
    order = sorted(range(PHYSICAL), key=lambda physical: (physical % LOCAL, physical))  # as documented

    def on_each_rank(group: Any) -> None:
        buffer = make_buffer(group, ONE_NODE, "weak")
        mine = slice(buffer.rank * LOCAL, (buffer.rank + 1) * LOCAL)
        given = [grad[mine].clone() for grad in grads]
        eplb.ReplicaSums(buffer, by).sum_(given)
        logical = by.physical_to_logical_map[0].tolist()
        for got, grad in zip(given, grads, strict=True):
            for slot, expert in enumerate(held(by, buffer.rank).tolist()):
                total = torch.zeros(grad.shape[1:])
                for physical in order:
                    if logical[physical] == expert:
                        total += grad[physical].float()
                assert torch.equal(got[slot], total.to(grad.dtype)), expert

    under_schedules(RANKS, on_each_rank)


@pytest.mark.once
def test_what_one_rank_alone_gets_wrong_is_raised_on_all() -> None:
    old, new = placement(0), placement(1)
    given = torch.zeros(LOCAL, 4)
    wrong: dict[str, tuple[tuple[Any, ...], str, str]] = {
        "a placement": (([given], old, placement(2)), r"ranks \[1\] passed other placements", r"ranks \[0, 2, 3\]"),
        "a shape": (([given[:, :3].contiguous()], old, new), r"ranks \[1\] passed other", "tensors of other shapes"),
        "a type": (([given.double()], old, new), r"ranks \[1\] passed other", "tensors of other shapes or types"),
        "experts": (([given[:2]], old, new), r"ranks \[1\] have refused", r"tensors\[0\]=.*with 3 experts"),
        "strides": (([given.t()], old, new), r"ranks \[1\] have refused", r"tensors\[0\]=.*contiguous"),
        "a device": (
            ([given.to("meta")], old, new),
            r"ranks \[1\] have refused",
            "on cpu, the device= that the Buffer",
        ),
        "no tensor": (([], old, new), r"ranks \[1\] have refused", "tensors=.*at least one"),
        "ranks": (([given], old, placement(1, 2)), r"ranks \[1\] have refused", "new: a placement for 2 ranks"),
    }

    def on_each_rank(group: Any) -> None:
        buffer = make_buffer(group, ONE_NODE, "peer")
        for arguments, elsewhere, there in wrong.values():
            mine, expected = (arguments, there) if buffer.rank == 1 else (([given], old, new), elsewhere)
            with pytest.raises((TypeError, ValueError), match=expected):
                eplb.Move(buffer, *mine)
        with pytest.raises(ValueError, match=r"ranks \[1\]" if buffer.rank != 1 else r"ranks \[0, 2, 3\]"):
            eplb.ReplicaSums(buffer, new if buffer.rank == 1 else old)
        sums = eplb.ReplicaSums(buffer, old)
        for name in ("a shape", "a type", "experts", "strides", "no tensor"):
            (tensors, *_), elsewhere, there = wrong[name]
            with pytest.raises((TypeError, ValueError), match=there if buffer.rank == 1 else elsewhere):
                sums.sum_(tensors if buffer.rank == 1 else [given])
        with pytest.raises(TypeError, match=r"tensors\[0\]: torch.int64"):
            sums.sum_([torch.zeros(LOCAL, dtype=torch.int64)])
        with pytest.raises(TypeError, match="expected a Buffer or an ElasticBuffer"):
            eplb.Move(group, [given], old, new)
        move = eplb.Move(buffer, [given], old, new)  # nothing is lost
        assert move.finish()[0].shape == given.shape

    run_ranks(RANKS, on_each_rank)


# --- training through a switch --------------------------------------------------------------------------------

HIDDEN, INTERMEDIATE, TOPK, TOKENS, STEPS, SWITCH = 16, 8, 2, 12, 8, 3


class ReplicatedGate(nn.Module):
    """A gate whose choices are mapped to replicas."""

    def __init__(self, gate: moe.Gate, by: eplb.Placement, rank: int) -> None:
        super().__init__()
        self.gate, self.placement, self.rank = gate, by, rank

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        topk_idx, topk_weights = self.gate(x)
        return eplb.logical_to_physical(topk_idx, self.placement, rank=self.rank), topk_weights


def gate() -> moe.Gate:
    torch.manual_seed(5)
    return moe.Gate(HIDDEN, EXPERTS, TOPK).requires_grad_(False)


def batches() -> Iterator[list[Tensor]]:
    """Return each step's tokens of each rank, which prefer some experts."""
    random = torch.Generator().manual_seed(6)
    preferred = 3 * gate().weight[2:4].sum(0)
    for _ in range(STEPS):
        yield [torch.randn(TOKENS, HIDDEN, generator=random) + preferred for _ in range(RANKS)]


def optimizer_of(parameters: Iterator[nn.Parameter]) -> torch.optim.SGD:
    return torch.optim.SGD(parameters, lr=0.3, momentum=0.9)


def loss_of(layer: nn.Module, x: Tensor) -> Tensor:
    return (layer(x) - x).square().sum() / (RANKS * TOKENS * HIDDEN)


def alone() -> tuple[list[float], moe.Experts]:
    """Train in one process with all experts."""
    experts = moe.Experts(0, EXPERTS, HIDDEN, INTERMEDIATE, seed=3)
    layer, optimizer, losses = OneProcessMoE(gate(), [experts]), optimizer_of(experts.parameters()), []
    for parts in batches():
        optimizer.zero_grad()
        loss = loss_of(layer, torch.cat(parts))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, experts


def test_training_through_a_switch() -> None:
    wanted_losses, wanted = alone()
    assert wanted_losses[-1] < 0.8 * wanted_losses[0], "expected a model that learns"
    case = Case("train", RANKS, (TOKENS,) * RANKS, hidden=HIDDEN, topk=TOPK, experts=PHYSICAL, num_nvl_bytes=AMPLE)

    def on_each_rank(group: Any) -> list[Any]:
        buffer = make_buffer(group, case, "weak")
        rank = buffer.rank
        by = eplb.plan(torch.ones(EXPERTS), num_physical_experts=PHYSICAL, num_ranks=RANKS)
        everything = moe.Experts(0, EXPERTS, HIDDEN, INTERMEDIATE, seed=3)
        experts = moe.Experts(0, LOCAL, HIDDEN, INTERMEDIATE)
        parameters = list(experts.parameters())
        for mine, whole in zip(parameters, everything.parameters(), strict=True):
            mine.data.copy_(whole.data[held(by, rank)])
        router = ReplicatedGate(gate(), by, rank)
        layer = moe.MoELayer(router, experts, PHYSICAL, ops.register(buffer, f"rank {rank}"))
        optimizer, losses, counts = optimizer_of(experts.parameters()), [], torch.zeros(PHYSICAL, dtype=torch.int64)
        sums = eplb.ReplicaSums(buffer, by)
        for step, parts in enumerate(batches()):
            if step == SWITCH:
                counted = torch.stack(group.all_gather_object(counts)).sum(0)
                new = eplb.plan(eplb.physical_to_logical(counted, by), num_physical_experts=PHYSICAL, num_ranks=RANKS)
                assert not torch.equal(new.physical_to_logical_map, by.physical_to_logical_map)
                moments = [optimizer.state[mine]["momentum_buffer"] for mine in parameters]
                moved = eplb.Move(buffer, [*parameters, *moments], by, new).finish()
                for mine, other in zip([*parameters, *moments], moved, strict=True):
                    mine.data.copy_(other)
                by = router.placement = new
                sums = eplb.ReplicaSums(buffer, by)
            optimizer.zero_grad()
            counts += router(parts[rank])[0].flatten().bincount(minlength=PHYSICAL)
            loss = loss_of(layer, parts[rank])
            loss.backward()
            sums.sum_([mine.grad for mine in parameters])
            optimizer.step()
            losses.append(loss.item())
        return [losses, by, [mine.detach() for mine in parameters]]

    for together in under_schedules(RANKS, on_each_rank, count=2):
        by = together[0][1]
        assert int(by.expert_count.max()) > 1
        losses = torch.tensor([one[0] for one in together]).sum(0)
        torch.testing.assert_close(losses, torch.tensor(wanted_losses), rtol=2**-8, atol=0)  # rows are rounded to BF16
        for index, whole in enumerate(wanted.parameters()):
            physical = torch.cat([parameters[index] for _, _, parameters in together])
            logical = by.physical_to_logical_map[0]
            for expert in range(EXPERTS):
                first, *others = physical[logical == expert]
                assert all(torch.equal(first, other) for other in others), "replicas have drifted apart"
                torch.testing.assert_close(first, whole[expert].detach(), rtol=2**-6, atol=1e-2)
