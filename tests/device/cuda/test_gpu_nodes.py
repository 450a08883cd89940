"""The benchmark on GPUs of several nodes, over the stand-ins for the driver and for NVSHMEM's host library."""

from __future__ import annotations

import importlib.util
import json
import subprocess
from typing import Any

import pytest
from click.testing import CliRunner

import pretend_torch_cuda
from builds import in_long
from deep_ep_py.base.native import C
from deep_ep_py.tools.bench import BenchConfig, CapabilityError, rates
from deep_ep_py.tools.bench.cli import command
from deep_ep_py.tools.bench.gpu_nodes import require_nodes
from deep_ep_py.tools.bench.gpu_ranks import gpu_per_rank
from deep_ep_py.tools.bench.routing import route
from nvshmem_runs import Nvshmem

pytestmark = pytest.mark.once

needs_nvshmem = pytest.mark.skipif(
    importlib.util.find_spec("nvshmem") is None, reason="no nvshmem4py (`make venv` installs it)"
)
RANKS, TOKENS, HIDDEN, TOPK, EXPERTS, ITERATIONS = 4, 16, 128, 4, 16, 2
SIZES = [f"--tokens={TOKENS}", f"--hidden={HIDDEN}", f"--topk={TOPK}", f"--experts={EXPERTS}"]
SIZES += [f"--iterations={ITERATIONS}", "--warmup=1"]
MACHINES = {"MACHINES": "2", "NVSHMEM_DOUBLE_PES_PER_NODE": "2"}
"""Ranks 0 and 1 appear to be on another machine than ranks 2 and 3, and NVSHMEM maps no memory between them."""
QUEUE_PAIRS = {"paths": ["peer", "ibgda"], "heap": "nvshmem", "through_host": 0, "provider": ""}
PROXY = {"paths": ["peer", "proxy"], "heap": "own", "through_host": 1, "provider": ""}


def run(nvshmem: Nvshmem, *options: str, ranks: int = RANKS, **environment: str) -> tuple[dict[str, Any], str]:
    """Run the benchmark on ranks with a GPU each. Returns its verified report and its output."""
    nics, file = nvshmem.folder / "nics", nvshmem.folder / "report.json"
    (nics / "mlx5_0").mkdir(parents=True)
    given = {
        "NICS": str(nics),
        "DOUBLE_MULTIPROCESSORS": "132",
        "DEEP_EP_CACHE_DIR": str(nvshmem.folder / "kernels"),
        **environment,
    }
    files = ["--no-plot", f"--json={file}"]
    arguments = ["bench", "all", "--device=cuda", *SIZES, *files, *options]
    done: subprocess.CompletedProcess[str] = nvshmem.run("gpu_per_rank.py", ranks, *arguments, version="3.8.0", **given)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(file.read_text())
    assert report["verified"] is True and report["config"]["gpus"] == ranks
    return report, " ".join(done.stdout.split())


def crossing_bytes(nodes: int, parts: int, row_bytes: int, ranks: int = RANKS) -> int:
    """Return the bytes that a rank sends to other nodes: a row per token for each of `parts` parts of the experts."""
    rows = 0
    for step in range(1, 1 + ITERATIONS):
        for rank in range(ranks):
            for chosen in route("uniform", TOKENS, TOPK, EXPERTS, 0, rank, step)[0].tolist():
                there = {expert * parts // EXPERTS for expert in chosen}
                rows += sum(part * nodes // parts != rank * nodes // ranks for part in there)
    return round(rows / ITERATIONS * row_bytes / ranks)


@needs_nvshmem
@pytest.mark.thorough
def test_two_machines(nvshmem: Nvshmem) -> None:
    """No option describes the nodes: they are torchrun's machines, and NVSHMEM's queue pairs join them by default."""
    report, printed = run(nvshmem, NVSHMEM_IB_ENABLE_IBGDA="1", **MACHINES)
    config, (size,) = report["config"], report["sizes"]
    assert config["nodes"] == 2 and config["heap"] is None
    assert config["transport"] == {**QUEUE_PAIRS, "machines": 2}
    assert set(report["checks"]) == {"dispatch", "dispatch_cached", "combine", "combine_private", "pair"}
    assert (
        "4 ranks on 4 GPUs of 2 machines, a process and a GPU each (Double), as 2 nodes with NVSHMEM's queue pairs "
        "between them, heaps in NVSHMEM's, hidden 128" in printed
    )
    assert "from one to another" in config["timing"] and "Forwarding inside a node" in config["notes"]["moved"]
    # In two-hop mode a row goes once to the other node.
    crossing = crossing_bytes(2, 2, 2 * HIDDEN)
    assert 0 < crossing <= TOKENS * 2 * HIDDEN
    assert {name: op.get("crossing_bytes") for name, op in size["ops"].items()} == {
        "layout_notify": None,
        **dict.fromkeys(("dispatch", "dispatch_cached", "combine", "combine_private"), crossing),
        "pair": 2 * crossing,
    }
    assert "crossing GB/s" in printed and "other node that it goes to" in config["notes"]["crossing"]


@needs_nvshmem
@pytest.mark.parametrize(
    ("options", "environment"),
    [
        (["--heap=nvshmem"], MACHINES),
        in_long(["--nodes=4", "--heap=nvshmem", "--dtype=fp8"], MACHINES),
        in_long(["--nodes=2", "--heap=nvshmem", "--dtype=fp8"], {}),
    ],
)
@pytest.mark.thorough
def test_low_latency_mode(nvshmem: Nvshmem, options: list[str], environment: dict[str, str]) -> None:
    report, printed = run(nvshmem, "--mode=low-latency", *options, **environment)
    assert report["config"]["transport"]["paths"][-1] == "ibgda" and report["config"]["heap"] == "nvshmem"
    assert "with NVSHMEM's queue pairs between them" in printed
    assert {"dispatch_halves", "combine_halves", "combine_zero_copy"} <= set(report["checks"])
    assert "crossing" not in report["config"]["notes"], "the Buffer chooses which rows cross there"


@needs_nvshmem
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("ranks", "options", "parts", "element"),
    [
        (2, [], 2, 2),
        in_long(4, ["--hops=1"], 4, 2),
        in_long(4, [], 2, 2),
        in_long(4, ["--dtype=fp8"], 2, 1),
        in_long(4, ["--nodes=4"], 4, 2),
    ],
)
def test_one_machine_as_several_nodes(
    nvshmem: Nvshmem, ranks: int, options: list[str], parts: int, element: int
) -> None:
    report, printed = run(nvshmem, "--nodes=2", "--heap=nvshmem", *options, ranks=ranks)
    config, ops = report["config"], report["ops"]
    nodes = config["nodes"]
    assert config["transport"] == {**QUEUE_PAIRS, "machines": 1, "paths": ["peer", "ibgda"][nodes == ranks :]}
    assert f"{ranks} GPUs, a process and a GPU each (Double), as {nodes} nodes on one machine with NVSHMEM's" in printed
    row_bytes = HIDDEN * element + (4 if element == 1 else 0)
    assert ops["dispatch"]["crossing_bytes"] == crossing_bytes(nodes, parts, row_bytes, ranks)


@needs_nvshmem
@pytest.mark.parametrize("mode", [in_long("normal"), in_long("low-latency")])
def test_one_node_in_nvshmems_heap(nvshmem: Nvshmem, mode: str) -> None:
    """Only loads and stores."""
    report, printed = run(nvshmem, f"--mode={mode}", "--heap=nvshmem")
    assert report["config"]["transport"] == {**QUEUE_PAIRS, "machines": 1, "paths": ["peer"]}
    assert "4 linked GPUs, a process and a GPU each (Double), heaps in NVSHMEM's" in printed


@pytest.mark.skipif(not C.proxy_providers(), reason="no libfabric")
@pytest.mark.parametrize(
    ("options", "environment", "expected"),
    [
        in_long(["--nodes=2", "--fabric=proxy"], {}, {**PROXY, "machines": 1}),
        in_long(["--nodes=2", "--fabric=ibgda"], {}, {**PROXY, "machines": 1, "paths": ["peer", "ibgda"]}),
        in_long([], {"MACHINES": "2"}, {**PROXY, "machines": 2}),
        in_long(["--mode=low-latency", "--heap=own"], {"MACHINES": "2"}, {**PROXY, "machines": 2}),
    ],
)
def test_through_host_memory(
    nvshmem: Nvshmem, options: list[str], environment: dict[str, str], expected: dict[str, Any]
) -> None:
    report, printed = run(nvshmem, *options, **environment)
    assert report["config"]["transport"] == expected
    joins = "software NICs" if "ibgda" in expected["paths"] else "the proxy (libfabric's best provider)"
    assert f"with {joins} through host memory between them, hidden" in printed


# --- what cannot work -------------------------------------------------------------------------------------------------


@needs_nvshmem
@pytest.mark.parametrize("fabric", [in_long("peer")])
def test_the_environment_makes_other_nodes(nvshmem: Nvshmem, fabric: str) -> None:
    arguments = ["bench", "all", "--device=cuda", *SIZES, "--no-plot", "--nodes=2", "--heap=nvshmem"]
    done = nvshmem.run("gpu_per_rank.py", 2, *arguments, version="3.8.0", DEEP_EP_FABRIC=fabric)
    assert done.returncode == 1
    said = " ".join(done.stderr.split())
    assert "--nodes is 2; expected 1, from DEEP_EP_FABRIC='peer' in the environment" in said, done.stderr


@pytest.fixture
def two_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pose as rank 1 of 4 that torchrun has started on two machines."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "test")
    for name, value in {"RANK": 1, "WORLD_SIZE": 4, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    pretend_torch_cuda.install(["a", "b"], monkeypatch.setattr)


def refusal(start: Any, *options: str) -> str:
    result = CliRunner().invoke(start, options)
    assert result.exit_code == 2, result.output
    return result.output


@pytest.mark.usefixtures("two_machines")
def test_nodes_that_machines_cannot_make(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "--nodes is 1; expected a multiple of the 2 machines" in refusal(command, "--device=cuda", "--nodes=1")
    said = refusal(command, "--device=cuda", "--nodes=4")
    assert "--nodes is 4; expected --heap nvshmem or --fabric with it: the ranks are on 2 machines" in said
    assert "ranks on 2 machines: expected all on one" in refusal(rates.command)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    said = refusal(command, "--device=cuda", "--nodes=2")
    assert "--nodes is 2; expected --heap nvshmem or --fabric with it: the ranks are on one machine" in said
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    said = "4 ranks, 3 of them on this machine: expected equally many on each machine"
    assert said in refusal(command, "--device=cuda")
    with pytest.raises(ValueError, match=said), gpu_per_rank():
        pass


def test_threads_that_share_a_gpu_are_one_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    with pytest.raises(CapabilityError, match="--nodes 2: on GPUs only under torchrun"):
        require_nodes(BenchConfig(device="cuda", nodes=2))
    with pytest.raises(CapabilityError, match="--heap nvshmem: only under torchrun"):
        require_nodes(BenchConfig(device="cuda", heap="nvshmem"))
    require_nodes(BenchConfig(device="cuda"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--heap=nvshmem"], "--heap is nvshmem; expected --device cuda with it"),
        (["--device=cuda", "--heap=nvshmem", "--nodes=2", "--fabric=proxy"], "--fabric is proxy; expected ibgda with"),
        (["--device=cuda", "--fabric=proxy"], "--fabric is proxy; expected several nodes with it"),
    ],
)
def test_options_that_do_not_go_together(options: list[str], message: str) -> None:
    assert message in refusal(command, *options)
