"""The host time of a call before its kernels may run."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist

from deep_ep_py.tools.bench.timing import summary

if TYPE_CHECKING:
    from deep_ep_py import Buffer

T = TypeVar("T")

NOTE = (
    "Host time per eager call: from entering the Buffer's method until the call's launch is handed to the native "
    "launcher, with everything that the host does in between: checking arguments, allocating outputs, ordering "
    "streams, counting the operation. The kernel itself is not included. "
    "Microseconds by the host's monotonic clock, over all ranks' calls in the chains of `pair`: as in decoding, one "
    "call follows another. With more ranks than cores the largest values include the scheduler's work."
)


class HostTimes:
    """Times the host's part of eager calls.

    Parameters
    ----------
    buffer
        The Buffer that is called.
    """

    def __init__(self, buffer: Buffer) -> None:
        self._runtime = buffer.runtime
        self._samples: dict[str, list[float]] = defaultdict(list)
        self.recording = False
        """Whether samples are kept."""

    def time(self, name: str, call: Callable[..., T], *given: Any, **options: Any) -> T:
        """Make a call, and time the host's part of it.

        Parameters
        ----------
        name
            Name of the call, for the report.
        call
            A method of the Buffer that makes one launch.
        given, options
            Its arguments.

        Returns
        -------
        object
            The result of the call.
        """
        begin = time.monotonic_ns()
        result = call(*given, **options)
        if self.recording:
            self._samples[name].append((self._runtime.launched_ns - begin) / 1e3)
        return result

    def summaries(self, group: dist.ProcessGroup) -> dict[str, dict[str, float]]:
        """Return the median, minimum and maximum microseconds of each call over all ranks' samples. Collective.

        Parameters
        ----------
        group
            The ranks; the result is the same on all of them.
        """
        gathered: list[Any] = [None] * group.size()
        dist.all_gather_object(gathered, dict(self._samples), group=group)
        return {name: summary([sample for samples in gathered for sample in samples[name]]) for name in gathered[0]}
