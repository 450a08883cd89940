"""The rows that travel: different in every iteration, cheap to make, and known to every rank without communication."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from deep_ep_py.tools.bench.config import BenchConfig
from deep_ep_py.tools.bench.routing import generator, route, tokens_in_rank

# Sign and mantissa of a BF16, and of two FP8: flipping these keeps every value finite and of the same magnitude.
_FLIPPABLE_BITS = {"bf16": 0x807F - (1 << 16), "fp8": 0x8787 - (1 << 16)}
_TYPES = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}
_ROWS_STREAM, _MASK_STREAM = 1001, 1002


class Inputs:
    """One rank's inputs for all iterations.

    Row t of rank r in iteration i is `base[t] ^ mask[r, i]`. One pass over memory makes the rows, any rank can
    recompute any row of any other, and rows that differ in token, source or iteration differ in their bits.

    Parameters
    ----------
    config
        The run.
    tokens
        Tokens of each rank.
    rank
        This rank.
    gather
        Takes this rank's counts for all iterations, and returns every rank's, by rank. Called once.
    """

    def __init__(
        self,
        config: BenchConfig,
        tokens: int,
        rank: int,
        gather: Callable[[torch.Tensor], Sequence[torch.Tensor]],
    ) -> None:
        self.config, self.tokens, self.rank = config, tokens, rank
        random = generator(config.seed, _ROWS_STREAM)
        values = torch.randn(tokens, config.hidden, generator=random)
        self._base = values.to(_TYPES[config.dtype]).view(torch.int16)
        self._x = torch.empty_like(self._base)
        self._scales = torch.empty(tokens, config.scales)
        steps = config.warmup + config.iterations
        self._routes = [self.route_of(rank, step) for step in range(steps)]
        counts = torch.stack([self._in_rank(topk_idx).sum(dim=0) for topk_idx, _ in self._routes])
        self.counts = torch.stack(list(gather(counts)), dim=1)
        """int64 [iterations, source, destination]: rows that travel."""
        self.max_received = int(self.counts.sum(dim=1).max())
        """The maximum number of rows that any rank receives in any iteration."""
        self.max_sent = int(self.counts[:, rank].sum(dim=1).max())
        self._expert_rows: torch.Tensor | None = None
        self._expert_mask: torch.Tensor | None = None
        self.step = -1

    def advance(self, step: int) -> None:
        """Make this iteration's inputs. Never called while timing."""
        self.step = step
        torch.bitwise_xor(self._base, self._mask(self.rank, step), out=self._x)
        self._scales.copy_(self.scales_of(self._x))
        self.topk_idx, self.topk_weights = self._routes[step]
        self.in_rank = self._in_rank(self.topk_idx)
        if not self.config.combines:
            return
        mask = self._mask(self.config.ranks + self.rank, step)
        if self._expert_rows is None or self._expert_mask is None:
            self._expert_rows = self.expert_row_bits(self.rank, step, torch.arange(self.max_received))
        else:
            self._expert_rows.bitwise_xor_(mask ^ self._expert_mask)
        self._expert_mask = mask

    @property
    def x(self) -> torch.Tensor:
        """BF16 or FP8 [tokens, hidden]: this rank's tokens."""
        return self._x.view(_TYPES[self.config.dtype])

    @property
    def payload(self) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """The argument of dispatch: the rows; FP8 rows come with float32 [tokens, hidden / 128] scales."""
        return (self.x, self._scales) if self.config.scales else self.x

    def scales_of(self, bits: torch.Tensor) -> torch.Tensor:
        """Return the scales of rows given as bits: the first bits of the rows, so that they differ as the rows do."""
        return bits.view(torch.int32)[:, : self.config.scales].view(torch.float32)

    @property
    def words(self) -> torch.Tensor:
        """BF16 [tokens, row bytes / 2]: the bits of `x`, in a type that every library can send."""
        return self._x.view(torch.bfloat16)

    @property
    def received(self) -> int:
        """The number of rows that this rank receives in this iteration."""
        return int(self.counts[self.step, :, self.rank].sum())

    @property
    def expert_out(self) -> torch.Tensor:
        """BF16 [received, hidden] in ordinary memory: the output of this rank's experts for the rows it received."""
        assert self._expert_rows is not None
        return self._expert_rows[: self.received].view(torch.bfloat16)

    def route_of(self, rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the experts and weights that a rank's tokens choose in an iteration."""
        config = self.config
        return route(config.routing, self.tokens, config.topk, config.experts, config.seed, rank, step)

    def x_bits(self, rank: int, step: int, rows: torch.Tensor) -> torch.Tensor:
        """Return rows of a rank's x in an iteration, as int16 bits."""
        return self._base[rows] ^ self._mask(rank, step)

    def expert_row_bits(self, rank: int, step: int, rows: torch.Tensor) -> torch.Tensor:
        """Return rows of a rank's expert output in an iteration, as int16 bits."""
        return self._base[rows % self.tokens] ^ self._mask(self.config.ranks + rank, step)

    def _in_rank(self, topk_idx: torch.Tensor) -> torch.Tensor:
        return tokens_in_rank(topk_idx, self.config.experts, self.config.ranks)

    def _mask(self, stream: int, step: int) -> torch.Tensor:
        random = generator(self.config.seed, _MASK_STREAM, stream, step)
        words = self.config.row_bytes // 2
        bits = torch.randint(-(1 << 15), 1 << 15, (words,), dtype=torch.int16, generator=random)
        return bits & _FLIPPABLE_BITS[self.config.dtype]
