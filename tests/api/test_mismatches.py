"""Ranks that make different calls: every rank's error names what differs, and on which ranks."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch

import deep_ep_py as deep_ep
from builds import BUILD
from deep_ep_py.base.arguments import difference, ranks_text
from deep_ep_py.base.native import C
from deep_ep_py.session.call_notes import Note, SentNotes, mismatch_text
from deep_ep_py.testing import run_ranks

if TYPE_CHECKING:
    from deep_ep_py.base.native import C
    from deep_ep_py.session.call_notes import Exchange
    from deep_ep_py.transport.bootstrap.connections import Connections

RANKS, ODD = 4, 2


def dispatch(buffer: deep_ep.Buffer, hidden: int = 128, topk: int = 4, experts: int = 8) -> None:
    ids = torch.arange(8 * topk).view(8, topk) % experts
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(ids, experts)
    buffer.dispatch(
        torch.zeros(8, hidden, dtype=torch.bfloat16),
        num_tokens_per_rank=per_rank,
        is_token_in_rank=in_rank,
        num_tokens_per_expert=per_expert,
        topk_idx=ids,
        topk_weights=torch.zeros(8, topk),
    )


def errors_of(changed: dict[str, int], buffers: Any, group: Any) -> str:
    """One rank calls dispatch with other arguments; then all recover."""
    with buffers(group) as buffer:
        with pytest.raises(deep_ep.DeepEPError) as info:
            dispatch(buffer, **(changed if buffer.rank == ODD else {}))
        buffer.recover()
        dispatch(buffer)
        return str(info.value)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"hidden": 256}, "bytes per row of x (256 on ranks 0-1, 3; 512 on rank 2)"),
        ({"topk": 2}, "num_topk (4 on ranks 0-1, 3; 2 on rank 2)"),
        (
            {"topk": 8, "experts": 12},
            "num_topk (4 on ranks 0-1, 3; 8 on rank 2), num_experts (8 on ranks 0-1, 3; 12 on",
        ),
    ],
)
def test_threads(changed: dict[str, int], said: str) -> None:
    told = run_ranks(RANKS, lambda group: errors_of(changed, lambda group: deep_ep.Buffer(group, 1 << 20), group))
    for rank, one in enumerate(told):
        assert one.startswith(f"rank {rank}: dispatch does not match among the ranks, expected the same on all: {said}")


@pytest.mark.skipif(BUILD == "tsan", reason="messages of mismatched calls overwrite each other: intended races")
@pytest.mark.parametrize("hook", [False, True])
@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"max_tokens": 8}, "num_max_dispatch_tokens_per_rank (16 on ranks 0-1, 3; 8 on rank 2)"),
        ({"hidden": 256}, "hidden (128 on ranks 0-1, 3; 256 on rank 2)"),
        ({"experts": 4}, "num_experts (8 on ranks 0-1, 3; 4 on rank 2)"),
    ],
)
@pytest.mark.overwrites  # sizes differ, and with them the places of messages
def test_low_latency(changed: dict[str, int], said: str, hook: bool) -> None:
    def on_each_rank(group: Any) -> str:
        num_bytes = deep_ep.Buffer.get_low_latency_rdma_size_hint(16, 256, RANKS, 8)
        with deep_ep.Buffer(group, 0, num_bytes, low_latency_mode=True) as buffer:
            given = {"max_tokens": 16, "hidden": 128, "experts": 8} | (changed if buffer.rank == ODD else {})
            x, ids = torch.zeros(4, given["hidden"], dtype=torch.bfloat16), torch.arange(8).view(4, 2) % 4
            with pytest.raises(deep_ep.DeepEPError) as info:
                sizes = (given["max_tokens"], given["experts"])
                buffer.low_latency_dispatch(x, ids, *sizes, use_fp8=False, return_recv_hook=hook)[-1]()
            return str(info.value)

    expected = f"low-latency dispatch does not match among the ranks, expected the same on all: {said}"
    for rank, one in enumerate(run_ranks(RANKS, on_each_rank)):
        assert one == f"rank {rank}: {expected}"


class Told:
    """Notes that have come from the other ranks, and a call of this rank."""

    seconds = 0.0

    def __init__(self, mine: Note, others: dict[int, Note]) -> None:
        self._mine, self._others = mine, others

    def note_of(self, call: Any) -> Note:
        return self._mine

    def notes(self, mine: Note) -> dict[int, Note]:
        return self._others


@pytest.mark.parametrize(
    ("operation", "ended", "ranks"), [(3, "", "ranks 0-1"), (2, " ended because another call", "rank 1")]
)
def test_a_rank_that_is_still_in_an_earlier_call_says_what_differs(operation: int, ended: str, ranks: str) -> None:
    """The failure ends that call too."""
    others = {1: Note(1, 3, "dispatch", {"hidden": 64}), 2: Note(1, 3, "dispatch", {"hidden": 128})}
    told = Told(Note(1, operation, "dispatch", {"hidden": 64}), others)
    said = f"does not match among the ranks, expected the same on all: hidden (64 on {ranks}; 128 on rank 2)"
    assert mismatch_text(cast("Exchange", told), cast("C.Call", None), 0, {1, 2}, {}) == f"dispatch{ended} {said}"


@dataclass(eq=False)
class FailedCall:
    """A call whose kernels have left, with the operation that they have stored."""

    operation: int
    captured: bool
    generation: int = 1
    kind: str = "dispatch"
    arguments: tuple[tuple[str, int], ...] = ()


@pytest.mark.parametrize(("stored", "captured", "told"), [(0, False, 3), (3, False, 3), (7, True, 7)])
def test_a_note_has_the_operation_of_a_call_whose_kernels_did_not_store_it(
    stored: int, captured: bool, told: int
) -> None:
    """Those of low-latency mode store it only once they have sent; but only they know that of a graph's replay."""
    notes, call = SentNotes(cast("Connections", None)), cast("C.Call", FailedCall(stored, captured))
    notes.begin(call, 3)
    note = notes.note_of(call)
    assert note is not None and note.operation == told


def test_calls_of_another_generation_say_nothing() -> None:
    told = Told(Note(2, 0, "dispatch", {"hidden": 64}), {1: Note(1, 0, "dispatch", {"hidden": 128})})
    assert not mismatch_text(cast("Exchange", told), cast("C.Call", None), 0, {1}, {})


def test_another_call() -> None:
    def on_each_rank(group: Any) -> str:
        with deep_ep.Buffer(group, 1 << 20) as buffer:
            ids = torch.arange(32).view(8, 4) % 8
            per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(ids, 8)
            x = torch.zeros(8, 128, dtype=torch.bfloat16)
            received = buffer.dispatch(x, None, per_rank, None, in_rank, per_expert)
            with pytest.raises(deep_ep.DeepEPError) as info:
                if buffer.rank == ODD:
                    buffer.combine(received[0], received[4])
                else:
                    dispatch(buffer)
            return str(info.value)

    for one in run_ranks(RANKS, on_each_rank):
        assert "which call ('dispatch' on ranks 0-1, 3; 'combine' on rank 2)" in one, one


# Experts of each token: two of each of two ranks. Each of the 8 experts is chosen 4 times.
TOKENS, TOPK, EXPERTS = 8, 4, 8
IDS = torch.arange(TOKENS * TOPK).view(TOKENS, TOPK) % EXPERTS
WRONG_COUNT = r"num_tokens_per_expert\[\d\] is {}: expected {}, as many as in topk_idx"
NO_ROW = r"is_token_in_rank\[\d, \d\] is False: expected True for topk_idx=\d, an expert of rank \d"
OTHER_IDS: dict[str, tuple[str, Any, str]] = {
    "masked": ("topk_idx", lambda ids: torch.where(torch.arange(TOPK) % 2 == 0, -1, ids), WRONG_COUNT.format(4, 0)),
    "rerouted": ("topk_idx", lambda ids: (ids + EXPERTS // 2) % EXPERTS, NO_ROW),
    "another of the same rank": ("topk_idx", lambda ids: ids // 2 * 2, WRONG_COUNT.format(4, "[08]")),
    "other counts": ("num_tokens_per_expert", lambda counts: counts + 1, WRONG_COUNT.format(5, 4)),
    "negative counts": ("num_tokens_per_expert", lambda counts: counts - 50, WRONG_COUNT.format(-46, 4)),
    "no rows": ("is_token_in_rank", torch.zeros_like, NO_ROW),
}


def dispatch_ids(buffer: deep_ep.Buffer, num_experts: int = EXPERTS, **changes: Any) -> Any:
    """Dispatch with a layout, parts of which are changed after it has been counted."""
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(IDS, EXPERTS)
    per_expert = torch.cat([per_expert, per_expert.new_zeros(num_experts - EXPERTS)])
    given = {"num_tokens_per_expert": per_expert, "is_token_in_rank": in_rank, "topk_idx": IDS}
    given |= {part: change(given[part]) for part, change in changes.items()}
    x, weights = torch.zeros(TOKENS, 128, dtype=torch.bfloat16), torch.zeros(TOKENS, TOPK)
    return buffer.dispatch(x, topk_weights=weights, num_tokens_per_rank=per_rank * 0 + 5, **given)


@pytest.mark.parametrize("name", OTHER_IDS)
@pytest.mark.parametrize("options", [{}, {"fabric": "ibgda", "ranks_per_node": 2}], ids=["one hop", "two hops"])
def test_layout_of_other_ids(name: str, options: dict[str, Any]) -> None:
    """The rank that sends ids of which its layout is not says so, and all ranks end, before any row is sent."""
    part, change, said = OTHER_IDS[name]

    def on_each_rank(group: Any) -> str:
        with deep_ep.Buffer(group, 1 << 20, timeout=20, **options) as buffer:
            with pytest.raises(deep_ep.DeepEPError) as info:
                dispatch_ids(buffer, **({part: change} if buffer.rank == ODD else {}))
            buffer.recover()
            assert buffer.stats()["dispatches"] == 0
            received = dispatch_ids(buffer)
            assert received.num_recv_tokens_per_expert_list == [4 * RANKS, 4 * RANKS]
            return str(info.value)

    for rank, one in enumerate(run_ranks(RANKS, on_each_rank)):
        if rank == ODD:
            assert re.fullmatch(rf"rank {ODD}: dispatch: {said}, since the layout must have been counted .*", one), one
        else:
            layout = "a layout to dispatch (num_tokens_per_expert, is_token_in_rank) that is not of its topk_idx"
            assert re.search(rf"because rank {ODD} passed {re.escape(layout)}(;|$)", one), one


@pytest.mark.parametrize("part", ["is_token_in_rank", "topk_idx"])
def test_layout_that_leaves_a_lost_rank_out(part: str) -> None:
    """Its rows go nowhere in any case, so the caller may leave them out of the ids or of the layout, or of neither."""
    lost = RANKS - 1

    def on_each_rank(group: Any) -> None:
        buffer = deep_ep.Buffer(group, 1 << 20, ranks_per_node=2, hops=2, fabric="ibgda")
        group.barrier()
        if buffer.rank == lost:
            buffer.destroy()
            return
        buffer.recover(mask=[lost])
        per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(IDS, EXPERTS)
        ids = torch.where(lost == IDS // (EXPERTS // RANKS), -1, IDS) if part == "topk_idx" else IDS
        in_rank[:, lost] &= part != "is_token_in_rank"
        rows, *_ = buffer.dispatch(
            torch.ones(len(ids), 64, dtype=torch.bfloat16),
            num_tokens_per_rank=per_rank,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            topk_idx=ids,
            topk_weights=torch.zeros(ids.shape),
        )
        assert len(rows) == int(in_rank[:, buffer.rank].sum()) * lost

    run_ranks(RANKS, on_each_rank, seed=1)


def test_layout_of_tokens_that_are_not_there() -> None:
    def on_each_rank(group: Any) -> str:
        with deep_ep.Buffer(group, 1 << 20, timeout=20) as buffer:
            tokens = 0 if buffer.rank == ODD else TOKENS
            ids, x = IDS[:tokens], torch.zeros(tokens, 128, dtype=torch.bfloat16)
            per_rank, _, _, in_rank, _ = buffer.get_dispatch_layout(ids, EXPERTS)
            per_expert = buffer.get_dispatch_layout(IDS, EXPERTS)[2]
            with pytest.raises(deep_ep.DeepEPError) as info:
                buffer.dispatch(x, None, per_rank, None, in_rank, per_expert, ids, torch.zeros(tokens, TOPK))
            return str(info.value)

    told = run_ranks(RANKS, on_each_rank)
    assert re.search(WRONG_COUNT.format(4, 0), told[ODD]), told


def test_layout_of_fewer_experts() -> None:
    def on_each_rank(group: Any) -> str:
        with deep_ep.Buffer(group, 1 << 20, timeout=20) as buffer:
            with pytest.raises(deep_ep.DeepEPError, match="ids") as info:
                dispatch_ids(buffer, 2 * EXPERTS)
            return str(info.value)

    assert any(re.search(NO_ROW, one) for one in run_ranks(RANKS, on_each_rank))


def test_other_memory() -> None:
    def on_each_rank(group: Any) -> str:
        with pytest.raises(ValueError) as info:
            deep_ep.Buffer(group, 1 << 21 if group.rank() == ODD else 1 << 20)
        return str(info.value)

    for rank, one in enumerate(run_ranks(RANKS, on_each_rank)):
        mine = 1 << 21 if rank == ODD else 1 << 20
        assert one == (
            f"num_nvl_bytes or num_rdma_bytes={mine} on rank {rank}: expected the same on all ranks, it is "
            "1048576 on ranks 0-1, 3; "
            "2097152 on rank 2"
        )


def test_ranks_in_words() -> None:
    assert ranks_text([3]) == "rank 3"
    assert ranks_text([0, 1, 2, 5, 7, 6]) == "ranks 0-2, 5-7"
    assert difference({0: 1, 1: 1}) == ""
    assert difference({0: "a", 1: 2, 2: 2}) == "2 on ranks 1-2; 'a' on rank 0"


WRITTEN = {
    "topk_idx": WRONG_COUNT.format(4, 0),
    "num_tokens_per_expert": WRONG_COUNT.format(0, 4),
    "is_token_in_rank": NO_ROW,
}


@pytest.mark.parametrize("part", WRITTEN)
def test_layout_of_ids_that_were_written_to(part: str) -> None:
    """A Buffer knows the tensors of its latest layout, and takes them for known only until one is written to."""

    def on_each_rank(group: Any) -> str:
        with deep_ep.Buffer(group, 1 << 20, timeout=20) as buffer:
            ids = IDS.clone()
            per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(ids, EXPERTS)
            given = {"topk_idx": ids, "num_tokens_per_expert": per_expert, "is_token_in_rank": in_rank}
            x, weights = torch.zeros(TOKENS, 128, dtype=torch.bfloat16), torch.zeros(TOKENS, TOPK)
            received = buffer.dispatch(x, topk_weights=weights, num_tokens_per_rank=per_rank, **given)
            assert received.num_recv_tokens_per_expert_list == [4 * RANKS, 4 * RANKS]
            group.barrier()  # a failure also ends what other ranks have not finished yet
            if buffer.rank == ODD:
                given[part].fill_(-1 if part == "topk_idx" else 0)
            with pytest.raises(deep_ep.DeepEPError) as info:
                buffer.dispatch(x, topk_weights=weights, num_tokens_per_rank=per_rank, **given)
            return str(info.value)

    assert re.match(rf"rank {ODD}: dispatch: {WRITTEN[part]}", run_ranks(RANKS, on_each_rank)[ODD])


def test_a_layout_that_is_known_is_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel that compares ids and layout gets no ids then."""
    checked: list[bool] = []
    notify = C.normal.notify

    def noted(*args: Any, **options: Any) -> Any:
        checked.append(options["checked_ids"] is not None)
        return notify(*args, **options)

    monkeypatch.setattr(C.normal, "notify", noted)

    def on_each_rank(group: Any) -> None:
        with deep_ep.Buffer(group, 1 << 20, timeout=20) as buffer:
            dispatch_ids(buffer)  # the counts are a copy
            per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(IDS, EXPERTS)
            given = {"topk_idx": IDS, "topk_weights": torch.zeros(TOKENS, TOPK), "num_tokens_per_rank": per_rank}
            given |= {"num_tokens_per_expert": per_expert, "is_token_in_rank": in_rank}
            buffer.dispatch(torch.zeros(TOKENS, 128, dtype=torch.bfloat16), **given)
            buffer.dispatch(torch.zeros(TOKENS, 128, dtype=torch.bfloat16), **given | {"topk_idx": IDS.clone()})

    run_ranks(1, on_each_rank)
    assert checked == [True, False, True]
