"""The oracle: what dispatch and combine must return, in plain torch, from the seed alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from deep_ep_py.tools.bench.inputs import Inputs
from deep_ep_py.tools.bench.routing import tokens_in_rank

_CHUNK = 256
_ULP = 2.0**-8
"""Bound on the relative error of a sum that is rounded to BF16."""


class Oracle:
    """Checks all elements of one iteration's results on one rank.

    Every rank's routing and rows are recomputed from the seed: nothing that was sent is trusted.

    Parameters
    ----------
    inputs
        The rank's inputs.
    step
        The iteration to check.
    """

    def __init__(self, inputs: Inputs, step: int) -> None:
        config = inputs.config
        self._inputs, self._step, self._me = inputs, step, inputs.rank
        self._ranks, self._local_experts = config.ranks, config.experts // config.ranks
        self._per_node, self._two_hops = config.ranks // config.nodes, config.two_hops
        self._routes = [inputs.route_of(source, step) for source in range(config.ranks)]
        self._in_rank = [tokens_in_rank(topk_idx, config.experts, config.ranks) for topk_idx, _ in self._routes]

    def check_dispatch(
        self,
        received: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        recv_topk_idx: torch.Tensor | None = None,
        recv_topk_weights: torch.Tensor | None = None,
        tokens_per_expert: Sequence[int] | None = None,
    ) -> str | None:
        """Compare bit for bit: rows sorted by source rank, then token; scales; local expert ids; weights; counts.

        Returns
        -------
        str or None
            What is wrong, or None.
        """
        recv_x, recv_scales = received if isinstance(received, tuple) else (received, None)
        begin, counts = 0, torch.zeros(self._local_experts, dtype=torch.int64)
        for source, in_rank in enumerate(self._in_rank):
            tokens = in_rank[:, self._me].nonzero().flatten()
            end = begin + tokens.numel()
            if end > recv_x.size(0):
                return f"dispatch: {recv_x.size(0)} rows received, at least {end} expected"
            got = recv_x[begin:end].view(torch.int16)
            if not torch.equal(got, self._inputs.x_bits(source, self._step, tokens)):
                wrong = (got != self._inputs.x_bits(source, self._step, tokens)).sum()
                return f"dispatch: {int(wrong)} elements of the rows from rank {source} differ"
            # The rows are right, so the expected scales can be computed from them.
            if recv_scales is not None and not _same_bits(recv_scales[begin:end], self._inputs.scales_of(got)):
                return f"dispatch: scales of the rows from rank {source} differ"
            idx, weights = self._local_choice(source, tokens)
            if recv_topk_idx is not None and not torch.equal(recv_topk_idx[begin:end].to(torch.int64), idx):
                return f"dispatch: expert ids of the rows from rank {source} differ"
            if recv_topk_weights is not None and not torch.equal(recv_topk_weights[begin:end], weights):
                return f"dispatch: weights of the rows from rank {source} differ"
            counts += torch.bincount(idx[idx >= 0], minlength=self._local_experts)
            begin = end
        if begin != recv_x.size(0):
            return f"dispatch: {recv_x.size(0)} rows received, {begin} expected"
        if tokens_per_expert is not None and list(tokens_per_expert) != counts.tolist():
            return f"dispatch: tokens per expert {list(tokens_per_expert)}, {counts.tolist()} expected"
        return None

    def check_combine(self, combined_x: torch.Tensor) -> str | None:
        """Check the sum of the received rows themselves: every destination sends its copy of the token back."""
        in_rank = self._in_rank[self._me]

        def rows(begin: int, end: int, destination: int) -> tuple[torch.Tensor, torch.Tensor]:
            tokens = in_rank[begin:end, destination].nonzero().flatten()
            return tokens, self._inputs.x_bits(self._me, self._step, tokens + begin)

        return self._check_sum("combine", combined_x, rows)

    def check_combine_private(self, combined_x: torch.Tensor) -> str | None:
        """Check the sum of the expert outputs: every destination sends something different back."""
        before = sum((in_rank.sum(dim=0) for in_rank in self._in_rank[: self._me]), torch.zeros(self._ranks))
        in_rank = self._in_rank[self._me]
        row_of_token = in_rank.cumsum(dim=0) - 1 + before.to(torch.int64)

        def rows(begin: int, end: int, destination: int) -> tuple[torch.Tensor, torch.Tensor]:
            tokens = in_rank[begin:end, destination].nonzero().flatten()
            index = row_of_token[tokens + begin, destination]
            return tokens, self._inputs.expert_row_bits(destination, self._step, index)

        return self._check_sum("combine_private", combined_x, rows)

    def _check_sum(
        self, name: str, got: torch.Tensor, rows: Callable[[int, int, int], tuple[torch.Tensor, torch.Tensor]]
    ) -> str | None:
        """Compare with the float64 sum: |got - exact| <= u |exact| + K 2^-23 sum |x_i|, u = 2^-8, K summands.

        With two hops, the sum from another node was rounded there, so u (1 + u) |its exact sum| is added for each node.
        """
        if got.shape != self._inputs.x.shape:
            return f"{name}: shape {tuple(got.shape)}, {tuple(self._inputs.x.shape)} expected"
        for begin in range(0, got.size(0), _CHUNK):
            end = min(begin + _CHUNK, got.size(0))
            exact = torch.zeros(end - begin, got.size(1), dtype=torch.float64)
            magnitude, summands = torch.zeros_like(exact), torch.zeros(end - begin, 1, dtype=torch.float64)
            rounded = torch.zeros_like(exact)
            for node in range(self._inputs.config.nodes):
                of_node = torch.zeros_like(exact)
                for destination in range(node * self._per_node, (node + 1) * self._per_node):
                    tokens, bits = rows(begin, end, destination)
                    values = bits.view(torch.bfloat16).to(torch.float64)
                    of_node.index_add_(0, tokens, values)
                    magnitude.index_add_(0, tokens, values.abs_())
                    summands[tokens] += 1
                exact += of_node
                if self._two_hops and node != self._me // self._per_node:
                    rounded += of_node.abs_()
            bound = (
                exact.abs()
                .mul_(_ULP)
                .add_(magnitude.mul_(summands).mul_(2.0**-23))
                .add_(rounded, alpha=_ULP * (1 + _ULP))
            )
            # Written such that a NaN counts as wrong.
            wrong = ~((got[begin:end].to(torch.float64) - exact).abs_() <= bound)
            if bool(wrong.any()):
                return f"{name}: {int(wrong.sum())} elements of the tokens {begin} to {end} are out of bounds"
        return None

    def _local_choice(self, source: int, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        topk_idx, topk_weights = self._routes[source]
        local = topk_idx[tokens] - self._me * self._local_experts
        mine = (local >= 0) & (local < self._local_experts)
        return local.where(mine, -1), topk_weights[tokens].where(mine, 0.0)


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.int32), b.contiguous().view(torch.int32))
