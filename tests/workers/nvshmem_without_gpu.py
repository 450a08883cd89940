"""Runs under torchrun, over NVSHMEM's own library: joins it as far as that goes without a GPU, and prints the error."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch.distributed as dist

from deep_ep_py.bootstrap.groups import make_bootstrap
from deep_ep_py.nvshmem.job import join
from deep_ep_py.nvshmem.library import NvshmemError, library


class NoContext:
    """In place of a GPU's: nothing becomes current."""

    def current(self) -> AbstractContextManager[None]:
        return nullcontext()


def main() -> None:
    dist.init_process_group("gloo")
    try:
        join(make_bootstrap(dist.group.WORLD), NoContext(), 4)
    except NvshmemError as error:
        print(f"status {library().status()}: {error}", flush=True)
    dist.barrier()


if __name__ == "__main__":
    main()
