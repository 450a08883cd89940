"""What must exist, and be kept, while kernels of V2's calls may use it."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch

from cases import BY_NAME
from deep_ep_py.device.cpu import CpuDevice
from deep_ep_py.modes.normal import layout
from deep_ep_py.session.engine import Engine
from deep_ep_py.testing import run_ranks
from elastic import ElasticTrial

pytestmark = pytest.mark.once

TRIAL = ElasticTrial.of(BY_NAME["one_rank_alone"], alignment=4)


def addresses(tensors: Any) -> set[int]:
    return {tensor.data_ptr() for tensor in tensors if isinstance(tensor, torch.Tensor)}


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "no_host_wait"])
def test_outputs_are_there_before_kernels_are_ordered_behind_the_caller(exact: bool) -> None:
    """Kernels wait for what the caller's stream has done before: a fill that is queued later could come after them."""
    events: list[Any] = []
    zeros, order = torch.zeros, CpuDevice.order_after_caller

    def filling(*args: Any, **options: Any) -> torch.Tensor:
        events.append(zeros(*args, **options))
        return events[-1]

    def ordering(*args: Any) -> None:
        events.append("ordered")
        order(*args)

    def on_each_rank(group: Any) -> None:
        with TRIAL.make_buffer(group, "peer") as buffer:
            with patch.object(torch, "zeros", filling), patch.object(CpuDevice, "order_after_caller", ordering):
                results = TRIAL.dispatch(buffer, 0, do_expand=True, do_cpu_sync=exact)
            fills = [at for at, one in enumerate(events) if one is results.recv_topk_weights]
            assert fills and max(fills) < len(events) - 1 - events[::-1].index("ordered")

    run_ranks(1, on_each_rank)


def test_what_the_count_writes_is_held() -> None:
    counted: list[Any] = []
    held: list[Any] = []
    count, opening = layout.launch_count, Engine.opening

    def counting(*args: Any) -> Any:
        counted.extend(count(*args))
        return tuple(counted)

    def watched(engine: Engine, kind: str, *tensors: Any) -> Any:
        held.extend(tensors)
        return opening(engine, kind, *tensors)

    def on_each_rank(group: Any) -> None:
        with TRIAL.make_buffer(group, "peer") as buffer:
            with patch.object(layout, "launch_count", counting), patch.object(Engine, "opening", watched):
                handle = TRIAL.dispatch(buffer, 0).handle
            assert addresses([*counted, handle.topk_idx, handle.num_unaligned_recv_tokens_per_expert]) <= addresses(
                held
            )

    run_ranks(1, on_each_rank)


@pytest.mark.parametrize("expanded", [False, True], ids=["rows", "expanded"])
def test_what_a_graph_keeps(expanded: bool) -> None:
    """A captured call by a handle reads tensors that only the handle holds."""
    kept: list[Any] = []
    end = Engine.end_operation

    def ending(engine: Engine, call: Any, operation: int, streams: Any, handle: Any = ()) -> Any:
        kept.append(addresses(handle))
        return end(engine, call, operation, streams, handle)

    def on_each_rank(group: Any) -> None:
        with TRIAL.make_buffer(group, "peer") as buffer:
            handle = TRIAL.dispatch(buffer, 0, do_expand=expanded).handle
            with patch.object(Engine, "end_operation", ending):
                TRIAL.combine(buffer, 0, handle)
                buffer.dispatch(TRIAL.inputs.x[0], handle=handle, do_expand=expanded)
            of_combine, of_dispatch = kept
            assert addresses([handle.topk_idx]) <= of_combine
            read = [*handle.dispatched.tensors(), *(handle.expanded.tensors() if expanded else [handle.topk_idx])]
            assert addresses(read) <= of_dispatch

    run_ranks(1, on_each_rank)


def test_a_dispatch_that_fails_after_its_count_waits_for_it() -> None:
    """The count writes to memory that nothing holds any longer."""
    waited: list[Any] = []
    order = CpuDevice.order_caller_after

    def ordering(device: CpuDevice, tensors: Any, async_finish: bool, on_comm_stream: bool) -> Any:
        waited.append(tensors)
        return order(device, tensors, async_finish, on_comm_stream)

    def on_each_rank(group: Any) -> None:
        with TRIAL.make_buffer(group, "peer") as buffer:
            ids = TRIAL.inputs.topk_idx[0]
            x = torch.zeros(len(ids), 1 << 22, dtype=torch.bfloat16)
            with patch.object(CpuDevice, "order_caller_after", ordering), pytest.raises(ValueError, match="rows of"):
                buffer.dispatch(x, ids, num_experts=TRIAL.work.num_experts)
            assert len(waited) == 1 and len(waited[0]) == 5

    run_ranks(1, on_each_rank)
