"""Named cases on a GPU, for tools that watch every access of the kernels. Ranks are threads, and launch together."""

from __future__ import annotations

import argparse

from cases import BY_NAME
from deep_ep_py.testing import run_ranks
from gpu_ranks import on_each_rank
from harness import Trial

TIMEOUT = 60.0
"""Seconds: kernels that are watched are slow."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="+", choices=list(BY_NAME), metavar="case")
    for name in parser.parse_args().cases:
        case = BY_NAME[name]
        trial = Trial.of(case).on("cuda")
        run_ranks(case.ranks, on_each_rank, trial, device="cuda", one_launch=True, timeout=TIMEOUT)
        print(name, flush=True)


if __name__ == "__main__":
    main()
