"""Refusal of what waits for a device on the host, in one thread: the ranks of a test are threads of one process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from deep_ep_py.session.engine import Engine
from pretend_gpu import PretendGpu


class HostWaitError(AssertionError):
    """The host would wait for the device."""


_here = threading.local()


@contextmanager
def refused() -> Iterator[None]:
    """Let the calling thread raise HostWaitError where the host would wait."""
    _here.refused = True
    try:
        yield
    finally:
        _here.refused = False


def install() -> None:
    """Make `refused` work in this process."""
    for owner, name in ((Engine, "_run"), (PretendGpu, "synchronize"), (torch.Tensor, "item")):
        _watch(owner, name, lambda *_: True)
    # Numbers of the host itself: the ops keep those of their routes as int64 on the CPU.
    _watch(torch.Tensor, "tolist", lambda tensor: tensor.dtype != torch.int64)


def _watch(owner: type, name: str, waits: Callable[..., bool]) -> None:
    method = getattr(owner, name)

    def watched(*args: Any, **options: Any) -> Any:
        if getattr(_here, "refused", False) and waits(*args):
            raise HostWaitError(f"{owner.__name__}.{name} in a step that must not wait on the host")
        return method(*args, **options)

    setattr(owner, name, watched)
