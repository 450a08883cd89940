"""Workloads of FP8 rows with scales, and of 32-bit or 64-bit expert ids, with their expected results."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import deep_ep_py as deep_ep
import oracle
from cases import Case
from harness import Trial, dispatch_arguments


def scales_of(kind: str, tokens: int, random: torch.Generator) -> Tensor:
    """Return scales in the layouts that callers use."""
    if kind == "one_per_row":
        return torch.randn(tokens, generator=random)
    if kind == "rows":
        return torch.randn(tokens, 3, generator=random)
    if kind == "rows_of_whole_pieces":
        return torch.randn(tokens, 8, generator=random)
    if kind == "columns":  # as DeepGEMM prefers: adjacent values belong to one channel block
        return torch.randn(5, tokens + 3, generator=random).t()[:tokens]
    if kind == "every_other_ue8m0":
        exponents = torch.randint(0, 255, (tokens, 2 * 2, 4), generator=random, dtype=torch.uint8)
        return exponents.view(torch.int32)[:, :, 0][:, ::2]
    assert kind == "one_for_all"
    return torch.randn(1, 2, generator=random).expand(tokens, 2)


KINDS = ("one_per_row", "rows", "rows_of_whole_pieces", "columns", "every_other_ue8m0", "one_for_all")


@dataclass(frozen=True)
class Fp8Trial:
    """A trial whose rows are FP8; its expert outputs stay BF16."""

    trial: Trial
    scales: list[Tensor]

    @staticmethod
    def of(case: Case, kind: str, ids: torch.dtype) -> Fp8Trial:
        """Draw rows of all bit patterns except NaNs, twice as wide as the case's, so that a row is again a multiple
        of 16 bytes."""
        trial = Trial.of(case)
        random = torch.Generator().manual_seed(7)
        x = []
        for own in trial.work.x:
            bits = torch.randint(0, 127, (own.shape[0], 2 * own.shape[1]), generator=random, dtype=torch.uint8)
            sign = torch.randint(0, 2, bits.shape, generator=random, dtype=torch.uint8) * 128
            x.append(bits + sign)
        received = [
            replace(part, x=part.x.view(torch.float8_e4m3fn), topk_idx=part.topk_idx.to(ids))
            for part in oracle.dispatch(replace(trial.work, x=x))
        ]
        work = replace(
            trial.work,
            x=[part.view(torch.float8_e4m3fn) for part in x],
            topk_idx=[idx.to(ids) for idx in trial.work.topk_idx],
        )
        scales = [scales_of(kind, case.tokens_of(rank), random) for rank in range(case.ranks)]
        return Fp8Trial(replace(trial, work=work, received=received), scales)

    def arguments(self, rank: int, device: str = "cpu", **options: Any) -> dict[str, Any]:
        """Return the arguments of a dispatch."""
        wide = replace(self.trial.work, topk_idx=[idx.long() for idx in self.trial.work.topk_idx])
        given = dispatch_arguments(wide, rank, topk_idx=self.trial.work.topk_idx[rank])
        given = {name: value.to(device) for name, value in given.items()}
        scales = self.scales[rank]
        memory = scales.new_empty(0).set_(scales.untyped_storage()).to(device)
        scales = memory.as_strided(scales.size(), scales.stride(), scales.storage_offset())
        return {**given, "x": (given["x"], scales), **options}

    def check_rows(self, rank: int, recv_x: Any) -> None:
        expected, own = self.trial.received[rank], self.scales[rank]
        pairs = zip(expected.src_rank, expected.src_idx, strict=True)
        sent = [self.scales[source][token] for source, token in pairs]
        wanted = torch.stack(sent) if sent else own.new_empty(0, *own.shape[1:])
        x, scales = (part.cpu() for part in recv_x)
        wrong = oracle.difference("x", x, expected.x) or oracle.difference("scales", scales, wanted)
        assert wrong is None, wrong
        assert recv_x[1].is_contiguous()

    def round_trip(self, buffer: deep_ep.Buffer, device: str = "cpu") -> None:
        """Check layout, dispatch, cached dispatch and combine on the calling rank."""
        rank, trial = buffer.rank, self.trial
        given = self.arguments(rank, device)
        layout = buffer.get_dispatch_layout(given["topk_idx"], trial.work.num_experts)
        assert torch.equal(layout[0], given["num_tokens_per_rank"])
        assert torch.equal(layout[2], given["num_tokens_per_expert"])
        assert torch.equal(layout[3], given["is_token_in_rank"])
        recv_x, idx, weights, counts, handle, _ = buffer.dispatch(**given)
        self.check_rows(rank, recv_x)
        expected = trial.received[rank]
        assert oracle.difference("topk_idx", idx.cpu(), expected.topk_idx) is None
        assert oracle.difference("topk_weights", weights.cpu(), expected.topk_weights) is None
        assert counts == expected.num_tokens_per_expert
        self.check_rows(rank, buffer.dispatch(given["x"], handle=handle)[0])
        x, topk_weights = trial.expert.x[rank].to(device), trial.expert.topk_weights[rank].to(device)
        trial.check_combine(rank, buffer.combine(x, handle, topk_weights=topk_weights))
