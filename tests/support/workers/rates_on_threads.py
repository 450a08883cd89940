"""Runs over the stand-in for the driver: the measurement of rates, with fabricated times; then their use by Buffers."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from typing import Any

import torch
from rich.console import Console

import deep_ep_py as deep_ep
import pretend_gpu
from deep_ep_py.testing import run_ranks
from deep_ep_py.tools.bench import rates

TOKENS, ITERATIONS = 256, 2


def times() -> Iterator[float]:
    """Milliseconds of every call, in order: 10 us, and for many tokens 1 ms of work that 20 blocks can share."""
    repeats = range(ITERATIONS + 2)
    yield from (0.01 for _ in repeats)
    for blocks in (1, 2, 4, 8, 16, 32, 64, 128, 132):
        yield from (0.01 + 1 / min(blocks, 20) for _ in repeats)


class ScriptedTimer:
    """A replacement for EventTimer with fabricated times."""

    script = times()

    def time(self, launch: Callable[[], Any], stream: Any, align: Any) -> tuple[Any, float]:
        assert align is None, "one rank is alone"
        del stream
        return launch(), next(self.script)


def blocks_of_calls(group: Any) -> list[int]:
    """Return the numbers of blocks for calls of few and of many tokens, and for one with a Config."""
    buffer = deep_ep.Buffer(group, num_nvl_bytes=1 << 20, device="cuda")
    launched = []
    for tokens, config in ((1, None), (512, None), (512, deep_ep.Config(num_sms=3))):
        topk_idx = torch.zeros(tokens, 1, dtype=torch.int64)
        per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(topk_idx, 1)
        x = torch.ones(tokens, 64, dtype=torch.bfloat16)
        pending = buffer._begin_dispatch(
            x,
            num_tokens_per_rank=per_rank,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            config=config,
        )
        launched.append(pending.blocks)
        pending.finish()
    return launched


def main() -> None:
    pretend_gpu.install(compile_kernels=False)
    pretend_gpu.PretendGpu.comm_stream = None
    rates.EventTimer = ScriptedTimer  # type: ignore[assignment, misc]
    (unmeasured,) = run_ranks(1, blocks_of_calls, device="cuda")
    (report,) = run_ranks(1, rates.measure, TOKENS, 64, ITERATIONS, device="cuda")
    assert next(ScriptedTimer.script, None) is None
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(rates.as_table(report))
    # For a GPU on which one block achieves nearly the maximum rate, and then only half of it.
    ours = rates.Rates(((1, 100e9), (2, 101e9)), startup=1e-6)
    ours.save(report["file"])
    (one,) = run_ranks(1, blocks_of_calls, device="cuda")
    rates.Rates(((1, 50e9), (2, 100e9)), startup=1e-9).save(report["file"])
    (more,) = run_ranks(1, blocks_of_calls, device="cuda")
    found = {"unmeasured": unmeasured, "one": one, "more": more, "table": console.export_text()}
    print(json.dumps({**rates.as_json(report), **found, "kept": str(report["file"])}))


if __name__ == "__main__":
    main()
