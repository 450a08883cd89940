"""How much memory an `ElasticBuffer` shares with its peers."""

from __future__ import annotations

from dataclasses import dataclass

from deep_ep_py.base import arguments
from deep_ep_py.base.native import C

ALIGNMENT = 2 << 20
"""Of a size hint, as in V2."""
_REGIONS = 2
_CHUNK_ROWS = 64
"""Rows of a source in each chunk slot: with fewer, handshakes take longer than the rows."""
_HEADERS = 64 << 10
"""Bytes of a region for counts and headers, per source."""
_UNKNOWN_TRANSIT = 64 << 20
_SCALE_CHANNELS = 32
"""Channels per scale of 4 bytes that the hint has room for, as V2's."""


@dataclass(frozen=True)
class Settings:
    """The sizes of an MoE layer.

    Parameters
    ----------
    ranks
        Number of ranks.
    max_tokens
        Maximum number of tokens per rank, on which `bytes` depend; 0: not known.
    hidden
        Elements of a token.
    topk
        Experts per token; 0: up to 32.
    fp8
        Whether dispatch moves FP8 rows with scales; combine moves BF16 in any case.
    """

    ranks: int
    max_tokens: int
    hidden: int
    topk: int = 0
    fp8: bool = False

    def check(self, least_tokens: int = 1) -> Settings:
        """Raise a TypeError or a ValueError that names the argument unless all of them are usable."""
        arguments.integer("num_max_tokens_per_rank", self.max_tokens, least_tokens, arguments.MAX_TOKENS)
        arguments.integer("hidden", self.hidden, 1, arguments.MAX_ROW_BYTES // 2)
        arguments.integer("num_topk", self.topk, 0, arguments.MAX_TOPK)
        arguments.flag("use_fp8_dispatch", self.fp8)
        return self

    @property
    def _row_bytes(self) -> int:
        """Bytes of a received row with ids, weights and source."""
        scales = -(-self.hidden // _SCALE_CHANNELS) * 4 if self.fp8 else 0
        choices = (self.topk or arguments.MAX_TOPK) * (8 + 4)
        return self.hidden * (1 if self.fp8 else 2) + scales + choices + 8

    @property
    def transit_bytes(self) -> int:
        """Bytes for rows in transit: chunk slots for every source and every destination, in each of two regions."""
        row_bytes = 2 * self.hidden + (self.topk or arguments.MAX_TOPK) * 12 + 64
        chunks = 2 * C.two_hops.SLOTS * _CHUNK_ROWS * row_bytes
        return _REGIONS * self.ranks * (chunks + _HEADERS)

    @property
    def output_bytes(self) -> int:
        """Bytes of the largest output of a dispatch, or input of a combine, that peers access."""
        rows = self.ranks * self.max_tokens
        return rows * max(self._row_bytes, 2 * self.hidden + (self.topk or arguments.MAX_TOPK) * 4)

    @property
    def bytes(self) -> int:
        """Bytes in all, rounded up to `ALIGNMENT`."""
        return -(-(self.transit_bytes + self.output_bytes) // ALIGNMENT) * ALIGNMENT


def transit_of(num_bytes: int, settings: Settings | None) -> int:
    """Return the part of a Buffer's bytes for rows in transit; the rest is for outputs."""
    wanted = _UNKNOWN_TRANSIT if settings is None else settings.transit_bytes
    return min(wanted, num_bytes // 2) // 128 * 128


def too_small(num_bytes: int, settings: Settings | None, needed: int) -> str:
    """Return the beginning of an error about a Buffer whose rows in transit need more bytes than they have."""
    if needed <= (_UNKNOWN_TRANSIT if settings is None else settings.transit_bytes):
        return f"num_bytes={num_bytes}: expected at least {-(-2 * needed // ALIGNMENT) * ALIGNMENT}"
    given = "none" if settings is None else settings.hidden
    return f"hidden={given}: expected, in the constructor, that of the widest rows; {needed} bytes are needed"
