"""Mutants of the PTX, and the workloads that must detect them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from deep_ep_py.base.native import C
from deep_ep_py.device.device import Shape as RuntimeShape
from deep_ep_py.device.jit.registry import Kernel, Shape
from deep_ep_py.tools.profile.device import Images, interpreting
from interpreted_calls import (
    NIC,
    WIDE_NIC,
    counting,
    going_on,
    going_on_with_low_latency,
    low_latency_calls,
    masking,
    normal,
    posting,
    summing_at_nodes,
)
from ptx_idioms import Idiom, Weakened, idioms_of, weakenings_of
from ptx_kernels import ptx_cache

Workload = Callable[[Iterable[int]], None]
_MAX_SCHEDULES = 40
_CPU_ALONE = "fabric/weak.h"
"""This fabric's agent runs only on a CPU, and its accesses are not reported."""
_BLOCKS = 3
"""Blocks of a kernel that moves no rows."""

WORKLOADS: dict[str, Workload] = {
    "normal, peer": lambda seeds: normal(2, seeds, fabric="peer"),
    "low latency, peer": lambda seeds: low_latency_calls(2, seeds, fabric="peer"),
    "posting": posting,
    "counting": counting,
    "normal, weak": lambda seeds: normal(2, seeds, fabric="weak"),
    "normal, ibgda": lambda seeds: normal(2, seeds, fabric="ibgda", nic=NIC),
    "low latency, ibgda": lambda seeds: low_latency_calls(2, seeds, fabric="ibgda", nic=WIDE_NIC),
    "normal, rounds": lambda seeds: normal(3, seeds, num_nvl_bytes=84 << 10, fabric="peer", arena_bytes=0),
    "normal, proxy": lambda seeds: normal(2, seeds, fabric="proxy"),
    "low latency, proxy": lambda seeds: low_latency_calls(2, seeds, fabric="proxy"),
    "normal, proxy, full rings": lambda seeds: normal(
        2, seeds, num_nvl_bytes=104 << 10, blocks=6, fabric="proxy", nic=replace(NIC, blocks=8)
    ),
    "two hops, small chunks": lambda seeds: normal(
        4, seeds, num_nvl_bytes=224 << 10, fabric="ibgda", ranks_per_node=2, nic=NIC
    ),
    "two hops": lambda seeds: normal(4, seeds, fabric="ibgda", ranks_per_node=2, nic=NIC),
    "two hops, rounds": lambda seeds: normal(
        4, seeds, num_nvl_bytes=112 << 10, fabric="ibgda", ranks_per_node=2, arena_bytes=0, nic=NIC
    ),
    "once per node": lambda seeds: low_latency_calls(
        4, seeds, fabric="ibgda", ranks_per_node=2, once_per_node=True, nic=WIDE_NIC
    ),
    "sums at nodes": lambda seeds: summing_at_nodes(4, seeds, fabric="ibgda", ranks_per_node=2, nic=WIDE_NIC),
    "going on, peer": lambda seeds: going_on(3, seeds, fabric="peer"),
    "going on, ibgda": lambda seeds: going_on(3, seeds, fabric="ibgda", nic=NIC),
    "going on, two hops": lambda seeds: going_on(4, seeds, fabric="ibgda", ranks_per_node=2, nic=NIC),
    "going on, low latency": lambda seeds: going_on_with_low_latency(3, seeds, fabric="peer"),
    "going on, low latency, ibgda": lambda seeds: going_on_with_low_latency(3, seeds, fabric="ibgda", nic=WIDE_NIC),
    "going on, proxy": lambda seeds: going_on(3, seeds, fabric="proxy"),
    "masking, peer": lambda seeds: masking(3, seeds, fabric="peer"),
    "masking, ibgda": lambda seeds: masking(3, seeds, fabric="ibgda", nic=WIDE_NIC),
}


class RecordingImages(Images):
    """Images that record their texts by kernel symbol: of each kernel, the text that was requested last."""

    def __init__(self, architecture: str) -> None:
        self.texts: dict[str, str] = {}
        self._all: dict[tuple[str, Shape], str] = {}
        super().__init__(architecture, self._record)

    def _record(self, kernel: Kernel, shape: Shape, architecture: str) -> tuple[str, str]:
        text, symbol = ptx_cache().get(kernel, shape, architecture)
        self._all[kernel.name, shape] = text
        return text, symbol

    def get(self, name: str, shape: RuntimeShape, options: C.BufferOptions | None = None) -> tuple[str, Any]:
        symbol, image = super().get(name, shape, options)
        self.texts[symbol] = self._all[name, self.shapes[name]]
        return symbol, image


class MutatedImages(Images):
    """Images in which only the kernels with the mutant's idiom are read again."""

    def __init__(self, base: RecordingImages, mutant: Weakened) -> None:
        super().__init__(base.architecture)
        self._base, self._mutant = base, mutant
        self._mutated: dict[str, tuple[str, Any]] = {}

    def get(self, name: str, shape: RuntimeShape, options: C.BufferOptions | None = None) -> tuple[str, Any]:
        symbol, image = self._base.get(name, shape, options)
        text = self._base.texts[symbol]
        if all(idiom != self._mutant.idiom for _, idiom in idioms_of(text)):
            return symbol, image
        if text not in self._mutated:
            self._mutated[text] = symbol, C.ptx.Image(self._mutant.applied(text))
        return self._mutated[text]


@dataclass
class Found:
    """The idioms that the workloads execute.

    `statements`: the PTX statement of each; `workloads`: the workloads that execute it, fastest first; `seconds`: the
    duration of each workload.
    """

    statements: dict[Idiom, str] = field(default_factory=dict)
    workloads: dict[Idiom, list[str]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    def mutants(self) -> list[Weakened]:
        """Return all mutants of these idioms."""
        return sorted(
            mutant
            for idiom in self.workloads
            if idiom.file != _CPU_ALONE
            for mutant in weakenings_of(idiom, self.statements[idiom])
        )


def look(images: RecordingImages) -> Found:
    """Run all workloads and record which idioms they execute."""
    found = Found()
    executed: dict[str, set[Idiom]] = {}
    for name, workload in WORKLOADS.items():
        C.ptx.count(True)
        with interpreting(images, blocks=_BLOCKS):
            workload((1,))
            begun = time.monotonic()
            workload((1,))
            found.seconds[name] = time.monotonic() - begun
        executed[name] = set()
        for symbol, (_, reports) in C.ptx.counted().items():
            lines, text = {one.line for one in reports}, images.texts[symbol].splitlines()
            executed[name] |= {idiom for number, idiom in idioms_of(images.texts[symbol]) if number + 1 in lines}
            for number, idiom in idioms_of(images.texts[symbol]):
                found.statements.setdefault(idiom, text[number])
    C.ptx.count(False)
    for name in sorted(WORKLOADS, key=lambda name: found.seconds[name]):
        for idiom in executed[name]:
            found.workloads.setdefault(idiom, []).append(name)
    return found


def catch(images: RecordingImages, found: Found, mutant: Weakened, seconds: float) -> str:
    """Run a mutant until a workload detects it. Returns the workload and the symptom; "" if it goes undetected.

    Each workload that executes the idiom has so many seconds: many schedules if it is short, one if it is long.
    """
    mutated = MutatedImages(images, mutant)
    for name in found.workloads[mutant.idiom]:
        for seed in range(1, 2 + min(int(seconds / found.seconds[name]), _MAX_SCHEDULES)):
            try:
                with interpreting(mutated, blocks=_BLOCKS):
                    WORKLOADS[name]((seed,))
            # Any symptom counts: a race, a wrong result, a deadlock, a timeout.
            except BaseException as error:
                if isinstance(error, KeyboardInterrupt):
                    raise
                return f"{name}, seed {seed}: {str(error).strip().splitlines()[0][:160]}"
    return ""
