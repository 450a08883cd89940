"""Copies on the threads of ranks that share a GPU wait for their stream before the driver does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from deep_ep_py.testing.ready_copies import ReadyCopies

pytestmark = pytest.mark.once

HERE = torch.ones(3)
# What torch calls "meta" has no data, but is another device without being a GPU.
THERE = torch.ones(3, device="meta")


def waits_of(call: Callable[[], Any]) -> int:
    waited: list[int] = []
    with ReadyCopies(lambda: waited.append(0)):
        try:
            call()
        except (NotImplementedError, RuntimeError):  # a tensor without data cannot be read
            assert waited
    return len(waited)


@pytest.mark.parametrize(
    "copy",
    [
        THERE.cpu,
        THERE.tolist,
        lambda: THERE.sum().item(),
        lambda: bool(THERE.all()),
        lambda: int(THERE.sum()),
        lambda: float(THERE.sum()),
        lambda: torch.equal(THERE, THERE),
        lambda: HERE.to("meta"),
        lambda: HERE.to(device=torch.device("meta"), copy=True),
        lambda: HERE.to(THERE),
        lambda: THERE.copy_(HERE),
        lambda: torch.tensor([1], device="meta"),
        lambda: torch.as_tensor([1], device="meta"),
        lambda: THERE.new_tensor([1]),
        lambda: THERE.equal(THERE),
        lambda: THERE.nonzero(),
        lambda: repr(THERE),
        lambda: THERE[torch.tensor([1])],
        lambda: THERE.__setitem__(0, HERE[0]),
        lambda: torch.tensor([THERE[0], THERE[1]]),
    ],
)
def test_a_copy_between_devices_waits(copy: Callable[[], Any]) -> None:
    assert waits_of(copy) == 1


@pytest.mark.parametrize(
    "work",
    [
        HERE.cpu,
        HERE.tolist,
        lambda: HERE.sum().item(),
        lambda: torch.equal(HERE, HERE),
        lambda: HERE.to(torch.float64),
        lambda: HERE.to("cpu", copy=True),
        lambda: HERE.clone().copy_(HERE),
        lambda: THERE.copy_(THERE),
        lambda: THERE.to(torch.float64),
        lambda: THERE + THERE,
        lambda: torch.empty(3, device="meta"),
        lambda: torch.tensor([1]),
    ],
)
def test_work_on_one_device_does_not_wait(work: Callable[[], Any]) -> None:
    """A copy inside the GPU is queued in its stream; a caller that waited would change what is measured."""
    assert waits_of(work) == 0
