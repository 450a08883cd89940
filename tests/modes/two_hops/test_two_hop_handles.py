"""A handle of two-hop mode is V1's complete tuple of 10: against the oracle, as tensors, on other Buffers. So is a
handle of rows that went straight to each rank."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import oracle
from cases import BY_NAME, ROUTED_IN_TWO_HOPS, Case
from deep_ep_py.modes.normal.handles import record_of
from deep_ep_py.testing import run_ranks
from harness import MANY_RANKS, Trial, dispatch_arguments, make_buffer

NAMES = [case.name for case in ROUTED_IN_TWO_HOPS if case.ranks <= MANY_RANKS]
ELEMENTS = tuple(oracle.Internode.__dataclass_fields__)
CASE = Case("handles", 4, 6, topk=2, experts=8, ranks_per_node=2)


def same(name: str, got: torch.Tensor, expected: torch.Tensor) -> None:
    wrong = oracle.difference(name, got, expected)
    assert wrong is None, wrong


@pytest.mark.parametrize("name", NAMES)
def test_elements(name: str) -> None:
    trial = Trial.of(BY_NAME[name])
    per_node = trial.case.ranks_per_node

    def on_each_rank(group: Any) -> None:
        buffer = make_buffer(group, trial.case, "ibgda")
        rank = buffer.rank
        layout = buffer.get_dispatch_layout(trial.work.topk_idx[rank], trial.work.num_experts)
        handle = buffer.dispatch(**dispatch_arguments(trial.work, rank))[4]
        expected, received = trial.handles[rank], trial.received[rank]
        oracle.check_handle(handle, expected)
        assert all(element.is_contiguous() for element in handle)
        # Elements that callers read by index, and that other results also contain.
        same("handle[-4]", handle[-4], expected.recv_gbl_rank_prefix_sum)
        same("rows per source", handle[6], received.rank_prefix_matrix[:, rank])
        same("rows per rank", handle[2], received.channel_prefix_matrix)
        same("rows per node", handle[1].flatten(), layout[1])
        same("tokens", handle[7].view(torch.int32)[:, 0], received.src_idx)
        record = record_of(handle)
        same("recv_src_idx", record.recv_src_idx, received.src_idx)
        assert record.rows == len(received.x) and record.tokens == trial.case.tokens_of(rank)
        assert record.topk == trial.case.topk
        assert handle[9].shape == (int(handle[4][-1]), per_node)

    run_ranks(trial.case.ranks, on_each_rank, seed=1)


@pytest.mark.parametrize("name", ["2x1_uniform", "2x2_uniform", "2x2_of_one_node", "2x3_holes"])
def test_elements_where_rows_go_straight_to_each_rank(name: str) -> None:
    """Elements that do not concern forwarding are the same; none is None."""
    trial = Trial.of(replace(BY_NAME[name], hops=1))
    per_node = trial.case.ranks_per_node or 1
    handles = oracle.internode(trial.work, trial.received, per_node)

    def on_each_rank(group: Any) -> None:
        buffer = make_buffer(group, trial.case, "ibgda")
        rank = buffer.rank
        handle = buffer.dispatch(**dispatch_arguments(trial.work, rank))[4]
        expected = handles[rank]
        assert isinstance(handle, tuple) and len(handle) == len(ELEMENTS)
        for element, part in zip(handle, ELEMENTS):
            wanted = getattr(expected, part)
            if part.startswith("recv_rdma") or part in ("recv_src_meta", "send_nvl_head"):
                assert element.dtype == wanted.dtype, part
                assert element.shape == wanted.shape or part == "send_nvl_head", part
            else:
                same(part, element, wanted)
        assert handle[9].shape[1:] == (per_node,)
        tokens, index = handle[7].view(torch.int32).T
        same("tokens", tokens, trial.received[rank].src_idx)
        same(
            "index",
            index,
            torch.arange(len(index), dtype=torch.int32) - handle[5][:, 0][trial.received[rank].src_rank.long()],
        )
        assert all(element.is_contiguous() for element in handle)
        trial.check_combine(rank, trial.combine(buffer, rank, tuple(handle)))

    run_ranks(trial.case.ranks, on_each_rank, seed=1)


class Keeper(torch.autograd.Function):
    """A function whose backward hands its caller the elements of a handle that autograd has saved."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, handle: Any, then: Any) -> torch.Tensor:
        ctx.save_for_backward(*handle)
        ctx.then = then
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        ctx.then(ctx.saved_tensors)
        return grad, None, None


@pytest.mark.parametrize("fabric", ["ibgda", "weak"])
def test_elements_serve_as_the_handle(fabric: str) -> None:
    """As a tuple, as a list, as autograd returns them, and under V1's other names."""
    trial = Trial.of(BY_NAME["3x2_uniform"])

    def on_each_rank(group: Any) -> None:
        buffer = make_buffer(group, trial.case, fabric)
        rank, used = buffer.rank, []

        def then(elements: Any) -> None:
            x, weights = trial.expert.x[rank], trial.expert.topk_weights[rank]
            trial.check_cached(rank, buffer.dispatch(trial.work.x[rank], handle=elements))
            trial.check_combine(rank, trial.combine(buffer, rank, list(elements)))
            trial.check_cached(rank, buffer.internode_dispatch(trial.work.x[rank], elements))
            trial.check_combine(rank, buffer.internode_combine(x, elements, weights))
            used.append(elements)

        handle = buffer.dispatch(**dispatch_arguments(trial.work, rank))[4]
        then(tuple(handle))
        then([*handle[:5], *handle[5:]])
        Keeper.apply(torch.ones(1, requires_grad=True), handle, then).backward()
        assert len(used) == 3

    run_ranks(trial.case.ranks, on_each_rank, seed=1)


def test_other_elements_are_refused() -> None:
    trial = Trial.of(CASE)

    def on_each_rank(group: Any) -> None:
        buffer = make_buffer(group, CASE, "ibgda")
        rank = buffer.rank
        handle, other = (buffer.dispatch(**dispatch_arguments(trial.work, rank))[4] for _ in range(2))
        elements, others = tuple(handle), tuple(other)
        for place in range(10):
            for wrong in (others[place], elements[place - 1], elements[place].clone(), None, 0):
                with pytest.raises(ValueError, match=r"a tuple of 10: .*(element \d is not that of|not copies)"):
                    trial.combine(buffer, rank, (*elements[:place], wrong, *elements[place + 1 :]))
        with pytest.raises(ValueError, match="not copies of them nor other tensors"):
            trial.combine(buffer, rank, tuple(element.clone() for element in elements))
        trial.check_combine(rank, trial.combine(buffer, rank, elements))

    run_ranks(4, on_each_rank, seed=1)


@pytest.mark.parametrize("destroyed", [False, True])
@pytest.mark.parametrize(("fabric", "then"), [("ibgda", "weak"), ("weak", "ibgda"), ("ibgda", "ibgda")])
def test_a_handle_of_another_buffer(fabric: str, then: str, destroyed: bool) -> None:
    """The other Buffer has the same nodes but another fabric, another size, and another arena."""
    trial = Trial.of(BY_NAME["2x2_uneven"])

    def on_each_rank(group: Any) -> None:
        older = make_buffer(group, trial.case, fabric)
        rank = older.rank
        handle = older.dispatch(**dispatch_arguments(trial.work, rank))[4]
        newer = make_buffer(group, trial.case, then, num_nvl_bytes=2 * trial.case.num_nvl_bytes, arena_bytes=0)
        if destroyed:
            older.destroy()
        for given in (handle, tuple(handle)):
            trial.check_cached(rank, newer.dispatch(trial.work.x[rank], handle=given))
            trial.check_combine(rank, trial.combine(newer, rank, given))
        if not destroyed:
            trial.check_combine(rank, trial.combine(older, rank, handle))

    run_ranks(trial.case.ranks, on_each_rank, seed=1)


@pytest.mark.parametrize("made_with", [{"hops": 1}, {"hops": 2, "ranks_per_node": 1}], ids=["one_hop", "other_nodes"])
def test_a_handle_of_other_routes_is_refused(made_with: dict[str, int]) -> None:
    """Rows that took another path have other return routes."""
    trial = Trial.of(CASE)

    def on_each_rank(group: Any) -> None:
        buffers = [make_buffer(group, CASE, "ibgda"), make_buffer(group, CASE, "ibgda", **made_with)]
        rank = buffers[0].rank
        handles = [buffer.dispatch(**dispatch_arguments(trial.work, rank))[4] for buffer in buffers]
        for buffer, handle in zip(buffers, handles[::-1]):
            for given in (handle, tuple(handle)):
                with pytest.raises(ValueError, match="handle: expected one of a Buffer"):
                    trial.combine(buffer, rank, given)
                with pytest.raises(ValueError, match="handle: expected one of a Buffer"):
                    buffer.dispatch(trial.work.x[rank], handle=given)
        trial.check_combine(rank, trial.combine(buffers[0], rank, handles[0]))

    run_ranks(4, on_each_rank, seed=1)
