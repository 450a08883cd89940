"""Any value for any argument, on all ranks or on one, leads to an error that names it before anything is launched, to a
correct result, or, if the calls of the ranks do not match, to an error on all ranks. Never to a hang, a crash or a
wrong result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

import deep_ep_py as deep_ep
import oracle
from cases import Case
from deep_ep_py.testing import run_ranks
from harness import Trial, dispatch_arguments, make_buffer
from odd_values import ODD

CASE = Case("fuzz", ranks=2, tokens=6, hidden=64, topk=2, experts=8)
TRIAL = Trial.of(CASE)
RANKS = CASE.ranks

LAYOUT = ("topk_idx", "num_experts", "previous_event", "async_finish", "allocate_on_comm_stream")
DISPATCH = (
    *("x", "handle", "num_tokens_per_rank", "num_tokens_per_rdma_rank", "is_token_in_rank", "num_tokens_per_expert"),
    *("topk_idx", "topk_weights", "expert_alignment", "num_worst_tokens", "config"),
    *("previous_event", "async_finish", "allocate_on_comm_stream"),
)
COMBINE = (
    *("x", "handle", "topk_weights", "bias", "config"),
    *("previous_event", "async_finish", "allocate_on_comm_stream"),
)


@dataclass(frozen=True)
class Oddity:
    """One argument of one call, replaced on some ranks."""

    call: str
    argument: str
    odd: str
    ranks: tuple[int, ...]

    def applied(self, rank: int, arguments: dict[str, Any]) -> dict[str, Any]:
        if rank not in self.ranks:
            return arguments
        return {**arguments, self.argument: ODD[self.odd](arguments.get(self.argument))}


def of(call: str, arguments: tuple[str, ...]) -> st.SearchStrategy[Oddity]:
    return st.builds(
        Oddity,
        st.just(call),
        st.sampled_from(arguments),
        st.sampled_from(sorted(ODD)),
        st.sampled_from([(0,), (1,), (0, 1)]),
    )


def refuses(oddity: Oddity, call: Callable[..., Any], wrong: dict[str, Any]) -> tuple[str, Any]:
    """Return the outcome of a call with these arguments: "done" and the result, "refused" or "failed" and the error."""
    try:
        result = call(**wrong)
        if isinstance(result, tuple):
            result[-1].current_stream_wait()
        return "done", result
    except (ValueError, TypeError) as error:
        # If two arguments do not match, either may be named.
        assert any(name in str(error) for name in (*wrong, oddity.argument)), f"{oddity} is not named: {error}"
        return "refused", error
    except deep_ep.DeepEPError as error:
        return "failed", error


def check_dispatch(rank: int, arguments: list[dict[str, Any]], results: Any) -> None:
    """Check that a rank has received what the arguments of all ranks imply."""
    alignment, worst = arguments[rank].get("expert_alignment", 1), arguments[rank].get("num_worst_tokens", 0)
    mine = CASE.experts // RANKS
    expected: list[list[torch.Tensor]] = [[], [], [], []]
    for passed in arguments:
        in_rank = passed["is_token_in_rank"][:, rank]
        x, scales = passed["x"] if isinstance(passed["x"], tuple) else (passed["x"], None)
        parts = [x, scales, passed["topk_idx"], passed["topk_weights"]]
        for part, tensor in zip(expected, parts, strict=True):
            if tensor is not None:
                bits = tensor.detach().view(torch.uint8) if tensor.element_size() == 1 else tensor.detach()
                part.append(bits[in_rank])
    recv_x, idx, weights, counts, _, _ = results
    x, scales = recv_x if isinstance(recv_x, tuple) else (recv_x, None)
    used = len(torch.cat(expected[0]))
    assert len(x) == (worst or used)
    for name, got, part in zip(("x", "scales"), (x, scales), expected, strict=False):
        assert (got is None) == (not part)
        if got is not None:
            got = got.view(torch.uint8) if got.element_size() == 1 else got
            assert oracle.difference(name, got[:used], torch.cat(part)) is None
    assert (idx is None) == (not expected[2])
    if idx is not None:
        local = torch.cat(expected[2]) - rank * mine
        here = (local >= 0) & (local < mine)
        assert torch.equal(idx[:used].long(), torch.where(here, local, -1).long())
        assert oracle.same_bits(weights[:used], torch.where(here, torch.cat(expected[3]), 0.0))
    per_expert = sum(passed["num_tokens_per_expert"].long() for passed in arguments)
    wanted = per_expert[rank * mine : (rank + 1) * mine].int().tolist()
    assert counts == ([] if worst else [-(-count // alignment) * alignment for count in wanted])


def check_combine(rank: int, arguments: list[dict[str, Any]], results: Any) -> None:
    biases = []
    for passed in arguments:
        bias = passed.get("bias")
        given = bias if isinstance(bias, tuple) else (bias,)
        biases.append([one.detach() for one in given if one is not None])
    weights = [passed.get("topk_weights") for passed in arguments]
    assert (results[1] is None) == (weights[rank] is None)
    x = [passed["x"].detach() for passed in arguments]
    zeros = [torch.zeros(len(rows), CASE.topk) for rows in x]
    summed = [zero if given is None else given.detach() for given, zero in zip(weights, zeros, strict=True)]
    expected = oracle.combine(TRIAL.received, [CASE.tokens_of(r) for r in range(RANKS)], x, summed, biases)[rank]
    # NaN has many bit patterns; it is unspecified which of them a sum yields.
    got = results[0]
    assert torch.equal(got.isnan(), expected.x.isnan())
    assert torch.equal(got.nan_to_num(0.0), expected.x.nan_to_num(0.0))
    if results[1] is not None:
        assert torch.equal(results[1].nan_to_num(0.0), expected.topk_weights.nan_to_num(0.0))


def round_trip(buffer: deep_ep.Buffer) -> None:
    """Make a correct call, which must work after any preceding one."""
    rank = buffer.rank
    results = buffer.dispatch(**dispatch_arguments(TRIAL.work, rank))
    TRIAL.check_dispatch(rank, results)
    TRIAL.check_combine(rank, TRIAL.combine(buffer, rank, results[4]))


def on_each_rank(group: Any, oddity: Oddity) -> None:
    buffer = make_buffer(group, CASE, "peer")
    rank = buffer.rank
    if oddity.call == "layout":
        right: dict[str, Any] = {"topk_idx": TRIAL.work.topk_idx[rank], "num_experts": CASE.experts}
        outcome, result = refuses(oddity, buffer.get_dispatch_layout, oddity.applied(rank, right))
        if outcome == "done":
            passed = oddity.applied(rank, right)
            wanted = oracle.layout(passed["topk_idx"].long(), passed["num_experts"], RANKS)
            assert torch.equal(result[0], wanted.num_tokens_per_rank)
            assert torch.equal(result[2], wanted.num_tokens_per_expert)
            assert torch.equal(result[3], wanted.is_token_in_rank)
        assert outcome != "failed", result
        round_trip(buffer)
        return
    call, check, right = buffer.dispatch, check_dispatch, dispatch_arguments(TRIAL.work, rank)
    if oddity.call == "combine":
        handle = buffer.dispatch(**right)[4]
        right = {"x": TRIAL.expert.x[rank], "handle": handle}
        call, check = buffer.combine, check_combine
    passed = oddity.applied(rank, right)
    outcome, result = refuses(oddity, call, passed)
    if outcome == "refused":  # nothing was launched: the correct call takes its place, and the peers are unaffected
        passed = right
        outcome, result = refuses(oddity, call, right)
    everybodys = group.all_gather_object((outcome, passed, passed is right, result))
    if any(one[0] == "failed" for one in everybodys):
        assert all(one[0] == "failed" for one in everybodys), everybodys
        differ = len({one[2] for one in everybodys}) > 1
        assert differ or oddity.argument in str(result), f"{oddity}: {result}"
        buffer = make_buffer(group, CASE, "peer")
    else:
        check(rank, [one[1] for one in everybodys], result)
    round_trip(buffer)


@given(of("layout", LAYOUT))
def test_layout(oddity: Oddity) -> None:
    run_ranks(RANKS, on_each_rank, oddity, seed=1)


@given(of("dispatch", DISPATCH))
def test_dispatch(oddity: Oddity) -> None:
    run_ranks(RANKS, on_each_rank, oddity, seed=1)


@given(of("combine", COMBINE))
def test_combine(oddity: Oddity) -> None:
    run_ranks(RANKS, on_each_rank, oddity, seed=1)


CONSTRUCTOR = (
    *("group", "num_nvl_bytes", "num_rdma_bytes", "low_latency_mode", "num_qps_per_rank"),
    *("allow_nvlink_for_low_latency_mode", "allow_mnnvl", "use_fabric", "explicitly_destroy", "enable_shrink", "comm"),
    *("device", "fabric", "ranks_per_node", "nic", "arena_bytes", "timeout", "regions"),
)


@given(of("Buffer", CONSTRUCTOR))
def test_constructor(oddity: Oddity) -> None:
    """The same on all ranks: if one rank alone refuses, the others wait for it in the group."""

    def on_each_rank(group: Any) -> None:
        right = {"group": group, "num_nvl_bytes": CASE.num_nvl_bytes}
        wrong = replace(oddity, ranks=(0,)).applied(0, right)
        # It is up to the system to refuse huge sizes.
        outcome, result = refuses(oddity, deep_ep.Buffer, wrong)
        assert outcome != "failed", result
        room = wrong["num_nvl_bytes"] == CASE.num_nvl_bytes
        round_trip(result if outcome == "done" and room else deep_ep.Buffer(**right))

    run_ranks(RANKS, on_each_rank, seed=1)


@given(of("warmup", ("hidden", "topk", "fp8")))
def test_warmup(oddity: Oddity) -> None:
    def on_each_rank(group: Any) -> None:
        buffer = make_buffer(group, CASE, "peer")
        refuses(oddity, buffer.warmup, replace(oddity, ranks=(0,)).applied(0, {"hidden": 64, "topk": 2, "fp8": False}))
        round_trip(buffer)

    run_ranks(RANKS, on_each_rank, seed=1)
