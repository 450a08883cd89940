"""Runs under torchrun, over NVSHMEM's own library: joins it as far as possible without a GPU, and prints the error."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext

import torch.distributed as dist

from deep_ep_py.transport.bootstrap.groups import make_bootstrap
from deep_ep_py.transport.nvshmem.job import join
from deep_ep_py.transport.nvshmem.library import NvshmemError, library


class NoContext:
    """A replacement for a GPU's context: nothing becomes current."""

    def current(self) -> AbstractContextManager[None]:
        return nullcontext()


def main() -> None:
    dist.init_process_group("gloo")
    try:
        join(make_bootstrap(dist.group.WORLD), NoContext(), 4)
    except NvshmemError as error:
        sys.stdout.write(f"status {library().status()}: {error}\n")  # one write: lines of two must not mix
        sys.stdout.flush()
    dist.barrier()


if __name__ == "__main__":
    main()
