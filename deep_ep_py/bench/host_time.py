"""What a call costs the host before its kernels may run."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist

from deep_ep_py.bench.timing import summary

if TYPE_CHECKING:
    from deep_ep_py import Buffer

T = TypeVar("T")

NOTE = (
    "Host time per eager call: from entering the Buffer's method until the call's launch is handed to the native "
    "launcher, with all that the host does in between: arguments checked, outputs made, streams ordered, the operation "
    "counted. The kernel's run is not inside. "
    "Microseconds by the host's monotonic clock, of all ranks' calls in the chains of `pair`: as in decoding, one call "
    "follows another. With more ranks than cores the largest ones include the scheduler's work."
)


class HostTimes:
    """Times the host's part of eager calls.

    Parameters
    ----------
    buffer
        Whose calls they are.
    """

    def __init__(self, buffer: Buffer) -> None:
        self._runtime = buffer.runtime
        self._samples: dict[str, list[float]] = defaultdict(list)
        self.recording = False
        """Whether samples are kept."""

    def time(self, name: str, call: Callable[..., T], *given: Any, **options: Any) -> T:
        """Make a call and time the host's part of it.

        Parameters
        ----------
        name
            Of the call, for the report.
        call
            A Buffer's method that makes one launch.
        given, options
            Its arguments.

        Returns
        -------
        object
            What the call returns.
        """
        begin = time.monotonic_ns()
        result = call(*given, **options)
        if self.recording:
            self._samples[name].append((self._runtime.launched_ns - begin) / 1e3)
        return result

    def summaries(self, group: dist.ProcessGroup) -> dict[str, dict[str, float]]:
        """Return median, least and largest microseconds of each call, over all ranks' samples; the same on every rank.

        Parameters
        ----------
        group
            The ranks; all of them ask.
        """
        gathered: list[Any] = [None] * group.size()
        dist.all_gather_object(gathered, dict(self._samples), group=group)
        return {name: summary([sample for samples in gathered for sample in samples[name]]) for name in gathered[0]}
