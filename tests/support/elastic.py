"""What `ElasticBuffer` must return, in plain torch, and trials that check it.

Like the oracle of normal mode, on whose results it builds, it shares neither code nor method with the library.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import deep_ep_py as deep_ep
import oracle
from cases import Case, build
from harness import HARSH_NIC, on_cpu
from oracle import Received, Workload


def _aligned(value: int, alignment: int) -> int:
    return -(-value // alignment) * alignment


@dataclass(frozen=True)
class Layout:
    """One rank's expanded layout."""

    rows: list[list[int]]  # of each local expert: the received row behind each of its rows
    begins: list[int]  # where each expert's rows begin
    slots: Tensor  # int32 [T_recv, K]
    size: int  # rows in all, padding included

    @staticmethod
    def of(received: Received, experts: int, alignment: int) -> Layout:
        ids = received.topk_idx.tolist()
        slots = torch.full(received.topk_idx.shape, -1, dtype=torch.int32)
        rows: list[list[int]] = []
        begins, end = [], 0
        for expert in range(experts):
            begins.append(end)
            mine = [(row, k) for row, choices in enumerate(ids) for k, one in enumerate(choices) if one == expert]
            for number, (row, k) in enumerate(mine):
                slots[row, k] = end + number
            rows.append([row for row, _ in mine])
            end += _aligned(len(mine), alignment)
        return Layout(rows, begins, slots, end)

    def padding(self) -> list[int]:
        """Return the rows that no choice has."""
        used = set(self.slots[self.slots >= 0].tolist())
        return [slot for slot in range(self.size) if slot not in used]


def summed(work: Workload, received: list[Received], x: list[Tensor], owner: int, bias: tuple[Tensor, ...]) -> Tensor:
    """Return one rank's sums in V2's order: ((0 + biases) + the rows of ranks by the last choice that each holds)."""
    tokens, topk = work.topk_idx[owner].shape
    result = torch.empty(tokens, x[owner].shape[1], dtype=torch.bfloat16)
    row_at = [
        {(int(s), int(t)): row for row, (s, t) in enumerate(zip(r.src_rank, r.src_idx, strict=True))} for r in received
    ]
    for token in range(tokens):
        total = torch.zeros(x[owner].shape[1])
        for part in bias:
            total = total + part[token].float()
        ranks = [int(expert) // work.experts_per_rank if expert >= 0 else -1 for expert in work.topk_idx[owner][token]]
        for k, rank in enumerate(ranks):
            if rank >= 0 and rank not in ranks[k + 1 :]:
                total = total + x[rank][row_at[rank][owner, token]].float()
        result[token] = total.to(torch.bfloat16)
    return result


def folded(layout: Layout, expanded: Tensor) -> Tensor:
    """Return the sum of each token's rows in the order of its choices, in fp32, rounded once."""
    rows, topk = layout.slots.shape
    total = torch.zeros(rows, expanded.shape[1])
    for k in range(topk):
        slot = layout.slots[:, k].long()
        total = total + torch.where((slot >= 0).unsqueeze(1), expanded[slot.clamp(min=0)].float(), 0.0)
    return total.to(torch.bfloat16)


def summed_one_by_one(
    work: Workload,
    received: list[Received],
    layouts: list[Layout],
    x: list[Tensor],
    owner: int,
    bias: tuple[Tensor, ...],
) -> Tensor:
    """Return one rank's sums of expanded rows that nothing sums on their way: ((0 + biases) + choice 0) + choice 1.."""
    ids = work.topk_idx[owner]
    total = torch.zeros(len(ids), x[owner].shape[1])
    for part in bias:
        total = total + part.float()
    slot_at = [
        {(int(s), int(t)): layout.slots[row] for row, (s, t) in enumerate(zip(r.src_rank, r.src_idx, strict=True))}
        for r, layout in zip(received, layouts, strict=True)
    ]
    for token, k in (ids >= 0).nonzero().tolist():
        rank = int(ids[token, k]) // work.experts_per_rank
        total[token] += x[rank][slot_at[rank][owner, token][k]].float()
    return total.to(torch.bfloat16)


@dataclass(frozen=True)
class Inputs:
    """The ranks' inputs, where their Buffers compute."""

    x: list[Tensor]
    topk_idx: list[Tensor]
    topk_weights: list[Tensor]
    expanded_x: list[Tensor]  # what the experts return in the expanded layout, NaN in the padding
    folded_x: list[Tensor]
    biases: list[tuple[Tensor, ...]]

    def on(self, device: str) -> Inputs:
        """Return the same inputs on another device."""

        def moved(tensors: list[Tensor]) -> list[Tensor]:
            return [tensor.to(device) for tensor in tensors]

        biases = [tuple(moved(list(both))) for both in self.biases]
        rows = moved(self.x), moved(self.topk_idx), moved(self.topk_weights)
        return Inputs(*rows, moved(self.expanded_x), moved(self.folded_x), biases)


@dataclass(frozen=True)
class ElasticTrial:
    """A workload with all its expected results."""

    case: Case
    work: Workload
    received: list[Received]
    layouts: list[Layout]
    folded_x: list[Tensor]  # the sum of each token's rows that the experts return
    biases: list[tuple[Tensor, ...]]
    alignment: int
    max_tokens: int
    inputs: Inputs

    @staticmethod
    def of(case: Case, alignment: int = 1, seed: int = 1) -> ElasticTrial:
        work = build(case, seed)
        received = oracle.dispatch(work, alignment)
        layouts = [Layout.of(part, work.experts_per_rank, alignment) for part in received]
        random = torch.Generator().manual_seed(seed + 2000)

        def noise(*shape: int) -> Tensor:
            return torch.randn(shape, generator=random).to(torch.bfloat16)

        expanded_x = [noise(layout.size, case.hidden) for layout in layouts]
        for layout, x in zip(layouts, expanded_x, strict=True):
            x[layout.padding()] = torch.nan
        folded_x = [folded(layout, x) for layout, x in zip(layouts, expanded_x, strict=True)]
        biases = [tuple(noise(*own.shape) for _ in range(2)) for own in work.x]
        tokens = max(1, *(len(own) for own in work.x))
        inputs = Inputs(work.x, work.topk_idx, work.topk_weights, expanded_x, folded_x, biases)
        return ElasticTrial(case, work, received, layouts, folded_x, biases, alignment, tokens + 3, inputs)

    def make_buffer(self, group: Any, fabric: str | None, **options: Any) -> deep_ep.ElasticBuffer:
        """Make a Buffer for the trial on the calling rank."""
        case = self.case
        if fabric in ("ibgda", "proxy"):
            options.setdefault("nic", HARSH_NIC)
        given = {"ranks_per_node": case.ranks_per_node, "hops": case.hops, "arena_bytes": case.arena_bytes}
        options = {**{name: value for name, value in given.items() if value is not None}, **options}
        return deep_ep.ElasticBuffer(
            group,
            num_max_tokens_per_rank=self.max_tokens,
            hidden=case.hidden,
            num_topk=case.topk,
            fabric=fabric,
            **options,
        )

    def on(self, device: str) -> ElasticTrial:
        """Return the same trial with the ranks' inputs on another device; the expected results stay."""
        return replace(self, inputs=self.inputs.on(device))

    def dispatch(self, buffer: deep_ep.ElasticBuffer, rank: int, **options: Any) -> Any:
        """Dispatch the calling rank's tokens."""
        inputs = self.inputs
        given = {"topk_weights": inputs.topk_weights[rank], "expert_alignment": self.alignment, **options}
        return buffer.dispatch(inputs.x[rank], inputs.topk_idx[rank], num_experts=self.work.num_experts, **given)

    def check(self, rank: int, results: Any, *, expanded: bool, exact: bool, weighted: bool = True) -> None:
        """Check a dispatch, `exact`: with a host wait; `weighted`: with weights."""
        x, idx, weights, _, _ = on_cpu(results)
        want, layout, hidden = self.received[rank], self.layouts[rank], self.case.hidden
        ranks, topk, here = self.case.ranks, self.case.topk, self.work.experts_per_rank
        most = ranks * self.max_tokens
        most_expanded = _aligned(most * min(topk, here) + (self.alignment - 1) * here, self.alignment)
        size = (layout.size if exact else most_expanded) if expanded else (len(want.x) if exact else most)
        assert x.shape == (size, hidden)
        if expanded:
            assert idx is None
            for expert, rows in enumerate(layout.rows):
                at = slice(layout.begins[expert], layout.begins[expert] + len(rows))
                assert oracle.same_bits(x[at], want.x[rows])
            if weighted:
                at, used = layout.slots >= 0, layout.slots[layout.slots >= 0].long()
                assert weights.shape == (size,) and oracle.same_bits(weights[used], want.topk_weights[at])
                assert not weights[torch.isin(torch.arange(size), used, invert=True)].any()
        else:
            n = len(want.x)
            assert oracle.same_bits(x[:n], want.x) and oracle.same_bits(idx[:n], want.topk_idx)
            assert (idx[n:] == -1).all()
            if weighted:
                assert oracle.same_bits(weights[:n], want.topk_weights) and not weights[n:].any()
        assert weighted or weights is None
        self.check_handle(rank, results[3], expanded=expanded, exact=exact)

    def check_handle(self, rank: int, handle: Any, *, expanded: bool, exact: bool) -> None:
        """Check the attributes of a handle."""
        want, layout = self.received[rank], self.layouts[rank]
        counts = [len(rows) for rows in layout.rows]
        assert handle.do_expand == expanded and handle.expert_alignment == self.alignment
        assert handle.num_unaligned_recv_tokens_per_expert.tolist() == counts
        ends = [begin + (count if expanded else _aligned(count, self.alignment))
                for begin, count in zip(layout.begins, counts, strict=True)]  # fmt: skip
        assert handle.psum_num_recv_tokens_per_expert.tolist() == ends
        assert handle.num_recv_tokens_per_expert_list == (
            [_aligned(n, self.alignment) for n in counts] if exact else []
        )
        group = self.case.ranks_per_node if self.case.two_hops else self.case.ranks
        per_local = torch.bincount(want.src_rank % group, minlength=group)
        assert torch.equal(handle.psum_num_recv_tokens_per_scaleup_rank.cpu(), per_local.cumsum(0).int())
        n, topk = len(want.x), self.case.topk
        metadata, sent = handle.recv_src_metadata[:n].cpu(), handle.dst_buffer_slot_idx.cpu()
        assert torch.equal(metadata[:, 0], (want.src_rank * self.max_tokens + want.src_idx).int())
        assert torch.equal(metadata[:, 1] // topk, want.src_rank.int()) and metadata.dtype is torch.int32
        assert torch.equal(metadata[:, 2:], layout.slots if expanded else torch.full((n, topk), -1, dtype=torch.int32))
        slots = oracle.layout(self.work.topk_idx[rank], self.work.num_experts, self.case.ranks)
        index, ids = oracle.numbered(slots.is_token_in_rank), self.work.topk_idx[rank]
        for token, k in (ids >= 0).nonzero().tolist():
            assert sent[token, k] == index[token, ids[token, k] // self.work.experts_per_rank]

    def combine(
        self,
        buffer: deep_ep.ElasticBuffer,
        rank: int,
        handle: Any,
        biases: int = 0,
        weights: Any = None,
        **options: Any,
    ) -> Any:
        """Combine the experts' rows on the calling rank."""
        x = self.inputs.expanded_x[rank] if handle.do_expand else self.inputs.folded_x[rank]
        rows = handle.num_expanded_tokens if handle.do_expand else handle.num_recv_tokens
        x = torch.cat([x, x.new_full((rows - len(x), x.shape[1]), torch.nan)])
        bias: Any = self.inputs.biases[rank][:biases]
        bias = (None, *bias, bias)[biases] if biases < 2 else bias
        return buffer.combine(x, handle, topk_weights=weights, bias=bias, **options)

    def check_combine(self, rank: int, results: Any, biases: int = 0, *, one_by_one: bool = False) -> None:
        """Check the bits of a combine; `one_by_one`: of expanded rows, with `allow_multiple_reduction=False`."""
        bias = self.biases[rank][:biases]
        if one_by_one:
            want = summed_one_by_one(
                self.work, self.received, self.layouts, [part.cpu() for part in self.inputs.expanded_x], rank, bias
            )
        elif self.case.two_hops:
            weights = [torch.zeros_like(part.topk_weights) for part in self.received]
            tokens = [len(own) for own in self.work.x]
            every = [both[:biases] for both in self.biases]
            per_node = self.case.ranks_per_node
            want = oracle.combine(self.received, tokens, self.folded_x, weights, every, per_node)[rank].x
        else:
            want = summed(self.work, self.received, self.folded_x, rank, bias)
        wrong = oracle.difference("combined_x", results[0].cpu(), want)
        assert wrong is None, wrong


def round_trip(buffer: deep_ep.ElasticBuffer, trial: ElasticTrial, blocks: int, *, expanded: bool, exact: bool) -> None:
    """Check a dispatch and its combine, and dispatches by the handle, on the calling rank."""
    rank, biases = buffer.rank_idx, blocks % 3
    one_by_one = expanded and not buffer.allow_multiple_reduction
    results = trial.dispatch(buffer, rank, do_expand=expanded, do_cpu_sync=exact, num_sms=blocks)
    trial.check(rank, results, expanded=expanded, exact=exact)
    handle = results[3]
    # Whatever rows have in the columns of other ranks' choices.
    weights = results[2] if expanded else torch.where(results[1] >= 0, results[2], torch.nan)
    combined = trial.combine(buffer, rank, handle, biases, weights=weights)
    trial.check_combine(rank, combined, biases, one_by_one=one_by_one)
    ids = trial.work.topk_idx[rank]
    assert oracle.same_bits(combined[1].cpu(), torch.where(ids >= 0, trial.work.topk_weights[rank], 0.0))
    for weights in (None, trial.inputs.topk_weights[rank]):
        again = buffer.dispatch(trial.inputs.x[rank], handle=handle, topk_weights=weights, do_expand=expanded)
        assert again.handle is handle
        trial.check(rank, again, expanded=expanded, exact=exact, weighted=weights is not None)
    trial.check_combine(rank, trial.combine(buffer, rank, handle), one_by_one=one_by_one)
