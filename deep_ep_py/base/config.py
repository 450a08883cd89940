"""Tuning parameters of a call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from deep_ep_py.base import arguments

_META_BYTES = 8 + 128 * 8 + 128 * 4 + 128 * 4
"""Bytes per row besides x in V1's size hints: source metadata, 128 expert ids, 128 weights, 128 scales."""


_MAX_RANKS = 1 << 16
"""Size hints accept more ranks than this library supports."""


def _check_sizes(hidden_bytes: int, num_ranks: int) -> None:
    arguments.integer("hidden_bytes", hidden_bytes, 1, arguments.MAX_BYTES)
    arguments.integer("num_ranks", num_ranks, 1, _MAX_RANKS)


def _align(value: int, alignment: int = 128) -> int:
    return (value + alignment - 1) // alignment * alignment


QUEUE_PAIRS = 8
"""To each peer, by default. The words of a call are spread over them, and warps that post to one queue pair wait for
each other's turns; but each takes memory on every rank."""


@dataclass(frozen=True)
class Config:
    """Tuning parameters of a dispatch or combine.

    Only `num_sms`, the number of thread blocks, has an effect. V1's chunk sizes are accepted and checked as in V1, but
    this library derives its own from the Buffer's size.

    Parameters
    ----------
    num_sms : int
        Thread blocks of the kernel, 1 to 256.
    num_max_nvl_chunked_send_tokens, num_max_nvl_chunked_recv_tokens : int
        Tokens per chunk (send) and per queue (recv) inside a node, at least 1; send < recv.
    num_max_rdma_chunked_send_tokens, num_max_rdma_chunked_recv_tokens : int
        The same between nodes; send is at most half of recv after recv is rounded up to a multiple of send.

    Raises
    ------
    TypeError, ValueError
        An argument is invalid; the message names it.
    """

    num_sms: int = 20
    num_max_nvl_chunked_send_tokens: int = 6
    num_max_nvl_chunked_recv_tokens: int = 256
    num_max_rdma_chunked_send_tokens: int = 6
    num_max_rdma_chunked_recv_tokens: int = 256

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            most = arguments.MAX_BLOCKS if name == "num_sms" else arguments.MAX_TOKENS
            arguments.integer(name, value, 1, most)
        if self.num_max_nvl_chunked_send_tokens >= self.num_max_nvl_chunked_recv_tokens:
            raise ValueError(
                f"num_max_nvl_chunked_send_tokens={self.num_max_nvl_chunked_send_tokens}: expected less than "
                f"num_max_nvl_chunked_recv_tokens={self.num_max_nvl_chunked_recv_tokens}"
            )
        send, receive = self.num_max_rdma_chunked_send_tokens, self.num_max_rdma_chunked_recv_tokens
        rounded = _align(receive, send)
        if 2 * send > rounded:
            raise ValueError(
                f"num_max_rdma_chunked_send_tokens={send}: expected at most half of "
                f"num_max_rdma_chunked_recv_tokens={receive}, rounded up to a multiple of it: {rounded}"
            )
        object.__setattr__(self, "num_max_rdma_chunked_recv_tokens", rounded)

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Return the size for `Buffer(num_nvl_bytes=)`, by V1's formula.

        Parameters
        ----------
        hidden_bytes : int
            Bytes of a token's row.
        num_ranks : int
            Number of ranks in the group.

        Returns
        -------
        int
            Bytes, a multiple of 128. Any size that holds 64 rows per source works; a larger one saves handshakes.

        Raises
        ------
        TypeError, ValueError
            An argument is invalid; the message names it.
        """
        _check_sizes(hidden_bytes, num_ranks)
        channels = max(self.num_sms // 2, 1)
        nvl_ranks, rdma_ranks = min(num_ranks, 8), max(num_ranks // 8, 1)
        row_bytes = hidden_bytes + _META_BYTES
        return _align(
            channels * nvl_ranks * ((2 * rdma_ranks + 3) * 4 + self.num_max_nvl_chunked_recv_tokens * row_bytes)
        )

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Return the size for `Buffer(num_rdma_bytes=)`, by V1's formula: 0 inside a node of 8.

        Parameters
        ----------
        hidden_bytes : int
            Bytes of a token's row.
        num_ranks : int
            Number of ranks in the group.

        Returns
        -------
        int
            Bytes, a multiple of 128.

        Raises
        ------
        TypeError, ValueError
            An argument is invalid; the message names it.
        """
        _check_sizes(hidden_bytes, num_ranks)
        if num_ranks <= 8:
            return 0
        channels, rdma_ranks = max(self.num_sms // 2, 1), max(num_ranks // 8, 1)
        row_bytes = 2 * (hidden_bytes + _META_BYTES + 16)
        return _align(channels * rdma_ranks * ((8 * 2 + 2) * 4 * 2 + self.num_max_rdma_chunked_recv_tokens * row_bytes))


def blocks_of(config: Any) -> int | None:
    """Check the argument `config` of a call and return the number of blocks it asks for; None without one."""
    if config is None:
        return None
    if not isinstance(config, Config):
        raise TypeError(f"config={arguments.describe(config)}: expected a Config")
    return arguments.integer("config.num_sms", config.num_sms, 1, arguments.MAX_BLOCKS)
