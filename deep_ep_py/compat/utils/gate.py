"""Stand-in for `deep_ep.utils.gate`: random scores of experts with which one rank receives more tokens than the others.

The favored rank is rank 0. Tensors are made on torch's default device, from its default generator.
"""

from __future__ import annotations

import torch

_UNCHOSEN = 0.9
"""Precise scores of experts that are not among a token's top-k are below this, those of the others above."""
_FACTORS = (1.0, 100.0)
_HALVINGS = 20


def get_unbalanced_scores(
    num_tokens: int, num_experts: int, num_ranks: int, num_topk: int, ratio: float, precise: bool
) -> torch.Tensor:
    """Return scores whose top-k send `ratio` times as many tokens to rank 0 as to each of the other ranks.

    Parameters
    ----------
    num_tokens, num_experts, num_ranks, num_topk : int
        Sizes. Each rank has `num_experts / num_ranks` consecutive experts.
    ratio : float
        At least 1.
    precise : bool
        Deal out tokens so that the ratio holds and all other ranks receive equally many, which no real router does.
        Otherwise scores are independent of each other, and the ratio holds on average, as far as it can be reached.

    Returns
    -------
    torch.Tensor
        float32 [num_tokens, num_experts].
    """
    scores = get_precise_unbalanced_scores if precise else get_random_unbalanced_scores
    return scores(num_tokens, num_experts, num_ranks, num_topk, ratio)


def get_precise_unbalanced_scores(
    num_tokens: int, num_experts: int, num_ranks: int, num_topk: int, ratio: float
) -> torch.Tensor:
    """As `get_unbalanced_scores` with `precise=True`.

    Raises
    ------
    ValueError
        The ratio is below 1, or cannot be reached.
    """
    rank_count = generate_rank_count(num_tokens, num_experts, num_ranks, num_topk, ratio)
    topk_idx = generate_topk_idx(rank_count, num_tokens, num_experts, num_ranks, num_topk)
    scores = torch.rand((num_tokens, num_experts), dtype=torch.float32) * _UNCHOSEN
    chosen = 1 - torch.rand((num_tokens, num_topk), dtype=torch.float32) * (0.99 * (1 - _UNCHOSEN))
    return scores.scatter_(1, topk_idx, chosen)


def get_random_unbalanced_scores(
    num_tokens: int, num_experts: int, num_ranks: int, num_topk: int, ratio: float
) -> torch.Tensor:
    """As `get_unbalanced_scores` with `precise=False`."""
    factor = 1.0
    if ratio != 1:
        factor = map_unbalanced_ratio_to_factor(num_tokens, num_experts, num_ranks, num_topk, ratio)
    return get_scores_by_factor(num_tokens, num_experts, num_ranks, factor)


def get_scores_by_factor(num_tokens: int, num_experts: int, num_ranks: int, factor: float) -> torch.Tensor:
    """Return uniform scores from 0 to 1, but from 0 to `factor` for the experts of rank 0.

    Returns
    -------
    torch.Tensor
        float32 [num_tokens, num_experts].
    """
    scores = torch.rand((num_tokens, num_experts), dtype=torch.float32)
    scores[:, : num_experts // num_ranks] *= factor
    return scores


def map_unbalanced_ratio_to_factor(
    num_tokens: int, num_experts: int, num_ranks: int, num_topk: int, ratio: float
) -> float:
    """Return the factor, from 1 to 100, with which `get_scores_by_factor` comes closest to a ratio.

    Found by bisection, with the same random numbers for every factor tried.
    """
    num_experts_per_rank = num_experts // num_ranks
    draws = get_scores_by_factor(num_tokens, num_experts, num_ranks, 1.0)
    lower, upper = _FACTORS
    for _ in range(_HALVINGS):
        factor = (lower + upper) / 2
        scores = draws.clone()
        scores[:, :num_experts_per_rank] *= factor
        received = _visited(scores, num_topk, num_ranks).sum(0).double()
        if received[0] > ratio * received[1:].mean():
            upper = factor
        else:
            lower = factor
    return lower


def generate_rank_count(num_tokens: int, num_experts: int, num_ranks: int, num_topk: int, ratio: float) -> torch.Tensor:
    """Decide how many of its top-k experts each token has on each rank, for precise scores.

    A token visits as many ranks as the top-k of random scores would, but no more than the ratio permits. Its experts
    are spread over them evenly, with one more on some. Ranks other than rank 0 are dealt out in turns.

    Parameters
    ----------
    num_tokens, num_experts, num_ranks, num_topk, ratio
        As in `get_unbalanced_scores`.

    Returns
    -------
    torch.Tensor
        int32 [num_tokens, num_ranks]; each row sums to `num_topk`.

    Raises
    ------
    ValueError
        The ratio is below 1, or a token would have more experts on a rank than the rank has.
    """
    if ratio < 1:
        raise ValueError(f"ratio={ratio}: expected at least 1")
    num_others = num_ranks - 1
    # The ratio can be reached even if every token visits as many ranks as this: rank 0, and 1 / ratio of the others.
    most = int(num_others / ratio) + 1
    if num_topk > most * (num_experts // num_ranks):
        raise ValueError(
            f"ratio={ratio}: expected a ratio with which {num_topk} experts of a token are on {most} ranks"
        )
    uniform = torch.rand((num_tokens, num_experts), dtype=torch.float32)
    visits = _visited(uniform, num_topk, num_ranks).sum(1).clamp(max=most)

    # Rank 0's share is rounded up or down at random, so that the average is right even for few tokens.
    share = ratio * int(visits.sum()) / (num_others + ratio)
    everywhere = visits == num_ranks
    favored = min(num_tokens, max(int(everywhere.sum()), int(share + torch.rand((), dtype=torch.float64).item())))
    at_zero = torch.zeros(num_tokens, dtype=torch.bool)
    at_zero[(torch.rand(num_tokens, dtype=torch.float32) + everywhere).topk(favored).indices] = True

    # A token's ranks, rank 0 first: the others continue where those of the token before have ended.
    place = torch.arange(num_topk)
    elsewhere = visits - at_zero.int()
    turns = (elsewhere.cumsum(0) - elsewhere - at_zero.int())[:, None] + place
    order = torch.randperm(max(1, num_others)) + 1
    ranks = order[turns % len(order)].masked_fill_(at_zero[:, None] & (place == 0), 0)
    visits = visits[:, None]
    held = torch.where(place < visits, num_topk // visits + (place < num_topk % visits), 0)
    # Places that a token does not use add nothing; with a single rank they name one that is not there.
    counts = torch.zeros((num_tokens, num_ranks), dtype=torch.int32)
    counts.scatter_add_(1, ranks.clamp_(max=num_others), held.int())
    return counts[torch.randperm(num_tokens)]


def generate_topk_idx(
    rank_count: torch.Tensor, num_tokens: int, num_experts: int, num_ranks: int, num_topk: int
) -> torch.Tensor:
    """Choose experts at random, as many on each rank as `rank_count` says.

    Parameters
    ----------
    rank_count : torch.Tensor
        Integers [num_tokens, num_ranks]; each row sums to `num_topk`.
    num_tokens, num_experts, num_ranks, num_topk : int
        Sizes.

    Returns
    -------
    torch.Tensor
        int64 [num_tokens, num_topk]: distinct experts of each token, in ascending order.

    Raises
    ------
    ValueError
        `rank_count` has another shape or other sums.
    """
    if rank_count.shape != (num_tokens, num_ranks) or bool((rank_count.sum(1) != num_topk).any()):
        shape = list(rank_count.shape)
        raise ValueError(
            f"rank_count of shape {shape}: expected {[num_tokens, num_ranks]}, rows that sum to {num_topk}"
        )
    draws = torch.rand((num_tokens, num_ranks, num_experts // num_ranks), dtype=torch.float32, device=rank_count.device)
    among_its_rank = draws.argsort(2).argsort(2)
    chosen = (among_its_rank < rank_count[:, :, None]).flatten(1)
    return chosen.nonzero()[:, 1].view(num_tokens, num_topk)


def _visited(scores: torch.Tensor, num_topk: int, num_ranks: int) -> torch.Tensor:
    """Return, as bool [tokens, ranks], which ranks have experts among the top-k of scores [tokens, experts]."""
    ranks = scores.topk(num_topk, sorted=False).indices // (scores.shape[1] // num_ranks)
    visited = torch.zeros((len(scores), num_ranks), dtype=torch.bool, device=scores.device)
    return visited.scatter_(1, ranks, True)
