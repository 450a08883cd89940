"""The part of a low-latency test that runs on each rank, on a GPU or on its stand-in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

import deep_ep_py as deep_ep
import logfmt
from low_latency import (
    BF16,
    CASTS,
    Cast,
    Sizes,
    Work,
    check_combine,
    check_dispatch,
    combine,
    make_buffer,
    round_trip,
)

BLOCKS = (1, 2, 5)
TIMEOUT = 10.0
"""Seconds: an experiment of `make gpu-lab` has time for several kernels that wait until they time out."""
ARENA_BYTES = 32 << 20
"""torch's allocator asks for 20 MiB at once for a view of one or more."""
CASES = (
    Sizes("low_latency_one_rank", 1, (5,), 8, 256, 2, 4),
    Sizes("low_latency_two_ranks", 2, (7, 3), 8, 128, 3, 4),
    Sizes("low_latency_small_rows", 2, (7, 20), 20, 16, 2, 6, torch.int32),
    Sizes("low_latency_odd_rows", 3, (5, 0, 3), 5, 640, 8, 24, torch.int32),
    Sizes("low_latency_several_units", 4, (70, 33, 0, 64), 70, 128, 4, 8),
    Sizes("low_latency_top_11", 8, tuple(range(8)), 7, 512, 11, 32),
    Sizes("low_latency_model", 8, (4, 3, 4, 4, 0, 4, 2, 4), 4, 7168, 8, 64),
)
BY_NAME = {case.name: case for case in CASES}
WATCHED = ("low_latency_one_rank", "low_latency_two_ranks", "low_latency_several_units")
"""The cases to run under tools that watch kernels: with 1, 2 and 4 ranks."""


@contextmanager
def warm_buffer(group: Any, sizes: Sizes, fabric: str = "peer", **options: Any) -> Iterator[deep_ep.Buffer]:
    """Make a Buffer whose low-latency calls have nothing left to load, on all ranks: loading and unloading may both
    wait for another rank's kernels. Only the kernels of such calls are compiled.
    """
    options = {"timeout": TIMEOUT, "arena_bytes": ARENA_BYTES, **options}
    buffer = make_buffer(group, sizes, fabric, device="cuda", **options)
    buffer._engine.prepare(2 * sizes.hidden, sizes.topk, "low_latency_dispatch", "low_latency_combine")
    group.barrier()
    yield buffer
    group.barrier()
    buffer.destroy()


def with_blocks(buffer: deep_ep.Buffer, blocks: int) -> None:
    """Launch kernels with so many blocks from now on, whatever rates were measured here."""
    buffer._engine.device.blocks_for = lambda moved: blocks


def casts_of(sizes: Sizes) -> list[Cast]:
    """Return the casts that rows of this size support."""
    return [*CASTS.values()] if sizes.hidden % 128 == 0 else [BF16]


@dataclass(frozen=True)
class Works:
    """A workload; and, where its rows support LogFMT, the same with results of all kinds and with small ones."""

    plain: Work
    logfmt: tuple[Work, ...]

    @staticmethod
    def of(sizes: Sizes, seed: int = 1) -> Works:
        plain = Work.of(sizes, seed, twice=0.1)
        return Works(plain, (logfmt.spread(plain), logfmt.small(plain)) if sizes.hidden % 128 == 0 else ())


def on_each_rank(group: Any, works: Works, fabric: str = "peer", **options: Any) -> None:
    """Check every kind of rows and of combine, with and without hooks, with several numbers of blocks."""
    work = works.plain
    with warm_buffer(group, work.sizes, fabric, **options) as buffer:
        for blocks in BLOCKS:
            with_blocks(buffer, blocks)
            for cast in casts_of(work.sizes):
                handle = round_trip(buffer, work, cast, hooks=blocks == 2)
            combine_without_copies(buffer, work, handle, hooks=blocks != 2)
            for made in works.logfmt:
                combined, _, hook = combine(buffer, made, handle, use_logfmt=True, return_recv_hook=blocks == 2)
                if hook is not None:
                    hook()
                check_combine(made, buffer.rank, combined)


def combine_without_copies(buffer: deep_ep.Buffer, work: Work, handle: Any, hooks: bool) -> None:
    """Combine results that peers read in place, checked; the `x` argument must be ignored."""
    view = buffer.get_next_low_latency_combine_buffer(handle)
    assert buffer.runtime.arena_contains(view.data_ptr(), view.nbytes), "peers cannot read it there"
    view.copy_(work.results[buffer.rank])
    elsewhere = torch.full_like(view, torch.nan)
    combined, _, hook = combine(buffer, work, handle, elsewhere, zero_copy=True, return_recv_hook=hooks)
    if hook is not None:
        hook()
    view.fill_(torch.nan)  # it belongs to the caller again
    check_combine(work, buffer.rank, combined)


class Matmul:
    """Work of the caller between the two parts of a call. Its products are exact in any order of summation.

    The constructor runs it once, so that the GPU has loaded it and it waits for no other rank's kernel later.
    """

    def __init__(self, device: torch.device, extent: int = 512, repeats: int = 4) -> None:
        random = torch.Generator().manual_seed(1)
        factors = torch.randint(-4, 5, (2, extent, extent), generator=random).float()
        self._factors, self._repeats = factors.to(device), repeats
        self._expected = factors[0] @ factors[1]
        self.check(self.run())

    def run(self) -> torch.Tensor:
        for _ in range(self._repeats):
            product = self._factors[0] @ self._factors[1]
        return product

    def check(self, product: torch.Tensor) -> None:
        assert torch.equal(product.cpu(), self._expected)


class CapturedPair:
    """A dispatch and its combine in a graph, with or without hooks, over tensors at fixed addresses.

    `capture` returns a context manager that captures; `replay` runs what was captured.
    """

    def __init__(
        self,
        buffer: deep_ep.Buffer,
        work: Work,
        cast: Cast,
        hooks: bool,
        capture: Callable[[], AbstractContextManager[Any]],
        replay: Callable[[], None],
    ) -> None:
        self._rank, self._cast, self._replay = buffer.rank, cast, replay
        self._inputs = [value.to(buffer.device, copy=True) for value in self._inputs_of(work)]
        x, topk_idx, weights, results = self._inputs
        sizes = work.sizes
        with capture():
            self._received = buffer.low_latency_dispatch(
                x, topk_idx, sizes.max_tokens, sizes.experts, return_recv_hook=hooks, **cast.options
            )
            if hooks:
                self._received[4]()
            self._combined, _, hook = buffer.low_latency_combine(
                results, topk_idx, weights, self._received[2], return_recv_hook=hooks
            )
            if hook is not None:
                hook()

    def _inputs_of(self, work: Work) -> list[torch.Tensor]:
        return [values[self._rank] for values in (work.x, work.topk_idx, work.weights, work.results)]

    def replay(self, work: Work) -> None:
        """Replay on other inputs of the same shapes, and check the results."""
        for place, value in zip(self._inputs, self._inputs_of(work), strict=True):
            place.copy_(value)
        self._replay()
        check_dispatch(work, self._rank, self._cast, self._received)
        check_combine(work, self._rank, self._combined)
