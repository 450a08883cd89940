"""The default number of blocks of a call: the fewest that, by measured rates, are about as fast as all of them."""

from __future__ import annotations

import json
import math
import os
import re
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

SLACK = 0.05
"""How much longer a call may take than with all blocks: the blocks that it saves are left to computation."""


@dataclass(frozen=True)
class Rates:
    """The measured throughput of the blocks of a kernel that moves rows.

    Parameters
    ----------
    per_block
        Bytes per second, read and written, of a single block.
    most
        The same for as many blocks as help: the limit of memory or links.
    startup
        Seconds that a call takes if it moves nothing.

    Raises
    ------
    ValueError
        A rate is not positive, or `startup` is negative.
    """

    per_block: float
    most: float
    startup: float

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not (math.isfinite(value) and (value > 0 or (name == "startup" and value == 0))):
                raise ValueError(f"{name}={value!r}: expected a positive number")

    def seconds(self, moved: float, blocks: int, share: int = 1) -> float:
        """Return the duration of a call: `startup + moved / min(blocks * per_block, most / share)`.

        Parameters
        ----------
        moved
            Bytes that the call reads and writes.
        blocks
            Blocks of its kernel.
        share
            Ranks that share the memory.
        """
        return self.startup + moved / min(blocks * self.per_block, self.most / share)

    def blocks_for(self, moved: float, max_blocks: int, share: int = 1) -> int:
        """Return the fewest blocks with which a call takes at most `SLACK` longer than with `max_blocks`."""
        allowed = (1 + SLACK) * self.seconds(moved, max_blocks, share) - self.startup
        needed = math.ceil(moved / (self.per_block * allowed)) if allowed > 0 else 1
        return max(1, min(max_blocks, needed))

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
            return Rates(**json.loads(text))
        except (TypeError, ValueError) as error:
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
