"""A handle is V1's tuple: its elements, by index and unpacked; and it is of one Buffer."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch

import oracle
from cases import BY_NAME, Case
from deep_ep_py.handles import DispatchHandle
from deep_ep_py.testing import run_ranks
from harness import Trial, dispatch_arguments, make_buffer

NAMES = ("uniform", "uneven_tokens", "ranks_that_send_nothing", "unrouted_selections", "three_ranks", "two_ranks")


def same(name: str, got: torch.Tensor, expected: torch.Tensor) -> None:
    wrong = oracle.difference(name, got, expected)
    assert wrong is None, wrong


@pytest.mark.parametrize("name", NAMES)
def test_elements_on_one_node(name: str) -> None:
    trial = Trial.of(BY_NAME[name])

    def on_each_rank(group: Any) -> None:
        buffer = make_buffer(group, trial.case, "peer")
        arguments = dispatch_arguments(trial.work, buffer.rank)
        handle = buffer.dispatch(**arguments)[4]
        expected = trial.received[buffer.rank]
        assert isinstance(handle, tuple) and len(handle) == 6
        prefix, channel, recv_channel, src_idx, in_rank, send_head = handle
        same("rank_prefix_matrix", prefix, expected.rank_prefix_matrix)
        same("channel_prefix_matrix", channel, expected.channel_prefix_matrix)
        same("recv_channel_prefix_matrix", recv_channel, expected.recv_channel_prefix_matrix)
        same("recv_src_idx", src_idx, expected.src_idx)
        same("is_token_in_rank", in_rank, arguments["is_token_in_rank"])
        same("send_head", send_head, expected.send_head)

    run_ranks(trial.case.ranks, on_each_rank, seed=1)


@pytest.mark.parametrize("ranks_per_node", [1, 2])
@pytest.mark.parametrize("name", ["uniform", "uneven_tokens", "ranks_that_send_nothing", "unrouted_selections"])
def test_elements_on_several_nodes(name: str, ranks_per_node: int) -> None:
    trial = Trial.of(BY_NAME[name])

    def on_each_rank(group: Any) -> None:
        buffer = make_buffer(group, trial.case, "ibgda", ranks_per_node=ranks_per_node)
        arguments = dispatch_arguments(trial.work, buffer.rank)
        handle = buffer.dispatch(**arguments)[4]
        received = trial.received[buffer.rank]
        expected = oracle.internode(trial.work, received, buffer.rank, ranks_per_node)
        in_rank, rdma_channel, gbl_channel, *_, recv_gbl_channel, recv_gbl_rank, meta, rdma_head, nvl_head = handle
        assert isinstance(handle, tuple) and len(handle) == 10
        same("is_token_in_rank", in_rank, arguments["is_token_in_rank"])
        same("rdma_channel_prefix_matrix", rdma_channel, expected.rdma_channel_prefix_matrix)
        same("gbl_channel_prefix_matrix", gbl_channel, received.channel_prefix_matrix)
        same("recv_gbl_channel_prefix_matrix", recv_gbl_channel, expected.recv_gbl_channel_prefix_matrix)
        same("recv_gbl_rank_prefix_sum", recv_gbl_rank, expected.recv_gbl_rank_prefix_sum)
        same("handle[-4]", handle[-4], expected.recv_gbl_rank_prefix_sum)
        same("send_rdma_head", rdma_head, expected.send_rdma_head)
        assert handle[3] is handle[4] is meta is nvl_head is None, "how V1 forwards inside a node is not done here"

    run_ranks(trial.case.ranks, on_each_rank, seed=1)


def test_ways_to_read_it() -> None:
    trial = Trial.of(BY_NAME["two_ranks"])

    def on_each_rank(group: Any) -> None:
        buffer = make_buffer(group, trial.case, "peer")
        first, second = (buffer.dispatch(**dispatch_arguments(trial.work, buffer.rank))[4] for _ in range(2))
        shapes = [element.shape for element in first]
        for elements in (tuple(first), list(first), [*first], first[:], (lambda *each: each)(*first)):
            assert [element.shape for element in elements] == shapes
        assert [element.shape for element in first[-3:]] == shapes[-3:]
        assert [element.shape for element in reversed(first)] == shapes[::-1]
        assert first[-1].shape == shapes[5]
        with pytest.raises(IndexError):
            first[6]
        assert first == first and first != second and len({first, second, first}) == 2
        assert f"rank={buffer.rank} of 2" in repr(first) and f"operation={first.operation}" in repr(first)

    run_ranks(trial.case.ranks, on_each_rank, seed=1)


def test_nothing_is_computed_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    trial = Trial.of(BY_NAME["uniform"])

    def never(handle: DispatchHandle) -> tuple[Any, ...]:
        raise AssertionError("the library reads the elements of its own handle")

    monkeypatch.setattr(DispatchHandle, "_elements", never)

    def on_each_rank(group: Any) -> None:
        buffer = make_buffer(group, trial.case, "ibgda")
        handle = buffer.dispatch(**dispatch_arguments(trial.work, buffer.rank))[4]
        trial.check_cached(buffer.rank, buffer.dispatch(trial.work.x[buffer.rank], handle=handle))
        trial.check_combine(buffer.rank, trial.combine(buffer, buffer.rank, handle))

    run_ranks(trial.case.ranks, on_each_rank, seed=1)


CASE = Case("handles", ranks=2, tokens=6, hidden=64, topk=2, experts=8)


def test_what_is_no_handle_of_this_buffer_is_refused() -> None:
    trial = Trial.of(CASE)

    def on_each_rank(group: Any) -> None:
        first, second = (make_buffer(group, CASE, "peer") for _ in range(2))
        rank = first.rank
        handle = first.dispatch(**dispatch_arguments(trial.work, rank))[4]
        uses = (
            lambda buffer, handle: buffer.dispatch(trial.work.x[rank], handle=handle),
            lambda buffer, handle: trial.combine(buffer, rank, handle),
        )
        for use in uses:
            with pytest.raises(ValueError, match="handle: .*another Buffer"):
                use(second, handle)
            with pytest.raises(TypeError, match="handle=tuple: expected the handle that dispatch returned"):
                use(first, tuple(handle))
        with pytest.raises(TypeError):
            type(handle)(element for element in handle)  # as code does that maps over the tuples it is given
        with pytest.raises(TypeError, match="handle"):
            pickle.dumps(handle)
        trial.check_combine(rank, trial.combine(first, rank, handle))

    run_ranks(2, on_each_rank, seed=1)
