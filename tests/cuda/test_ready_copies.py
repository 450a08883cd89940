"""Copies on the threads of ranks that share a GPU wait for their stream before the driver does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from deep_ep_py.testing.ready_copies import ReadyCopies

pytestmark = pytest.mark.once

VALUES = torch.ones(3)


@pytest.mark.parametrize(
    ("copies", "waits"),
    [
        (VALUES.cpu, True),
        (lambda: VALUES.to("cpu", copy=True), True),
        (lambda: VALUES.clone().copy_(VALUES), True),
        (VALUES.tolist, True),
        (lambda: VALUES.sum().item(), True),
        (lambda: bool(VALUES.all()), True),
        (lambda: int(VALUES.sum()), True),
        (lambda: float(VALUES.sum()), True),
        (lambda: torch.equal(VALUES, VALUES), True),
        (lambda: torch.tensor([1]), True),
        (lambda: VALUES + VALUES, False),
        (lambda: torch.empty(3), False),
        (VALUES.clone, False),
    ],
)
def test_what_copies_waits_once(copies: Callable[[], Any], waits: bool) -> None:
    waited: list[int] = []
    with ReadyCopies(lambda: waited.append(0)):
        copies()
    assert len(waited) == waits
    copies()
    assert len(waited) == waits, "it must not outlive the ranks"
