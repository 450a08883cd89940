"""The choice of a replica for each choice of a router."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from deep_ep_py import eplb

pytestmark = pytest.mark.once

EXPERTS, PHYSICAL, RANKS = 6, 12, 4
LOADS = torch.tensor([[1, 1, 1, 1, 1, 1], [60, 25, 9, 3, 2, 1]])


@pytest.fixture(scope="module")
def placement() -> eplb.Placement:
    return eplb.plan(LOADS, num_physical_experts=PHYSICAL, num_ranks=RANKS)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("layer", [0, 1])
def test_replicas_take_turns(placement: eplb.Placement, dtype: torch.dtype, layer: int) -> None:
    generator = torch.Generator().manual_seed(layer)
    topk_idx = torch.randint(-1, EXPERTS, (50, 4), generator=generator).to(dtype)
    for rank in range(RANKS):
        chosen = eplb.logical_to_physical(topk_idx, placement, rank=rank, layer=layer)
        assert chosen.dtype == dtype and chosen.shape == topk_idx.shape and chosen.is_contiguous()
        for token, (experts, physical) in enumerate(zip(topk_idx.tolist(), chosen.tolist())):
            for expert, found in zip(experts, physical):
                places = placement.logical_to_physical_map[layer, expert]
                places = places[places >= 0].tolist()
                assert found == (-1 if expert == -1 else places[(token + rank) % len(places)])
        held = placement.physical_to_logical_map[layer][chosen.clamp(min=0).long()]
        assert torch.equal(held[topk_idx >= 0], topk_idx[topk_idx >= 0].long())


def test_shares_of_an_expert_that_every_token_chooses(placement: eplb.Placement) -> None:
    replicas = int(placement.expert_count[1, 0])
    places = placement.logical_to_physical_map[1, 0, :replicas]
    assert replicas > 2
    for tokens in (1, 2, 7, 100):
        topk_idx = torch.zeros(tokens, 1, dtype=torch.int64)
        ranks = range(RANKS)
        chosen = [eplb.logical_to_physical(topk_idx, placement, rank=rank, layer=1) for rank in ranks]
        shares = torch.stack([one.flatten().bincount(minlength=PHYSICAL)[places] for one in chosen])
        assert (shares.amax(dim=1) - shares.amin(dim=1) <= 1).all()
    # Ranks with one token each do not all choose the same replica.
    of_ranks = [eplb.logical_to_physical(topk_idx[:1], placement, rank=rank, layer=1).item() for rank in ranks]
    assert len(set(of_ranks)) == min(RANKS, replicas)


def test_shares_of_random_choices_are_what_was_predicted(placement: eplb.Placement) -> None:
    generator = torch.Generator().manual_seed(1)
    rows = torch.zeros(PHYSICAL, dtype=torch.int64)
    loads = torch.zeros(EXPERTS, dtype=torch.int64)
    for rank in range(RANKS):
        topk_idx = torch.multinomial(LOADS[1].double().expand(2000, -1), 2, generator=generator)
        loads += topk_idx.flatten().bincount(minlength=EXPERTS)
        chosen = eplb.logical_to_physical(topk_idx, placement, rank=rank, layer=1)
        rows += chosen.flatten().bincount(minlength=PHYSICAL)
    predicted = eplb.rank_loads(torch.stack([loads, loads]), placement).rows[1]
    torch.testing.assert_close(rows.view(RANKS, -1).sum(dim=1).double(), predicted, rtol=0.03, atol=0)
    assert torch.equal(eplb.physical_to_logical(rows, placement, layer=1), loads)


@pytest.mark.parametrize("layer", [0, 1])
def test_without_a_rank_the_other_replicas_take_turns(placement: eplb.Placement, layer: int) -> None:
    """As if the experts had no more; and so loads are predicted and counted."""
    left = placement.without([0])
    chosen = eplb.logical_to_physical(torch.arange(EXPERTS).repeat(12, 1), left, rank=0, layer=layer)
    for expert, places in enumerate(placement.logical_to_physical_map[layer].tolist()):
        elsewhere = [place for place in places if place >= PHYSICAL // RANKS]
        assert chosen[:, expert].tolist() == [elsewhere[token % len(elsewhere)] for token in range(12)]
    counts = chosen.flatten().bincount(minlength=PHYSICAL)
    assert eplb.physical_to_logical(counts, left, layer).tolist() == [12] * EXPERTS
    rows, max_over_mean = eplb.rank_loads(torch.full((2, EXPERTS), 12), left)
    assert rows[layer].tolist() == counts.view(RANKS, -1).sum(dim=1).tolist()
    assert max_over_mean[layer] == rows[layer].max() / rows[layer, 1:].mean() > 1
    assert left.without([]).expert_count.tolist() == left.expert_count.tolist()
    assert (left.physical_to_logical_map.view(2, RANKS, -1) >= 0).all(dim=2).tolist() == [[False, True, True, True]] * 2


def test_experts_without_replicas_on_other_ranks_are_named(placement: eplb.Placement) -> None:
    with pytest.raises(ValueError, match=r"ranks=\[1\]: experts \[4\] of layer 1 have no replica on other ranks"):
        placement.without([1])
    with pytest.raises(ValueError, match=r"ranks=\[0, 2\]: experts \[0, 2, 4\] of layer 0 have no replica"):
        placement.without([0]).without([0, 2])
    for wrong, error, message in (
        ([RANKS], ValueError, "a rank of ranks=4: expected 0 to 3"),
        (1, TypeError, "ranks=1: expected the ranks to leave out, such as"),
        (["1"], TypeError, r"ranks=\['1'\]: expected the ranks to leave out"),
    ):
        with pytest.raises(error, match=message):
            placement.without(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", [(0, 4), (3, 1)])
def test_no_tokens_and_none_chosen(placement: eplb.Placement, shape: tuple[int, int]) -> None:
    none = torch.full(shape, -1)
    assert torch.equal(eplb.logical_to_physical(none, placement, rank=0, layer=0), none)


def test_the_host_waits_for_no_tensor(placement: eplb.Placement) -> None:
    """A tensor on "meta" has no contents, so any operation whose result the host would have to read raises."""
    elsewhere = placement.to("meta")
    topk_idx = torch.empty(5, 2, dtype=torch.int32, device="meta")
    with pytest.raises((RuntimeError, NotImplementedError)):
        bool((topk_idx < EXPERTS).all())
    chosen = eplb.logical_to_physical(topk_idx, elsewhere, rank=1, layer=1)
    assert (chosen.shape, chosen.dtype, chosen.device) == (topk_idx.shape, topk_idx.dtype, topk_idx.device)
    loads = eplb.physical_to_logical(torch.empty(2, PHYSICAL, dtype=torch.int32, device="meta"), elsewhere)
    assert (loads.shape, loads.dtype) == ((2, EXPERTS), torch.int64)


def test_under_compile_ids_are_not_read_and_wrong_ones_stay_wrong(placement: eplb.Placement) -> None:
    def chosen(topk_idx: torch.Tensor) -> torch.Tensor:
        return eplb.logical_to_physical(topk_idx, placement, rank=1, layer=1)

    compiled = torch.compile(chosen, fullgraph=True, backend="eager")
    topk_idx = torch.tensor([[0, 1], [-1, 5]])
    assert torch.equal(compiled(topk_idx), chosen(topk_idx))
    wrong = torch.tensor([[EXPERTS, 2**40], [-2, 0]])
    assert compiled(wrong)[0].tolist() == [PHYSICAL, PHYSICAL]
    assert compiled(wrong)[1, 0] == -2


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"topk_idx": [[0]]}, TypeError, r"topk_idx=\[\[0\]\]: expected int64 or int32\[any, any\]"),
        ({"topk_idx": torch.zeros(2, 2)}, TypeError, r"topk_idx=float32\[2, 2\]"),
        ({"topk_idx": torch.zeros(2, 2, dtype=torch.int64, device="meta")}, TypeError, "on meta: expected.*on cpu$"),
        ({"topk_idx": torch.zeros(2, dtype=torch.int64)}, ValueError, r"topk_idx=int64\[2\]"),
        ({"topk_idx": torch.tensor([[0, EXPERTS]])}, ValueError, "ids from 0 to 6, expected -1 to 5 with 6 experts"),
        ({"topk_idx": torch.tensor([[0, -2]])}, ValueError, "ids from -2 to 0, expected -1 to 5"),
        ({"placement": None}, TypeError, "placement=None: expected a deep_ep_py.eplb.Placement"),
        ({"rank": RANKS}, ValueError, "rank=4: expected 0 to 3"),
        ({"rank": "0"}, TypeError, "rank='0': expected an int"),
        ({"layer": None}, ValueError, "layer=None: expected 0 to 1, since the placement has several"),
        ({"layer": 2}, ValueError, "layer=2: expected 0 to 1"),
        ({"layer": -1}, ValueError, "layer=-1: expected 0 to 1"),
    ],
)
def test_wrong_arguments(
    placement: eplb.Placement, wrong: dict[str, Any], error: type[Exception], message: str
) -> None:
    good: dict[str, Any] = dict(topk_idx=torch.zeros(2, 2, dtype=torch.int64), placement=placement, rank=0, layer=0)
    eplb.logical_to_physical(**good)
    with pytest.raises(error, match=message):
        eplb.logical_to_physical(**{**good, **wrong})
