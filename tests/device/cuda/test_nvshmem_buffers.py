"""Buffers whose heaps are in NVSHMEM's symmetric heap and whose kernels post to its queue pairs, over stand-ins for its
host library and for the driver.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import deep_ep_py as deep_ep
from builds import in_long
from deep_ep_py.base.native import C
from deep_ep_py.testing import run_ranks
from launches import of_ranks
from nvshmem_runs import Nvshmem

pytestmark = [
    pytest.mark.once,
    pytest.mark.skipif(importlib.util.find_spec("nvshmem") is None, reason="no nvshmem4py (`make venv` installs it)"),
]

SHARED, OWN = "3.4.5", "3.8.0"
"""The release whose queue pairs are shared, and the newest, which creates others."""
PCI_ATOMICS = {
    "NVSHMEM_DOUBLE_PCI_ATOMICS": "1",
    # Rows take long enough for kernels to see a signal first.
    "NVSHMEM_DOUBLE_NIC_MTU": "64",
    "NVSHMEM_DOUBLE_NIC_MAX_DELAY": "1000",
}


@pytest.mark.parametrize(
    ("version", "ranks", "per_node", "options"),
    [
        pytest.param(SHARED, 4, (1, 2, 4), ("--foreign",), marks=pytest.mark.thorough),
        (OWN, 4, (1, 2), ("--foreign",)),
        pytest.param(OWN, 8, (4,), (), marks=pytest.mark.thorough),
        in_long(SHARED, 8, (1, 2, 4), ("--foreign",)),
        in_long(OWN, 2, (1, 2), ("--foreign",)),
        in_long("3.5.21", 4, (1, 2), ("--foreign",)),
        in_long("3.6.5", 4, (1, 2), ("--foreign",)),
        in_long("3.7.2", 4, (1, 2), ("--foreign",)),
    ],
)
def test_both_modes(
    nvshmem: Nvshmem, version: str, ranks: int, per_node: tuple[int, ...], options: tuple[str, ...]
) -> None:
    nodes = [f"--ranks-per-node={count}" for count in per_node]
    done = nvshmem.run("nvshmem_buffers.py", ranks, *nodes, *options, version=version)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(("version", "nics"), [(SHARED, 2), in_long(OWN, 2)])
@pytest.mark.thorough
def test_several_nics_and_small_rings(nvshmem: Nvshmem, version: str, nics: int) -> None:
    """Key chunks that end within the heap, full rings, data that overtakes data."""
    done = nvshmem.run(
        "nvshmem_buffers.py",
        4,
        "--ranks-per-node=2",
        "--foreign",
        version=version,
        NVSHMEM_DOUBLE_NICS=str(nics),
        NVSHMEM_QP_DEPTH="128",
        NVSHMEM_DOUBLE_CHUNK_LOG2="16",
        NVSHMEM_DOUBLE_NIC_RELAXED="1",
        NVSHMEM_DOUBLE_NIC_MTU="64",
        NVSHMEM_DOUBLE_NIC_MAX_DELAY="3",
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("case", "ranks", "version", "environment"),
    [
        ("ibgda_off", 2, SHARED, {"NVSHMEM_IB_ENABLE_IBGDA": "0"}),
        ("ibgda_off", 2, OWN, {"NVSHMEM_IB_ENABLE_IBGDA": "0"}),
        ("cpu_doorbells", 2, SHARED, {"NVSHMEM_DOUBLE_CPU_DOORBELLS": "1"}),
        ("no_loads_and_stores", 2, SHARED, {"NVSHMEM_DISABLE_P2P": "1"}),
        ("heap_too_small", 2, OWN, {"NVSHMEM_SYMMETRIC_SIZE": "1M"}),
        ("initialisation_fails", 2, OWN, {"NVSHMEM_DOUBLE_FAIL": "nvshmemx_hostlib_init_attr=7"}),
        ("states_are_not_filled_in", 2, OWN, {"NVSHMEM_DOUBLE_FAIL": "nvshmemx_cumodule_init=7"}),
        ("interrupted_while_states_are_filled_in", 2, OWN, {}),
        ("no_queue_pairs_of_ones_own", 2, SHARED, {}),
        ("unknown_version", 2, OWN, {}),
        ("rows_do_not_wait_for_writes", 2, OWN, {"DOUBLE_NO_ORDERING": "1"}),
        ("atomics_that_pass_data", 2, OWN, PCI_ATOMICS),
        ("joined_with_relaxed_ordering", 2, SHARED, {}),
        ("a_queue_pair_that_fails", 2, SHARED, {"NVSHMEM_DOUBLE_FAULT": "0,1,9,21"}),
        in_long("a_queue_pair_that_fails", 2, OWN, {"NVSHMEM_DOUBLE_FAULT": "0,1,9,21"}),
        ("wrong_arguments", 2, OWN, {}),
        in_long("memory_is_taken_again", 2, SHARED, {}),
        ("memory_is_taken_again", 2, OWN, {}),
        ("memory_of_a_failed_buffer_is_not", 2, OWN, {}),
        ("memory_of_one_that_could_not_be_made_is", 2, OWN, {}),
        ("queue_pairs_differ", 2, SHARED, {}),
        ("no_memory_on_one", 2, OWN, {}),
        ("reserved_differently", 4, OWN, {}),
        ("allocated_in_another_order", 2, OWN, {}),
        ("joined", 3, SHARED, {}),
        in_long("joined", 3, OWN, {}),
        ("joined_without_a_gpu", 2, SHARED, {}),
        ("joined_with_another_gpu", 2, SHARED, {}),
        ("joined_by_some", 2, OWN, {}),
        in_long("groups_of_some", 4, SHARED, {}),
        ("groups_of_some", 4, OWN, {}),
        ("ranks_of_two_jobs", 4, OWN, {}),
        ("initialised_anew", 2, SHARED, {}),
        in_long("initialised_anew", 2, OWN, {}),
    ],
)
@pytest.mark.thorough
def test_what_nvshmem_is_like(
    nvshmem: Nvshmem, case: str, ranks: int, version: str, environment: dict[str, str]
) -> None:
    done = nvshmem.run("nvshmem_refusals.py", ranks, case, version=version, **environment)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("case", "environment"),
    [
        ("by_itself", {}),
        in_long("by_itself_beside_others", {}),
        ("not_by_itself_where_writes_are_not_ordered", {"DOUBLE_NO_ORDERING": "1"}),
        ("not_by_itself_where_a_cpu_rings", {"NVSHMEM_DOUBLE_CPU_DOORBELLS": "1"}),
        ("not_by_itself_where_it_does_not_start", {"NVSHMEM_DOUBLE_FAIL": "nvshmemx_hostlib_init_attr=7"}),
        in_long("not_by_itself_after_one_that_was_told", {}),
        in_long("not_by_itself_where_gpus_are_apart", {"DOUBLE_APART": "1", "NVSHMEM_DISABLE_P2P": "1"}),
    ],
)
def test_it_is_chosen_where_it_serves(nvshmem: Nvshmem, tmp_path: Path, case: str, environment: dict[str, str]) -> None:
    if not C.proxy_providers():
        pytest.skip("no libfabric (Debian: libfabric-dev), which is used if no fabric is chosen")
    (tmp_path / "nics" / "mlx5_0").mkdir(parents=True)
    nics = {"NICS": str(tmp_path / "nics"), "NVSHMEM_DOUBLE_PES_PER_NODE": "2", **environment}
    done = nvshmem.run("nvshmem_refusals.py", 4, case, version=OWN, **nics)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_heap_of_nvshmems_is_a_gpus() -> None:
    def on_each_rank(group: Any) -> None:
        with pytest.raises(ValueError, match="heap='nvshmem': expected device='cuda'"):
            deep_ep.Buffer(group, 1 << 20, heap="nvshmem")

    run_ranks(2, on_each_rank)


def test_the_library_is_imported_without_it() -> None:
    """Neither deep_ep_py nor a Buffer that does not ask for NVSHMEM loads nvshmem4py or NVSHMEM's library."""
    program = (
        "import sys, deep_ep_py as d; from deep_ep_py.testing import run_ranks\n"
        "run_ranks(2, lambda group: d.Buffer(group, 1 << 20).rank)\n"
        "assert not {'nvshmem', 'deep_ep_py.transport.nvshmem.library'} & {*sys.modules}\n"
        "assert 'nvshmem' not in open('/proc/self/maps').read()"
    )
    done = subprocess.run([sys.executable, "-c", program], env=of_ranks(), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
