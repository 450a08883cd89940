"""Whether tensors are those of an earlier call."""

from __future__ import annotations

import weakref

import torch


class Unchanged:
    """Remembers some tensors until one of them is gone or torch has written to it.

    Writes by other libraries go unnoticed. Tensors made in inference mode count no writes, and are not remembered.
    """

    def __init__(self) -> None:
        self._noted: list[tuple[weakref.ref[torch.Tensor], int]] = []

    def note(self, *tensors: torch.Tensor) -> None:
        """Remember these tensors instead of those of before."""
        counted = not any(tensor.is_inference() for tensor in tensors)
        self._noted = [(weakref.ref(tensor), tensor._version) for tensor in tensors] if counted else []

    def are(self, *tensors: torch.Tensor) -> bool:
        """Return whether these are the remembered tensors, with the same contents."""
        return len(tensors) == len(self._noted) and all(
            noted() is tensor and tensor._version == version
            for tensor, (noted, version) in zip(tensors, self._noted, strict=True)
        )
