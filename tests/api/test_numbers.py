"""Numbers that callers pass: Python's and NumPy's, nothing that a GPU may hold."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch

from deep_ep_py.base import arguments

pytestmark = pytest.mark.once


@pytest.mark.parametrize("value", [7, numpy.int64(7), numpy.uint8(7), numpy.arange(8)[7]])
def test_integers(value: Any) -> None:
    found = arguments.integer("n", value, 0, 7)
    assert found == 7 and type(found) is int
    with pytest.raises(ValueError, match="n=7: expected 0 to 6"):
        arguments.integer("n", value, 0, 6)


@pytest.mark.parametrize("value", [True, 7.0, "7", None, torch.tensor(7), numpy.float32(7), numpy.arange(2), [7]])
def test_what_is_no_integer(value: Any) -> None:
    with pytest.raises(TypeError, match="n=.*: expected an int"):
        arguments.integer("n", value, 0, 7)


@pytest.mark.parametrize("value", [0.5, numpy.float32(0.5), numpy.float64(0.5)])
def test_numbers_and_seconds(value: Any) -> None:
    assert arguments.number("x", value, 0, 1) == arguments.seconds("x", value) == 0.5
    for wrong in (True, "1", None, torch.tensor(0.5)):
        with pytest.raises(TypeError, match="x=.*: expected"):
            arguments.number("x", wrong, 0, 1)
        with pytest.raises(TypeError, match="x=.*: expected seconds"):
            arguments.seconds("x", wrong)
