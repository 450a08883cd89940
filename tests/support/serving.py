"""How vLLM and SGLang call low-latency mode: which call follows which, with which arguments, on whose thread hooks run,
and what is freed or written over between a call and its hook.

Written anew from what the engines do; the code is not theirs. Experts are played by the results of a `Work`, so that
every tensor is compared with the oracle bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from low_latency import Sizes, Work

Hook = Callable[[], None]
Step = Callable[[int, Callable[[], Any]], Any]


def works_of(sizes: Sizes, layers: int, seed: int, padding: int = 0) -> list[Work]:
    """Make one for each layer. The last tokens of a rank, at most `padding`, choose no expert: engines fill a batch up
    to a size that a CUDA graph was captured for.
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
    """Have a micro-batch go on."""
    return go_on()


def take_turns(batches: Sequence[Iterator[None]], lead: int = 0, step: Step = on_this_thread) -> None:
    """Let micro-batches go on in turns, each up to its next `yield`, until all have ended.

    Parameters
    ----------
    batches
        The micro-batches.
    lead
        Turns by which the first is ahead.
    step
        Has a micro-batch, by its number, go on; may do so on a thread of its own.
    """
    ended = object()
    for _ in range(lead):
        step(0, lambda: next(batches[0], ended))
    running = list(range(len(batches)))
    while running:
        running = [batch for batch in running if step(batch, lambda batch=batch: next(batches[batch], ended)) is None]
