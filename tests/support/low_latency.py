"""The results that low-latency calls must return, in plain torch; shares no code with the library."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import deep_ep_py as deep_ep
from harness import HARSH_NIC, on_cpu

GROUP = 128


@dataclass(frozen=True)
class Sizes:
    """A case.

    Attributes
    ----------
    tokens
        Tokens of each rank.
    max_tokens
        num_max_dispatch_tokens_per_rank.
    """

    name: str
    ranks: int
    tokens: tuple[int, ...]
    max_tokens: int
    hidden: int
    topk: int
    experts: int
    id_dtype: torch.dtype = torch.int64

    @property
    def local(self) -> int:
        """Experts per rank."""
        return self.experts // self.ranks

    @property
    def rows(self) -> int:
        """Rows in an expert's output."""
        return self.ranks * self.max_tokens


@dataclass(frozen=True)
class Packed:
    """What a rank receives: for each local expert, the (source, token) pairs in order."""

    pairs: list[list[tuple[int, int]]]

    def counts(self) -> Tensor:
        return torch.tensor([len(own) for own in self.pairs], dtype=torch.int32)

    def ranges(self, ranks: int) -> Tensor:
        ranges = torch.zeros((len(self.pairs), ranks), dtype=torch.int64)
        for expert, own in enumerate(self.pairs):
            begin = 0
            for rank in range(ranks):
                count = sum(source == rank for source, _ in own)
                ranges[expert, rank] = begin << 32 | count
                begin += count
        return ranges


@dataclass(frozen=True)
class Work:
    """Tokens of all ranks, their routes, the experts' results, and the expected sums."""

    sizes: Sizes
    x: list[Tensor]
    topk_idx: list[Tensor]
    weights: list[Tensor]
    packed: list[Packed]
    results: list[Tensor]  # [local experts, rows, hidden] of each rank
    combined: list[Tensor]

    @staticmethod
    def of(sizes: Sizes, seed: int = 1, skipped: float = 0.1, twice: float = 0.0, results: bool = True) -> Work:
        """Make one at random; choices are -1 with probability `skipped`, a repetition with `twice`. Without
        `results` nothing is known of a combine.
        """
        random = torch.Generator().manual_seed(seed)
        x, topk_idx, weights = [], [], []
        for tokens in sizes.tokens:
            x.append((3 * torch.randn((tokens, sizes.hidden), generator=random)).to(torch.bfloat16))
            order = torch.rand((tokens, sizes.experts), generator=random).argsort(dim=1)
            ids = order[:, : sizes.topk]
            if sizes.topk > sizes.experts:
                ids = order.repeat(1, -(-sizes.topk // sizes.experts))[:, : sizes.topk]
            again = torch.rand(ids.shape, generator=random) < twice
            again[:, 0] = False
            ids = torch.where(again, ids[:, :1], ids)
            none = torch.rand(ids.shape, generator=random) < skipped
            topk_idx.append(torch.where(none, -1, ids).to(sizes.id_dtype).contiguous())
            weights.append(torch.rand((tokens, sizes.topk), generator=random))
        if not results:
            return Work(sizes, x, topk_idx, weights, _packed(sizes, topk_idx), [], [])
        return Work.on(sizes, x, topk_idx, weights, random)

    @staticmethod
    def on(
        sizes: Sizes, x: list[Tensor], topk_idx: list[Tensor], weights: list[Tensor], random: torch.Generator
    ) -> Work:
        packed = _packed(sizes, topk_idx)
        results = []
        for own in packed:
            # Rows that no token occupies must not be read.
            result = torch.full((sizes.local, sizes.rows, sizes.hidden), torch.nan, dtype=torch.bfloat16)
            for expert, pairs in enumerate(own.pairs):
                values = torch.randn((len(pairs), sizes.hidden), generator=random) * 2
                result[expert, : len(pairs)] = values.to(torch.bfloat16)
            results.append(result)
        combined = [
            _combine(sizes, rank, topk_idx[rank], weights[rank], packed, results) for rank in range(sizes.ranks)
        ]
        return Work(sizes, x, topk_idx, weights, packed, results, combined)

    def without(self, *gone: int) -> Work:
        """Return the workload in which the given ranks have no tokens and no experts."""
        x, kept, weights = [*self.x], self._choices_without(*gone), [*self.weights]
        for rank in gone:
            x[rank], weights[rank], kept[rank] = x[rank][:0], weights[rank][:0], kept[rank][:0]
        sizes = replace(self.sizes, tokens=tuple(len(own) for own in x))
        return Work.on(sizes, x, kept, weights, torch.Generator().manual_seed(9))

    def sums_without(self, *gone: int) -> list[Tensor]:
        """Return the expected sums where the results of the given ranks are missing."""
        kept = self._choices_without(*gone)
        return [
            _combine(self.sizes, rank, kept[rank], self.weights[rank], self.packed, self.results)
            for rank in range(self.sizes.ranks)
        ]

    def _choices_without(self, *gone: int) -> list[Tensor]:
        experts = torch.tensor(gone)
        return [ids.where(~torch.isin(ids // self.sizes.local, experts), -1) for ids in self.topk_idx]


def _packed(sizes: Sizes, topk_idx: list[Tensor]) -> list[Packed]:
    return [
        Packed([_pairs(topk_idx, rank * sizes.local + e) for e in range(sizes.local)]) for rank in range(sizes.ranks)
    ]


def _pairs(topk_idx: list[Tensor], expert: int) -> list[tuple[int, int]]:
    return [
        (rank, int(token))
        for rank, ids in enumerate(topk_idx)
        for token in (ids == expert).any(dim=1).nonzero().flatten()
    ]


def _combine(
    sizes: Sizes, rank: int, topk_idx: Tensor, weights: Tensor, packed: Sequence[Packed], results: Sequence[Tensor]
) -> Tensor:
    sums = torch.zeros((len(topk_idx), sizes.hidden), dtype=torch.float32)
    return _add_results(sums, sizes, rank, topk_idx, weights, packed, results).to(torch.bfloat16)


def _add_results(
    sums: Tensor,
    sizes: Sizes,
    rank: int,
    topk_idx: Tensor,
    weights: Tensor,
    packed: Sequence[Packed],
    results: Sequence[Tensor],
) -> Tensor:
    for token in range(len(topk_idx)):
        for k in range(sizes.topk):
            expert = int(topk_idx[token, k])
            if expert < 0:
                continue
            owner, local = divmod(expert, sizes.local)
            row = packed[owner].pairs[local].index((rank, token))
            sums[token] = sums[token] + weights[token, k] * results[owner][local, row].to(sums.dtype)
    return sums


def combined_of(work: Work, rank: int) -> Tensor:
    """Sum a rank's results, which are bfloat16 or have been converted."""
    return _combine(work.sizes, rank, work.topk_idx[rank], work.weights[rank], work.packed, work.results)


def summed_by_node(work: Work, rank: int, per_node: int, together: Sequence[int] = ()) -> Tensor:
    """Sum a rank's results as a combine does whose dispatch had the weights: those of another node separately,
    rounded.

    `together`: ranks that are mapped to this one where each rank is a node. Their results are summed with the rank's
    own, in the order of choices.
    """
    sizes, topk_idx, weights = work.sizes, work.topk_idx[rank], work.weights[rank]
    experts = sizes.local * per_node
    sums = torch.zeros((len(topk_idx), sizes.hidden), dtype=torch.float32)
    own_node, near = rank // per_node, torch.tensor([*together, rank // per_node])
    for node in range(sizes.ranks // per_node):
        if node != own_node and node in together:
            continue
        nodes = near if node == own_node else torch.tensor([node])
        there = topk_idx.where(torch.isin(topk_idx // experts, nodes), -1)
        if node == own_node:
            sums = _add_results(sums, sizes, rank, there, weights, work.packed, work.results)
        else:
            zeros = torch.zeros_like(sums)
            part = _add_results(zeros, sizes, rank, there, weights, work.packed, work.results)
            sums = sums + part.to(torch.bfloat16).float()
    return sums.to(torch.bfloat16)


def exact_sums(work: Work, rank: int) -> tuple[Tensor, Tensor]:
    """Sum a rank's results, and their magnitudes, in float64."""
    sizes, topk_idx, weights = work.sizes, work.topk_idx[rank], work.weights[rank].double()
    zeros = torch.zeros((len(topk_idx), sizes.hidden), dtype=torch.float64)
    sums, magnitudes = (
        _add_results(zeros.clone(), sizes, rank, topk_idx, weights, work.packed, results)
        for results in ([own.double() for own in work.results], [own.double().abs() for own in work.results])
    )
    return sums, magnitudes


@dataclass(frozen=True)
class Cast:
    """The cast of a dispatch, as its options."""

    use_fp8: bool = False
    round_scale: bool = False
    use_ue8m0: bool = False

    @property
    def options(self) -> dict[str, bool]:
        return {"use_fp8": self.use_fp8, "round_scale": self.round_scale, "use_ue8m0": self.use_ue8m0}

    def of(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return float8_e4m3fn [tokens, hidden] and scales [tokens, groups]: fp32, or bytes of exponents."""
        groups = x.float().view(len(x), x.shape[1] // GROUP, GROUP)
        amax = groups.abs().amax(dim=2).clamp(min=1e-4)
        inverse, factor = amax * torch.tensor(1 / 448, dtype=torch.float32), torch.tensor(448.0) / amax
        if self.round_scale:
            mantissa, exponent = torch.frexp(inverse)  # in [0.5, 1)
            exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)
            inverse, factor = torch.exp2(exponent.float()), torch.exp2(-exponent.float())
        cast = (groups * factor[:, :, None]).clamp(-448, 448).to(torch.float8_e4m3fn).view(x.shape)
        if self.use_ue8m0:
            return cast, (inverse.view(torch.int32) >> 23).to(torch.uint8)
        return cast, inverse


BF16 = Cast()
CASTS = {"bf16": BF16, "fp8": Cast(True), "rounded": Cast(True, True), "ue8m0": Cast(True, True, True)}


def check_dispatch(work: Work, rank: int, cast: Cast, results: Sequence[Any]) -> None:
    """Compare the results of a dispatch bit by bit."""
    sizes, own = work.sizes, work.packed[rank]
    packed, counts, handle = results[:3]
    recv_x, recv_scales = on_cpu(packed if cast.use_fp8 else (packed, None))
    counts, handle = counts.cpu(), on_cpu(handle)
    assert recv_x.shape == (sizes.local, sizes.rows, sizes.hidden)
    assert torch.equal(counts, own.counts()), (counts, own.counts())
    assert torch.equal(handle[1], own.ranges(sizes.ranks))
    assert handle[2:] == [sizes.max_tokens, sizes.hidden, sizes.experts]
    for expert, pairs in enumerate(own.pairs):
        tokens = torch.tensor([token for _, token in pairs], dtype=torch.int32)
        assert torch.equal(handle[0][expert, : len(pairs)], tokens)
        sent = [work.x[source][token] for source, token in pairs]
        if not sent:
            continue
        rows = torch.stack(sent)
        got = recv_x[expert, : len(pairs)]
        if recv_scales is None:
            assert torch.equal(got.view(torch.int16), rows.view(torch.int16)), (rank, expert)
            continue
        wanted, scales = cast.of(rows)
        assert torch.equal(got.view(torch.uint8), wanted.view(torch.uint8)), (rank, expert)
        check_scales(recv_scales[expert, : len(pairs)], scales)


def check_scales(got: Tensor, wanted: Tensor) -> None:
    """Compare scales; exponents are packed four to an int32."""
    if wanted.dtype == torch.uint8:
        words = -(-wanted.shape[1] // 4)
        padded = torch.zeros((len(wanted), 4 * words), dtype=torch.uint8)
        padded[:, : wanted.shape[1]] = wanted
        assert torch.equal(got.contiguous(), padded.view(torch.int32))
    else:
        assert torch.equal(got, wanted)


def check_combine(work: Work, rank: int, combined: Tensor) -> None:
    """Compare the result of a combine bit by bit."""
    assert torch.equal(combined.cpu().view(torch.int16), work.combined[rank].view(torch.int16)), rank


def make_buffer(group: Any, sizes: Sizes, fabric: str, **options: Any) -> deep_ep.Buffer:
    """Make a case's Buffer of the minimum size on the calling rank."""
    regions = options.get("regions", 2)
    needed = deep_ep.Buffer.get_low_latency_rdma_size_hint(
        sizes.max_tokens, sizes.hidden, sizes.ranks, sizes.experts, num_topk=sizes.topk, regions=regions
    )
    if fabric in ("ibgda", "proxy") and "nic" not in options:
        # A message takes a few requests.
        row_bytes = 2 * sizes.hidden + 64  # also for words of LogFMT
        longest = max(sizes.max_tokens * min(sizes.topk, sizes.local) * row_bytes, 4096)
        most = max(HARSH_NIC.max_bytes, -(-longest // 4 // 16) * 16)
        queues = HARSH_NIC.queues_per_peer if sizes.ranks < 16 else 1
        options["nic"] = replace(HARSH_NIC, queues_per_peer=queues, max_bytes=most)
    options = {"arena_bytes": 1 << 24, **options}
    return deep_ep.Buffer(group, 0, needed, low_latency_mode=True, fabric=fabric, **options)


def dispatch(buffer: deep_ep.Buffer, work: Work, cast: Cast = BF16, **options: Any) -> tuple[Any, ...]:
    """Dispatch the calling rank's tokens."""
    sizes, rank = work.sizes, buffer.rank
    x, topk_idx = work.x[rank].to(buffer.device), work.topk_idx[rank].to(buffer.device)
    return buffer.low_latency_dispatch(x, topk_idx, sizes.max_tokens, sizes.experts, **cast.options, **options)


def combine(
    buffer: deep_ep.Buffer, work: Work, handle: Any, x: Tensor | None = None, **options: Any
) -> tuple[Any, ...]:
    """Combine the calling rank's results, which may be in `x`."""
    rank, device = buffer.rank, buffer.device
    x = work.results[rank].to(device) if x is None else x
    return buffer.low_latency_combine(
        x, work.topk_idx[rank].to(device), work.weights[rank].to(device), handle, **options
    )


def round_trip(buffer: deep_ep.Buffer, work: Work, cast: Cast = BF16, hooks: bool = False) -> Any:
    """Dispatch and combine, checked. Returns the handle."""
    results = dispatch(buffer, work, cast, return_recv_hook=hooks)
    if hooks:
        results[4]()
    check_dispatch(work, buffer.rank, cast, results)
    combined, _, hook = combine(buffer, work, results[2], return_recv_hook=hooks)
    if hooks:
        hook()
    check_combine(work, buffer.rank, combined)
    if not cast.use_fp8:
        # In the received tensor, which mapped ranks can read.
        packed = results[0].copy_(work.results[buffer.rank])
        combined, _, hook = combine(buffer, work, results[2], packed, return_recv_hook=hooks)
        if hooks:
            hook()
        else:
            packed.fill_(torch.nan)  # it belongs to the caller again
        check_combine(work, buffer.rank, combined)
    return results[2]
