"""One named case on a GPU, its ranks as threads: a small program for tools that watch every access of the kernels."""

from __future__ import annotations

import argparse

from cases import BY_NAME
from deep_ep_py.testing import run_ranks
from harness import Trial
from test_gpu import on_each_rank


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("case", choices=list(BY_NAME))
    case = BY_NAME[parser.parse_args().case]
    run_ranks(case.ranks, on_each_rank, Trial.of(case).on("cuda"), device="cuda")


if __name__ == "__main__":
    main()
