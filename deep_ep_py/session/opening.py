"""Bodies of `with` statements that peers rely on: what is begun there goes on, or they are told that it does not.

These are classes, not generators under `contextmanager`: every call enters one, and a generator takes longer to set up
than all that is done here.
"""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from deep_ep_py.session.engine import Engine


class TellingOthers:
    """Breaks the Buffer if the body raises: peers would wait for what this rank will not do.

    Parameters
    ----------
    engine : Engine
        Of the Buffer.
    kind : str
        What the body is, for the peers.
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
        self._engine.break_off(f"{self._kind} raised {error!r}")


class Opening(TellingOthers):
    """The same for a body that launches an operation's first kernel: the operation is counted as the body is entered.

    Parameters
    ----------
    engine, kind
        As above.
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
            return self._engine.issue(self._tensors)
        except BaseException as error:  # an interrupt: `__exit__` is not called for what happens in here
            self._tell(error)
            raise
