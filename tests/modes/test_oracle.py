"""The oracle itself, checked on cases worked out by hand."""

from __future__ import annotations

import pytest
import torch

import oracle
from cases import BY_NAME, build
from oracle import Workload


def bf16(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.bfloat16)


def tiny() -> Workload:
    """Return work for two ranks and four experts; rank 0 has two tokens, rank 1 has three, one of them unrouted."""
    return Workload(
        num_experts=4,
        x=[torch.stack([bf16(1), bf16(2)]), torch.stack([bf16(3), bf16(4), bf16(5)])],
        topk_idx=[torch.tensor([[0, 3], [2, 3]]), torch.tensor([[1, 0], [-1, -1], [-1, 2]])],
        topk_weights=[torch.tensor([[0.1, 0.2], [0.3, 0.4]]), torch.tensor([[0.5, 0.6], [0.7, 0.8], [0.9, 1.0]])],
    )


def test_layout() -> None:
    first, second = (oracle.layout(idx, 4, 2) for idx in tiny().topk_idx)
    assert first.num_tokens_per_rank.tolist() == [1, 2] and first.num_tokens_per_expert.tolist() == [1, 0, 1, 2]
    assert first.is_token_in_rank.tolist() == [[True, True], [False, True]]
    assert second.num_tokens_per_rank.tolist() == [1, 1] and second.num_tokens_per_expert.tolist() == [1, 1, 1, 0]
    assert second.is_token_in_rank.tolist() == [[True, False], [False, False], [False, True]]


def test_dispatch() -> None:
    first, second = oracle.dispatch(tiny())
    assert first.x.flatten().tolist() == [1, 3] and second.x.flatten().tolist() == [1, 2, 5]
    assert first.topk_idx.tolist() == [[0, -1], [1, 0]] and second.topk_idx.tolist() == [[-1, 1], [0, 1], [-1, 0]]
    assert torch.equal(first.topk_weights, torch.tensor([[0.1, 0.0], [0.5, 0.6]]))
    assert torch.equal(second.topk_weights, torch.tensor([[0.0, 0.2], [0.3, 0.4], [0.0, 1.0]]))
    assert first.num_tokens_per_expert == [2, 1] and second.num_tokens_per_expert == [2, 2]
    assert first.src_rank.tolist() == [0, 1] and second.src_rank.tolist() == [0, 0, 1]
    assert first.src_idx.tolist() == [0, 0] and second.src_idx.tolist() == [0, 1, 2]
    assert first.rank_prefix_matrix.tolist() == second.rank_prefix_matrix.tolist() == [[1, 2], [2, 3]]
    assert first.channel_prefix_matrix.tolist() == [[1], [2]] and second.channel_prefix_matrix.tolist() == [[1], [1]]
    assert first.send_head.tolist() == [[0, 0], [-1, 1]] and second.send_head.tolist() == [[0, -1], [-1, -1], [-1, 0]]


def test_alignment_rounds_only_the_counts() -> None:
    plain, aligned = oracle.dispatch(tiny()), oracle.dispatch(tiny(), expert_alignment=4)
    assert [part.num_tokens_per_expert for part in aligned] == [[4, 4], [4, 4]]
    assert oracle.same_bits(plain[0].x, aligned[0].x)


def test_combine() -> None:
    received = oracle.dispatch(tiny())
    x = [torch.stack([bf16(10), bf16(20)]), torch.stack([bf16(1), bf16(2), bf16(3)])]
    weights = [torch.tensor([[1.0, 0.0], [2.0, 3.0]]), torch.tensor([[0.0, 4.0], [5.0, 6.0], [0.0, 7.0]])]
    bias = [[torch.stack([bf16(100), bf16(200)])], [torch.stack([bf16(7), bf16(8), bf16(9)])]]
    plain = oracle.combine(received, [2, 3], x, weights)
    biased = oracle.combine(received, [2, 3], x, weights, bias)
    assert plain[0].x.flatten().tolist() == [11, 2] and plain[1].x.flatten().tolist() == [20, 0, 3]
    assert biased[0].x.flatten().tolist() == [111, 202] and biased[1].x.flatten().tolist() == [27, 8, 12]
    assert plain[0].topk_weights.tolist() == [[1, 4], [5, 6]] and plain[1].topk_weights.tolist() == [
        [2, 3],
        [0, 0],
        [0, 7],
    ]
    assert plain[0].exact.flatten().tolist() == [11, 2]


def sum_of(*rows: float) -> tuple[float, float]:
    """Combine one token that went to every rank; return the sum of the model and the exact one."""
    ranks = len(rows)
    silent = [torch.zeros(0, 1)] * (ranks - 1)
    none = [torch.zeros(0, ranks, dtype=torch.int64)] * (ranks - 1)
    work = Workload(
        num_experts=ranks,
        x=[torch.zeros(1, 1), *silent],
        topk_idx=[torch.arange(ranks).reshape(1, -1), *none],
        topk_weights=[torch.zeros(1, ranks), *(torch.zeros(0, ranks) for _ in silent)],
    )
    received = oracle.dispatch(work)
    combined = oracle.combine(
        received, [1] + [0] * (ranks - 1), [bf16(row)[None] for row in rows], [torch.zeros(1, ranks)] * ranks
    )
    return combined[0].x.item(), combined[0].exact.item()


def test_the_order_of_summation_shows() -> None:
    """2^24 + 1 is not an fp32 number: the 1 is lost if it is second and kept if it is last."""
    big = 2.0**24
    assert sum_of(big, 1.0, -big) == (0.0, 1.0)
    assert sum_of(big, -big, 1.0) == (1.0, 1.0)


def test_rounding_is_once_to_nearest_even() -> None:
    """1 + 2^-8 is halfway between two bf16 numbers, of which 1 is even. bf16 sums would lose both small terms below."""
    assert sum_of(1.0, 2.0**-8)[0] == 1.0
    assert sum_of(1.0, 2.0**-8, 2.0**-8)[0] == 1.0 + 2.0**-7
    assert sum_of(1.0, 2.0**-7, 2.0**-8)[0] == 1.0 + 2.0**-6


def test_checks_see_what_is_wrong() -> None:
    received = oracle.dispatch(tiny())
    wrong = oracle.Received(**{**vars(received[0]), "x": received[0].x.flip(0)})
    oracle.check_received(received[0], received[0])
    with pytest.raises(AssertionError, match=r"x\[0, 0\] is 3"):
        oracle.check_received(wrong, received[0])
    combined = oracle.combine(received, [2, 3], [part.x for part in received], [part.topk_weights for part in received])
    oracle.check_combined(combined[0].x, combined[0].topk_weights, combined[0])
    with pytest.raises(AssertionError, match="bound"):
        oracle.check_combined(combined[0].x * 1.02, None, combined[0])
    last_bit = (combined[0].x.view(torch.int16) + 1).view(torch.bfloat16)
    with pytest.raises(AssertionError, match="combined_x"):
        oracle.check_combined(last_bit, None, combined[0])


def test_bits_tell_negative_zero_from_zero() -> None:
    assert not oracle.same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert oracle.same_bits(torch.tensor([float("nan")]), torch.tensor([float("nan")]))
    assert oracle.difference("x", torch.tensor([0.0]), torch.tensor([-0.0])) == "x: equal values with other bits"


@pytest.mark.parametrize("case", BY_NAME.values(), ids=lambda case: case.name)
def test_every_case_is_what_its_shape_says(case) -> None:
    work = build(case)
    assert work.num_ranks == case.ranks and case.experts % case.ranks == 0 and case.hidden % 8 == 0
    for rank, idx in enumerate(work.topk_idx):
        assert work.x[rank].shape == (case.tokens_of(rank), case.hidden) and idx.shape == (
            case.tokens_of(rank),
            case.topk,
        )
        assert ((idx >= -1) & (idx < case.experts)).all()
        for row in idx.tolist():
            chosen = [expert for expert in row if expert >= 0]
            assert len(set(chosen)) == len(chosen), "a token must not choose an expert twice"
    total = sum(len(part.x) for part in oracle.dispatch(work))
    assert total == sum(
        int(oracle.layout(idx, case.experts, case.ranks).num_tokens_per_rank.sum()) for idx in work.topk_idx
    )
