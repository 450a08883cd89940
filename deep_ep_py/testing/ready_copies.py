"""Copies between a GPU and pageable memory, made safe for ranks that are threads of one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

# The host learns a value, or a size that depends on one.
_READS = frozenset(
    {
        torch.allclose,
        torch.equal,
        torch.is_nonzero,
        torch.masked_select,
        torch.nonzero,
        torch.unique,
        Tensor.__bool__,
        Tensor.__complex__,
        Tensor.__contains__,
        Tensor.__float__,
        Tensor.__index__,
        Tensor.__int__,
        Tensor.__repr__,
        Tensor.allclose,
        Tensor.cpu,
        Tensor.equal,
        Tensor.is_nonzero,
        Tensor.item,
        Tensor.masked_select,
        Tensor.nonzero,
        Tensor.tolist,
        Tensor.unique,
    }
)
_MAKES = frozenset({torch.as_tensor, torch.asarray, torch.tensor})
_MOVES = _MAKES | {
    Tensor.__getitem__,
    Tensor.__setitem__,
    Tensor.copy_,
    Tensor.cuda,
    Tensor.new_tensor,
    Tensor.to,
}


def wait_for_stream() -> None:
    """Wait for the current stream, unless it is being captured: a capture copies nothing yet."""
    if not torch.cuda.is_current_stream_capturing():
        torch.cuda.current_stream().synchronize()


class ReadyCopies(TorchFunctionMode):
    """While active on a thread, makes torch's copies between devices wait for the current stream before they begin.

    A copy from or to pageable memory waits inside the driver until its stream is ready, and meanwhile the driver keeps
    the lock of the GPU's context, without which no other thread of the process can launch a kernel (seen with driver
    580 on an H200). If the stream waits for a kernel of this rank, which waits for the kernel of another rank, that one
    would never be launched. Waiting for the stream holds no lock.

    It sees the calls of torch that a rank makes on its own thread by name, and not what torch calls inside of others or
    on the threads of autograd.

    Parameters
    ----------
    wait
        Waits for the current stream.
    """

    def __init__(self, wait: Callable[[], None] = wait_for_stream) -> None:
        super().__init__()
        self._wait = wait

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _copies_between_devices(func, [*args, *kwargs.values()]):
            self._wait()
        return func(*args, **kwargs)


def _copies_between_devices(func: Any, values: list[Any]) -> bool:
    """Return whether a call reads from a GPU on the host, or has arguments of several devices."""
    if func in _READS:
        return bool(_types(values) - {"cpu"})
    implied = {"cuda"} if func is Tensor.cuda else {"cpu"} if func in _MAKES or func is Tensor.new_tensor else set()
    return func in _MOVES and len(_types(values) | implied) > 1


def _types(values: list[Any]) -> set[str]:
    """Return the types of the devices that are named, or that hold tensors, among a call's arguments."""
    found = set()
    for value in values:
        if isinstance(value, (list, tuple)):
            found |= _types([one for one in value if isinstance(one, Tensor)])
        elif isinstance(value, (Tensor, torch.device)):
            found.add(value.device.type if isinstance(value, Tensor) else value.type)
        elif isinstance(value, str):
            found.add(torch.device(value).type)
    return found
