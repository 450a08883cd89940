"""Runs under torchrun: where ranks cannot proceed, all raise the reason; afterwards they can still make a Buffer."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch.distributed as dist

import deep_ep_py as deep_ep
from deep_ep_py.base.environment import FABRIC, PROVIDER, PROXY_CPUS

ODD = 1
"""The rank that gets a different setting."""


@contextmanager
def told(name: str, value: str, everywhere: bool = False) -> Iterator[None]:
    """Set a variable of the environment on one rank, or on all."""
    if everywhere or dist.get_rank() == ODD:
        os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name, None)


def refusal(fabric: list[str] | None) -> str:
    with pytest.raises(ValueError) as info:
        deep_ep.Buffer(dist.group.WORLD, 1 << 20, fabric=fabric, ranks_per_node=1)
    return str(info.value)


def main() -> None:
    dist.init_process_group("gloo")
    with told(PROVIDER, "carrier pigeons"):
        said = refusal(["peer", "proxy"])
        assert said.startswith(f"{PROVIDER}=") and "expected the same on all ranks" in said, said
    with told(PROVIDER, "carrier pigeons", everywhere=True):
        first, *table = refusal(["peer", "proxy"]).splitlines()
        assert "rank 0 does not reach rank 1 (peer: it is on another node" in first, first
        assert "proxy: DEEP_EP_PROXY_PROVIDER='carrier pigeons': expected one of efa" in first, first
        assert [line.split()[-1] for line in table[1:4]] == [".--", "-.-", "--."], table
    with told(PROXY_CPUS, "none"):
        said = refusal(["peer", "proxy"])
        assert said.startswith("" if dist.get_rank() == ODD else f"rank {ODD}: "), said
        assert f"{PROXY_CPUS}='none'" in said, said
    with told(FABRIC, "copper"):
        said = refusal(None)
        assert f"{FABRIC}='copper': expected one of" in said, said
    with deep_ep.Buffer(dist.group.WORLD, 1 << 20, fabric=["peer", "proxy"], ranks_per_node=1) as buffer:
        assert buffer._engine.topology.networks == ("proxy",)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
