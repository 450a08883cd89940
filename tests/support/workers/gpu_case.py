"""Named cases of either mode on a GPU, for tools that watch every access of the kernels. Ranks are threads, and launch
together.
"""

from __future__ import annotations

import argparse

import low_latency_gpu
from cases import BY_NAME
from deep_ep_py.testing import run_ranks
from gpu_ranks import on_each_rank
from harness import Trial

TIMEOUT = 60.0
"""Seconds: kernels under such tools are slow."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="+", choices=[*BY_NAME, *low_latency_gpu.BY_NAME], metavar="case")
    for name in parser.parse_args().cases:
        options = {"device": "cuda", "one_launch": True, "timeout": TIMEOUT}
        if name in BY_NAME:
            case = BY_NAME[name]
            run_ranks(case.ranks, on_each_rank, Trial.of(case).on("cuda"), **options)
        else:
            sizes = low_latency_gpu.BY_NAME[name]
            run_ranks(sizes.ranks, low_latency_gpu.on_each_rank, low_latency_gpu.Works.of(sizes), **options)
        print(name, flush=True)


if __name__ == "__main__":
    main()
