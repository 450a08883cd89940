"""Tensors that bring an object along, wherever frameworks take them: the record of a handle among its elements."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.dlpack import from_dlpack, to_dlpack  # type: ignore[attr-defined]


def alias_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor over the same memory with a storage of its own: if that is moved or freed, this one is not."""
    alias: torch.Tensor = from_dlpack(to_dlpack(tensor))
    return alias


def carrying(name: str, record: Any, tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor over the same memory whose storage refers to a record, which may hold the given tensor.

    The storage is a new one, of which neither the record nor the session knows. Otherwise these would refer to
    themselves through a storage, which Python's garbage collector does not look into.
    """
    alias = alias_of(tensor)
    setattr(alias.untyped_storage(), name, record)
    return alias


def carried(name: str, element: Any) -> Any:
    """Return the record that an object's storage refers to; None if it has none.

    All tensors that share the storage bring the record along, such as those that autograd returns for saved ones.
    Copies do not, nor does a later tensor at the same address.
    """
    if not isinstance(element, torch.Tensor):
        return None
    try:
        return getattr(element.untyped_storage(), name, None)
    except RuntimeError:  # a tensor without a storage, such as a sparse one
        return None
