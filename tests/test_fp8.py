"""FP8 rows with their scales, and expert ids of 32 bits: moved as they are, whatever their strides."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import deep_ep_py as deep_ep
import oracle
from builds import FABRICS
from cases import BY_NAME, Case
from deep_ep_py.testing import run_ranks
from harness import Trial, dispatch_arguments, make_buffer, under_schedules

CASES = ("uniform", "uneven_tokens", "ranks_that_send_nothing", "rounds_of_few_rows", "no_tokens_at_all")


def scales_of(kind: str, tokens: int, random: torch.Generator) -> Tensor:
    """Scales as callers lay them out."""
    if kind == "one_per_row":
        return torch.randn(tokens, generator=random)
    if kind == "rows":
        return torch.randn(tokens, 3, generator=random)
    if kind == "columns":  # as DeepGEMM likes them: neighbours are of one channel block
        return torch.randn(5, tokens + 3, generator=random).t()[:tokens]
    if kind == "every_other_ue8m0":
        exponents = torch.randint(0, 255, (tokens, 2 * 2, 4), generator=random, dtype=torch.uint8)
        return exponents.view(torch.int32)[:, :, 0][:, ::2]
    assert kind == "one_for_all"
    return torch.randn(1, 2, generator=random).expand(tokens, 2)


KINDS = ("one_per_row", "rows", "columns", "every_other_ue8m0", "one_for_all")


def as_fp8(case: Case, ids: torch.dtype) -> Trial:
    """The case's trial with rows of all bit patterns but NaNs', twice as wide: a multiple of 16 bytes again."""
    trial = Trial.of(case)
    random = torch.Generator().manual_seed(7)
    x = []
    for own in trial.work.x:
        bits = torch.randint(0, 127, (own.shape[0], 2 * own.shape[1]), generator=random, dtype=torch.uint8)
        sign = torch.randint(0, 2, bits.shape, generator=random, dtype=torch.uint8) * 128
        x.append((bits + sign).view(torch.float8_e4m3fn))
    work = replace(trial.work, x=x)
    received = oracle.dispatch(replace(work, x=[part.view(torch.uint8) for part in x]))
    received = [replace(r, x=r.x.view(torch.float8_e4m3fn), topk_idx=r.topk_idx.to(ids)) for r in received]
    work = replace(work, topk_idx=[idx.to(ids) for idx in work.topk_idx])
    return replace(trial, work=work, received=received)


@pytest.mark.parametrize("fabric", FABRICS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CASES)
def test_round_trip(name: str, kind: str, fabric: str) -> None:
    ids = torch.int32 if KINDS.index(kind) % 2 == 0 else torch.int64
    trial = as_fp8(BY_NAME[name], ids)
    ranks = trial.case.ranks
    random = torch.Generator().manual_seed(8)
    scales = [scales_of(kind, trial.case.tokens_of(rank), random) for rank in range(ranks)]
    # Chunks of FP8 rows with scales are a little longer than those of the case.
    case = replace(trial.case, num_nvl_bytes=trial.case.num_nvl_bytes * 2)

    def check(rank: int, recv_x: Any) -> None:
        expected = trial.received[rank]
        sent = [scales[source][token] for source, token in zip(expected.src_rank, expected.src_idx, strict=True)]
        wanted = torch.stack(sent) if sent else scales[rank].new_empty(0, *scales[rank].shape[1:])
        wrong = oracle.difference("x", recv_x[0], expected.x) or oracle.difference("scales", recv_x[1], wanted)
        assert wrong is None, wrong
        assert recv_x[1].is_contiguous()

    def on_each_rank(group: Any) -> None:
        buffer = make_buffer(group, case, fabric)
        rank = buffer.rank
        x = (trial.work.x[rank], scales[rank])
        layout = buffer.get_dispatch_layout(trial.work.topk_idx[rank], trial.work.num_experts)
        arguments = dispatch_arguments(replace(trial.work, topk_idx=[i.long() for i in trial.work.topk_idx]), rank)
        assert torch.equal(layout[0], arguments["num_tokens_per_rank"])
        assert torch.equal(layout[2], arguments["num_tokens_per_expert"])
        assert torch.equal(layout[3], arguments["is_token_in_rank"])
        arguments.update(x=x, topk_idx=trial.work.topk_idx[rank])
        recv_x, idx, weights, counts, handle, _ = buffer.dispatch(**arguments)
        check(rank, recv_x)
        expected = trial.received[rank]
        assert oracle.difference("topk_idx", idx, expected.topk_idx) is None
        assert oracle.difference("topk_weights", weights, expected.topk_weights) is None
        assert counts == expected.num_tokens_per_expert
        check(rank, buffer.dispatch(x, handle=handle)[0])
        trial.check_combine(rank, trial.combine(buffer, rank, handle))

    under_schedules(ranks, on_each_rank, count=3)


@pytest.mark.parametrize("fabric", FABRICS)
def test_worst_tokens(fabric: str) -> None:
    trial = as_fp8(BY_NAME["uniform"], torch.int32)
    rows = trial.most_rows + 3

    def on_each_rank(group: Any) -> None:
        buffer = make_buffer(group, trial.case, fabric)
        rank, used = buffer.rank, len(trial.received[buffer.rank].x)
        arguments = dispatch_arguments(replace(trial.work, topk_idx=[i.long() for i in trial.work.topk_idx]), rank)
        x = (trial.work.x[rank], torch.arange(float(trial.case.tokens_of(rank))))
        arguments.update(x=x, topk_idx=trial.work.topk_idx[rank], num_worst_tokens=rows)
        (recv_x, recv_scales), idx, weights, _, handle, _ = buffer.dispatch(**arguments)
        assert oracle.same_bits(recv_x[:used], trial.received[rank].x)
        assert torch.equal(recv_scales[:used], trial.received[rank].src_idx.float())
        assert len(recv_x) == len(recv_scales) == rows and idx.dtype == torch.int32
        assert (idx[used:] == -1).all() and not weights[used:].any()

    under_schedules(trial.case.ranks, on_each_rank, count=3)


def test_ranks_that_differ_in_types_are_told() -> None:
    """Rows and scales of the same sizes, but of other types: never mixed silently."""
    trial = as_fp8(BY_NAME["two_ranks"], torch.int64)

    def on_each_rank(group: Any) -> None:
        buffer = make_buffer(group, trial.case, "peer")
        rank = buffer.rank
        scales = torch.zeros(trial.case.tokens_of(rank), 1, dtype=(torch.float32, torch.int32)[rank])
        arguments = dispatch_arguments(trial.work, rank, x=(trial.work.x[rank], scales))
        with pytest.raises(deep_ep.DeepEPError, match="does not match|did not match|arguments"):
            buffer.dispatch(**arguments)

    run_ranks(2, on_each_rank, seed=1)


def test_ids_that_no_check_of_the_host_saw() -> None:
    """On a GPU the host does not read ids: the layout counts a wrong one as none, and the next call says so."""
    case = BY_NAME["two_ranks"]

    def on_each_rank(group: Any) -> None:
        buffer = make_buffer(group, case, "peer")
        ids = torch.tensor([[0, case.experts], [-7, 1]])
        counts = [torch.zeros(2, dtype=torch.int32), torch.zeros(case.experts, dtype=torch.int32)]
        in_rank = torch.empty(2, 2, dtype=torch.bool)
        engine = buffer._engine
        sizes = deep_ep.native.C.Sizes(2, 0, 2, case.experts)
        engine.launch_layout(sizes, ids, (*counts, in_rank))
        assert counts[1].sum() == 2 and counts[0].tolist() == [2, 0]
        with pytest.raises(ValueError, match=rf"topk_idx.*the id ({case.experts}|-7), expected"):
            buffer.get_dispatch_layout(torch.zeros(2, 2, dtype=torch.int64), case.experts)
        buffer.get_dispatch_layout(torch.zeros(2, 2, dtype=torch.int64), case.experts)

    run_ranks(2, on_each_rank, seed=1)
