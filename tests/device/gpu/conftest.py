"""Tests on a GPU skip where there is none, unless DEEP_EP_REQUIRE_GPU says that there is one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from deep_ep_py.device.hardware_queues import provide_hardware_queues

HERE = Path(__file__).resolve().parent

provide_hardware_queues()  # tests create tensors on the GPU before they run ranks


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    no_gpu = not torch.cuda.is_available() and "DEEP_EP_REQUIRE_GPU" not in os.environ
    skip = pytest.mark.skipif(no_gpu, reason="needs a GPU and a torch that can use it")
    for item in items:
        if item.path.resolve().is_relative_to(HERE):
            item.add_marker(skip)
            item.add_marker("once")
