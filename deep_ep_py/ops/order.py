"""The order of ops in compiled code.

All ranks must execute ops in the same order, but a compiler only sees what depends on what. Of ops that depend on
nothing of each other, Inductor executes those first that need less memory by the sizes on this rank, so that ranks with
other numbers of tokens would send each other rows of different ops. Therefore each op depends, in code that Inductor
generates, on all ops before it, also on those of other Buffers. The graphs that Inductor starts from, of the forward
and of the backward with what it recomputes, have their ops in an order that does not depend on sizes.
"""

from __future__ import annotations

import functools
import logging
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

_log = logging.getLogger("deep_ep_py")


def in_order(op: Any) -> Callable[[Callable[..., Any]], None]:
    """Return a decorator for the function that tells compilers what a custom op returns.

    It is called whenever the op is traced, and thus before Inductor lowers the op. Importing Inductor takes a second,
    which a program that compiles nothing is spared. An op returns several tensors or a list: one that returns a tensor
    would be moved to where that is used, before it is lowered.
    """

    def register(shapes: Callable[..., Any]) -> None:
        @op.register_fake
        @functools.wraps(shapes)
        def _(*args: Any, **kwargs: Any) -> Any:
            _lower_in_order(op._opoverload)
            return shapes(*args, **kwargs)

    return register


_earlier: weakref.WeakKeyDictionary[Any, list[str]] = weakref.WeakKeyDictionary()
"""The outputs of the ops in each graph that Inductor is lowering."""
_changed: set[torch._ops.OpOverload] = set()
_lock = threading.Lock()


def _lower_in_order(op: torch._ops.OpOverload) -> None:
    """Have Inductor call the op as it is, as it would by itself, but behind the ops that it has lowered before."""
    with _lock:
        if op not in _changed:
            _change_lowering(op)
            _changed.add(op)


def _change_lowering(op: torch._ops.OpOverload) -> None:
    with unset_fake_temporarily():
        from torch._inductor import lowering
        from torch._inductor.ir import FallbackKernel
        from torch._inductor.virtualized import V

        try:
            from torch._library.utils import get_layout_constraint_tag
        except ImportError:
            _log.warning("torch %s may change the order of ops in compiled code; 2.13 does not", torch.__version__)
            return

    layout = lowering.tag_to_layout_constraint(get_layout_constraint_tag(op, with_default=True))
    lowering.make_fallback(op, layout_constraint=layout)
    lower = lowering.lowerings[op]

    def lower_in_order(*args: Any, **kwargs: Any) -> Any:
        graph = V.graph
        lowered = len(graph.operations)
        result = lower(*args, **kwargs)
        (kernel,) = (one for one in graph.operations[lowered:] if isinstance(one, FallbackKernel))
        earlier = _earlier.setdefault(graph, [])
        graph.additional_buffer_deps[kernel.get_operation_name()].update(earlier)  # one of them may be dropped
        earlier.append(kernel.get_name())
        return result

    lowering.lowerings[op] = lower_in_order
