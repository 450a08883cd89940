"""Plans of redundant experts, against DeepSeek's published example and a reference in exact arithmetic."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from itertools import combinations, product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deep_ep_py import eplb

pytestmark = pytest.mark.once

REDUNDANT = 9
UNIT = 2520
"""A multiple of 1 to REDUNDANT + 1, so that the loads of replicas are whole numbers. Below 2**24 float32 adds these
exactly, and the reference must agree about every tie."""


def pack(loads: list[Fraction], num_packs: int) -> list[list[int]]:
    """Return the items of each pack."""
    room = len(loads) // num_packs
    if room == 1:
        return [[item] for item in range(num_packs)]
    packs: list[list[int]] = [[] for _ in range(num_packs)]
    for item in sorted(range(len(loads)), key=lambda item: (-loads[item], item)):
        open_packs = [pack for pack in packs if len(pack) < room]
        min(open_packs, key=lambda pack: sum(loads[other] for other in pack)).append(item)
    return packs


def reference(
    loads: list[int], physical: int, ranks: int, nodes: int, groups: int
) -> tuple[list[int], list[list[int]]]:
    """Return EPLB's plan: the expert of each physical expert of a layer, and the physical experts of each expert."""
    if groups % nodes:
        nodes = groups = 1
    size = len(loads) // groups
    members = [range(group * size, (group + 1) * size) for group in range(groups)]
    held: list[int] = []
    places: dict[tuple[int, int], int] = {}
    for packed in pack([Fraction(sum(loads[expert] for expert in group)) for group in members], nodes):
        experts = [expert for group in packed for expert in members[group]]
        replicas = [(expert, 0) for expert in experts]
        while len(replicas) < physical // nodes:
            count = {expert: sum(other == expert for other, _ in replicas) for expert in experts}
            busiest = max(experts, key=lambda expert: Fraction(loads[expert], count[expert]))
            replicas.append((busiest, count[busiest]))
        count = {expert: sum(other == expert for other, _ in replicas) for expert in experts}
        shares = [Fraction(loads[expert], count[expert]) for expert, _ in replicas]
        for on_rank in pack(shares, ranks // nodes):
            for index in on_rank:
                places[replicas[index]] = len(held)
                held.append(replicas[index][0])
    return held, [[places[key] for key in sorted(places) if key[0] == expert] for expert in range(len(loads))]


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[list[int]], dict[str, int]]:
    """Draw the loads of some layers, and the numbers that `plan` takes."""
    nodes = draw(st.integers(1, 4))
    ranks = nodes * draw(st.integers(1, 4))
    groups = draw(st.sampled_from([1, nodes, 2 * nodes, 3 * nodes, nodes + 1]))
    experts = groups * draw(st.integers(1, max(1, 24 // groups)))
    least = -(-experts // ranks)
    shares = [share for share in range(least, least + 4) if share * ranks - experts <= REDUNDANT] or [least]
    physical = ranks * draw(st.sampled_from(shares))
    highest = draw(st.sampled_from([0, 2, 20, 200]))
    layer = st.lists(st.integers(0, highest).map(UNIT.__mul__), min_size=experts, max_size=experts)
    loads = draw(st.lists(layer, min_size=1, max_size=3))
    return loads, dict(num_physical_experts=physical, num_ranks=ranks, num_nodes=nodes, num_groups=groups)


def pairs(held: list[int], ranks: int) -> int:
    """Return the number of places that repeat an expert of the same rank."""
    of_rank = len(held) // ranks
    return len(held) - sum(len(set(held[first : first + of_rank])) for first in range(0, len(held), of_rank))


@given(problems())
def test_plans_equal_the_reference_where_it_has_no_pair(problem: tuple[list[list[int]], dict[str, int]]) -> None:
    loads, numbers = problem
    placement = eplb.plan(torch.tensor(loads), **numbers)
    width = int(placement.expert_count.max())
    assert placement.logical_to_physical_map.shape == (len(loads), len(loads[0]), width)
    for layer, of_layer in enumerate(loads):
        held, places = reference(of_layer, *numbers.values())
        if pairs(held, numbers["num_ranks"]):
            continue
        assert placement.physical_to_logical_map[layer].tolist() == held
        assert placement.expert_count[layer].tolist() == [len(of_expert) for of_expert in places]
        padded = [of_expert + [-1] * (width - len(of_expert)) for of_expert in places]
        assert placement.logical_to_physical_map[layer].tolist() == padded


def test_the_example_of_deepseek() -> None:
    loads = torch.tensor(
        [
            [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
            [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
        ]
    )
    placement = eplb.plan(loads, num_physical_experts=16, num_ranks=8, num_nodes=2, num_groups=4)
    assert placement.physical_to_logical_map.tolist() == [
        [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1],
        [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1],
    ]
    assert placement.num_ranks == 8 and placement.device == torch.device("cpu")
    assert (placement.num_layers, placement.num_logical_experts, placement.num_physical_experts) == (2, 12, 16)


@given(problems())
def test_groups_stay_in_a_node_and_the_maps_are_inverse(problem: tuple[list[list[int]], dict[str, int]]) -> None:
    loads, numbers = problem
    placement = eplb.plan(torch.tensor(loads), **numbers)
    experts, nodes, groups = len(loads[0]), numbers["num_nodes"], numbers["num_groups"]
    for held, places in zip(placement.physical_to_logical_map, placement.logical_to_physical_map):
        for expert, of_expert in enumerate(places):
            found = of_expert[of_expert >= 0].tolist()
            assert sorted(found) == (held == expert).nonzero().flatten().tolist()
        if groups % nodes == 0:
            on_nodes = [set((on_node // (experts // groups)).tolist()) for on_node in held.view(nodes, -1)]
            assert [len(on_node) for on_node in on_nodes] == [groups // nodes] * nodes
            assert set.union(*on_nodes) == set(range(groups))


@given(problems())
def test_a_rank_holds_as_many_experts_as_it_can(problem: tuple[list[list[int]], dict[str, int]]) -> None:
    """So no rank has two replicas of an expert, unless it has more places than there are experts to put there."""
    loads, numbers = problem
    placement = eplb.plan(torch.tensor(loads), **numbers)
    ranks, nodes, experts = numbers["num_ranks"], numbers["num_nodes"], len(loads[0])
    of_node = experts if numbers["num_groups"] % nodes else experts // nodes
    unavoidable = max(0, numbers["num_physical_experts"] // ranks - of_node)
    for held in placement.physical_to_logical_map.tolist():
        assert pairs(held, ranks) == ranks * unavoidable


@pytest.mark.parametrize("loads", [torch.ones(256), torch.zeros(256), 1 / torch.arange(1, 257), torch.eye(256)[7]])
@pytest.mark.parametrize("nodes", [1, 4])
def test_first_plans_have_no_pairs(loads: torch.Tensor, nodes: int) -> None:
    """With the numbers of the documentation: EPLB's plan for equal loads pairs all 32 redundant replicas."""
    placement = eplb.plan(loads, num_physical_experts=288, num_ranks=32, num_nodes=nodes, num_groups=8)
    assert pairs(placement.physical_to_logical_map[0].tolist(), 32) == 0
    if loads.min() == loads.max() > 0:
        assert eplb.rank_loads(loads, placement).max_over_mean == 1
        equal = [int(load) for load in loads]
        assert pairs(reference(equal, 288, 32, nodes, 8)[0], 32) == 32


def test_a_replica_takes_the_place_of_another_one() -> None:
    placement = eplb.plan(torch.tensor([4, 4, 3, 2]), num_physical_experts=6, num_ranks=2)
    assert placement.expert_count.tolist() == [[2, 2, 1, 1]]
    # Expert 2 is packed first, on rank 0; then 0 and 1 on rank 1, 3 and 0 on rank 0. There 1 takes the place of 2.
    assert placement.physical_to_logical_map.tolist() == [[1, 3, 0, 0, 1, 2]]
    assert placement.logical_to_physical_map.tolist() == [[[3, 2], [4, 0], [5, -1], [1, -1]]]


def lightest(share: list[Fraction], count: list[int], ranks: int, room: int) -> Fraction:
    """Return the load of the heaviest rank in the best of all placements without pairs."""
    experts, best = range(len(count)), sum(share, Fraction(0)) * ranks

    def fill(rank: int, left: Counter[int], heaviest: Fraction) -> None:
        nonlocal best
        if rank == ranks:
            best = heaviest
            return
        # What is left of an expert must fit on the ranks that are left.
        for held in combinations([expert for expert in experts if left[expert]], room):
            most = max(heaviest, sum((share[expert] for expert in held), Fraction(0)))
            after = left - Counter(held)
            if most < best and max(after.values(), default=0) < ranks - rank:
                fill(rank + 1, after, most)

    fill(0, Counter(dict(enumerate(count))), Fraction(0))
    return best


@pytest.mark.parametrize("numbers", [(8, 10, 2), (5, 8, 4), (6, 12, 4), (7, 9, 3)], ids=str)
def test_no_placement_without_pairs_is_much_more_even(numbers: tuple[int, int, int]) -> None:
    experts, physical, ranks = numbers
    loads = (torch.rand(20, experts, generator=torch.Generator().manual_seed(1)) ** 2 * 1000).long() + 1
    placement = eplb.plan(loads, num_physical_experts=physical, num_ranks=ranks)
    found = 0
    for of_layer, count, held in zip(
        loads.tolist(), placement.expert_count.tolist(), placement.physical_to_logical_map
    ):
        if not pairs(reference(of_layer, physical, ranks, 1, 1)[0], ranks):
            continue
        share = [Fraction(load, replicas) for load, replicas in zip(of_layer, count)]
        heaviest = max(sum(share[expert] for expert in on_rank) for on_rank in held.view(ranks, -1).tolist())
        assert heaviest <= Fraction(101, 100) * lightest(share, count, ranks, physical // ranks)
        found += 1
    assert found > 2


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("highest", [4, 1000])
def test_plans_are_as_even_as_those_with_pairs(nodes: int, highest: int) -> None:
    numbers = dict(num_physical_experts=72, num_ranks=8, num_nodes=nodes, num_groups=nodes)
    loads = torch.randint(1, highest, (8, 64), generator=torch.Generator().manual_seed(1))
    planned, others, found = eplb.rank_loads(loads, eplb.plan(loads, **numbers)).max_over_mean, [], 0
    for of_layer in loads.tolist():
        held, places = reference(of_layer, *numbers.values())
        found += pairs(held, 8)
        rows = [Fraction(of_layer[expert], len(places[expert])) for expert in held]
        others.append(float(8 * max(sum(rows[first : first + 9]) for first in range(0, 72, 9)) / sum(rows)))
    assert found > 0
    assert planned.mean() <= sum(others) / len(others) + 1e-9


@given(st.lists(st.integers(0, 50), min_size=1, max_size=5), st.integers(1, 3), st.data())
def test_no_other_numbers_of_replicas_give_a_lower_maximum(loads: list[int], ranks: int, data: st.DataObject) -> None:
    """With at most one replica of an expert for each rank."""
    experts = len(loads)
    physical = ranks * data.draw(st.integers(-(-experts // ranks), experts))
    placement = eplb.plan(torch.tensor(loads), num_physical_experts=physical, num_ranks=ranks)
    count = placement.expert_count[0].tolist()

    def most(count: tuple[int, ...]) -> Fraction:
        return max(Fraction(load, replicas) for load, replicas in zip(loads, count))

    others = [other for other in product(range(1, ranks + 1), repeat=experts) if sum(other) == physical]
    assert tuple(count) in others
    assert most(tuple(count)) == min(map(most, others))


@pytest.mark.parametrize("masked", [[2], [0, 3]], ids=str)
def test_masked_ranks_get_no_experts(masked: list[int]) -> None:
    """The others get what a plan for them alone gives them, and the ids are those of all ranks."""
    loads = torch.rand(2, 6, generator=torch.Generator().manual_seed(1))
    numbers = dict(num_nodes=2, num_groups=2, masked_ranks=iter(masked))
    placement = eplb.plan(loads, num_physical_experts=16, num_ranks=4, **numbers)  # type: ignore[arg-type]
    left = [rank for rank in range(4) if rank not in masked]
    alone = eplb.plan(loads, num_physical_experts=4 * len(left), num_ranks=len(left))
    of_ranks = placement.physical_to_logical_map.view(2, 4, 4)
    assert torch.equal(of_ranks[:, left].flatten(1), alone.physical_to_logical_map)
    assert (of_ranks[:, masked] == -1).all()
    assert torch.equal(placement.expert_count, alone.expert_count)
    for layer, of_layer in enumerate(placement.logical_to_physical_map.tolist()):
        for expert, places in enumerate(of_layer):
            replicas = int(placement.expert_count[layer, expert])
            assert places[replicas:] == [-1] * (len(places) - replicas)
            assert [of_ranks[layer].flatten()[place].item() for place in places[:replicas]] == [expert] * replicas
            assert len(set(places[:replicas])) == replicas


def test_ties_go_to_the_first() -> None:
    equal = eplb.plan(torch.ones(6), num_physical_experts=8, num_ranks=4)
    # The redundant replicas, with half the load, are those of experts 0 and 1; they are packed last.
    assert equal.expert_count.tolist() == [[2, 2, 1, 1, 1, 1]]
    assert equal.physical_to_logical_map.tolist() == [[2, 0, 3, 1, 4, 0, 5, 1]]
    assert equal.logical_to_physical_map.tolist() == [[[1, 5], [3, 7], [0, -1], [2, -1], [4, -1], [6, -1]]]
    empty = eplb.plan(torch.zeros(4), num_physical_experts=8, num_ranks=2)
    assert empty.expert_count.tolist() == [[2, 2, 2, 2]]
    more = eplb.plan(torch.zeros(4), num_physical_experts=10, num_ranks=2)
    assert more.physical_to_logical_map.view(2, 5).sort().values.tolist() == [[0, 0, 1, 2, 3]] * 2


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float32, torch.float64, torch.bfloat16])
def test_types_of_loads(dtype: torch.dtype) -> None:
    loads = torch.tensor([[7, 1, 12, 3], [0, 0, 5, 64]], dtype=dtype)
    given = loads.clone()
    numbers: dict[str, int] = dict(num_physical_experts=6, num_ranks=2)
    placement = eplb.plan(loads, **numbers)
    assert torch.equal(loads, given)
    whole = eplb.plan(loads.long(), **numbers)
    of_each = [eplb.plan(layer, **numbers).physical_to_logical_map[0] for layer in loads]
    assert torch.equal(placement.physical_to_logical_map, whole.physical_to_logical_map)
    assert torch.equal(placement.physical_to_logical_map, torch.stack(of_each))
    assert {one.dtype for one in (placement.physical_to_logical_map, placement.expert_count)} == {torch.int64}


def test_loads_of_any_memory_layout_and_device_are_read() -> None:
    loads = torch.tensor([[7.0, 0.0], [1.0, 0.0], [12.0, 5.0], [3.0, 64.0]], requires_grad=True)
    numbers = dict(num_physical_experts=6, num_ranks=2)
    transposed, contiguous = (eplb.plan(one, **numbers) for one in (loads.t(), loads.t().contiguous()))
    assert torch.equal(transposed.physical_to_logical_map, contiguous.physical_to_logical_map)


GOOD: dict[str, Any] = dict(loads=torch.ones(2, 12), num_physical_experts=16, num_ranks=8, num_nodes=2, num_groups=4)


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"loads": [1, 2]}, TypeError, r"loads=\[1, 2\]: expected a tensor of an integer or floating-point dtype"),
        ({"loads": torch.ones(2, 12, dtype=torch.bool)}, TypeError, r"loads=bool\[2, 12\] on cpu: expected a tensor"),
        ({"loads": torch.ones(2, 12, dtype=torch.complex64)}, TypeError, r"loads=complex64\[2, 12\] on cpu"),
        ({"loads": torch.ones(2, 2, 3)}, ValueError, r"loads=float32\[2, 2, 3\] on cpu: expected \[layers, logical"),
        ({"loads": torch.ones(0, 12)}, ValueError, "not empty"),
        ({"loads": torch.ones(())}, ValueError, r"loads=float32\[\] on cpu"),
        ({"loads": torch.ones(2, 2049)}, ValueError, r"loads=.*at most 2048 logical experts"),
        ({"loads": torch.tensor([1, -2])}, ValueError, r"loads=int64\[2\] on cpu: the lowest is -2 .*not negative"),
        ({"loads": torch.tensor([1, float("nan")])}, ValueError, "loads=.*nan.*expected finite"),
        ({"loads": torch.tensor([1, float("inf")])}, ValueError, "loads=.*inf.*expected finite"),
        ({"loads": torch.full((12,), 3e38)}, ValueError, r"loads=.*sum of a layer 3.6e\+39.*range of float32"),
        ({"num_ranks": 0}, ValueError, "num_ranks=0: expected 1 to 1024"),
        ({"num_ranks": 8.0}, TypeError, "num_ranks=8.0: expected an int"),
        ({"num_nodes": 3}, ValueError, "num_nodes=3: expected a divisor of the 8 ranks"),
        ({"num_nodes": 16}, ValueError, "num_nodes=16: expected 1 to 8"),
        ({"num_groups": 5}, ValueError, "num_groups=5: expected a divisor of the 12 logical experts"),
        ({"num_groups": True}, TypeError, "num_groups=True: expected an int"),
        ({"num_groups": 24}, ValueError, "num_groups=24: expected 1 to 12"),
        ({"num_physical_experts": 20}, ValueError, "num_physical_experts=20: expected a multiple of the 8 ranks"),
        ({"num_physical_experts": 8}, ValueError, "num_physical_experts=8: expected at least 12, as in loads"),
        ({"masked_ranks": [1, 6, 1, 7]}, ValueError, r"=16, of which 10 are on .* other than \[1, 6, 7\]: .* least 12"),
        ({"masked_ranks": range(8)}, ValueError, "of which 0 are on"),
        ({"masked_ranks": [8]}, ValueError, "a rank of masked_ranks=8: expected 0 to 7"),
        ({"masked_ranks": 1}, TypeError, "masked_ranks=1: expected the ranks to leave out"),
        ({"num_physical_experts": 4096}, ValueError, "num_physical_experts=4096: expected 1 to 2048"),
    ],
)
def test_wrong_arguments(wrong: dict[str, Any], error: type[Exception], message: str) -> None:
    eplb.plan(**GOOD)
    with pytest.raises(error, match=message):
        eplb.plan(**{**GOOD, **wrong})


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"expert_count": None}, TypeError, "expert_count=None: expected a torch.Tensor"),
        ({"expert_count": torch.ones(1, 6)}, TypeError, r"expert_count=float32\[1, 6\].*expected int64\[any, any\]"),
        ({"expert_count": torch.ones(6, dtype=torch.int64)}, ValueError, r"expert_count=int64\[6\]"),
        ({"logical_to_physical_map": torch.ones(1, 5, 2, dtype=torch.int64)}, ValueError, r"int64\[1, 6, any\]"),
        ({"physical_to_logical_map": torch.ones(2, 8, dtype=torch.int64)}, ValueError, r"int64\[1, any\]"),
        ({"physical_to_logical_map": torch.ones(1, 8, dtype=torch.int64, device="meta")}, TypeError, "on cpu"),
        ({"num_ranks": 3}, ValueError, r"physical_to_logical_map=int64\[1, 8\].*multiple of the 3 ranks"),
    ],
)
def test_maps_that_do_not_fit_together(wrong: dict[str, Any], error: type[Exception], message: str) -> None:
    good = eplb.plan(torch.ones(6), num_physical_experts=8, num_ranks=4)
    with pytest.raises(error, match=message):
        eplb.Placement(**{**vars(good), **wrong})
