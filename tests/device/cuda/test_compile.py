"""Every kernel compiles for GPUs, from csrc/ alone, without spilling registers."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console

from builds import LONG, in_long
from deep_ep_py.base.native import C
from deep_ep_py.base.sources import include_root
from deep_ep_py.device.cuda import copy_piece as chosen_piece
from deep_ep_py.device.jit import (
    GATHERED,
    KERNELS,
    CompiledKernel,
    CompileError,
    Kernel,
    KernelCache,
    NvrtcUnavailableError,
    Shape,
    compile_kernel,
    compiler,
    copy_piece,
    require_nvrtc,
)
from deep_ep_py.device.jit.ptx import compile_ptx
from deep_ep_py.device.jit.registry import ANY_FABRIC
from deep_ep_py.device.jit.report import Outcome, as_table
from deep_ep_py.errors import CudaError
from deep_ep_py.tools.cli.compile import command
from deep_ep_py.tools.profile.sass import disassemble, find_nvdisasm
from places import DATA

pytestmark = pytest.mark.once

WITHOUT_SPILLS = ("sm_90a", "sm_100a")
# Each architecture takes a minute.
ARCHITECTURES = (*WITHOUT_SPILLS, "sm_80", "sm_120a") if LONG else WITHOUT_SPILLS[:1]
# Bytes, in total over all functions of the kernel and outside of loops over rows: their calls are nested four deep.
A_FEW_SPILLED = {"two_hops_dispatch": 128, "two_hops_combine": 128}
OF_A_PUT = 64  # in post(), which keeps addresses in registers that threads would otherwise load while others wait
WITHIN_A_NODE = Shape(ranks=8, row_bytes=2 * 7168, topk=8, experts=256)
SHAPE = dataclasses.replace(WITHIN_A_NODE, fabrics=ANY_FABRIC, masks_ranks=True)  # all code that kernels may have
WITH_DATA = (include_root(), DATA)

CONTRACT = Kernel("contract", "device_contract.h", "deep_ep::test::contract<{static}>", "deep_ep::test::ContractKernel")
SPILLING = Kernel("spilling", "spilling.h", "deep_ep::test::spilling<{static}>")
SPILLING_IN_A_CALL = Kernel("spilling_in_a_call", "spilling.h", "deep_ep::test::spilling_in_a_call<{static}>")


@pytest.fixture(autouse=True)
def nvrtc(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEP_EP_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "kernels"))
    try:
        require_nvrtc()
    except NvrtcUnavailableError as error:
        pytest.skip(str(error))


@functools.cache
def compiled(name: str, architecture: str, kernels: str = "KERNELS") -> CompiledKernel:
    return compile_kernel({"KERNELS": KERNELS, "GATHERED": GATHERED}[kernels][name], SHAPE, architecture)


@pytest.mark.long
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(
    "name",
    [name if name.startswith("two_hops") else pytest.param(name, marks=pytest.mark.thorough) for name in KERNELS],
)
def test_kernel_compiles(name: str, architecture: str) -> None:
    kernel = compiled(name, architecture)
    *space, function = re.findall(r"\w+", KERNELS[name].expression.split("<")[0])
    assert all(part in kernel.symbol for part in (*space, function))
    assert kernel.resources.code > 0
    assert 0 < kernel.resources.registers <= 65536 // (32 * SHAPE.warps), "a multiprocessor holds a block"
    if architecture in WITHOUT_SPILLS:
        most = A_FEW_SPILLED.get(name, OF_A_PUT)
        assert max(kernel.resources.spill_stores, kernel.resources.spill_loads) <= most


@pytest.mark.parametrize("architecture", ["sm_90a"])
@pytest.mark.parametrize("name", GATHERED if LONG else ("dispatch", "two_hops_combine"))
@pytest.mark.thorough
def test_kernel_for_all_ranks_compiles(name: str, architecture: str) -> None:
    """The kernel finds each rank's arguments in an array. It serves tools that observe kernels, so it may spill."""
    alone, together = compiled(name, architecture), compiled(name, architecture, "GATHERED")
    assert "of_each_rank" in together.symbol and "of_each_rank" not in alone.symbol
    assert 0 < together.resources.registers <= 65536 // (32 * SHAPE.warps), "a multiprocessor holds a block"
    shared = [(each.resources.static_shared, each.resources.dynamic_shared) for each in (alone, together)]
    assert shared[0] == shared[1]


@pytest.mark.parametrize("kernels", ["KERNELS", in_long("GATHERED")])
@pytest.mark.thorough
@pytest.mark.parametrize("launches", [("notify", "dispatch"), ("dispatch",), ("combine",)])
def test_profilers_find_each_phase_once(launches: tuple[str, ...], kernels: str) -> None:
    """Searching the kernel names for a phase, as users of profilers do, finds one kernel per operation."""
    symbols = "\n".join(compiled(name, "sm_90a", kernels).symbol for name in launches)
    names = subprocess.check_output(["c++filt"], input=symbols, text=True).splitlines()
    assert all(name.startswith(("deep_ep::", "void deep_ep::")) for name in names)
    found = {phase: sum(phase in name for name in names) for phase in ("notify", "dispatch", "combine")}
    assert found == {phase: int(any(name.startswith(phase) for name in launches)) for phase in found}


@pytest.mark.thorough
def test_report(capsys: pytest.CaptureFixture[str]) -> None:
    """Shows the report in the test output."""
    outcomes = [Outcome(name, arch, compiled(name, arch)) for arch in ARCHITECTURES for name in KERNELS]
    with capsys.disabled():
        Console(width=80).print("", as_table(outcomes, SHAPE))


@pytest.mark.parametrize("shape", [Shape(1, 16, 1, 1), Shape(64, 2 * 8192, 32, 2048)], ids=["least", "most"])
@pytest.mark.parametrize("name", ["dispatch", "combine"])
@pytest.mark.thorough
def test_extreme_shapes_compile(name: str, shape: Shape) -> None:
    resources = compile_kernel(KERNELS[name], shape, "sm_90a").resources
    # Bytes. With 64 ranks a register or two may spill, depending on small changes of the source.
    max_spilled = 16 if shape.ranks == 64 else 0
    assert max(resources.spill_stores, resources.spill_loads) <= max_spilled


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("dispatch", Shape(64, 2 * 8192, 32, 2048)),
        ("combine", Shape(64, 2 * 8192, 32, 2048)),
        ("low_latency_dispatch", Shape()),
        ("low_latency_combine", Shape()),
    ],
)
@pytest.mark.thorough
def test_blocks_fit_into_little_shared_memory(name: str, shape: Shape) -> None:
    resources = compile_kernel(KERNELS[name], shape, "sm_120a").resources
    assert 64 * 1024 < resources.static_shared + resources.dynamic_shared <= 99 * 1024


@pytest.mark.parametrize("name", ["layout", "two_hops_notify", "two_hops_dispatch", "two_hops_combine"])
@pytest.mark.thorough
def test_kernels_among_1024_ranks(name: str) -> None:
    shape = Shape(1024, 2 * 7168, 8, 1024, ranks_per_node=8, fabrics=ANY_FABRIC)
    resources = compile_kernel(KERNELS[name], shape, "sm_90a").resources
    max_spilled = A_FEW_SPILLED.get(name, OF_A_PUT)
    assert max(resources.spill_stores, resources.spill_loads) <= max_spilled
    assert resources.static_shared + resources.dynamic_shared <= 227 * 1024


@pytest.mark.long
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_device_contract_compiles(architecture: str) -> None:
    resources = compile_kernel(CONTRACT, SHAPE, architecture, WITH_DATA).resources
    if architecture in WITHOUT_SPILLS:
        assert (resources.spill_stores, resources.spill_loads) == (0, 0)
    assert resources.static_shared >= 16
    per_warp = 8 * 32 + C.cuda.copies_bytes(copy_piece(architecture))
    assert resources.dynamic_shared == per_warp * SHAPE.warps


def test_the_environment_chooses_how_rows_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    architectures = ("sm_80", "sm_90a", "sm_103a", "sm_110a", "sm_120a")
    assert [chosen_piece(name) for name in architectures] == [0, 2048, 2048, 2048, 1024]
    monkeypatch.setenv("DEEP_EP_COPIES", "vector")
    assert not any(chosen_piece(name) for name in architectures)
    monkeypatch.setenv("DEEP_EP_COPIES", "fast")
    with pytest.raises(ValueError, match="DEEP_EP_COPIES='fast': expected 'bulk' or 'vector'"):
        chosen_piece("sm_90a")


@pytest.mark.parametrize(
    ("architecture", "bulk"), [("sm_90a", True), ("sm_90a", False), ("sm_80", True), in_long("sm_80", False)]
)
@pytest.mark.thorough
def test_rows_are_copied_as_asked_where_the_architecture_can(architecture: str, bulk: bool) -> None:
    """Bulk copies are recognized by the shared memory they pass through, whose size the copying class declares."""
    shape = dataclasses.replace(SHAPE, bulk_copies=bulk)
    kernel = compile_kernel(KERNELS["dispatch"], shape, architecture)
    expected = C.cuda.copies_bytes(copy_piece(architecture) if bulk else 0)
    without = compiled("dispatch", "sm_80").resources.dynamic_shared
    # The additional memory that the host allots if it reports that the kernels use bulk copies.
    assert kernel.resources.dynamic_shared - without == SHAPE.warps * expected
    assert max(kernel.resources.spill_stores, kernel.resources.spill_loads) <= OF_A_PUT


def ptx_of(name: str, architecture: str) -> str:
    """Return the PTX of a kernel, in which loads and stores are in source order."""
    return compile_ptx(KERNELS[name], SHAPE, architecture)[0]


def test_notify_loads_a_batch_of_flags_before_it_counts() -> None:
    """One warp does the scan, so the latencies of its loads are exposed unless they overlap."""
    before, vote, _ = ptx_of("notify", "sm_90a").partition("vote.sync.ballot")
    assert vote and len(re.findall(r"\bld\.\S*[bu]8\b", before)) >= 16


@pytest.mark.thorough
def test_a_kernel_reads_the_clock_for_stages_only_on_request() -> None:
    """Otherwise only bounded waits do; its stages are 6, its begin, and its end wherever it may leave."""
    without, noting = (
        compile_ptx(KERNELS["notify"], dataclasses.replace(WITHIN_A_NODE, notes_stages=notes), "sm_90a")[0]
        for notes in (False, True)
    )
    assert noting.count("%globaltimer") >= without.count("%globaltimer") + 7
    assert without.count("%globaltimer") <= 4


def test_combine_loads_the_next_pieces_before_it_stores_a_sum() -> None:
    """From as many ranks as registers allow; otherwise a warp waits for the loads of each step.

    For bulk copies, tests/sim/ptx/test_bytes_in_flight.py counts the bytes in flight.
    """
    steps = ptx_of("combine", "sm_80").split("st.global.v4.b32")[:-1]
    letters = {"ld.": "L", "add": "A"}
    work = r"ld\.global\.L1::no_allocate\.v4|add\.f32|add\.rn\.f32"
    order = ["".join(letters[found[:3]] for found in re.findall(work, step)) for step in steps]
    for sources in range(2, 7):
        pattern = rf"(?<!A)A{{{8 * sources}}}L{{{sources},}}"  # eight elements from each source, then the next loads
        assert any(re.search(pattern, step) for step in order), (sources, order)


@pytest.mark.parametrize("kernel", [SPILLING, SPILLING_IN_A_CALL], ids=["kernel", "call"])
def test_spills_are_reported(kernel: Kernel) -> None:
    resources = compile_kernel(kernel, SHAPE, "sm_90a", WITH_DATA).resources
    assert resources.registers <= 32
    assert resources.spill_stores > 0
    assert resources.spill_loads > 0


def test_search_path_holds_only_our_sources(tmp_path: Path) -> None:
    (tmp_path / "outsider.h").write_text("#include <stdint.h>\n")
    with pytest.raises(CompileError, match='cannot open source file "stdint.h"'):
        compile_kernel(Kernel("outsider", "outsider.h", "none"), SHAPE, "sm_90a", (include_root(), tmp_path))


def test_failure_shows_the_log(tmp_path: Path) -> None:
    (tmp_path / "broken.h").write_text("__global__ void broken() { no_such_name = 1; }\n")
    with pytest.raises(CompileError, match=r"broken for sm_90a(.|\n)*no_such_name"):
        compile_kernel(Kernel("broken", "broken.h", "broken"), SHAPE, "sm_90a", (tmp_path,))


def test_command_writes_a_report(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    arguments = [
        "--kernel",
        "layout",
        "--kernel",
        "scale_columns_of_each_rank",
        "--arch",
        "sm_90a",
        "--json",
        str(report),
    ]
    result = CliRunner().invoke(command, arguments)
    assert result.exit_code == 0, result.output
    assert "regs" in result.output and max(map(len, result.output.splitlines()[:10])) <= 80
    entries = json.loads(report.read_text())["kernels"]
    assert [(entry["kernel"], entry["arch"], entry["compiled"]) for entry in entries] == [
        ("layout", "sm_90a", True),
        ("scale_columns_of_each_rank", "sm_90a", True),
    ]
    for entry in entries:
        assert {"registers", "static_shared", "dynamic_shared", "local", "code", "seconds"} <= entry.keys()
        assert entry["spill_stores"] == entry["spill_loads"] == 0


def test_command_fills_the_cache(tmp_path: Path) -> None:
    for _ in range(2):
        result = CliRunner().invoke(command, ["--kernel", "layout", "--hidden", "64", "--cache", str(tmp_path)])
        assert result.exit_code == 0, result.output
        (made,) = tmp_path.glob("*.kernel")
    assert made == KernelCache(tmp_path).path(KERNELS["layout"], Shape(row_bytes=128), "sm_90a")
    before = made.stat().st_mtime_ns
    result = CliRunner().invoke(command, ["--kernel", "notify", "--fresh", "--cache", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert list(tmp_path.glob("*.kernel")) == [made] and made.stat().st_mtime_ns == before


def test_command_fails_when_a_kernel_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise CompileError("layout for sm_90a: no such instruction")

    report = tmp_path / "report.json"
    monkeypatch.setattr(KernelCache, "get", refuse)
    result = CliRunner().invoke(command, ["--kernel", "layout", "--arch", "sm_90a", "--json", str(report)])
    assert result.exit_code == 1
    assert "does not compile" in result.output and "no such instruction" in result.output
    (entry,) = json.loads(report.read_text())["kernels"]
    assert entry["compiled"] is False
    assert "no such instruction" in entry["error"]


def test_command_names_the_architectures() -> None:
    result = CliRunner().invoke(command, ["--kernel", "layout", "--arch", "sm_42"])
    assert result.exit_code == 2 and "'sm_42': expected one of sm_75, " in result.output, result.output


@pytest.mark.parametrize("arguments", [[], ["--all", "--kernel", "layout"], ["--all", "--hidden", "7"]])
def test_command_refuses(arguments: list[str]) -> None:
    result = CliRunner().invoke(command, arguments)
    assert result.exit_code == 2, result.output


@pytest.mark.parametrize(
    ("driver", "said"),
    [
        (13000, None),
        (14020, None),
        (12080, r"supports CUDA 12\.8.*expected a driver for CUDA 13, or the packages for CUDA 12: .*gpu-cu12"),
        (11080, r"supports CUDA 11\.8.*expected a driver for CUDA 13$"),
    ],
)
def test_a_driver_loads_what_its_own_release_compiles(
    monkeypatch: pytest.MonkeyPatch, driver: int, said: str | None
) -> None:
    monkeypatch.setattr(compiler, "nvrtc_version", lambda: "13.2")
    if said is None:
        compiler.check_driver(driver)
        return
    with pytest.raises(CudaError, match=said):
        compiler.check_driver(driver)


# What the machine code of hot kernels has that slows it down, within a node. Each figure is the most that is accepted,
# and falls as kernels improve; zero is the aim.
COLD = ("4failE", "7give_upE", "9wait_wordE")
ACCEPTED = {
    "layout": {"code_bytes": 5_300},
    "notify": {
        "code_bytes": 99_000,
        "fences_in_loops": 1,
        "local_loads_in_loops": 23,
        "generic_loads_in_loops": 15,
    },
    "dispatch": {
        "code_bytes": 130_700,
        "fences_in_loops": 6,
        "local_loads_in_loops": 35,
        "generic_loads_in_loops": 55,
    },
    "combine": {
        "code_bytes": 118_000,
        "fences_in_loops": 6,
        "local_loads_in_loops": 35,
        "generic_loads_in_loops": 77,
    },
    "low_latency_dispatch": {
        "code_bytes": 120_500,
        "fences_in_loops": 3,
        "local_loads_in_loops": 31,
        "generic_loads_in_loops": 35,
    },
    "low_latency_combine": {
        "code_bytes": 91_500,
        "fences_in_loops": 2,
        "local_loads_in_loops": 23,
        "generic_loads_in_loops": 18,
    },
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", ACCEPTED)
def test_machine_code(name: str) -> None:
    nvdisasm = find_nvdisasm()
    if nvdisasm is None:
        pytest.skip("nvdisasm is not installed: pip install nvidia-cuda-nvdisasm")
    kernel = compile_kernel(KERNELS[name], WITHIN_A_NODE, "sm_90a")
    assert kernel.resources.spill_stores == kernel.resources.spill_loads == 0
    code = disassemble(nvdisasm, kernel.cubin, COLD)
    figures = {**dataclasses.asdict(code), "code_bytes": code.code_bytes}
    checked = ("code_bytes", "unused_atomics", *(figure for figure in figures if figure.endswith("_in_loops")))
    above = {figure: figures[figure] for figure in checked if figures[figure] > ACCEPTED[name].get(figure, 0)}
    assert not above, f"more than accepted: {above}"


@pytest.mark.parametrize("fabrics", [(), ("proxy",)])
def test_command_compiles_what_a_buffer_may_launch(monkeypatch: pytest.MonkeyPatch, fabrics: tuple[str, ...]) -> None:
    """Rows take two hops only where some ranks are not mapped; and the kernels are those of such a Buffer."""
    asked: list[tuple[list[str], Shape]] = []

    def note(kernels: list[Kernel], architectures: list[str], shape: Shape, compile_: object) -> list[Outcome]:
        asked.append(([kernel.name for kernel in kernels], shape))
        return []

    monkeypatch.setattr("deep_ep_py.tools.cli.compile.compile_each", note)
    options = [part for fabric in fabrics for part in ("--fabric", fabric)]
    result = CliRunner().invoke(command, ["--all", "--masks-ranks", *options])
    assert result.exit_code == 0, result.output
    ((names, shape),) = asked
    assert (shape.fabrics, shape.masks_ranks) == (fabrics, True)
    assert "dispatch" in names and any(name.startswith("two_hops") for name in names) == bool(fabrics)
