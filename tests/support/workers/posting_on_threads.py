"""Runs over the stand-in for the driver: the posting benchmark, with the CPU's clock."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Callable
from typing import Any

from rich.console import Console

import pretend_gpu
from deep_ep_py.tools.bench import posting


class CpuTimer:
    """A replacement for EventTimer where a kernel runs while its caller waits."""

    def time(self, launch: Callable[[], Any], stream: Any) -> tuple[Any, float]:
        del stream
        begin = time.perf_counter()
        return launch(), 1e3 * (time.perf_counter() - begin)


def main() -> None:
    pretend_gpu.install(compile_kernels=False)
    pretend_gpu.PretendGpu.comm_stream = None
    posting.EventTimer = CpuTimer  # type: ignore[assignment, misc]
    patterns = (posting.Pattern("one warp", 1, 1, 1), posting.Pattern("many warps", 2, 4, 2))
    report = posting.measure(iterations=3, requests=64, warmup=1, patterns=patterns)
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(posting.as_table(report))
    print(json.dumps({**report, "table": console.export_text()}))


if __name__ == "__main__":
    main()
