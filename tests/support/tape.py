"""A stand-in for CUDA graphs of whole layers: torch's operations and this library's kernels, replayed in their order.

The stand-in for the driver captures the kernels of this library alone. A `Tape` cuts such a capture before each of
torch's operations, runs what has been captured, then the operation, and notes both. A replay runs all of it again into
the same memory. What a GPU could not capture, since the host would need a value that the GPU computes, is refused.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._library import custom_ops
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import host_waits
import pretend_gpu
from deep_ep_py.session.engine import Engine
from host_waits import HostWaitError

_VALUES = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "unique_dim", "_unique2")
"""Operations of torch whose result, or its size, the host takes from the device."""
_UNINITIALIZED = ("empty", "empty_strided", "new_empty", "new_empty_strided", "empty_like", "empty_permuted")


@dataclass
class _Step:
    """One of torch's operations, and what it returned the first time."""

    function: Any
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    results: list[torch.Tensor]

    def run_again(self) -> None:
        again = [leaf for leaf in tree_leaves(self.function(*self.arguments, **self.options)) if _is_tensor(leaf)]
        for kept, result in zip(self.results, again, strict=True):
            if kept.data_ptr() != result.data_ptr():  # otherwise it is a view, or was changed in place
                kept.copy_(result)


@dataclass
class Tape(TorchDispatchMode):
    """What one thread does in the body of `record`."""

    _steps: list[_Step | pretend_gpu.Graph] = field(default_factory=list)
    _kept: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    @contextmanager
    def record(self) -> Iterator[None]:
        """Run the body as if in a capture; raise HostWaitError where a capture would fail."""
        _recording.tape = self
        self._begin_graph()
        try:
            with self, host_waits.refused():
                yield
        finally:
            self._end_graph()
            _recording.tape = None

    def replay(self) -> None:
        """Run everything again."""
        with torch._C._AutoDispatchBelowAutograd():  # a graph has no autograd: memory is written in place
            for step in self._steps:
                step.replay() if isinstance(step, pretend_gpu.Graph) else step.run_again()

    def keep(self, *things: Any) -> None:
        """Keep what kernels use, as a graph's pool would keep its memory."""
        self._kept.append(things)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function.namespace == "deep_ep":
            with self:  # its kernels and what it asks of torch, each by itself
                return custom_ops.OPDEFS[f"deep_ep::{function._opname}"]._init_fn(*args, **kwargs)
        name = function._opname
        by_mask = name in ("index", "index_put_") and any(
            _is_tensor(one) and one.dtype in (torch.bool, torch.uint8) for one in args[1]
        )
        if name in _VALUES or by_mask:
            raise HostWaitError(f"{function} needs values on the host")
        self._end_graph()
        results = function(*args, **kwargs)
        tensors = [leaf for leaf in tree_leaves(results) if _is_tensor(leaf)]
        if name in _UNINITIALIZED:
            self.keep(tensors)
        else:
            self._steps.append(_Step(function, args, kwargs, tensors))
        self._begin_graph()
        return results

    def _begin_graph(self) -> None:
        self._graph = pretend_gpu.Graph()
        self._cut = self._graph.capture()
        self._cut.__enter__()

    def _end_graph(self) -> None:
        self._cut.__exit__(None, None, None)
        self._steps.append(self._graph)
        self._graph.replay()


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor)


_recording = threading.local()


def install() -> None:
    """Let tapes keep the tensors of this library's operations, and refuse waits that are none of torch's operations."""

    def keeping(method: Any) -> Any:
        def keeps(engine: Engine, *args: Any) -> Any:
            tape = getattr(_recording, "tape", None)
            if tape is not None:
                tape.keep(*args)
            return method(engine, *args)

        return keeps

    for name in ("opening", "hold", "launch_alone"):
        setattr(Engine, name, keeping(getattr(Engine, name)))
    host_waits.install()
