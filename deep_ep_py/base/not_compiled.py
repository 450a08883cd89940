"""Calls that `torch.compile` leaves alone."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

import torch

_Function = TypeVar("_Function", bound=Callable[..., Any])


def not_compiled(function: _Function) -> _Function:
    """Make a compiler break its graph at each call of a function, and look at nothing inside.

    The function waits for other ranks, launches kernels, and changes objects of this library. This is
    `torch.compiler.disable`, which is called late because it imports the compiler.
    """
    disabled: Callable[..., Any] | None = None

    @wraps(function)
    def called(*args: Any, **options: Any) -> Any:
        nonlocal disabled
        if sys.modules.get("torch._dynamo") is None:  # so torch.compile has not been used
            return function(*args, **options)
        if disabled is None:
            disabled = torch.compiler.disable(function)
        return disabled(*args, **options)

    # Code of its own: compilers count how often they have compiled the same code, and give up.
    result: Any = called
    result.__code__ = result.__code__.replace(co_name=function.__name__)
    return cast("_Function", result)
