"""The default number of blocks of a call: the fewest that, by measured rates, are about as fast as all of them."""

from __future__ import annotations

import bisect
import itertools
import json
import math
import os
import re
import tempfile
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

SLACK = 0.05
"""How much longer a call may take than with all blocks: the blocks that it saves are left to computation."""


@dataclass(frozen=True)
class Rates:
    """The measured throughput of a kernel that moves rows, by the number of its blocks.

    Parameters
    ----------
    points
        Numbers of blocks, increasing from 1, each with the bytes per second, read and written, that so many blocks
        move. Between two of them the throughput is taken to be linear; it never falls with more blocks.
    startup
        Seconds that a call takes if it moves nothing.

    Raises
    ------
    ValueError
        There is no point for one block, the numbers do not increase, a throughput is not positive, or `startup` is
        negative.
    """

    points: tuple[tuple[int, float], ...]
    startup: float

    def __post_init__(self) -> None:
        blocks = [count for count, _ in self.points]
        if blocks[:1] != [1] or any(a >= b for a, b in zip(blocks, blocks[1:])):
            raise ValueError(f"points={self.points!r}: expected numbers of blocks that increase from 1")
        for value in (*(rate for _, rate in self.points), self.startup):
            if not (math.isfinite(value) and (value > 0 or (value is self.startup and value == 0))):
                raise ValueError(
                    f"{'startup' if value is self.startup else 'a rate'}={value!r}: expected a positive number"
                )

    @cached_property
    def _by_blocks(self) -> list[float]:
        """The throughput with 1, 2, ... blocks, up to the largest number that was measured."""
        found = [self.points[0][1]]
        for (few, slow), (many, fast) in zip(self.points, self.points[1:]):
            found += [slow + (fast - slow) * (count - few) / (many - few) for count in range(few + 1, many + 1)]
        return list(itertools.accumulate(found, max))

    @property
    def most(self) -> float:
        """Bytes per second of as many blocks as help: the limit of memory or links."""
        return self._by_blocks[-1]

    def seconds(self, moved: float, blocks: int, share: int = 1) -> float:
        """Return the duration of a call: `startup + moved / min(throughput(blocks), most / share)`.

        Parameters
        ----------
        moved
            Bytes that the call reads and writes.
        blocks
            Blocks of its kernel.
        share
            Ranks that share the memory.
        """
        rate = self._by_blocks[min(blocks, len(self._by_blocks)) - 1]
        return self.startup + moved / min(rate, self.most / share)

    def blocks_for(self, moved: float, max_blocks: int, share: int = 1) -> int:
        """Return the fewest blocks with which a call takes at most `SLACK` longer than with `max_blocks`."""
        allowed = (1 + SLACK) * self.seconds(moved, max_blocks, share) - self.startup
        if allowed <= 0:
            return 1
        return min(max_blocks, bisect.bisect_left(self._by_blocks, moved / allowed) + 1)

    def save(self, file: Path) -> None:
        """Write the rates to a file atomically: a reader finds all of them or the previous content."""
        # For this user alone, since compiled kernels are kept there too.
        for missing in reversed([one for one in file.parents if not one.exists()]):
            missing.mkdir(mode=0o700, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=file.parent, prefix=".", suffix=".tmp", delete=False) as written:
            written.write(json.dumps(asdict(self), indent=2) + "\n")
        os.replace(written.name, file)

    @staticmethod
    def load(file: Path) -> Rates | None:
        """Read what `save` wrote; return None if there is no file.

        Raises
        ------
        ValueError
            The file holds something else.
        """
        try:
            text = file.read_text()
        except FileNotFoundError:
            return None
        try:
            found = json.loads(text)
            return Rates(tuple((int(blocks), float(rate)) for blocks, rate in found["points"]), float(found["startup"]))
        except (LookupError, TypeError, ValueError) as error:
            raise ValueError(f"{file}: expected what `python -m deep_ep_py rates` writes: {error}") from None


def rates_file(folder: Path, gpu: str, copies: str, linked: bool) -> Path:
    """Return the file in which rates are kept.

    Parameters
    ----------
    folder
        The folder of compiled kernels.
    gpu
        Name of the GPU.
    copies
        How rows are copied, "bulk" or "vector".
    linked
        Whether the ranks are several processes, each with a GPU of its own.
    """
    name = re.sub(r"\W+", "-", gpu).strip("-").lower()
    return folder / f"rates-{name}-{copies}-{'linked' if linked else 'alone'}.json"


def destinations(topk: int, ranks: int) -> float:
    """Return the mean number of ranks that a token goes to if experts are equally popular: R (1 - (1 - 1/R)^k)."""
    return ranks * (1 - (1 - 1 / ranks) ** topk)
