"""Runs under torchrun: requests an option that the proxy does not support between processes, and prints the answer."""

from __future__ import annotations

import torch.distributed as dist

import deep_ep_py as deep_ep


def main() -> None:
    dist.init_process_group("gloo")
    try:
        deep_ep.Buffer(dist.group.WORLD, 0, 1 << 20, low_latency_mode=True, enable_shrink=True, fabric="proxy")
    except ValueError as error:
        print(error, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
