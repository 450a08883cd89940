"""The results that dispatch and combine must return, in plain torch, for all ranks at once.

It shares neither code nor method with the library: rows are gathered by boolean masks, not placed by prefix sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor


@dataclass(frozen=True)
class Workload:
    """The inputs of one dispatch on every rank; lists are indexed by rank."""

    num_experts: int
    x: list[Tensor]  # bf16 [T_r, H]
    topk_idx: list[Tensor]  # int64 [T_r, K], -1: no expert
    topk_weights: list[Tensor]  # fp32 [T_r, K]

    @property
    def num_ranks(self) -> int:
        return len(self.x)

    @property
    def experts_per_rank(self) -> int:
        return self.num_experts // self.num_ranks


@dataclass(frozen=True)
class Layout:
    """The results of one rank's get_dispatch_layout."""

    num_tokens_per_rank: Tensor  # int32 [R]
    num_tokens_per_expert: Tensor  # int32 [E]
    is_token_in_rank: Tensor  # bool [T, R]


@dataclass(frozen=True)
class Received:
    """The results of one rank's dispatch."""

    x: Tensor  # [T_recv, H], sorted by source rank, then token
    topk_idx: Tensor  # int64 [T_recv, K], local expert or -1
    topk_weights: Tensor  # fp32 [T_recv, K], 0 where the index is -1
    num_tokens_per_expert: list[int]
    src_rank: Tensor  # int32 [T_recv]
    src_idx: Tensor  # int32 [T_recv], the token's index at its source
    rank_prefix_matrix: Tensor  # int32 [R, R], [i][j] = tokens that ranks <= i send to rank j
    channel_prefix_matrix: Tensor  # int32 [R, 1], tokens this rank sends to each rank
    recv_channel_prefix_matrix: Tensor  # int32 [R, 1], where the only channel begins among a source's rows
    send_head: Tensor  # int32 [T, R], index among this rank's tokens for r, or -1


@dataclass(frozen=True)
class Combined:
    """The result of one rank's combine, and its maximum distance from the exact sum."""

    x: Tensor  # bf16 [T, H], in the stated order of summation
    topk_weights: Tensor  # fp32 [T, K]
    exact: Tensor  # float64 [T, H]
    tolerance: Tensor  # float64 [T, H]


def numbered(chosen: Tensor) -> Tensor:
    """Number the chosen elements of each column from 0; the rest are -1."""
    return torch.where(chosen, chosen.cumsum(0) - 1, -1).int()


def layout(topk_idx: Tensor, num_experts: int, num_ranks: int) -> Layout:
    """Count one rank's tokens per rank and per expert."""
    per_rank = num_experts // num_ranks
    chosen = topk_idx.unsqueeze(-1) == torch.arange(num_experts)  # [T, K, E]
    in_rank = chosen.any(dim=1).reshape(len(topk_idx), num_ranks, per_rank).any(dim=2)
    return Layout(in_rank.sum(0).int(), chosen.sum((0, 1)).int(), in_rank)


def dispatch(work: Workload, expert_alignment: int = 1) -> list[Received]:
    """Return what every rank receives."""
    ranks = range(work.num_ranks)
    layouts = [layout(work.topk_idx[r], work.num_experts, work.num_ranks) for r in ranks]
    sent = torch.stack([one.num_tokens_per_rank for one in layouts])  # [source, destination]
    prefixes = sent.cumsum(0).int()
    per_expert = torch.stack([one.num_tokens_per_expert for one in layouts]).sum(0)
    received = []
    for rank in ranks:
        tokens = [layouts[source].is_token_in_rank[:, rank].nonzero().flatten() for source in ranks]
        first = rank * work.experts_per_rank
        idx = torch.cat([work.topk_idx[source][tokens[source]] for source in ranks])
        weights = torch.cat([work.topk_weights[source][tokens[source]] for source in ranks])
        local = (idx >= first) & (idx < first + work.experts_per_rank)
        counts = per_expert[first : first + work.experts_per_rank].tolist()
        received.append(
            Received(
                x=torch.cat([work.x[source][tokens[source]] for source in ranks]),
                topk_idx=torch.where(local, idx - first, -1),
                topk_weights=torch.where(local, weights, 0.0),
                num_tokens_per_expert=[-(-count // expert_alignment) * expert_alignment for count in counts],
                src_rank=torch.cat([torch.full_like(tokens[source], source) for source in ranks]).int(),
                src_idx=torch.cat(tokens).int(),
                rank_prefix_matrix=prefixes,
                channel_prefix_matrix=sent[rank].reshape(-1, 1),
                recv_channel_prefix_matrix=torch.zeros(work.num_ranks, 1, dtype=torch.int32),
                send_head=numbered(layouts[rank].is_token_in_rank),
            )
        )
    return received


@dataclass(frozen=True)
class Internode:
    """A rank's handle where rows go in two hops among N nodes of G ranks, with all elements in order.

    A node row is a token on its way to a node. The node rows from a rank to a node, in the order of its tokens, are a
    row stream; the rank with the same position in that node forwards it. With rows that go straight to each rank the
    same holds for everything except `recv_rdma_*`, `recv_src_meta` and `send_nvl_head`."""

    is_token_in_rank: Tensor  # bool [T, R]
    rdma_channel_prefix_matrix: Tensor  # int32 [N, 1], node rows of this rank for each node
    gbl_channel_prefix_matrix: Tensor  # int32 [R, 1], rows of this rank for each rank
    recv_rdma_channel_prefix_matrix: (
        Tensor  # int32 [N, 1], node rows that this rank forwards, by the node they are from
    )
    recv_rdma_rank_prefix_sum: Tensor  # int32 [N], where these end
    recv_gbl_channel_prefix_matrix: Tensor  # int32 [R, 1], where each source's rows begin
    recv_gbl_rank_prefix_sum: Tensor  # int32 [R], where they end
    recv_src_meta: Tensor  # uint8 [T_recv, 8]: int32 index of the token at its source, int32 that of its node row
    send_rdma_head: Tensor  # int32 [T, N], index of the token's node row for the node, or -1
    send_nvl_head: Tensor  # int32 [forwarded, G], index among the source's rows for each rank of this node, or -1


def internode(work: Workload, received: Sequence[Received], ranks_per_node: int) -> list[Internode]:
    """Return every rank's handle, given what each receives."""
    ranks = range(work.num_ranks)
    in_rank = [layout(idx, work.num_experts, work.num_ranks).is_token_in_rank for idx in work.topk_idx]
    in_node = [each.unflatten(1, (-1, ranks_per_node)).any(dim=2) for each in in_rank]
    node_rows, rows = [numbered(each) for each in in_node], [numbered(each) for each in in_rank]
    # Tokens of all ranks, concatenated.
    first_token = torch.tensor([0, *(len(each) for each in in_rank)]).cumsum(0)
    node_row = torch.cat(node_rows)
    handles = []
    for rank in ranks:
        node, place = divmod(rank, ranks_per_node)
        neighbours = slice(node * ranks_per_node, (node + 1) * ranks_per_node)
        sources = ranks[place::ranks_per_node]
        brought = torch.stack([in_node[source][:, node].sum() for source in sources]).int()
        from_rank, token = received[rank].src_rank.long(), received[rank].src_idx
        counts = torch.bincount(from_rank, minlength=work.num_ranks)
        handles.append(
            Internode(
                is_token_in_rank=in_rank[rank],
                rdma_channel_prefix_matrix=in_node[rank].sum(0).int()[:, None],
                gbl_channel_prefix_matrix=in_rank[rank].sum(0).int()[:, None],
                recv_rdma_channel_prefix_matrix=brought[:, None],
                recv_rdma_rank_prefix_sum=brought.cumsum(0).int(),
                recv_gbl_channel_prefix_matrix=(counts.cumsum(0) - counts).int()[:, None],
                recv_gbl_rank_prefix_sum=counts.cumsum(0).int(),
                recv_src_meta=torch.stack([token, node_row[first_token[from_rank] + token, node]], 1).view(torch.uint8),
                send_rdma_head=node_rows[rank],
                send_nvl_head=torch.cat([rows[s][in_node[s][:, node], neighbours] for s in sources]),
            )
        )
    return handles


def combine(
    received: Sequence[Received],
    num_tokens: Sequence[int],
    x: Sequence[Tensor],
    topk_weights: Sequence[Tensor],
    bias: Sequence[Sequence[Tensor]] | None = None,
    ranks_per_node: int | None = None,
) -> list[Combined]:
    """Return every rank's sums of the rows `x[rank]` that belong to its tokens.

    The stated order, in fp32: ((0 + the row of the lowest rank) + that of the next ...) + bias 0 + bias 1, rounded
    once. With `ranks_per_node` rows go in two hops: those of a node other than the owner's are summed in the same way,
    from 0, and rounded; this sum is added in the place of the node's rows. Weights likewise, never rounded.

    The bound, with u = 2**-8 for a rounding to BF16: another node's sum is off by u times itself, and the total by u
    times its value at that point, so |x - exact| <= u |exact| + (1 + u) u (the sum of other nodes' |exact sums|), plus
    a small term for fp32: 2**-23 times the number of terms times the sum of their magnitudes. A rounding may also be
    off by 2**-134, where BF16 is denormal."""
    per_node = ranks_per_node or len(received)
    unit, least = 2.0**-8, 2.0**-134
    ends = received[0].rank_prefix_matrix.tolist()
    combined = []
    for owner, tokens in enumerate(num_tokens):
        hidden, topk = x[owner].shape[1], topk_weights[owner].shape[1]
        total = torch.zeros(tokens, hidden)
        weights = torch.zeros(tokens, topk)
        exact = torch.zeros(tokens, hidden, dtype=torch.float64)
        magnitude = torch.zeros_like(exact)
        rounded = torch.zeros_like(exact)
        terms = torch.zeros(tokens, 1, dtype=torch.float64)
        for first in range(0, len(received), per_node):
            own = first <= owner < first + per_node
            node_total, node_weights = (total, weights) if own else (torch.zeros_like(total), torch.zeros_like(weights))
            node_exact = torch.zeros_like(exact)
            for rank in range(first, first + per_node):
                mine = slice(ends[owner - 1][rank] if owner else 0, ends[owner][rank])
                if mine.start == mine.stop:
                    continue
                token = received[rank].src_idx[mine].long()
                part = x[rank][mine]
                node_total[token] += part.float()
                node_weights[token] += topk_weights[rank][mine]
                node_exact[token] += part.double()
                magnitude[token] += part.double().abs()
                terms[token] += 1
            exact += node_exact
            if not own:
                total += node_total.to(torch.bfloat16).float()
                weights += node_weights
                rounded += node_exact.abs()
        for part in bias[owner] if bias is not None else ():
            total = total + part.float()
            exact += part.double()
            magnitude += part.double().abs()
            terms += 1
        tolerance = unit * exact.abs() + (1 + unit) * unit * rounded + terms * 2.0**-23 * magnitude
        tolerance += least * (len(received) // per_node)
        combined.append(Combined(total.to(torch.bfloat16), weights, exact, tolerance))
    return combined


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors hold the same bits (so -0.0 is not 0.0, and a NaN equals itself)."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32}.get(a.element_size()) if a.is_floating_point() else None
    return torch.equal(a.contiguous().view(kind), b.contiguous().view(kind)) if kind else torch.equal(a, b)


def difference(name: str, got: Tensor, expected: Tensor) -> str | None:
    """Return None if the bits agree, otherwise one line with the first difference."""
    if same_bits(got, expected):
        return None
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return f"{name}: {got.dtype} {tuple(got.shape)}, expected {expected.dtype} {tuple(expected.shape)}"
    wrong = (got != expected).nonzero()
    if len(wrong) == 0:
        return f"{name}: equal values with other bits"
    at = tuple(wrong[0].tolist())
    return f"{name}{list(at)} is {got[at]}, expected {expected[at]} ({len(wrong)} of {got.numel()} elements differ)"


def check_received(got: Received, expected: Received) -> None:
    """Assert that a dispatch is bit-exact, naming each part that is not. Parts that are None were not requested."""
    wrong = []
    for part in fields(Received):
        value, wanted = getattr(got, part.name), getattr(expected, part.name)
        if value is None:
            continue
        if isinstance(wanted, Tensor):
            wrong.append(difference(part.name, value, wanted))
        elif value != wanted:
            wrong.append(f"{part.name} is {value}, expected {wanted}")
    assert not any(wrong), "; ".join(filter(None, wrong))


def check_handle(handle: Sequence[Tensor | None], expected: Internode, padded: bool = False) -> None:
    """Assert that all elements of a handle are present and bit-exact. A dispatch with a fixed number of rows to
    return does not know how many rows it receives or forwards; elements beyond the actual ones are not checked."""
    assert isinstance(handle, tuple) and len(handle) == len(fields(Internode))
    wrong = []
    for part, value in zip(fields(Internode), handle):
        wanted = getattr(expected, part.name)
        if value is None:
            wrong.append(f"{part.name} is None")
            continue
        value = value.cpu()
        if padded and part.name in ("recv_src_meta", "send_nvl_head"):
            value = value[: len(wanted)]
        wrong.append(difference(part.name, value, wanted))
    assert not any(wrong), "; ".join(filter(None, wrong))


def check_combined(x: Tensor, topk_weights: Tensor | None, expected: Combined) -> None:
    """Assert that a combine is within its error bound and has the bits of the stated order."""
    assert x.shape == expected.exact.shape, f"combined_x has shape {tuple(x.shape)}"
    excess = (x.double() - expected.exact).abs() - expected.tolerance
    assert not (excess > 0).any(), f"combined_x is off by {excess.max().item():.3g} more than the bound allows"
    wrong = [difference("combined_x", x, expected.x)]
    if topk_weights is not None:
        wrong.append(difference("combined_topk_weights", topk_weights, expected.topk_weights))
    assert not any(wrong), "; ".join(filter(None, wrong))
