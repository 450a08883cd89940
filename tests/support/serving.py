"""The way vLLM and SGLang use low-latency mode: the order of calls, their arguments, the threads that run hooks, and
the memory that is freed or overwritten between a call and its hook.

Written from scratch after the engines' behavior; the code is not theirs. The results of a `Work` stand in for the
experts, so that every tensor is compared with the oracle bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from low_latency import Sizes, Work

Hook = Callable[[], None]
Step = Callable[[int, Callable[[], Any]], Any]


def works_of(sizes: Sizes, layers: int, seed: int, padding: int = 0) -> list[Work]:
    """Make one workload for each layer. The last `padding` tokens of a rank, at most, choose no expert: engines pad
    a batch to a size for which a CUDA graph was captured.
    """
    made = []
    for layer in range(layers):
        work = Work.of(sizes, seed + layer, results=False)
        for ids in work.topk_idx:
            if padding:
                ids[-padding:] = -1
        random = torch.Generator().manual_seed(seed + layer)
        made.append(Work.on(sizes, work.x, work.topk_idx, work.weights, random))
    return made


def on_this_thread(batch: int, go_on: Callable[[], Any]) -> Any:
    """Advance a micro-batch."""
    return go_on()


def take_turns(batches: Sequence[Iterator[None]], lead: int = 0, step: Step = on_this_thread) -> None:
    """Advance micro-batches in turns, each up to its next `yield`, until all have ended.

    Parameters
    ----------
    batches
        The micro-batches.
    lead
        Turns by which the first micro-batch is ahead.
    step
        Advances a micro-batch, given by number; may do so on a separate thread.
    """
    ended = object()
    for _ in range(lead):
        step(0, lambda: next(batches[0], ended))
    running = list(range(len(batches)))
    while running:
        running = [batch for batch in running if step(batch, lambda batch=batch: next(batches[batch], ended)) is None]
