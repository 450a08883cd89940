"""Runs over the stand-in for the driver, with DEEP_EP_STAGES=on: the kernels as compiled note their stages, and those
of a graph note none, also when it is replayed during a recording."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pretend_gpu
from cases import BY_NAME
from deep_ep_py.testing import run_ranks
from deep_ep_py.tools.trace.merge import read
from graphs import Captured
from harness import Trial, make_buffer, round_trip

CASE = BY_NAME["two_ranks"]


def on_each_rank(group: Any, folder: Path) -> set[tuple[str, str]]:
    trials = [Trial.of(CASE, seed) for seed in (1, 2)]
    with make_buffer(group, CASE, "peer", device="cuda") as buffer:
        graph = pretend_gpu.Graph()
        with buffer.trace(folder / "captured.json"):
            captured = Captured(buffer, trials, graph.capture, graph.replay)
            captured.replay(trials[0])
        with buffer.trace(folder / "called.json"):
            round_trip(buffer, buffer.rank, trials[0], blocks=2)
            captured.replay(trials[1])
        rank = buffer.rank
    captured_events, called = (
        [entry for entry in read(folder / f"{name}.rank{rank}.json")["traceEvents"] if entry["ph"] == "X"]
        for name in ("captured", "called")
    )
    assert not [entry for entry in captured_events if entry["cat"] == "stage"]
    kernels = [entry for entry in called if entry["cat"] == "kernel"]
    stages = [entry for entry in called if entry["cat"] == "stage"]
    for number, kernel in enumerate(kernels):
        own = [entry for entry in stages if entry["args"]["launch"] == number]
        assert {(entry["args"]["block"], entry["args"]["warp"]) for entry in own} >= {(0, 0), (1, 3)}
        assert kernel["ts"] <= min(entry["ts"] for entry in own)
        assert max(entry["ts"] + entry["dur"] for entry in own) <= kernel["ts"] + kernel["dur"] + 0.01
    return {(entry["args"]["kernel"], entry["name"]) for entry in stages}


def main() -> None:
    pretend_gpu.install(compile_kernels=False)
    folder = Path(sys.argv[1])
    for found in run_ranks(CASE.ranks, lambda group: on_each_rank(group, folder), device="cuda"):
        print(sorted(found))


if __name__ == "__main__":
    main()
