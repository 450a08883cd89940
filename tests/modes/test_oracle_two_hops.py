"""The oracle of two-hop mode, against plain loops over tokens and sums worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy
import pytest
import torch

import oracle
from cases import BY_NAME, Case, build
from harness import Trial
from oracle import Combined, Workload

NAMES = ("2x1_uniform", "2x2_of_one_node", "2x2_holes", "3x2_uniform", "2x3_holes")


def rows_of(work: Workload, source: int) -> list[list[int]]:
    """Return the ranks to which each token of a source goes."""
    return [
        sorted({expert // work.experts_per_rank for expert in row if expert >= 0})
        for row in work.topk_idx[source].tolist()
    ]


@pytest.mark.parametrize("name", NAMES)
def test_handles(name: str) -> None:
    """Row streams are lists to which each node row is appended."""
    case = BY_NAME[name]
    per_node, work = case.ranks_per_node, build(case)
    assert per_node is not None
    # By source and node: the tokens of the row stream. By source and rank: those of the rows.
    streams = {(s, n): [] for s in range(case.ranks) for n in range(case.nodes)}
    rows = {(s, r): [] for s in range(case.ranks) for r in range(case.ranks)}
    for source in range(case.ranks):
        for token, ranks in enumerate(rows_of(work, source)):
            for rank in ranks:
                rows[source, rank].append(token)
                if token not in streams[source, rank // per_node]:
                    streams[source, rank // per_node].append(token)

    received = oracle.dispatch(work)
    for rank, got in enumerate(oracle.internode(work, received, per_node)):
        node, sources = rank // per_node, range(rank % per_node, case.ranks, per_node)
        ranks, nodes, tokens = range(case.ranks), range(case.nodes), range(case.tokens_of(rank))
        of_each = [len(rows[source, rank]) for source in ranks]
        brought = [len(streams[source, node]) for source in sources]
        assert got.is_token_in_rank.tolist() == [[t in rows[rank, r] for r in ranks] for t in tokens]
        assert got.rdma_channel_prefix_matrix.tolist() == [[len(streams[rank, n])] for n in nodes]
        assert got.gbl_channel_prefix_matrix.tolist() == [[len(rows[rank, r])] for r in ranks]
        assert got.recv_rdma_channel_prefix_matrix.tolist() == [[count] for count in brought]
        assert got.recv_rdma_rank_prefix_sum.tolist() == [sum(brought[: n + 1]) for n in nodes]
        assert got.recv_gbl_channel_prefix_matrix.tolist() == [[sum(of_each[:r])] for r in ranks]
        assert got.recv_gbl_rank_prefix_sum.tolist() == [sum(of_each[: r + 1]) for r in ranks]
        assert torch.equal(got.recv_gbl_rank_prefix_sum, received[rank].rank_prefix_matrix[:, rank])
        assert got.recv_src_meta.shape[1] == 8 and got.recv_src_meta.view(torch.int32).tolist() == [
            [token, streams[source, node].index(token)] for source in ranks for token in rows[source, rank]
        ]
        assert got.send_rdma_head.tolist() == [
            [streams[rank, n].index(t) if t in streams[rank, n] else -1 for n in nodes] for t in tokens
        ]
        neighbours = range(node * per_node, (node + 1) * per_node)
        assert got.send_nvl_head.tolist() == [
            [rows[source, r].index(token) if token in rows[source, r] else -1 for r in neighbours]
            for source in sources
            for token in streams[source, node]
        ]


def rounded(value: numpy.float32) -> numpy.float32:
    """Round to BF16 and back, on the bits: to nearest, ties to even."""
    bits = int(value.view(numpy.uint32))
    return numpy.uint32((bits + 0x7FFF + (bits >> 16 & 1)) >> 16 << 16).view(numpy.float32)


@pytest.mark.parametrize("name", NAMES)
def test_sums(name: str) -> None:
    """Token by token, element by element."""
    case = replace(BY_NAME[name], hidden=8)
    per_node, trial = case.ranks_per_node, Trial.of(case)
    for owner in range(case.ranks):
        for token, ranks in enumerate(rows_of(trial.work, owner)):
            rows, weights = {}, {}
            for rank in ranks:
                part = trial.received[rank]
                at = int(((part.src_rank == owner) & (part.src_idx == token)).nonzero())
                rows[rank] = trial.expert.x[rank][at].float().numpy()
                weights[rank] = trial.expert.topk_weights[rank][at].numpy()
            total, total_weights = numpy.zeros(8, numpy.float32), numpy.zeros(case.topk, numpy.float32)
            for node in range(case.nodes):
                of_node = [rank for rank in ranks if rank // per_node == node]
                if node == owner // per_node:
                    for rank in of_node:
                        total, total_weights = total + rows[rank], total_weights + weights[rank]
                elif of_node:
                    passed = sum((rows[rank] for rank in of_node), numpy.zeros(8, numpy.float32))
                    total = total + numpy.array([rounded(value) for value in passed])
                    total_weights = total_weights + sum(
                        (weights[rank] for rank in of_node), numpy.zeros(case.topk, numpy.float32)
                    )
            for biases, combined in trial.expert.expected.items():
                with_bias = total
                for bias in trial.expert.biases[owner][:biases]:
                    with_bias = with_bias + bias[token].float().numpy()
                assert combined[owner].x[token].float().tolist() == [float(rounded(value)) for value in with_bias]
                assert combined[owner].topk_weights[token].tolist() == total_weights.tolist()


@pytest.mark.parametrize("name", ["uniform", "uneven_tokens", "unrouted_selections"])
def test_nodes_of_all_ranks_or_of_one_change_nothing(name: str) -> None:
    """In these cases nothing is summed before it reaches the owner."""
    trial = Trial.of(BY_NAME[name])
    tokens = [len(x) for x in trial.work.x]
    for per_node in (1, trial.case.ranks):
        others = oracle.combine(
            trial.received, tokens, trial.expert.x, trial.expert.topk_weights, trial.expert.biases, per_node
        )
        for got, expected in zip(others, trial.expert.expected[2]):
            assert oracle.same_bits(got.x, expected.x) and oracle.same_bits(got.topk_weights, expected.topk_weights)


def sum_of(*rows: float, owner: int = 0, ranks_per_node: int | None = 2) -> Combined:
    """Combine one token that went to every rank. The weights equal the rows."""
    ranks = len(rows)
    tokens = [int(rank == owner) for rank in range(ranks)]
    work = Workload(
        num_experts=ranks,
        x=[torch.zeros(count, 1) for count in tokens],
        topk_idx=[torch.arange(ranks).expand(count, -1) for count in tokens],
        topk_weights=[torch.zeros(count, ranks) for count in tokens],
    )
    x = [torch.tensor([[row]], dtype=torch.bfloat16) for row in rows]
    weights = [row.float() for row in x]
    return oracle.combine(oracle.dispatch(work), tokens, x, weights, ranks_per_node=ranks_per_node)[owner]


def test_another_nodes_sum_is_rounded_and_the_own_is_not() -> None:
    """1 + 2^-8 is halfway between two BF16 numbers, of which 1 is even."""
    small = 2.0**-8
    assert sum_of(small, 0.0, 1.0, small).x == 1.0
    assert sum_of(1.0, small, small, 0.0).x == 1.0 + 2 * small
    assert sum_of(small, 0.0, 1.0, small, owner=2).x == 1.0 + 2 * small
    assert sum_of(small, 0.0, 1.0, small, ranks_per_node=None).x == 1.0 + 2 * small
    assert sum_of(small, 0.0, 1.0, small).topk_weights == 1.0 + 2 * small, "weights must not be rounded"


def test_the_order_of_summation_shows() -> None:
    """2^24 + 1 is not an fp32 number."""
    big = 2.0**24
    # The owner's node is summed in its place, not first.
    assert sum_of(big, 0.0, 1.0, -big, owner=2).x == 0.0
    # A node sum goes by ascending rank, from 0.
    assert sum_of(0.0, 0.0, 0.0, big, 1.0, -big, ranks_per_node=3).x == 0.0
    assert sum_of(0.0, 0.0, 0.0, big, -big, 1.0, ranks_per_node=3).x == 1.0
    # A node sum is one term: 1 + 1 is not lost, although each 1 would be.
    assert sum_of(big, 0.0, 1.0, 1.0).topk_weights == big + 2
    assert sum_of(big, 0.0, 1.0, 1.0, ranks_per_node=None).topk_weights == big
    # In the owner's node, each row is its own term.
    assert sum_of(big, 0.0, 1.0, 1.0, owner=2).topk_weights == big


def test_the_bound_allows_two_roundings_and_no_more() -> None:
    small = 2.0**-8
    # Both roundings are by half a unit in the same direction.
    worst = sum_of(0.0, 0.0, 1.0, small, small, 0.0)
    error = (worst.x.double() - worst.exact).abs().item()
    assert error == 2 * small
    assert worst.exact.abs().item() * small < 0.51 * error, "the case must exceed a single rounding"
    assert error <= worst.tolerance.item() < 1.02 * error
    # Rows from ranks of the owner's node are not rounded on the way.
    assert sum_of(0.0, 1.0, small, ranks_per_node=3).tolerance.item() < 1.01 * small


@pytest.mark.parametrize("per_node", [1, 2, 3, 6])
def test_sums_are_within_the_bound(per_node: int) -> None:
    """Rows of very different magnitudes and both signs, so that node sums are larger than the total."""
    case = Case("bound", 6, 40, hidden=64, topk=6, experts=6, ranks_per_node=per_node)
    trial = Trial.of(case)
    random = torch.Generator().manual_seed(3)
    x = [(part.float() * 2.0 ** torch.randint(-12, 12, part.shape, generator=random)) for part in trial.expert.x]
    combined = oracle.combine(
        trial.received,
        [40] * 6,
        [part.to(torch.bfloat16) for part in x],
        trial.expert.topk_weights,
        ranks_per_node=per_node,
    )
    for part in combined:
        oracle.check_combined(part.x, part.topk_weights, part)


def test_check_handle_sees_what_is_wrong() -> None:
    trial = Trial.of(BY_NAME["2x2_holes"])
    assert trial.handles is not None
    expected = trial.handles[1]
    elements = tuple(vars(expected).values())
    oracle.check_handle(elements, expected)
    for place, name in enumerate(vars(expected)):
        with pytest.raises(AssertionError, match=rf"^{name} is None"):
            oracle.check_handle((*elements[:place], None, *elements[place + 1 :]), expected)
        other = elements[place].clone()
        other[-1, ...] = ~other[-1] if other.dtype == torch.bool else other[-1] + 1
        with pytest.raises(AssertionError, match=rf"^{name}\["):
            oracle.check_handle((*elements[:place], other, *elements[place + 1 :]), expected)
    longer = [torch.cat([each, each[:1]]) if place in (7, 9) else each for place, each in enumerate(elements)]
    oracle.check_handle(tuple(longer), expected, padded=True)
    with pytest.raises(AssertionError, match="recv_src_meta: .* expected"):
        oracle.check_handle(tuple(longer), expected)
