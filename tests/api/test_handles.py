"""A handle is V1's tuple: its elements, by index or unpacked, are as good as the handle itself on any Buffer of the
same ranks."""

from __future__ import annotations

import copy
import ctypes
import pickle
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.distributed.utils import _apply_to_tensors, _recursive_to
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

import deep_ep_py as deep_ep
import oracle
from cases import BY_NAME, Case
from deep_ep_py.modes.normal import handles
from deep_ep_py.modes.normal.handles import DispatchHandle, record_of
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


def test_ways_to_read_it() -> None:
    trial = Trial.of(BY_NAME["two_ranks"])

    def on_each_rank(group: Any) -> None:
        buffer = make_buffer(group, trial.case, "peer")
        first, second = (buffer.dispatch(**dispatch_arguments(trial.work, buffer.rank))[4] for _ in range(2))
        shapes = [element.shape for element in first]
        # C code reads the items of the tuple itself, Python code may call methods of its class.
        for elements in (tuple(first), list(first), [*first], first[:], (lambda *each: each)(*first), first + ()):
            assert all(element is own for element, own in zip(elements, map(first.__getitem__, range(6)), strict=True))
        assert [element.shape for element in first[-3:]] == shapes[-3:]
        assert [element.shape for element in reversed(first)] == shapes[::-1]
        assert first[-1].shape == shapes[5]
        with pytest.raises(IndexError):
            first[6]
        assert first == first and first != second and len({first, second, first}) == 2
        assert f"rank={buffer.rank} of 2" in repr(first) and f"operation={record_of(first).operation}" in repr(first)

    run_ranks(trial.case.ranks, on_each_rank, seed=1)


def test_the_elements_of_its_own_handle_are_not_examined(monkeypatch: pytest.MonkeyPatch) -> None:
    trial = Trial.of(BY_NAME["uniform"])

    def never(given: Any) -> None:
        raise AssertionError("the library looks for what it has")

    monkeypatch.setattr(handles, "find_record", never)

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
        elements = tuple(handle)
        others = tuple(second.dispatch(**dispatch_arguments(trial.work, rank))[4])
        copies = tuple(element.clone() for element in elements)
        copied = "a tuple of 6: expected the elements of a dispatch's handle, not copies of them nor other tensors"
        for use in uses:
            for given, message in (
                (copies, copied),
                (tuple(torch.zeros_like(element) for element in elements), copied),
                ((*elements[:2], copies[2], *elements[3:]), copied),
                ((copies[0], *elements[1:]), "element 0 is not that of DispatchHandle"),
                ((*elements[:2], others[2], *elements[3:]), "element 0 is not that of DispatchHandle"),
                ((*elements[:5], others[5]), "element 5 is not that of DispatchHandle"),
                (elements[::-1], "element 0 is not that of DispatchHandle"),
                ((*elements[:5], None), "element 5 is not that of DispatchHandle"),
                (elements[:5], "a tuple of 5: .*of which there are 6"),
                ([elements[2].to_sparse()], "a list of 1: .*other tensors"),
            ):
                with pytest.raises(ValueError, match=message):
                    use(first, given)
            for given in ((), (None,) * 6, (1, 2, 3), elements[0]):
                with pytest.raises(TypeError, match="expected the handle that dispatch returned, or the tuple of its"):
                    use(first, given)
        for refused in (pickle.dumps, copy.deepcopy):
            with pytest.raises(TypeError, match="cannot be copied or pickled, since it belongs"):
                refused(handle)
        mapped = pytree.tree_map(torch.clone, handle)
        assert type(mapped) is DispatchHandle and "tensor(" in repr(mapped)
        for use in uses:
            with pytest.raises(ValueError, match="a DispatchHandle of 6: .*not copies of them nor other tensors"):
                use(first, mapped)
        trial.check_combine(rank, trial.combine(first, rank, handle))

    run_ranks(2, on_each_rank, seed=1)


CPU = torch.device("cpu")
REBUILT: dict[str, Callable[[Any], Any]] = {
    "tuple": tuple,
    "type": lambda handle: type(handle)(element for element in handle),
    "copy": copy.copy,
    "sum": lambda handle: (handle + (torch.ones(1),))[:-1],
    "pytree": lambda handle: pytree.tree_map(lambda element: element.view_as(element), handle),
    "pytree leaves": pytree.tree_leaves,
    "FSDP": lambda handle: _apply_to_tensors(lambda element: element.to(CPU), handle),
    "DDP": lambda handle: _recursive_to(handle, CPU, False)[0],
    "detached": lambda handle: [element.detach() for element in handle],
}


@pytest.mark.parametrize("fabric", ["peer", "ibgda"])
def test_a_handle_that_frameworks_have_rebuilt(fabric: str) -> None:
    trial = Trial.of(CASE)

    def on_each_rank(group: Any) -> None:
        buffer = make_buffer(group, CASE, fabric)
        rank = buffer.rank
        for name, rebuilt in REBUILT.items():
            handle = buffer.dispatch(**dispatch_arguments(trial.work, rank))[4]
            elements = rebuilt(handle)
            assert len(elements) == len(handle), name
            record = weakref.ref(record_of(elements))
            assert record() is record_of(handle), name
            del handle
            trial.check_cached(rank, buffer.dispatch(trial.work.x[rank], handle=elements))
            trial.check_combine(rank, trial.combine(buffer, rank, elements))
            del elements
            assert record() is None, f"{name}: it must be freed at once"

    run_ranks(2, on_each_rank, seed=1)


def moved_to_shared_memory(element: torch.Tensor) -> None:
    element.share_memory_()  # as a queue between processes does


def offloaded_and_loaded(element: torch.Tensor) -> None:
    storage = element.untyped_storage()
    if not storage.resizable():
        return
    kept, size = storage.clone(), storage.nbytes()
    storage.resize_(0)
    between = [torch.full((1000,), -7, dtype=torch.int32) for _ in range(50)]  # takes the memory that is free now
    storage.resize_(size)
    storage.copy_(kept)
    del between


@pytest.mark.parametrize("move", [moved_to_shared_memory, offloaded_and_loaded])
@pytest.mark.parametrize(
    ("fabric", "places"),
    [("peer", {}), ("ibgda", {"ranks_per_node": 1, "hops": 1}), ("ibgda", {"ranks_per_node": 1, "hops": 2})],
)
def test_elements_whose_storages_have_moved(
    move: Callable[[torch.Tensor], None], fabric: str, places: dict[str, int]
) -> None:
    """The handle itself leads kernels to where they are now; other handles of the Buffer are as they were."""
    trial = Trial.of(replace(CASE, **places))

    def on_each_rank(group: Any) -> None:
        buffer = make_buffer(group, trial.case, fabric)
        rank = buffer.rank
        handle, other, third = (buffer.dispatch(**dispatch_arguments(trial.work, rank))[4] for _ in range(3))
        for element in handle:
            move(element)
        assert all(torch.equal(one, same) for one, same in zip(other, third, strict=True))
        trial.check_combine(rank, trial.combine(buffer, rank, handle))
        trial.check_combine(rank, trial.combine(buffer, rank, tuple(other)))

    run_ranks(2, on_each_rank, seed=1)


# --- as tensors -----------------------------------------------------------------------------------------------------


class Keeper(torch.autograd.Function):
    """A function whose backward hands its caller the elements of a handle that autograd has saved."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, handle: Any, then: Callable[[Any], None]) -> torch.Tensor:
        ctx.save_for_backward(*handle)
        ctx.then = then
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        ctx.then(ctx.saved_tensors)
        return grad, None, None


@pytest.mark.parametrize("fabric", ["peer", "ibgda"])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_what_autograd_has_kept_serves_as_the_handle(fabric: str, checkpointed: bool) -> None:
    trial = Trial.of(BY_NAME["uniform"])

    def on_each_rank(group: Any) -> None:
        buffer = make_buffer(group, trial.case, fabric)
        rank = buffer.rank
        used: list[Any] = []

        def then(elements: Any) -> None:
            assert type(elements) in (tuple, list)
            trial.check_cached(rank, buffer.dispatch(trial.work.x[rank], handle=elements))
            trial.check_combine(rank, trial.combine(buffer, rank, list(elements)))
            trial.check_combine(rank, buffer.internode_combine(trial.expert.x[rank], elements, weights(trial, rank)))
            used.append(elements)

        def forward(x: torch.Tensor) -> torch.Tensor:
            return Keeper.apply(x, buffer.dispatch(**dispatch_arguments(trial.work, rank))[4], then)

        x = torch.ones(1, requires_grad=True)
        (checkpoint(forward, x, use_reentrant=False) if checkpointed else forward(x)).backward()
        assert len(used) == 1

    run_ranks(trial.case.ranks, on_each_rank, seed=1)


def weights(trial: Trial, rank: int) -> torch.Tensor:
    return trial.expert.topk_weights[rank]


def test_elements_in_other_places_are_refused() -> None:
    trial = Trial.of(CASE)

    def on_each_rank(group: Any) -> None:
        buffer = make_buffer(group, CASE, "ibgda")
        rank = buffer.rank
        handle, other = (buffer.dispatch(**dispatch_arguments(trial.work, rank))[4] for _ in range(2))
        elements, others = tuple(handle), tuple(other)
        refused = 0
        for place in range(10):
            for wrong in (others[place], elements[place - 1], None, 0):
                if isinstance(wrong, torch.Tensor) and place != 3 and wrong.data_ptr() == elements[place].data_ptr():
                    continue  # all 0, or empty: the same for every handle; and with nodes of one rank
                refused += 1
                with pytest.raises(ValueError, match=r"a tuple of 10: .*(element \d is not that of|not copies)"):
                    trial.combine(buffer, rank, (*elements[:place], wrong, *elements[place + 1 :]))
        assert refused > 30
        trial.check_combine(rank, trial.combine(buffer, rank, (*handle[:5], *elements[5:])))

    run_ranks(2, on_each_rank, seed=1)


def test_memory_that_a_handle_once_had() -> None:
    """Another tensor at the address of a former element: the address alone does not make it a handle."""
    trial = Trial.of(CASE)

    def on_each_rank(group: Any) -> None:
        buffer = make_buffer(group, CASE, "peer")
        handle = buffer.dispatch(**dispatch_arguments(trial.work, buffer.rank))[4]
        elements = tuple(handle)
        trial.check_combine(buffer.rank, trial.combine(buffer, buffer.rank, elements))
        array = (ctypes.c_int32 * 2).from_address(elements[2].data_ptr())
        again = torch.frombuffer(array, dtype=torch.int32).view(2, 1)
        assert again.data_ptr() == elements[2].data_ptr()
        with pytest.raises(ValueError, match="not copies of them nor other tensors"):
            trial.combine(buffer, buffer.rank, (*elements[:2], again, *elements[3:]))

    run_ranks(2, on_each_rank, seed=1)


def test_a_handle_lives_as_long_as_its_elements() -> None:
    trial = Trial.of(CASE)

    def on_each_rank(group: Any) -> None:
        buffer = make_buffer(group, CASE, "peer")
        handle = buffer.dispatch(**dispatch_arguments(trial.work, buffer.rank))[4]
        plan = weakref.ref(record_of(handle).plan)
        elements = tuple(handle)
        del handle
        trial.check_combine(buffer.rank, trial.combine(buffer, buffer.rank, elements))
        assert plan() is not None
        del elements
        assert plan() is None, "it must be freed at once, without a reference cycle"

    run_ranks(2, on_each_rank, seed=1)


@pytest.mark.parametrize("ending", ["awaited", "not awaited", "failed"])
def test_a_buffer_is_not_kept_by_its_own_calls(ending: str) -> None:
    """It holds the tensors of a call that failed or was not waited for. They do not lead to the Buffer."""
    trial = Trial.of(CASE)

    def on_each_rank(group: Any) -> None:
        buffer = make_buffer(group, CASE, "peer")
        results = buffer.dispatch(**dispatch_arguments(trial.work, buffer.rank), async_finish=True)
        if ending == "awaited":
            results[5].current_stream_wait()
        elif ending == "failed":
            buffer.abort()
        group.barrier()
        engine = weakref.ref(buffer._engine)
        del buffer, results
        assert engine() is None

    run_ranks(2, on_each_rank, seed=1)


def test_nor_by_a_low_latency_call_that_nobody_has_awaited() -> None:
    def on_each_rank(group: Any) -> None:
        size = deep_ep.Buffer.get_low_latency_rdma_size_hint(8, 64, 2, 4)
        buffer = deep_ep.Buffer(group, 0, size, low_latency_mode=True)
        topk_idx = torch.rand(5, 4).topk(2).indices
        x = torch.randn(5, 64).bfloat16()
        results = buffer.low_latency_dispatch(x, topk_idx, 8, 4, use_fp8=False, async_finish=True)
        group.barrier()
        engine = weakref.ref(buffer._engine)
        del buffer, results
        assert engine() is None

    run_ranks(2, on_each_rank, seed=1)


# --- of another Buffer of the same ranks ----------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["kept", "destroyed", "dropped"])
@pytest.mark.parametrize(("fabric", "then"), [("peer", "peer"), ("peer", "ibgda"), ("ibgda", "peer")])
def test_a_handle_of_an_older_buffer(fabric: str, then: str, end: str) -> None:
    trial = Trial.of(BY_NAME["uniform"])

    def on_each_rank(group: Any) -> None:
        older: Any = make_buffer(group, trial.case, fabric)
        rank = older.rank
        results = older.dispatch(**dispatch_arguments(trial.work, rank))
        recv_x, handle = results[0], results[4]
        newer = make_buffer(group, trial.case, then, num_nvl_bytes=2 * trial.case.num_nvl_bytes)
        if end == "destroyed":
            older.destroy()
        elif end == "dropped":
            group.barrier()
            del older
        for given in (handle, tuple(handle)):
            trial.check_cached(rank, newer.dispatch(trial.work.x[rank], handle=given))
            trial.check_combine(rank, trial.combine(newer, rank, given))
        # Rows in the memory where the older Buffer keeps its outputs.
        copied = newer.stats()["copied"]
        recv_x.copy_(trial.expert.x[rank])
        combined = newer.combine(recv_x, handle, topk_weights=weights(trial, rank))
        trial.check_combine(rank, combined)
        assert newer.stats()["copied"] == copied + (len(recv_x) > 0 and trial.case.ranks > 1 and then == "peer")
        if end == "kept":
            trial.check_combine(rank, trial.combine(older, rank, handle))

    run_ranks(trial.case.ranks, on_each_rank, seed=1)


@pytest.mark.parametrize("recovered", [False, True])
def test_ranks_that_mean_different_operations(recovered: bool) -> None:
    """Each rank means the first dispatch of its own Buffer, or the first since the recovery: all ranks raise."""
    trial = Trial.of(CASE)

    def on_each_rank(group: Any) -> None:
        first, second = (make_buffer(group, CASE, "peer") for _ in range(2))
        if recovered:
            second.recover()
        made = [one.dispatch(**dispatch_arguments(trial.work, one.rank))[4] for one in (first, second)]
        assert [record_of(handle).operation for handle in made] == [0, 0]
        third = make_buffer(group, CASE, "peer")
        with pytest.raises(deep_ep.DeepEPError, match="does not match"):
            trial.combine(third, first.rank, made[first.rank])

    run_ranks(2, on_each_rank, seed=1)


class Turned:
    """The same ranks in reverse order."""

    def __init__(self, group: Any) -> None:
        self.group, self.group_name = group, group.group_name

    def rank(self) -> int:
        return self.size() - 1 - self.group.rank()

    def size(self) -> int:
        return self.group.size()

    def all_gather_object(self, value: Any) -> list[Any]:
        return self.group.all_gather_object(value)[::-1]


def test_handles_of_buffers_that_no_other_can_use() -> None:
    trial = Trial.of(CASE)

    def refused(buffer: deep_ep.Buffer, handle: Any, message: str) -> None:
        for given in (handle, tuple(handle)):
            with pytest.raises(ValueError, match=f"handle: expected one of {message}"):
                trial.combine(buffer, buffer.rank, given)
            with pytest.raises(ValueError, match=f"handle: expected one of {message}"):
                buffer.dispatch(trial.work.x[buffer.rank], handle=given)

    def on_each_rank(group: Any) -> None:
        older, newer = (make_buffer(group, CASE, "peer") for _ in range(2))
        turned = make_buffer(Turned(group), CASE, "peer")
        rank = older.rank
        handle = older.dispatch(**dispatch_arguments(trial.work, rank))[4]
        refused(turned, handle, "a Buffer with the same ranks, got one of other ranks")
        group.barrier()  # a recovery ends the calls that other ranks are in
        older.recover()
        refused(older, handle, "a dispatch since the Buffer recovered")
        refused(newer, handle, "a dispatch since the Buffer recovered")
        handle = older.dispatch(**dispatch_arguments(trial.work, rank))[4]
        trial.check_combine(rank, trial.combine(newer, rank, handle))
        group.barrier()
        older.abort()
        refused(newer, handle, "a Buffer that has not failed, its Buffer has: .*aborted")
        trial.check_dispatch(rank, newer.dispatch(**dispatch_arguments(trial.work, rank)))

    run_ranks(2, on_each_rank, seed=1)


def test_a_handle_of_a_buffer_that_leaves_out_others() -> None:
    trial = Trial.of(BY_NAME["uniform"])
    lost = trial.case.ranks - 1

    def on_each_rank(group: Any) -> None:
        older, newer = (make_buffer(group, trial.case, "peer") for _ in range(2))
        group.barrier()
        if older.rank == lost:
            older.destroy()
        else:
            older.recover([lost])
            handle = older.dispatch(**dispatch_arguments(trial.work, older.rank))[4]
            with pytest.raises(ValueError, match=rf"leaves out the same ranks, \[\], .* leaves out \[{lost}\]"):
                trial.combine(newer, newer.rank, handle)
        group.barrier()

    run_ranks(trial.case.ranks, on_each_rank, seed=1)
