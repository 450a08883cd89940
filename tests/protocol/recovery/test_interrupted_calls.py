"""An interrupt between two lines of a call: the memory that its kernels use stays until they have ended."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

from cases import BY_NAME
from deep_ep_py.base.native import C
from deep_ep_py.errors import DeepEPError, DeepEPTimeout
from deep_ep_py.testing import run_ranks
from harness import Trial, dispatch_arguments, make_buffer
from low_latency import Sizes, Work
from low_latency import dispatch as low_latency_dispatch
from low_latency import make_buffer as low_latency_buffer

TRIAL = Trial.of(BY_NAME["two_ranks"])


class Interrupting(dict):
    """A dict that raises an interrupt when the entry of a call is removed."""

    def __delitem__(self, key: Any) -> None:
        super().__delitem__(key)
        raise KeyboardInterrupt

    def pop(self, key: Any, *default: Any) -> Any:
        super().pop(key, *default)
        raise KeyboardInterrupt


def test_as_a_call_ends() -> None:
    def on_each_rank(group: Any) -> None:
        buffer = make_buffer(group, TRIAL.case, "peer")
        engine, arguments = buffer._engine, dispatch_arguments(TRIAL.work, buffer.rank)
        if buffer.rank == 1:
            with pytest.raises(DeepEPError, match="rank 0"):
                buffer.dispatch(**arguments)
                buffer.dispatch(**arguments)
            return
        engine._open = Interrupting()
        arguments["x"] = arguments["x"].clone()
        x = weakref.ref(arguments["x"])
        with pytest.raises(KeyboardInterrupt):
            buffer.dispatch(**arguments)
        del arguments
        gc.collect()
        assert x() is not None, "its queued kernels still read it"
        engine._open = {}

    run_ranks(2, on_each_rank)


def test_before_a_finish_has_begun() -> None:
    """The peers are not notified of an interrupt there until the begun operation is dropped."""

    def interrupt() -> None:
        raise KeyboardInterrupt

    def on_each_rank(group: Any) -> None:
        buffer = make_buffer(group, TRIAL.case, "peer")
        engine, arguments = buffer._engine, dispatch_arguments(TRIAL.work, buffer.rank)
        if buffer.rank == 1:
            with pytest.raises(DeepEPError, match="rank 0") as raised:
                buffer.dispatch(**arguments)
            assert not isinstance(raised.value, DeepEPTimeout)
            return
        pending = buffer._begin_dispatch(**arguments)
        engine.check_whole = interrupt
        with pytest.raises(KeyboardInterrupt):
            pending.finish()
        del engine.check_whole
        del pending
        gc.collect()
        with pytest.raises(DeepEPError, match="begun and dropped"):
            buffer.check()

    run_ranks(2, on_each_rank)


def test_as_a_layout_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel is queued, the caller has none of its outputs, and the Buffer is not marked as broken."""
    launch, outputs = C.normal.layout, {}

    def interrupted(runtime: Any, sizes: Any, **addresses: Any) -> None:
        launch(runtime, sizes, **addresses)
        outputs[runtime] = [addresses[name] for name in ("tokens_per_rank", "tokens_per_expert", "is_token_in_rank")]
        raise KeyboardInterrupt

    def on_each_rank(group: Any) -> None:
        buffer = make_buffer(group, TRIAL.case, "peer")
        rank = buffer.rank
        with pytest.raises(KeyboardInterrupt):
            buffer.get_dispatch_layout(TRIAL.work.topk_idx[rank], TRIAL.work.num_experts)
        gc.collect()
        mine = [torch.zeros(TRIAL.work.num_experts, dtype=torch.int32) for _ in range(8)]
        assert not {tensor.data_ptr() for tensor in mine} & set(outputs.pop(buffer._engine.runtime))
        group.barrier()
        TRIAL.check_dispatch(rank, buffer.dispatch(**dispatch_arguments(TRIAL.work, rank)))
        group.barrier()

    monkeypatch.setattr(C.normal, "layout", interrupted)
    run_ranks(2, on_each_rank, seed=3)


def test_a_buffer_dropped_after_an_interrupted_layout() -> None:
    """Its kernel may not have run yet: the Buffer waits for it before it frees the memory that it reads and writes."""

    def on_each_rank(group: Any) -> None:
        buffer, other = (make_buffer(group, TRIAL.case, "peer") for _ in range(2))
        engine, rank = buffer._engine, buffer.rank

        def interrupted(job: str, **what: Any) -> Any:
            raise KeyboardInterrupt

        engine._run = interrupted
        with pytest.raises(KeyboardInterrupt):
            buffer.get_dispatch_layout(TRIAL.work.topk_idx[rank].clone(), TRIAL.work.num_experts)
        assert engine._alone
        runtime = engine.runtime
        del engine._run  # which would keep the Buffer alive
        del buffer, engine
        gc.collect()
        assert runtime.settle(0.0), "memory was freed before the layout's kernel had ended"
        del runtime
        TRIAL.check_dispatch(rank, other.dispatch(**dispatch_arguments(TRIAL.work, rank)))
        group.barrier()

    run_ranks(2, on_each_rank, seed=3)


@pytest.mark.parametrize("hooks", [False, True])
def test_as_a_low_latency_call_ends(hooks: bool) -> None:
    """At once or while its sending half is running: the peers are notified."""
    work = Work.of(Sizes("interrupted", 2, (9, 5), 9, 64, 2, 4))

    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    def on_each_rank(group: Any) -> None:
        buffer = low_latency_buffer(group, work.sizes, "peer")
        engine = buffer._engine
        if buffer.rank == 1:
            with pytest.raises(DeepEPError, match="rank 0") as raised:
                for _ in range(3):
                    hook = low_latency_dispatch(buffer, work, return_recv_hook=hooks)[4]
                    if hook is not None:
                        hook()
            assert not isinstance(raised.value, DeepEPTimeout)
            return
        ending = "await_half" if hooks else "end_operation"
        setattr(engine, ending, interrupt)
        with pytest.raises(KeyboardInterrupt):
            low_latency_dispatch(buffer, work, return_recv_hook=hooks)
        delattr(engine, ending)
        with pytest.raises(DeepEPError, match="KeyboardInterrupt"):
            buffer.check()

    run_ranks(2, on_each_rank)
