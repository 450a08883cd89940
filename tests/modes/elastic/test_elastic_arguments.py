"""Arguments that `ElasticBuffer` refuses before anything is sent, and what an operation refuses later."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import deep_ep_py as deep_ep
from cases import BY_NAME
from deep_ep_py import compat
from deep_ep_py.base import arguments
from deep_ep_py.testing import run_ranks
from elastic import ElasticTrial
from harness import under_schedules

TRIAL = ElasticTrial.of(BY_NAME["two_ranks"])
MIB = 1 << 20


def alone(**options: Any) -> deep_ep.ElasticBuffer:
    """Make a Buffer of one rank."""
    made: list[Any] = []
    run_ranks(1, lambda group: made.append(deep_ep.ElasticBuffer(group, **options)))
    return made[0]


@pytest.mark.once
@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({}, "num_bytes=None: expected bytes, or num_max_tokens_per_rank and hidden"),
        ({"hidden": 8}, "num_max_tokens_per_rank=0: expected 1 to"),
        ({"num_max_tokens_per_rank": 8}, "hidden=0: expected 1 to"),
        ({"num_max_tokens_per_rank": 8, "hidden": 64, "num_topk": 33}, "num_topk=33: expected 0 to 32"),
        ({"num_bytes": 3 * MIB}, f"num_bytes={3 * MIB}: expected a multiple of {2 * MIB}"),
        ({"num_bytes": 0}, f"num_bytes=0: expected {2 * MIB} to"),
        ({"num_bytes": 4 * MIB, "num_cpu_bytes": 2 * MIB}, "num_cpu_bytes=2097152: expected 0, since Engram"),
        ({"num_bytes": 4 * MIB, "allow_hybrid_mode": 2}, "allow_hybrid_mode=2: expected a bool"),
        ({"num_bytes": 4 * MIB, "num_gpu_timeout_secs": 0}, "num_gpu_timeout_secs=0: expected more than 0"),
        (
            {"num_bytes": 4 * MIB, "enable_shrink": True, "low_latency_mode": True},
            "enable_shrink=True: expected none, since",
        ),
        ({"num_bytes": 4 * MIB, "low_latency_mode": True}, "low_latency_mode=True: expected none, since"),
        ({"num_bytes": 4 * MIB, "timeout": 5}, "timeout=5: expected none, which num_gpu_timeout_secs determines"),
        ({"num_bytes": 4 * MIB, "num_nvl_bytes": MIB}, "num_nvl_bytes=1048576: expected none, which num_bytes"),
        ({"num_bytes": 4 * MIB, "hops": 2, "allow_hybrid_mode": False}, "hops=2: expected 1 or none"),
    ],
)
def test_constructor(options: dict[str, Any], why: str) -> None:
    with pytest.raises((ValueError, TypeError), match=why.replace("(", r"\(")):
        alone(**options)


@pytest.mark.once
@pytest.mark.parametrize(
    "options",
    [
        {"hidden": 128},
        {"hidden": 128, "num_topk": 2, "use_fp8_dispatch": True},
        {"num_max_tokens_per_rank": 8},
        {"timeout": None, "num_nvl_bytes": 0, "num_qps_per_rank": 0},
    ],
)
def test_bytes_with_some_of_the_sizes(options: dict[str, Any]) -> None:
    """The bytes given suffice; `hidden` says how many of them are for rows in transit."""

    def on_each_rank(group: Any) -> None:
        x, ids = torch.ones(3, 128).bfloat16(), torch.tensor([[0, 1], [1, -1], [0, -1]])
        with deep_ep.ElasticBuffer(group, num_bytes=8 * MIB, **options) as buffer:
            assert buffer.num_max_tokens_per_rank == options.get("num_max_tokens_per_rank", 0)
            got = buffer.dispatch(x, topk_idx=ids, num_experts=2, num_max_tokens_per_rank=3)
            assert torch.equal(buffer.combine(got.recv_x, got.handle).combined_x, x)

    run_ranks(1, on_each_rank)


@pytest.mark.once
@pytest.mark.parametrize("how", [{}, {"do_expand": True}, {"do_cpu_sync": False}])
def test_running_sums_that_do_not_fit_into_32_bits(how: dict[str, bool]) -> None:
    """Padded to the largest alignment, a row for each of the most experts is one more than fits."""
    topk, experts, alignment = arguments.MAX_TOPK, arguments.MAX_EXPERTS, arguments.MAX_ALIGNMENT
    assert experts * alignment == arguments.MAX_ROWS + 1
    ids = torch.arange(experts).view(-1, topk)
    x = torch.zeros(len(ids), 8, dtype=torch.bfloat16)
    # Without a host wait, any token may choose any experts.
    why = "expert_alignment=1048576: expected .* of all local experts, rounded up, "

    def on_each_rank(group: Any) -> None:
        for fewer, refused in ((0, True), (1, False)):
            with deep_ep.ElasticBuffer(group, num_max_tokens_per_rank=len(ids), hidden=8) as buffer:
                given: dict[str, Any] = {"topk_idx": ids.where(ids >= fewer, -1), "num_experts": experts, **how}
                if refused or "do_cpu_sync" in how:
                    with pytest.raises(ValueError, match=why):
                        buffer.dispatch(x, expert_alignment=alignment, **given)
                elif not how:
                    got = buffer.dispatch(x, expert_alignment=alignment, **given)
                    assert got.handle.psum_num_recv_tokens_per_expert[-1] == (experts - fewer) * alignment

    run_ranks(1, on_each_rank)


def test_an_argument_of_one_rank_is_told_to_all() -> None:
    def on_each_rank(group: Any) -> str:
        with pytest.raises(ValueError, match="hidden=0: expected 1 to") as info:
            deep_ep.ElasticBuffer(group, num_max_tokens_per_rank=8, hidden=64 * (group.rank() != 1))
        return str(info.value)

    said = run_ranks(3, on_each_rank)
    assert said[1].startswith("hidden=0") and said[0] == said[2] == f"rank 1: {said[1]}"


def refused(buffer: deep_ep.ElasticBuffer, rank: int, why: str, **options: Any) -> None:
    before = buffer.stats()["operations"]
    with pytest.raises((ValueError, TypeError), match=why):
        TRIAL.dispatch(buffer, rank, **options)
    assert buffer.stats()["operations"] == before


def test_dispatch() -> None:
    event = deep_ep.EventHandle()

    def on_each_rank(group: Any) -> None:
        with TRIAL.make_buffer(group, "peer") as buffer:
            rank, work = buffer.rank_idx, TRIAL.work
            for why, options in {
                "num_max_tokens_per_rank=5": {"num_max_tokens_per_rank": 5},
                "num_max_tokens_per_rank=0": {"num_max_tokens_per_rank": 0},
                "expert_alignment=0": {"expert_alignment": 0},
                "num_sms=257": {"num_sms": 257},
                "num_sms=True": {"num_sms": True},
                "num_qps=-1": {"num_qps": -1},
                "do_cpu_sync=2": {"do_cpu_sync": 2},
                "topk_weights=": {"topk_weights": work.topk_weights[rank].double()},
                "cumulative_local_expert_recv_stats=": {"cumulative_local_expert_recv_stats": torch.zeros(2)},
                "do_zero_padding=True: expected do_expand=True": {"do_zero_padding": True},
                "previous_event: expected allocate_on_comm_stream=True": {"previous_event": event},
                "previous_event=3: expected an EventHandle": {"previous_event": 3},
                "previous_event_before_epilogue='e'": {"previous_event_before_epilogue": "e"},
            }.items():
                refused(buffer, rank, why, **options)
            with pytest.raises(ValueError, match="topk_idx=None: expected a value, or a handle"):
                buffer.dispatch(work.x[rank], num_experts=work.num_experts)
            with pytest.raises(ValueError, match="num_experts=None: expected a value, or a handle"):
                buffer.dispatch(work.x[rank], work.topk_idx[rank])
            with pytest.raises(ValueError, match="num_experts=3: expected a multiple of the 2 ranks"):
                buffer.dispatch(work.x[rank], work.topk_idx[rank], num_experts=3)
            with pytest.raises(ValueError, match="topk_idx: ids from 0 to 9, expected -1 to 3"):
                buffer.dispatch(work.x[rank], work.topk_idx[rank].clamp(max=0) + 9 * (work.topk_idx[rank] > 0),
                                num_experts=4)  # fmt: skip
            TRIAL.check(rank, TRIAL.dispatch(buffer, rank), expanded=False, exact=True)

    run_ranks(2, on_each_rank)


def test_more_rows_than_can_be_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a host wait. Also without the expanded layout, since running sums of the experts' rows are stored."""

    def on_each_rank(group: Any, most: int) -> None:
        with TRIAL.make_buffer(group, "peer") as buffer:
            rank = buffer.rank_idx
            for expands in (False, True):
                how = {"do_expand": expands, "do_cpu_sync": False}
                if most < 48:
                    refused(buffer, rank, f"expected at most {most} rows .*, they may be 48", **how)
                else:
                    TRIAL.check(rank, TRIAL.dispatch(buffer, rank, **how), expanded=expands, exact=False)

    for most in (47, 48):
        monkeypatch.setattr(arguments, "MAX_ROWS", most)
        run_ranks(2, on_each_rank, most)


def test_with_a_handle() -> None:
    def on_each_rank(group: Any) -> None:
        with TRIAL.make_buffer(group, "peer") as buffer:
            rank, work = buffer.rank_idx, TRIAL.work
            x, handle = work.x[rank], TRIAL.dispatch(buffer, rank).handle
            for why, options in {
                "topk_idx: expected None with a handle": {"topk_idx": work.topk_idx[rank]},
                "do_cpu_sync=True: expected False with a handle": {"do_cpu_sync": True},
                "num_experts=8: expected 4, as in the handle's dispatch": {"num_experts": 8},
                "expert_alignment=2: expected 1": {"expert_alignment": 2},
                "num_max_tokens_per_rank=99: expected": {"num_max_tokens_per_rank": 99},
                "do_expand=True: expected a handle of a dispatch with do_expand=True": {"do_expand": True},
            }.items():
                with pytest.raises(ValueError, match=why):
                    buffer.dispatch(x, handle=handle, **options)
            for wrong in (3, handle.dispatched, handle.dispatched.handle()):
                with pytest.raises(TypeError, match="expected the EPHandle that dispatch returned"):
                    buffer.combine(x, wrong)
            kept = handle.topk_idx
            for wrong, why in ((kept[:-1], r"handle.topk_idx=int64\["), (kept + 99, "topk_idx: ids from")):
                handle.topk_idx = wrong
                with pytest.raises(ValueError, match=why):
                    TRIAL.combine(buffer, rank, handle)
                with pytest.raises(ValueError, match=why):
                    buffer.dispatch(x, handle=handle)
            assert (handle.dst_buffer_slot_idx == -1).all()
            handle.topk_idx = kept
            handle.recv_src_metadata, handle.dst_buffer_slot_idx = kept, kept
            assert handle.recv_src_metadata is handle.dst_buffer_slot_idx is kept, "callers may assign to attributes"
            TRIAL.check_combine(rank, TRIAL.combine(buffer, rank, handle))

    run_ranks(2, on_each_rank)


def test_a_handle_whose_rows_are_summed_on_their_way() -> None:
    def on_each_rank(group: Any) -> None:
        with (
            TRIAL.make_buffer(group, "peer") as summing,
            TRIAL.make_buffer(group, "peer", allow_multiple_reduction=False) as buffer,
        ):
            rank = buffer.rank_idx
            handle = TRIAL.dispatch(summing, rank, do_expand=True).handle
            with pytest.raises(ValueError, match="expected one of a Buffer with allow_multiple_reduction=False"):
                TRIAL.combine(buffer, rank, handle)
            TRIAL.check_combine(rank, TRIAL.combine(summing, rank, handle))
            handle = TRIAL.dispatch(buffer, rank, do_expand=True).handle
            TRIAL.check_combine(rank, TRIAL.combine(summing, rank, handle))
            TRIAL.check_combine(rank, TRIAL.combine(buffer, rank, handle), one_by_one=True)

    run_ranks(2, on_each_rank)


def test_too_few_bytes_for_rows_in_transit() -> None:
    """The size that the error names is enough; without `hidden`, or with another one, that is what has to be given."""
    wide = 1 << 17
    x, ids = torch.ones(1, wide, dtype=torch.bfloat16), torch.zeros(1, 1, dtype=torch.int64)

    def on_each_rank(group: Any) -> None:
        def dispatched(**sizes: Any) -> str:
            with deep_ep.ElasticBuffer(group, num_max_tokens_per_rank=1, **sizes) as buffer:
                try:
                    buffer.dispatch(x, ids, num_experts=2)
                except ValueError as error:
                    return str(error)
                return ""

        told = dispatched(num_bytes=2 * MIB, hidden=wide, num_topk=1)
        found = re.match(
            rf"num_bytes={2 * MIB}: expected at least (\d+) for rows of {2 * wide} bytes among 2 ranks", told
        )
        assert found is not None, told
        assert not dispatched(num_bytes=int(found[1]), hidden=wide, num_topk=1)
        assert "hidden=8: expected, in the constructor, that of the widest rows; " in dispatched(hidden=8)

    run_ranks(2, on_each_rank)


def test_more_choices_than_tokens_may_have() -> None:
    ids, x = torch.zeros(1, 32, dtype=torch.int64), torch.zeros(1, 8, dtype=torch.bfloat16)

    def on_each_rank(group: Any) -> None:
        with (
            deep_ep.ElasticBuffer(group, num_bytes=1 << 22, allow_multiple_reduction=False) as buffer,
            pytest.raises(ValueError, match="at most 65535 with 32 experts per token and allow_multiple_reduction"),
        ):
            buffer.dispatch(x, ids, num_experts=32, num_max_tokens_per_rank=65536, do_expand=True)

    run_ranks(1, on_each_rank)


def test_a_token_that_names_an_expert_twice() -> None:
    """With a host wait it gets a row for each; without one, the layout may be too small, which all ranks learn."""
    ids = torch.zeros(6, 4, dtype=torch.int64)
    x = torch.arange(6.0).repeat_interleave(8).reshape(6, 8).to(torch.bfloat16)

    def on_each_rank(group: Any) -> None:
        with deep_ep.ElasticBuffer(group, num_max_tokens_per_rank=6, hidden=8) as buffer:
            received = buffer.dispatch(x, ids, num_experts=2, do_expand=True)
            assert len(received.recv_x) == (2 * 6 * 4 if buffer.rank_idx == 0 else 0)
            combined = buffer.combine(received.recv_x, received.handle)[0]
            assert torch.equal(combined, 4 * x)
            with pytest.raises(
                deep_ep.DeepEPError,
                match="the experts of a token must be distinct|more rows than there is room for at rank 0",
            ):
                buffer.dispatch(x, ids, num_experts=2, do_expand=True, do_cpu_sync=False)
                buffer.dispatch(x, ids, num_experts=2)  # a rank that has no rows learns of it at its next call
            buffer.recover()
            assert len(buffer.dispatch(x, ids, num_experts=2).recv_x) == (12 if buffer.rank_idx == 0 else 0)

    under_schedules(2, on_each_rank)


def test_different_settings_on_ranks_are_told() -> None:
    def on_each_rank(group: Any) -> str:
        with TRIAL.make_buffer(group, "peer") as buffer:
            rank = buffer.rank_idx
            weights = TRIAL.work.topk_weights[rank] if rank == 0 else None
            with pytest.raises(deep_ep.DeepEPError) as info:
                TRIAL.dispatch(buffer, rank, topk_weights=weights)
            buffer.recover()
            TRIAL.check(rank, TRIAL.dispatch(buffer, rank, do_expand=True), expanded=True, exact=True)
            return str(info.value)

    said = run_ranks(2, on_each_rank)
    assert any("topk_weights (given on rank 0; None on rank 1)" in one for one in said), said


@pytest.mark.once
def test_what_is_not_offered_says_so() -> None:
    buffer = alone(num_bytes=4 * MIB)
    for name, what in (("engram_write", "Engram"), ("pp_send", "pipeline"), ("agrs_set_config", "all-gather"),
                       ("all_gather", "all-gather"), ("create_agrs_session", "all-gather"),
                       ("get_engram_storage_size_hint", "Engram"), ("get_pp_size_hint", "pipeline")):  # fmt: skip
        for of in (buffer, deep_ep.ElasticBuffer, compat.ElasticBuffer):
            assert not hasattr(of, name)
            with pytest.raises(AttributeError, match=f"has no attribute '{name}': not offered are {what}"):
                getattr(of, name)
    with pytest.raises(AttributeError, match="has no attribute 'dispatsch'$"):
        buffer.dispatsch  # noqa: B018
    buffer.destroy()
    assert buffer.runtime is None and buffer.group is None
    with pytest.raises(deep_ep.DeepEPError, match="the Buffer has been destroyed"):
        buffer.barrier()
