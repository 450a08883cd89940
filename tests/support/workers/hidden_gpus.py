"""Runs under torchrun, over the stand-ins for the driver and for NVML: two ranks, each of which sees its own GPU alone.
Buffers on GPUs of all kinds, with the path that joins the ranks, and what is said where only "peer" is allowed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch.distributed as dist

import deep_ep_py as deep_ep
import pretend_gpu
from cases import Case
from deep_ep_py.device import nvml
from deep_ep_py.errors import CudaError, DeepEPError
from harness import Trial, round_trip

CASE = Case("hidden", 2, 20, hidden=264, topk=4, experts=8)
NAMES = tuple(f"GPU-646f7562-6c65-203{gpu}-0000-000000000000" for gpu in (0, 1))
UNKNOWN = "cannot be asked here, so they count as apart"
FAIL, BROKEN, TO_DO = "DOUBLE_NVML_FAIL", "nvmlInit_v2=9", "let each process see both GPUs"


class Machine(NamedTuple):
    """What two GPUs are like.

    Attributes
    ----------
    path : str
        What joins their ranks.
    both, second : dict of str to str
        Variables of the stand-ins on both ranks, and on rank 1 alone.
    said : tuple of str
        Parts of the reason against "peer".
    """

    path: str
    both: dict[str, str]
    second: dict[str, str]
    said: tuple[str, ...]


MACHINES = {
    "NVLink": Machine("peer", {}, {}, ()),
    "one GPU for both": Machine("peer", {"DOUBLE_MACHINE": "1", FAIL: BROKEN}, {}, ()),
    "one GPU for both by MPS": Machine("peer", {"DOUBLE_MACHINE": "1", FAIL: BROKEN, "DOUBLE_MPS": "1"}, {}, ()),
    "PCIe": Machine("proxy", {"DOUBLE_PCIE": "1"}, {}, ("are not native", "NVML", "nvidia-smi topo -p2p a")),
    "no P2P": Machine("proxy", {"DOUBLE_APART": "1"}, {}, ("cannot map", "NVML", "nvidia-smi topo -p2p r")),
    "one direction": Machine("proxy", {"DOUBLE_ONE_WAY": "1"}, {}, ("cannot map", "NVML")),
    "MIG": Machine("proxy", {"DOUBLE_INSTANCES": "1"}, {}, ("is an instance (MIG), which has no peers",)),
    "NVML does not work": Machine("proxy", {FAIL: BROKEN}, {}, (UNKNOWN, "nvmlInit_v2: Some Error", TO_DO)),
    "NVML does not know": Machine("proxy", {FAIL: "nvmlDeviceGetP2PStatus=3"}, {}, (UNKNOWN, "GetP2PStatus", TO_DO)),
    "NVML hides them too": Machine("proxy", {"DOUBLE_NVML_HIDES": "1"}, {}, (UNKNOWN, "shows no GPU-", TO_DO)),
    "the driver of one sees both": Machine("peer", {"DOUBLE_DEVICES": "2"}, {"DOUBLE_DEVICES": "1", FAIL: BROKEN}, ()),
    "and one direction": Machine(
        "proxy",
        {"DOUBLE_DEVICES": "2", "DOUBLE_ONE_WAY": "1"},
        {"DOUBLE_DEVICES": "1", FAIL: BROKEN},
        ("cannot map each other's memory (",),
    ),
    "NVML works on one": Machine("peer", {}, {FAIL: BROKEN}, ()),
    "NVML works on one, PCIe": Machine("proxy", {"DOUBLE_PCIE": "1"}, {FAIL: BROKEN}, ("are not native",)),
    "a map fails on one": Machine(
        "proxy", {}, {"DOUBLE_MAP_REFUSED": "1"}, ("rank 1 cannot map memory of rank 0's GPU", "217")
    ),
    "nothing can be exported": Machine(
        "proxy",
        {},
        {"DOUBLE_FAIL": "cuMemExportToShareableHandle=218"},
        ("rank 1 cannot share memory of its GPU", "exporting", "218"),
    ),
    "no NVML": Machine("proxy", {"LIBRARY": "libnone.so.1"}, {}, (UNKNOWN, "libnone.so.1", TO_DO)),
}

WITH_ROWS = ("PCIe", "a map fails on one", "nothing can be exported")
"""Where the proxy's rows are checked, too, which takes longer."""


@contextmanager
def on_machine(machine: Machine, rank: int) -> Iterator[None]:
    mine: dict[str, str] = {"DOUBLE_DEVICES": "1", "DOUBLE_MACHINE": "2", "DOUBLE_FIRST_GPU": str(rank), **machine.both}
    mine |= machine.second if rank == 1 else {}
    nvml.library.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nvml, "LIBRARY", mine.pop("LIBRARY", nvml.LIBRARY))
        for name, value in mine.items():
            patch.setenv(name, value)
        yield
        dist.barrier()


def make(**options: Any) -> deep_ep.Buffer:
    return deep_ep.Buffer(dist.group.WORLD, num_nvl_bytes=1 << 20, timeout=60.0, arena_bytes=1 << 20, **options)


def check_share(device: Any, sharers: int) -> None:
    """Check that kernels of all ranks on a GPU have room on it at once, as they must under MPS."""
    whole = device.context.multiprocessors
    assert device.max_blocks == whole // sharers, (device.max_blocks, whole, sharers)


def check_abort(rank: int) -> None:
    """Check that a host's failure ends a wait of a rank whose abort word it does not reach."""
    with make(explicitly_destroy=True) as buffer:
        dist.barrier()
        begin = time.monotonic()
        if rank == 0:
            buffer.abort()
        with pytest.raises(DeepEPError, match="" if rank == 0 else "rank 0"):
            round_trip(buffer, rank, Trial.of(CASE), 2)
        assert time.monotonic() < begin + 30, "it took as long as a timeout"
        dist.barrier()


def check(machine: Machine, rank: int, has_rows: bool) -> None:
    if has_rows:
        with make() as buffer:
            assert buffer.paths[1 - rank] == machine.path, buffer.paths
            share = "DOUBLE_MPS" in machine.both
            check_share(buffer._engine.device, sharers=2 if share else 1)
            round_trip(buffer, rank, Trial.of(CASE), 2)
            if share:
                with pytest.raises(CudaError, match="at once for each of 2 ranks"):
                    round_trip(buffer, rank, Trial.of(CASE), 6)  # a GPU of the stand-in holds 8
    if machine.path == "peer":
        return
    if has_rows:
        check_abort(rank)
        with pytest.raises(ValueError, match="enable_shrink=True: expected ranks on GPUs that all use each other's"):
            make(fabric=["peer", "ibgda"], low_latency_mode=True, enable_shrink=True)
    with pytest.raises(ValueError) as info:
        make(fabric="peer")
    told = str(info.value)
    assert "rank 0 does not reach rank 1 (peer: " in told, told
    names = () if "DOUBLE_INSTANCES" in machine.both else NAMES
    for part in (*machine.said, *names, "with fabric=['peer', 'proxy'] the proxy joins them"):
        assert part in told, f"{part!r} is not in: {told}"


def main() -> None:
    logging.getLogger("deep_ep_py").setLevel(logging.ERROR)
    pretend_gpu.install(compile_kernels=False)
    dist.init_process_group("gloo")
    failed = []
    for name, machine in MACHINES.items():
        with on_machine(machine, dist.get_rank()):
            try:
                check(machine, dist.get_rank(), machine.path == "peer" or name in WITH_ROWS)
            except Exception as error:
                failed.append(f"{name}: {type(error).__name__}: {error}")
    assert not failed, "\n".join(failed)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
