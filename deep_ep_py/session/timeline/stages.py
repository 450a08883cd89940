"""The stages of a rank's kernels, as intervals by the clock of the timeline."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from deep_ep_py.base.native import C


class Stages:
    """What kernels noted about their stages.

    Parameters
    ----------
    launches
        The launches, in order.
    clocks_differ
        Whether the clock of kernels is not that of the host. The times of kernels are then moved so far that none
        begins before it was launched, and at least one begins right then.

    Attributes
    ----------
    launches : list of native.C.StagesOfLaunch
        Those whose kernels have begun.
    clocks_differ : bool
    """

    def __init__(self, launches: Sequence[C.StagesOfLaunch], clocks_differ: bool) -> None:
        self.launches: list[C.StagesOfLaunch] = []
        self.clocks_differ = clocks_differ
        leads = []
        self._times: dict[int, list[list[int]]] = {}  # by launch: of each warp of each block
        for launch in launches:
            flat, count = launch.ended_ns, len(C.STAGES)
            times = [flat[first : first + count] for first in range(0, len(flat), count)]
            begins = [of_warp[0] for of_warp in times if of_warp[0]]
            if begins:
                leads.append(launch.launched_ns - min(begins))
                self._times[len(self.launches)] = times
                self.launches.append(launch)
        self._lead = max(leads, default=0) if clocks_differ else 0

    def interval(self, number: int) -> tuple[int, int]:
        """Return when the kernel of a launch began and ended."""
        noted = [time for of_warp in self._times[number] for time in of_warp if time]
        return min(noted) + self._lead, max(noted) + self._lead

    def of(self, number: int) -> Iterator[tuple[int, int, str, int, int]]:
        """Yield the block, the warp, the name, the begin and the end of each stage of a launch."""
        warps = self.launches[number].warps
        for index, of_warp in enumerate(self._times[number]):
            begin = of_warp[0]
            noted = [(end, name) for end, name in zip(of_warp[1:], C.STAGES[1:], strict=True) if end]
            for end, name in sorted(noted, key=lambda one: one[0]):
                yield index // warps, index % warps, name, begin + self._lead, end + self._lead
                begin = end
