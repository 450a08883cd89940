"""Measurement of the transfer rate and latency between each pair of ranks of a job."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

from deep_ep_py.buffer import Buffer

_HIDDEN = 7168
_ROW_BYTES = 2 * _HIDDEN
_ROWS = 1024
_ITERATIONS = 5

HOW_MEASURED = (
    "medians over pairs: dispatches in which all ranks at the same time send 14.7 MB, or one row, to one other rank, "
    "first within nodes, then between nodes"
)


@dataclass(frozen=True)
class Pair:
    """The measurement of one rank receiving from another, while every rank sends to one other.

    Attributes
    ----------
    source, destination : int
        The ranks.
    path : str
        The path by which the destination reaches the source.
    gb_per_s : float
        Rate of a dispatch of 14.7 MB.
    us : float
        Time of a dispatch of one row.
    """

    source: int
    destination: int
    path: str
    gb_per_s: float
    us: float

    def as_json(self) -> dict[str, Any]:
        """Return the pair for the JSON report."""
        return asdict(self)


def buffer_bytes(ranks: int) -> int:
    """Return the `num_nvl_bytes` that the measurement needs."""
    return Buffer.get_dispatch_config(ranks).get_nvl_buffer_size_hint(_ROW_BYTES, ranks)


def measure(buffer: Buffer, routes: list[str], device: torch.device) -> list[Pair]:
    """Time transfers between all pairs of ranks at the receiver; in each round, every rank sends to one other.

    In a round, either all transfers are within nodes or all are between nodes, so that no path waits for a slower one.

    Parameters
    ----------
    buffer
        The Buffer of all ranks.
    routes
        The path to each rank.
    device
        The device of the tensors.

    Returns
    -------
    list of Pair
        The pairs in which this rank is the destination; each value is the mean of 5 consecutive dispatches.
    """
    found = []
    for source, target in rounds(buffer.rank, buffer.group_size, buffer._engine.topology.ranks_per_node):
        many, one = (_seconds(buffer, target, rows, device) for rows in (_ROWS, 1))
        found.append(Pair(source, buffer.rank, routes[source], _ROWS * _ROW_BYTES / many / 1e9, one * 1e6))
    return found


def rounds(rank: int, ranks: int, ranks_per_node: int) -> Iterator[tuple[int, int]]:
    """Yield, for each round, the rank to receive from and the rank to send to; rounds within the node come first."""
    node, place = divmod(rank, ranks_per_node)
    nodes = ranks // ranks_per_node
    for far in range(nodes):
        for step in range(ranks_per_node):
            if far or step:
                source, target = (
                    (node + sign * far) % nodes * ranks_per_node + (place + sign * step) % ranks_per_node
                    for sign in (-1, 1)
                )
                yield source, target


def _seconds(buffer: Buffer, target: int, rows: int, device: torch.device) -> float:
    x = torch.zeros(rows, _HIDDEN, dtype=torch.bfloat16, device=device)
    topk_idx = torch.full((rows, 1), target, dtype=torch.int64, device=device)
    weights = torch.ones(rows, 1, device=device)
    per_rank, per_node, per_expert, in_rank, _ = buffer.get_dispatch_layout(topk_idx, buffer.group_size)

    def once() -> None:
        received = buffer.dispatch(
            x,
            topk_idx=topk_idx,
            topk_weights=weights,
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_node,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
        )
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if received[0].shape[0] != rows:
            raise RuntimeError(f"received {received[0].shape[0]} rows, expected {rows}")

    once()
    # Dispatches run one after the other. Each waits for its source, so the ranks stay in step without a barrier, at
    # which a rank that fails would leave the others waiting.
    began = time.perf_counter()
    for _ in range(_ITERATIONS):
        once()
    return (time.perf_counter() - began) / _ITERATIONS


@dataclass(frozen=True)
class Summary:
    """Summary of all pairs with the same path.

    Attributes
    ----------
    path : str
        The path.
    gb_per_s, us : float
        Medians.
    slowest, latest : Pair
        The pairs with the lowest rate, and with the longest time for a row.
    """

    path: str
    gb_per_s: float
    us: float
    slowest: Pair
    latest: Pair


def summarize(pairs: list[Pair]) -> list[Summary]:
    """Return a summary for each path."""
    summaries = []
    for path in sorted({pair.path for pair in pairs}):
        those = [pair for pair in pairs if pair.path == path]
        rate, delay = (statistics.median(getattr(pair, name) for pair in those) for name in ("gb_per_s", "us"))
        slowest, latest = min(those, key=lambda pair: pair.gb_per_s), max(those, key=lambda pair: pair.us)
        summaries.append(Summary(path, rate, delay, slowest, latest))
    return summaries
