"""Ranks as threads that interpret the compiler's PTX of their kernels."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

import pytest

from builds import INTERPRETED
from deep_ep_py.device.jit import NvrtcUnavailableError, require_nvrtc
from deep_ep_py.device.jit.registry import Kernel, Shape
from deep_ep_py.tools.profile import interpreting
from deep_ep_py.tools.profile.device import Images
from ptx_kernels import ptx_cache

Change = Callable[[str], str]
"""A change to a kernel's text before it is read."""


@cache
def images_of(architecture: str) -> Images:
    """Return all kernels as compiled, each read once for all tests."""
    return Images(architecture, ptx_cache().get)


@contextmanager
def interpreted(architecture: str = "sm_90a", change: Change | None = None) -> Iterator[None]:
    """Let Buffers be made whose kernels are interpreted. Skips the test where NVRTC is not installed, unless the
    environment has asked for interpretation.
    """
    try:
        require_nvrtc()
    except NvrtcUnavailableError as error:
        if os.environ.get(INTERPRETED):
            raise
        pytest.skip(str(error))

    def changed(kernel: Kernel, shape: Shape, architecture: str) -> tuple[str, str]:
        text, symbol = ptx_cache().get(kernel, shape, architecture)
        return (change(text) if change is not None else text), symbol

    images = images_of(architecture) if change is None else Images(architecture, changed)
    with interpreting(images):
        yield
