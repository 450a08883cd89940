"""The experts that tokens choose: synthetic routings of three kinds, each a function of (seed, rank, iteration)."""

from __future__ import annotations

import torch

DEEPSEEK_GROUPS, DEEPSEEK_TOP_GROUPS = 8, 4
ZIPF_EXPONENT = 1.0
_SEED_STRIDE = 1_000_003


def generator(seed: int, *streams: int) -> torch.Generator:
    """Return a separate generator for each tuple of stream numbers.

    Parameters
    ----------
    seed
        The run's seed.
    *streams
        Small numbers, e.g. a rank and an iteration.

    Returns
    -------
    torch.Generator
    """
    value = seed
    for stream in streams:
        value = (value * _SEED_STRIDE + stream + 1) % (1 << 62)
    return torch.Generator().manual_seed(value)


def route(
    name: str, tokens: int, topk: int, experts: int, seed: int, rank: int, iteration: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose experts and weights for one rank's tokens.

    Parameters
    ----------
    name
        `uniform`: every set of experts is equally likely. `deepseek`: group-limited as in DeepSeek-V3 (8 groups of
        experts, the 4 with the largest sum of their two best scores, then the top-k inside those). `skewed`: expert
        popularity follows Zipf's law; which experts are popular depends only on the seed, so all ranks and iterations
        crowd the same ones.
    tokens, topk, experts
        The shape.
    seed, rank, iteration
        Equal values give equal results, in every process.

    Returns
    -------
    topk_idx : torch.Tensor
        int64 [tokens, topk], distinct experts in each row.
    topk_weights : torch.Tensor
        float32 [tokens, topk], positive, each row sums to 1.
    """
    random = generator(seed, rank, iteration)
    if name == "uniform":
        scores = torch.rand(tokens, experts, generator=random)
    elif name == "deepseek":
        scores = limit_to_groups(torch.rand(tokens, experts, generator=random), topk)
    elif name == "skewed":
        # Gumbel noise on log-probabilities: the top-k of the sum is a draw without replacement.
        uniform = torch.rand(tokens, experts, generator=random).clamp_(1e-12, 1 - 1e-7)
        scores = uniform.log_().neg_().log_().neg_().add_(_zipf_log_popularity(experts, seed))
    else:
        raise ValueError(f"routing is {name}; expected uniform, deepseek or skewed")
    topk_idx = scores.topk(topk, dim=1).indices
    weights = torch.rand(tokens, topk, generator=random).add_(0.01)
    return topk_idx, weights.div_(weights.sum(dim=1, keepdim=True))


def limit_to_groups(
    scores: torch.Tensor, topk: int, groups: int = DEEPSEEK_GROUPS, top_groups: int = DEEPSEEK_TOP_GROUPS
) -> torch.Tensor:
    """Rule out all experts outside each token's best groups.

    Parameters
    ----------
    scores
        [tokens, experts], larger is better.
    topk
        Experts per token; the remaining groups must hold at least as many.
    groups, top_groups
        Number of groups into which consecutive experts are split, and number of groups that remain.

    Returns
    -------
    torch.Tensor
        The scores, with -inf where the expert's group is ruled out.
    """
    tokens, experts = scores.shape
    require_groups(experts, topk, groups, top_groups)
    grouped = scores.view(tokens, groups, experts // groups)
    group_scores = grouped.topk(min(2, experts // groups), dim=2).values.sum(dim=2)
    chosen = group_scores.topk(top_groups, dim=1).indices
    out = torch.ones(tokens, groups, dtype=torch.bool).scatter_(1, chosen, False)
    return grouped.masked_fill(out.unsqueeze(2), float("-inf")).view(tokens, experts)


def require_groups(
    experts: int, topk: int, groups: int = DEEPSEEK_GROUPS, top_groups: int = DEEPSEEK_TOP_GROUPS
) -> None:
    """Raise ValueError if group-limited routing does not have top-k experts to choose from."""
    if experts % groups or experts // groups * top_groups < topk:
        raise ValueError(
            f"experts is {experts} and topk is {topk}; group-limited routing expects experts to be a multiple of "
            f"{groups} groups, {top_groups} of which hold at least topk experts"
        )


def _zipf_log_popularity(experts: int, seed: int) -> torch.Tensor:
    place = torch.randperm(experts, generator=generator(seed)) + 1
    return place.to(torch.float32).log_().mul_(-ZIPF_EXPONENT)


def tokens_in_rank(topk_idx: torch.Tensor, experts: int, ranks: int) -> torch.Tensor:
    """Return which ranks each token goes to.

    Parameters
    ----------
    topk_idx
        int64 [tokens, topk]; -1 chooses nothing.
    experts, ranks
        Rank r holds the experts [r * experts / ranks, (r + 1) * experts / ranks).

    Returns
    -------
    torch.Tensor
        bool [tokens, ranks].
    """
    mask = torch.zeros(topk_idx.size(0), ranks + 1, dtype=torch.bool)
    # -1 lands in the extra column.
    destination = torch.where(topk_idx >= 0, topk_idx // (experts // ranks), ranks)
    return mask.scatter_(1, destination, True)[:, :ranks].contiguous()
