"""The tracks of a rank's timeline. Slices of one track must nest, so what overlaps gets further tracks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any

Entry = dict[str, Any]

_WITHIN = 1e-3  # microseconds: an arrow must begin and end inside of the slices that it joins


@dataclass
class _Slice:
    begin: int
    end: int
    name: str
    category: str
    args: Entry
    arrow: tuple[str, str] | None  # its end, "s" or "f", and its identity


@dataclass
class Track:
    """What one agent does, on as many tracks of the file as its overlapping slices need.

    Parameters
    ----------
    title
        Its name.
    order
        Tracks are sorted by it.
    """

    title: str
    order: tuple[int, ...]
    _slices: list[_Slice] = field(default_factory=list)

    def add(
        self, name: str, category: str, begin: int, end: int, args: Entry, arrow: tuple[str, str] | None = None
    ) -> None:
        """Add a slice, in nanoseconds; `arrow`: "s" for the signal at its begin or "f" for the wait that it is, and the
        identity that both ends have in common.
        """
        self._slices.append(_Slice(begin, end, name, category, args, arrow))

    def lanes(self) -> list[list[_Slice]]:
        """Distribute the slices to as few tracks as it takes for those of each to nest."""
        lanes: list[tuple[list[int], list[_Slice]]] = []  # each: the ends of the slices that enclose the next, slices
        for one in sorted(self._slices, key=lambda one: (one.begin, -one.end)):
            lane = next((lane for lane in lanes if _nests(lane[0], one)), None)
            if lane is None:
                lane = ([], [])
                lanes.append(lane)
            lane[0].append(one.end)
            lane[1].append(one)
        return [slices for _, slices in lanes]


def _nests(enclosing: list[int], one: _Slice) -> bool:
    """Return whether a slice, which begins no earlier than those before it, nests in those that have not ended."""
    while enclosing and enclosing[-1] <= one.begin:
        enclosing.pop()
    return not enclosing or one.end <= enclosing[-1]


class Tracks:
    """All tracks of a rank.

    Parameters
    ----------
    rank
        The rank, which is a process in the file.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._tracks: dict[Hashable, Track] = {}
        self._counts: dict[int, int] = defaultdict(int)

    def track(self, kind: int, key: Hashable, title: str) -> Track:
        """Return a track; those of one kind are in the order in which they appear."""
        found = self._tracks.get((kind, key))
        if found is None:
            found = self._tracks[kind, key] = Track(title, (kind, self._counts[kind]))
            self._counts[kind] += 1
        return found

    def entries(self) -> Iterator[Entry]:
        """Return all entries for the file."""
        rank, number = self._rank, 0
        yield {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}}
        yield {"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}}
        for track in sorted(self._tracks.values(), key=lambda track: track.order):
            for lane in track.lanes():
                for name, args in (
                    ("thread_name", {"name": track.title}),
                    ("thread_sort_index", {"sort_index": number}),
                ):
                    yield {"ph": "M", "name": name, "pid": rank, "tid": number, "args": args}
                for one in lane:
                    yield from self._of_slice(one, number)
                number += 1

    def _of_slice(self, one: _Slice, track: int) -> Iterator[Entry]:
        place = {"pid": self._rank, "tid": track}
        begin, end = one.begin / 1e3, one.end / 1e3
        yield {
            "ph": "X",
            "name": one.name,
            "cat": one.category,
            **place,
            "ts": begin,
            "dur": (one.end - one.begin) / 1e3,
            "args": one.args,
        }
        if one.arrow is not None:
            kind, identity = one.arrow
            arrow = {"ph": kind, "name": "signal", "cat": "signal", "id": identity, **place}
            yield arrow | ({"ts": begin} if kind == "s" else {"ts": max(begin, end - _WITHIN), "bp": "e"})
