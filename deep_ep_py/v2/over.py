"""What `ElasticBuffer` has from the `Buffer` beneath it."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from deep_ep_py.buffer import Buffer

if TYPE_CHECKING:
    from typing_extensions import Self


class OverBuffer:
    """An interface over a `Buffer`, whose life, diagnostics and recovery it shares."""

    _buffer: Buffer

    @property
    def runtime(self) -> Any:
        """The native runtime, as `deep_ep_py.Buffer.runtime`; None once the Buffer is destroyed."""
        return self._buffer.runtime

    @property
    def device(self) -> torch.device:
        """Where tensors live."""
        return self._buffer.device

    @property
    def group(self) -> Any:
        """The process group; None once the Buffer is destroyed."""
        return self._buffer.group

    @property
    def paths(self) -> tuple[str, ...]:
        """How this rank reaches each rank: see `deep_ep_py.Buffer.paths`."""
        return self._buffer.paths

    def get_comm_stream(self) -> Any:
        """Return the stream on which kernels run; raise RuntimeError on a CPU, which has none."""
        return self._buffer.get_comm_stream()

    def stats(self) -> dict[str, int]:
        """Return counts of the operations of this Buffer: see `deep_ep_py.Buffer.stats`."""
        return self._buffer.stats()

    def network_counters(self) -> list[dict[str, int]]:
        """Return what this rank's software NICs have sent: see `deep_ep_py.Buffer.network_counters`."""
        return self._buffer.network_counters()

    def network_trace(self) -> list[dict[str, int]]:
        """Return every request of this rank's software NICs: see `deep_ep_py.Buffer.network_trace`."""
        return self._buffer.network_trace()

    def trace(self, path: str | os.PathLike[str]) -> AbstractContextManager[None]:
        """Record a timeline of what happens inside of the `with`: see `deep_ep_py.Buffer.trace`."""
        return self._buffer.trace(path)

    def check(self) -> None:
        """Raise the failure of an earlier operation that no call has raised yet: see `deep_ep_py.Buffer.check`."""
        self._buffer.check()

    def timeout_of(self, seconds: float) -> AbstractContextManager[None]:
        """Use another timeout for the calls that are begun in the body: see `deep_ep_py.Buffer.timeout_of`."""
        return self._buffer.timeout_of(seconds)

    def lost_ranks(self) -> list[int]:
        """Return the ranks that have ended, as far as this rank knows: see `deep_ep_py.Buffer.lost_ranks`."""
        return self._buffer.lost_ranks()

    def recover(self, mask: Any = (), timeout: float | None = None) -> None:
        """Make the Buffer usable again after a failure: see `deep_ep_py.Buffer.recover`."""
        self._buffer.recover(mask, timeout)

    def destroy(self) -> None:
        """Release everything that the Buffer holds, including the process group. Not collective; outputs stay valid."""
        self._buffer.destroy()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Destroy the Buffer; after an exception, notify the other ranks first."""
        self._buffer.__exit__(kind, value, traceback)
