"""Context managers for code that peers rely on: it completes what it begins, or the peers are notified.

These are classes, not generators under `contextmanager`: every call enters one, and setting up a generator takes longer
than everything else done here.
"""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING

import torch

from deep_ep_py.errors import brief

if TYPE_CHECKING:
    from deep_ep_py.session.engine import Engine


class TellingOthers:
    """A context that breaks the Buffer if its body raises, since peers would wait for what this rank will not do.

    Parameters
    ----------
    engine : Engine
        The engine of the Buffer.
    kind : str
        A name for the body, for the message.
    """

    __slots__ = ("_engine", "_kind")

    def __init__(self, engine: Engine, kind: str) -> None:
        self._engine, self._kind = engine, kind

    def __enter__(self) -> None:
        self._engine.check_process()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            self._tell(error)

    def _tell(self, error: BaseException) -> None:
        self._engine.break_off(f"{self._kind} raised {brief(error)}")


class Opening(TellingOthers):
    """The same for a body that launches an operation's first kernel; entering it counts the operation.

    Parameters
    ----------
    engine, kind
        As in `TellingOthers`.
    tensors : tuple of torch.Tensor or None
        What the operation's kernels read and write.
    """

    __slots__ = ("_tensors",)

    def __init__(self, engine: Engine, kind: str, tensors: tuple[torch.Tensor | None, ...]) -> None:
        super().__init__(engine, kind)
        self._tensors = tensors

    def __enter__(self) -> int:  # type: ignore[override]
        """Return the operation's number."""
        try:
            operation = self._engine.issue(self._tensors)
            self._engine.log.begin(operation, self._kind)
            return operation
        except BaseException as error:  # an interrupt: `__exit__` is not called if `__enter__` raises
            self._tell(error)
            raise
