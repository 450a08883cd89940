"""The parts of a Buffer, besides dispatch and combine, that exist because DeepEP has them: sizes, defaults, aliases."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import deep_ep_py as deep_ep
from cases import BY_NAME, Case
from deep_ep_py.modes.normal import operations
from deep_ep_py.testing import run_ranks
from harness import Trial, dispatch_arguments, make_buffer

TRIAL = Trial.of(BY_NAME["two_ranks"])


@pytest.fixture
def buffer_class(monkeypatch: pytest.MonkeyPatch) -> type[deep_ep.Buffer]:
    """Return a subclass with its own settings, because `set_num_sms` sets a class attribute."""

    class Own(deep_ep.Buffer):
        pass

    return Own


@pytest.mark.once
@pytest.mark.parametrize(
    ("ranks", "dispatch", "combine"),
    [
        (2, (24, 256, 6, 128), (10, 256, 6, 128)),
        (4, (6, 256, 6, 128), (9, 256, 6, 128)),
        (8, (6, 256, 6, 128), (4, 256, 6, 128)),
        (16, (36, 288, 20, 128), (4, 288, 12, 128)),
        (24, (32, 288, 8, 128), (1, 288, 8, 128)),
        (64, (32, 288, 8, 128), (1, 288, 8, 128)),
        (160, (28, 720, 12, 128), (2, 720, 8, 128)),
        (1, (24, 256, 6, 128), (10, 256, 6, 128)),  # V1 has no default for these
        (6, (6, 256, 6, 128), (4, 256, 6, 128)),
    ],
)
def test_default_configs(ranks: int, dispatch: tuple[int, ...], combine: tuple[int, ...]) -> None:
    for get, expected in ((deep_ep.Buffer.get_dispatch_config, dispatch), (deep_ep.Buffer.get_combine_config, combine)):
        # Config rounds the last one up to a multiple of the send size.
        *others, send, receive = expected
        assert tuple(vars(get(ranks)).values()) == (20, *others, send, -(-receive // send) * send)


@pytest.mark.once
def test_size_hints() -> None:
    """The expected values were worked out by hand from V1's formulas."""
    of_8, of_16 = (deep_ep.Buffer.get_dispatch_config(ranks) for ranks in (8, 16))
    assert of_8.get_nvl_buffer_size_hint(2 * 7168, 8) == 335_709_824
    assert of_8.get_rdma_buffer_size_hint(2 * 7168, 8) == 0
    assert of_16.get_rdma_buffer_size_hint(2 * 7168, 16) == 91_887_744


@pytest.mark.once
@pytest.mark.parametrize("name", ["num_max_dispatch_tokens_per_rank", "hidden", "num_ranks", "num_experts"])
@pytest.mark.parametrize("value", [0, -1, "128", None, 7168.0])
def test_size_hint_of_bad_arguments(name: str, value: Any) -> None:
    good = {"num_max_dispatch_tokens_per_rank": 128, "hidden": 7168, "num_ranks": 8, "num_experts": 288}
    with pytest.raises((ValueError, TypeError), match=f"{name}={value!r}: expected"):
        deep_ep.Buffer.get_low_latency_rdma_size_hint(**{**good, name: value})


@pytest.mark.once
def test_number_of_sms(buffer_class: type[deep_ep.Buffer]) -> None:
    assert deep_ep.Buffer.num_sms == buffer_class.num_sms == 20
    buffer_class.set_num_sms(12)
    assert buffer_class.num_sms == buffer_class.get_dispatch_config(8).num_sms == 12
    assert buffer_class.get_combine_config(8).num_sms == 12
    for odd in (7, 0, -2, "12"):
        with pytest.raises((ValueError, TypeError), match="new_num_sms"):
            buffer_class.set_num_sms(odd)
    assert buffer_class.num_sms == 12 and deep_ep.Buffer.num_sms == 20


def test_number_of_sms_is_that_of_the_kernels(
    buffer_class: type[deep_ep.Buffer], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int | None] = []
    check = operations.blocks_of

    def spy(value: Any) -> int | None:
        seen.append(check(value))
        return seen[-1]

    monkeypatch.setattr(operations, "blocks_of", spy)

    def on_each_rank(group: Any, blocks: int | None) -> None:
        buffer = buffer_class(group, num_nvl_bytes=1 << 20)
        results = buffer.dispatch(**dispatch_arguments(TRIAL.work, buffer.rank))
        TRIAL.check_dispatch(buffer.rank, results)
        TRIAL.check_combine(buffer.rank, TRIAL.combine(buffer, buffer.rank, results[4]))
        buffer.dispatch(TRIAL.work.x[buffer.rank], handle=results[4], config=deep_ep.Config(3))
        assert set(seen) == {blocks, 3}, seen
        group.barrier()

    run_ranks(2, on_each_rank, None, seed=1)
    seen.clear()
    buffer_class.set_num_sms(4)
    run_ranks(2, on_each_rank, 4, seed=1)


@pytest.mark.once
@pytest.mark.parametrize("ranks", [2, 4, pytest.param(8, marks=pytest.mark.thorough)])
def test_buffers_of_the_size_v1_hints_at(ranks: int) -> None:
    """As V1's callers create them: DeepSeek-V3's hidden size, the default Configs, no other arguments."""
    case = Case("v1_sized", ranks, tokens=24, hidden=7168, topk=8, experts=8 * ranks)
    trial = Trial.of(case)

    def on_each_rank(group: Any) -> None:
        num_nvl_bytes = num_rdma_bytes = 0
        configs = deep_ep.Buffer.get_dispatch_config(group.size()), deep_ep.Buffer.get_combine_config(group.size())
        for config in configs:
            num_nvl_bytes = max(config.get_nvl_buffer_size_hint(2 * case.hidden, group.size()), num_nvl_bytes)
            num_rdma_bytes = max(config.get_rdma_buffer_size_hint(2 * case.hidden, group.size()), num_rdma_bytes)
        buffer = deep_ep.Buffer(group, num_nvl_bytes, num_rdma_bytes)
        results = buffer.dispatch(**dispatch_arguments(trial.work, buffer.rank, config=configs[0]))
        trial.check_dispatch(buffer.rank, results)
        trial.check_combine(buffer.rank, trial.combine(buffer, buffer.rank, results[4], config=configs[1]))

    run_ranks(ranks, on_each_rank, seed=1)


def test_names_for_several_nodes() -> None:
    case = replace(BY_NAME["uniform"], ranks_per_node=2)
    trial = Trial.of(case)

    def on_each_rank(group: Any) -> None:
        buffer = make_buffer(group, case, "ibgda")
        rank = buffer.rank
        results = buffer.internode_dispatch(**dispatch_arguments(trial.work, rank, num_tokens_per_rdma_rank=None))
        trial.check_dispatch(rank, results)
        trial.check_cached(rank, buffer.internode_dispatch(trial.work.x[rank], results[4]))
        given = dispatch_arguments(trial.work, rank)
        names = ("num_tokens_per_rank", "is_token_in_rank", "num_tokens_per_expert", "topk_idx", "topk_weights")
        per_rank, in_rank, per_expert, idx, weights = (given[name] for name in names)
        config = deep_ep.Config(num_sms=2)
        # In V1's order, the Config follows the alignment.
        by_place = (
            given["x"],
            None,
            per_rank,
            None,
            in_rank,
            per_expert,
            idx,
            weights,
            trial.case.expert_alignment,
            config,
        )
        trial.check_dispatch(rank, buffer.internode_dispatch(*by_place))
        expert = trial.expert
        combined = buffer.internode_combine(expert.x[rank], results[4], topk_weights=expert.topk_weights[rank])
        trial.check_combine(rank, combined)

    run_ranks(case.ranks, on_each_rank, seed=1)


def test_attributes_that_callers_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVSHMEM_QP_DEPTH", "512")

    def on_each_rank(group: Any) -> None:
        buffer = deep_ep.Buffer(group, 1 << 20, explicitly_destroy=True)
        assert (buffer.group, buffer.group_size, buffer.rank) == (group, 2, group.rank())
        assert (buffer.num_nvl_bytes, buffer.num_rdma_bytes) == (1 << 20, 0)
        assert buffer.explicitly_destroy and not buffer.low_latency_mode and not buffer.enable_shrink
        assert buffer.nvshmem_qp_depth == 512 and buffer.runtime is not None
        buffer.destroy()
        assert buffer.runtime is None

    run_ranks(2, on_each_rank, seed=1)


@pytest.mark.parametrize("low_latency_mode", [False, True, 1])
def test_low_latency_mode_makes_normal_calls(low_latency_mode: Any) -> None:
    def on_each_rank(group: Any) -> None:
        size = deep_ep.Buffer.get_low_latency_rdma_size_hint(128, 64, group.size(), 8)
        buffer = deep_ep.Buffer(group, 1 << 20, size, low_latency_mode, 4)
        assert buffer.low_latency_mode is bool(low_latency_mode) and buffer.num_rdma_bytes == size
        for _ in range(2):
            results = buffer.dispatch(**dispatch_arguments(TRIAL.work, buffer.rank))
            TRIAL.check_dispatch(buffer.rank, results)
            if buffer.rank == 0:  # whichever rank cleans, and when
                assert buffer.clean_low_latency_buffer(128, 64, num_experts=8) is None
            TRIAL.check_combine(buffer.rank, TRIAL.combine(buffer, buffer.rank, results[4]))

    run_ranks(2, on_each_rank, seed=1)


@pytest.mark.parametrize("name", ["num_max_dispatch_tokens_per_rank", "hidden", "num_experts"])
@pytest.mark.parametrize("value", [0, -1, "128", None, 7168.0])
def test_cleaning_of_bad_arguments(name: str, value: Any) -> None:
    good = {"num_max_dispatch_tokens_per_rank": 128, "hidden": 7168, "num_experts": 288}

    def on_each_rank(group: Any) -> None:
        buffer = deep_ep.Buffer(group, 1 << 16)
        with pytest.raises((ValueError, TypeError), match=f"{name}={value!r}: expected"):
            buffer.clean_low_latency_buffer(**{**good, name: value})
        buffer.destroy()
        with pytest.raises(deep_ep.DeepEPError, match="destroyed"):
            buffer.clean_low_latency_buffer(**good)

    run_ranks(1, on_each_rank, seed=1)


class Communicator:
    """An mpi4py communicator, as far as a Buffer uses it."""

    def __init__(self, group: Any) -> None:
        self.Get_rank, self.Get_size, self.allgather = group.rank, group.size, group.all_gather_object


def test_arguments_by_position() -> None:
    def on_each_rank(group: Any) -> None:
        first = (group, 1 << 16, 0, False, 24, True, False)
        communicator = Communicator(group)
        #  use_fabric, explicitly_destroy, enable_shrink, comm; and explicitly_destroy, enable_shrink, comm
        for rest, destroy in (
            ((), False),
            ((True,), False),
            ((True, False), False),
            ((False, True), True),
            ((1, 1, 0), True),
            ((True, False, False), False),
            ((True, True, False, None), True),
            ((False, False, False, communicator), False),
            ((True, False, None), True),
            ((False, False, None), False),
            ((True, False, communicator), True),
        ):
            buffer = deep_ep.Buffer(*first, *rest)
            assert (buffer.explicitly_destroy, buffer.enable_shrink, buffer.group) == (destroy, False, group), rest
        for rest in ((False, False, True), (False, False, True, None), (False, True, None)):
            with pytest.raises(ValueError, match="enable_shrink=True"):
                deep_ep.Buffer(*first, *rest)

    run_ranks(1, on_each_rank, seed=1)


def test_communicator_by_position() -> None:
    def on_each_rank(group: Any) -> None:
        communicator = Communicator(group)
        for rest in ((False, True, False, communicator), (True, False, communicator)):
            buffer = deep_ep.Buffer(None, 1 << 16, 0, False, 24, True, False, *rest)
            assert buffer.group is communicator and buffer.explicitly_destroy

    run_ranks(1, on_each_rank, seed=1)


@pytest.mark.parametrize("previous", ["EventHandle", "EventOverlap"])
@pytest.mark.parametrize("on", [True, 1])
def test_events_and_flags_as_callers_write_them(previous: str, on: Any) -> None:
    """V2's callers pass the event itself, and integers as flags."""

    def on_each_rank(group: Any) -> None:
        buffer = make_buffer(group, TRIAL.case, "peer")
        rank, work = buffer.rank, TRIAL.work

        def options() -> dict[str, Any]:
            event: Any = deep_ep.EventHandle()
            event = event if previous == "EventHandle" else deep_ep.EventOverlap(event)
            return {"previous_event": event, "async_finish": on, "allocate_on_comm_stream": on}

        *_, laid_out = buffer.get_dispatch_layout(work.topk_idx[rank], work.num_experts, **options())
        laid_out.current_stream_wait()
        results = buffer.dispatch(**dispatch_arguments(work, rank, **options()))
        # The event of the dispatch: the combine waits for it, as a caller would.
        after = results[5].event if previous == "EventHandle" else results[5]
        combined = TRIAL.combine(buffer, rank, results[4], **{**options(), "previous_event": after})
        combined[2].current_stream_wait()
        TRIAL.check_dispatch(rank, results)
        TRIAL.check_combine(rank, combined)

    run_ranks(2, on_each_rank, seed=1)


@pytest.mark.parametrize("ranks_per_node", [1, 2, 4])
def test_runtime(ranks_per_node: int) -> None:
    def on_each_rank(group: Any) -> None:
        case, nodes = BY_NAME["uniform"], 4 // ranks_per_node
        assert group.size() == case.ranks == 4
        buffer = make_buffer(group, case, "ibgda", ranks_per_node=ranks_per_node)
        runtime, rank = buffer.runtime, buffer.rank
        assert runtime.is_available() is True and runtime.is_internode_available() is (nodes > 1)
        assert (runtime.get_num_rdma_ranks(), runtime.get_rdma_rank()) == (nodes, rank // ranks_per_node)
        assert (runtime.get_root_rdma_rank(True), runtime.get_root_rdma_rank(False)) == (rank % ranks_per_node, 0)
        assert runtime.get_local_device_id() == -1
        memory = runtime.get_local_buffer_tensor(torch.int32, 128, False)
        assert memory.data_ptr() == buffer.get_local_buffer_tensor(torch.int32, offset=128).data_ptr()
        assert runtime.clean_low_latency_buffer(128, 64, 8) is None
        assert runtime.arena_bytes == buffer.stats()["arena_bytes"], "names unknown to V1 are the native runtime's"
        for name in ("low_latency_dispatch", "_no_such_name"):
            assert not hasattr(runtime, name)
        with pytest.raises(RuntimeError, match="no streams"):
            runtime.get_comm_stream()
        group.barrier()
        runtime.destroy()
        assert buffer.runtime is None and not runtime.is_available() and not runtime.is_internode_available()

    run_ranks(4, on_each_rank, seed=1)


def test_local_buffer() -> None:
    def on_each_rank(group: Any) -> None:
        buffer = deep_ep.Buffer(group, 1 << 16)
        whole = buffer.get_local_buffer_tensor(torch.uint8)
        assert whole.shape == (1 << 16,)
        group.barrier()
        whole.fill_(buffer.rank + 1)
        part = buffer.get_local_buffer_tensor(torch.int16, torch.Size((3, 5)), offset=128)
        assert part.shape == (3, 5) and (part == 257 * (buffer.rank + 1)).all()
        part.zero_()
        assert whole.count_nonzero() == len(whole) - 30 and not whole[128:158].any()
        assert buffer.get_local_buffer_tensor(torch.int64, offset=8 * 8189).shape == (3,)
        group.barrier()
        # Rows go through exactly that memory.
        trial = Trial.of(BY_NAME["rounds_of_few_rows"])
        rounds = make_buffer(group, trial.case, "peer")
        before = rounds.get_local_buffer_tensor(torch.uint8).clone()
        trial.check_dispatch(rounds.rank, rounds.dispatch(**dispatch_arguments(trial.work, rounds.rank)))
        after = rounds.get_local_buffer_tensor(torch.uint8)
        assert (before != after).sum() > trial.work.x[0].nbytes // 2

    run_ranks(2, on_each_rank, seed=1)


@pytest.mark.parametrize(
    ("options", "argument"),
    [
        ({"dtype": "int8"}, "dtype='int8'"),
        ({"dtype": torch.int32, "offset": 2}, "offset=2: .*multiple of the 4"),
        ({"dtype": torch.int8, "offset": 1 << 17}, "offset=131072"),
        ({"dtype": torch.int32, "size": torch.Size((1 << 14, 2))}, "size=.*at most 16384"),
        ({"dtype": torch.int8, "use_rdma_buffer": True}, "use_rdma_buffer=True.*low_latency_mode=True"),
    ],
    ids=lambda value: None if isinstance(value, dict) else value.split("=")[0],
)
def test_local_buffer_of_bad_arguments(options: dict[str, Any], argument: str) -> None:
    def on_each_rank(group: Any) -> None:
        buffer = deep_ep.Buffer(group, 1 << 16)
        with pytest.raises((ValueError, TypeError), match=argument):
            buffer.get_local_buffer_tensor(**options)

    run_ranks(1, on_each_rank, seed=1)
