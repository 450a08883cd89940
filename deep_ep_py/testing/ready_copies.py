"""Copies between a GPU and pageable memory, made safe for ranks that are threads of one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_COPIES = frozenset(
    {
        torch.equal,
        torch.tensor,
        torch.Tensor.__bool__,
        torch.Tensor.__float__,
        torch.Tensor.__int__,
        torch.Tensor.copy_,
        torch.Tensor.cpu,
        torch.Tensor.cuda,
        torch.Tensor.item,
        torch.Tensor.to,
        torch.Tensor.tolist,
    }
)


def wait_for_stream() -> None:
    """Wait for the current stream, unless it is being captured: a capture copies nothing yet."""
    if not torch.cuda.is_current_stream_capturing():
        torch.cuda.current_stream().synchronize()


class ReadyCopies(TorchFunctionMode):
    """While active on a thread, makes torch's copies wait for the current stream before they begin.

    A copy from or to pageable memory waits inside the driver until its stream is ready, and meanwhile the driver keeps
    the lock of the GPU's context, without which no other thread of the process can launch a kernel (seen with driver
    580 on an H200). If the stream waits for a kernel of this rank, which waits for the kernel of another rank, that one
    would never be launched. Waiting for the stream holds no lock.

    Parameters
    ----------
    wait
        Waits for the current stream.
    """

    def __init__(self, wait: Callable[[], None] = wait_for_stream) -> None:
        super().__init__()
        self._wait = wait

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _COPIES:
            self._wait()
        return func(*args, **(kwargs or {}))
