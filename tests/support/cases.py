"""The named cases: sizes and routings at which a dispatch or a combine could go wrong.

They are as small as the case allows, because each runs under many schedules.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from oracle import Workload

# Enough transient memory that a named case works in rounds only where it asks to.
AMPLE = 1 << 20


def tight(ranks: int, hidden: int, topk: int, experts: int, rows: int = 2) -> int:
    """Return the bytes of a Buffer with two regions that leave room for chunks of a few rows: `rows` over a weak
    fabric, about twice as many over `peer`. A small case then has many chunks, and more of them than slots."""
    chunk = 128 + rows * (2 * hidden + 12 * topk + 4)
    counts = 256 + 8 * ranks + 8 * experts
    return 2 * (ranks * (2 * 4 * chunk + 2 * counts) + 127) // 128 * 128


Routing = Callable[["Case", int, int, torch.Generator], Tensor]


@dataclass(frozen=True)
class Case:
    """One workload's shape and the Buffer it runs on."""

    name: str
    ranks: int
    tokens: int | tuple[int, ...]  # per rank
    hidden: int = 64
    topk: int = 4
    experts: int = 16
    routing: str = "uniform"
    fabric: str | None = None  # None: runs over each of builds.FABRICS
    num_nvl_bytes: int = AMPLE
    arena_bytes: int | None = None
    ranks_per_node: int | None = None  # None: as the fabric determines
    hops: int | None = None  # None: 2 between several nodes of several ranks
    expert_alignment: int = 1
    # With many ranks, fewer blocks and calls bound the number of fibers.
    max_blocks: int = 5
    cached: bool = True

    def tokens_of(self, rank: int) -> int:
        return self.tokens if isinstance(self.tokens, int) else self.tokens[rank]

    @property
    def nodes(self) -> int:
        """Number of nodes of several ranks; 1 where the fabric decides, so that each rank is a node or all share
        one."""
        return self.ranks // (self.ranks_per_node or self.ranks)

    @property
    def two_hops(self) -> bool:
        """Whether rows are forwarded within their destination node, on a fabric that has nodes."""
        return self.hops == 2 if self.hops else 1 < self.nodes < self.ranks


def _distinct(scores: Tensor, topk: int) -> Tensor:
    return scores.topk(topk, dim=1).indices if len(scores) else torch.zeros(0, topk, dtype=torch.int64)


def _uniform(case: Case, rank: int, tokens: int, random: torch.Generator) -> Tensor:
    return _distinct(torch.rand(tokens, case.experts, generator=random), case.topk)


def _skewed(case: Case, rank: int, tokens: int, random: torch.Generator) -> Tensor:
    """Choose expert e with a probability proportional to 1 / (e + 1)."""
    noise = -torch.log(-torch.log(torch.rand(tokens, case.experts, generator=random).clamp(1e-6, 1 - 1e-6)))
    return _distinct(noise - torch.log(torch.arange(1.0, case.experts + 1)), case.topk)


def _one_rank(case: Case, rank: int, tokens: int, random: torch.Generator) -> Tensor:
    """Choose only experts of the last rank, so that each row carries duplicates of its rank."""
    mine = case.experts // case.ranks
    return case.experts - mine + _distinct(torch.rand(tokens, mine, generator=random), case.topk)


def _two_ranks(case: Case, rank: int, tokens: int, random: torch.Generator) -> Tensor:
    """Choose a token's experts on its own rank and the next, several on each."""
    mine = case.experts // case.ranks
    local = _distinct(torch.rand(tokens, 2 * mine, generator=random), case.topk)
    return (rank * mine + local) % case.experts


def _own_rank(case: Case, rank: int, tokens: int, random: torch.Generator) -> Tensor:
    mine = case.experts // case.ranks
    return rank * mine + _distinct(torch.rand(tokens, mine, generator=random), case.topk)


def _first_half(case: Case, rank: int, tokens: int, random: torch.Generator) -> Tensor:
    """Send from all ranks; those of the second half receive nothing."""
    return _distinct(torch.rand(tokens, case.experts // 2, generator=random), case.topk)


def _holes(case: Case, rank: int, tokens: int, random: torch.Generator) -> Tensor:
    chosen = _uniform(case, rank, tokens, random)
    return torch.where(torch.rand(chosen.shape, generator=random) < 0.5, -1, chosen)


def _void(case: Case, rank: int, tokens: int, random: torch.Generator) -> Tensor:
    return torch.full((tokens, case.topk), -1)


def _everywhere(case: Case, rank: int, tokens: int, random: torch.Generator) -> Tensor:
    """Choose one expert on each of the first `topk` ranks, in an order of the token's own."""
    mine = case.experts // case.ranks
    order = _distinct(torch.rand(tokens, case.topk, generator=random), case.topk)
    return order * mine + torch.randint(mine, order.shape, generator=random)


ROUTINGS: dict[str, Routing] = {
    "uniform": _uniform,
    "skewed": _skewed,
    "one_rank": _one_rank,
    "two_ranks": _two_ranks,
    "own_rank": _own_rank,
    "first_half": _first_half,
    "holes": _holes,
    "void": _void,
    "everywhere": _everywhere,
}


def build(case: Case, seed: int = 1) -> Workload:
    """Draw a case's inputs."""
    random = torch.Generator().manual_seed(seed)
    x, topk_idx, topk_weights = [], [], []
    for rank in range(case.ranks):
        tokens = case.tokens_of(rank)
        x.append(torch.randn(tokens, case.hidden, generator=random).to(torch.bfloat16))
        topk_idx.append(ROUTINGS[case.routing](case, rank, tokens, random))
        topk_weights.append(torch.rand(tokens, case.topk, generator=random))
    return Workload(case.experts, x, topk_idx, topk_weights)


CASES = [
    Case("uniform", ranks=4, tokens=12, topk=4),
    Case("one_rank_alone", ranks=1, tokens=7, topk=2, experts=4),
    Case("two_ranks", ranks=2, tokens=9, topk=2, experts=4),
    Case("three_ranks", ranks=3, tokens=8, topk=3, experts=9),
    Case("sixteen_ranks", ranks=16, tokens=4, topk=8, experts=32, hidden=16, max_blocks=3),
    Case("sixty_four_ranks", ranks=64, tokens=2, topk=4, experts=64, hidden=8, max_blocks=2, cached=False),
    Case("all_to_one_rank", ranks=4, tokens=10, topk=4, routing="one_rank"),
    Case("to_own_rank", ranks=4, tokens=10, topk=2, routing="own_rank"),
    Case("ranks_that_send_nothing", ranks=4, tokens=(0, 11, 0, 3)),
    Case("ranks_that_receive_nothing", ranks=4, tokens=8, topk=4, routing="first_half"),
    Case("uneven_tokens", ranks=4, tokens=(1, 33, 7, 2), routing="skewed"),
    Case("no_tokens_at_all", ranks=3, tokens=0, experts=6, topk=2),
    Case("unrouted_selections", ranks=4, tokens=12, routing="holes"),
    Case("nothing_routed", ranks=4, tokens=5, routing="void"),
    Case("several_experts_on_one_rank", ranks=4, tokens=9, topk=6, routing="two_ranks"),
    Case("skewed", ranks=4, tokens=14, topk=3, routing="skewed"),
    Case("hidden_of_one_piece", ranks=3, tokens=9, hidden=8, experts=6, topk=2),
    Case("hidden_24", ranks=2, tokens=9, hidden=24, experts=6, topk=2),
    Case("hidden_40", ranks=2, tokens=9, hidden=40, experts=6, topk=2),
    Case("hidden_1096", ranks=2, tokens=5, hidden=1096, experts=6, topk=2),
    Case("topk_1", ranks=4, tokens=10, topk=1),
    Case("topk_8_of_8_ranks", ranks=8, tokens=5, topk=8, experts=16, hidden=16, routing="everywhere", max_blocks=3),
    Case("topk_32", ranks=4, tokens=4, topk=32, experts=64),
    Case("experts_2048", ranks=2, tokens=6, topk=8, experts=2048, hidden=16),
    Case("aligned_counts", ranks=2, tokens=9, topk=2, experts=6, expert_alignment=16),
    Case("rounds_without_arena", ranks=4, tokens=12, arena_bytes=0),
    Case("rounds_of_few_rows", 2, 70, hidden=8, topk=2, experts=4, num_nvl_bytes=tight(2, 8, 2, 4), arena_bytes=0),
    Case("combine_in_few_rows", 2, 70, hidden=8, topk=2, experts=4, num_nvl_bytes=tight(2, 8, 2, 4)),
    Case("some_pairs_weak", ranks=4, tokens=12, fabric="mixed"),
    Case("some_pairs_weak_rounds", ranks=4, tokens=12, fabric="mixed", arena_bytes=0),
]
BY_NAME = {case.name: case for case in CASES}

# The same cases between nodes, where rows are forwarded. A name begins with nodes x ranks per node.
ROUTED_IN_TWO_HOPS = [
    Case("2x1_uniform", 2, 9, topk=2, experts=4, ranks_per_node=1, hops=2),
    Case("2x2_uniform", 4, 12, ranks_per_node=2),
    Case("2x2_to_one_rank", 4, 10, routing="one_rank", ranks_per_node=2),
    Case("2x2_to_own_rank", 4, 10, topk=2, routing="own_rank", ranks_per_node=2),
    Case("2x2_to_one_node", 4, 8, routing="first_half", ranks_per_node=2),
    # For every other rank, these experts are on two nodes.
    Case("2x2_to_two_ranks", 4, 9, topk=6, routing="two_ranks", ranks_per_node=2),
    Case("2x2_uneven", 4, (1, 33, 7, 2), routing="skewed", ranks_per_node=2),
    Case("2x2_of_one_node", 4, (0, 0, 11, 3), ranks_per_node=2),
    Case("2x2_of_one_rank", 4, (0, 17, 0, 0), ranks_per_node=2, expert_alignment=16),
    Case("2x2_no_tokens", 4, 0, topk=2, ranks_per_node=2),
    Case("2x2_holes", 4, 12, routing="holes", ranks_per_node=2),
    Case("2x2_nothing_routed", 4, 5, routing="void", ranks_per_node=2),
    Case("3x2_uniform", 6, 8, hidden=24, topk=3, experts=12, ranks_per_node=2),
    Case("2x3_holes", 6, (4, 0, 9, 1, 12, 5), hidden=40, topk=4, experts=12, routing="holes", ranks_per_node=3),
    Case("4x2_skewed", 8, 7, hidden=16, topk=4, routing="skewed", ranks_per_node=2, max_blocks=3),
    Case("2x4_everywhere", 8, 5, hidden=16, topk=8, routing="everywhere", ranks_per_node=4, max_blocks=3),
    Case("2x8_uniform", 16, 4, hidden=16, topk=8, experts=32, ranks_per_node=8, max_blocks=3),
    Case("8x8_uniform", 64, 2, hidden=8, experts=64, ranks_per_node=8, max_blocks=2, cached=False),
]
BY_NAME |= {case.name: case for case in ROUTED_IN_TWO_HOPS}
