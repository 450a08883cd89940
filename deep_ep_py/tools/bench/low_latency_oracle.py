"""The oracle of low-latency mode: where rows go and the expected results, in plain torch, from the seed alone."""

from __future__ import annotations

import torch

from deep_ep_py.tools.bench.config import FP8_BLOCK
from deep_ep_py.tools.bench.inputs import Inputs

_MOST, _MIN_AMAX = 448.0, 1e-4


class Selections:
    """The (token, expert) pairs of all ranks in one iteration.

    Parameters
    ----------
    inputs
        The rank's inputs, made for the iteration.

    Attributes
    ----------
    rows : torch.Tensor
        int64 [tokens, top-k]: for each choice of this rank's tokens, the row index among its expert's rows.
    """

    def __init__(self, inputs: Inputs) -> None:
        config = inputs.config
        self._inputs, self._experts = inputs, config.experts
        self._local = config.experts // config.ranks
        self.routes = [inputs.route_of(rank, inputs.step) for rank in range(config.ranks)]
        chosen = [self._one_hot(topk_idx) for topk_idx, _ in self.routes]
        counts = torch.stack([one.sum(dim=0) for one in chosen])
        begins = counts.cumsum(dim=0) - counts
        topk_idx = self.routes[inputs.rank][0]
        before = chosen[inputs.rank].cumsum(dim=0) - 1
        self.rows = (begins[inputs.rank] + before).gather(1, topk_idx)
        self._chosen, self._counts = chosen, counts

    def _one_hot(self, topk_idx: torch.Tensor) -> torch.Tensor:
        return torch.zeros((len(topk_idx), self._experts), dtype=torch.int64).scatter_(1, topk_idx, 1)

    def received(self, local: int) -> torch.Tensor:
        """Return the rows that this rank receives for one of its experts, as int16 bits, by source and token."""
        expert, inputs = self._inputs.rank * self._local + local, self._inputs
        rows = [
            inputs.x_bits(source, inputs.step, chosen[:, expert].nonzero().flatten())
            for source, chosen in enumerate(self._chosen)
        ]
        return torch.cat(rows)

    def copy_rows(self, results: torch.Tensor) -> None:
        """Fill in the experts' results: the rows themselves."""
        for local in range(self._local):
            rows = self.received(local)
            results[local, : len(rows)].view(torch.int16).copy_(rows)

    def check_dispatch(
        self, packed: torch.Tensor | tuple[torch.Tensor, torch.Tensor], counts: torch.Tensor
    ) -> str | None:
        """Compare counts and rows bit for bit."""
        first = self._inputs.rank * self._local
        wanted = self._counts.sum(dim=0)[first : first + self._local]
        if not torch.equal(counts.to(torch.int64), wanted):
            return f"dispatch: counts {counts.tolist()}, {wanted.tolist()} expected"
        for local in range(self._local):
            rows = self.received(local)
            if isinstance(packed, tuple):
                cast, scales = _cast(rows.view(torch.bfloat16))
                same = torch.equal(packed[0][local, : len(rows)].view(torch.uint8).cpu(), cast.view(torch.uint8))
                same = same and torch.equal(packed[1][local, : len(rows)].cpu(), scales)
            else:
                same = torch.equal(packed[local, : len(rows)].view(torch.int16).cpu(), rows)
            if not same:
                return f"dispatch: rows of expert {first + local} differ"
        return None

    def check_combine(self, combined_x: torch.Tensor) -> str | None:
        """Compare bit for bit with the sum in order of choices, where every expert has returned the row itself."""
        inputs = self._inputs
        x = inputs.x.float()
        total = torch.zeros_like(x)
        for k in range(inputs.topk_idx.shape[1]):
            total = total + inputs.topk_weights[:, k, None] * x
        wrong = combined_x.view(torch.int16) != total.to(torch.bfloat16).view(torch.int16)
        return f"combine: {int(wrong.sum())} elements differ" if bool(wrong.any()) else None


def _cast(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows as float8_e4m3fn, and their scales, as `Buffer.low_latency_dispatch` defines them."""
    groups = rows.float().view(len(rows), rows.shape[1] // FP8_BLOCK, FP8_BLOCK)
    amax = groups.abs().amax(dim=2).clamp(min=_MIN_AMAX)
    cast = (groups * (torch.tensor(_MOST) / amax)[:, :, None]).clamp(-_MOST, _MOST)
    return cast.to(torch.float8_e4m3fn).view(rows.shape), amax * torch.tensor(1 / _MOST)
