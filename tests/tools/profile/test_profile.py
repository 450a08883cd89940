"""`python -m deep_ep_py profile`, as a user runs it, and its evaluation of counts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from deep_ep_py.base.native import C
from deep_ep_py.device.jit import NvrtcUnavailableError, require_nvrtc
from deep_ep_py.tools.profile import cli
from deep_ep_py.tools.profile.cli import command
from deep_ep_py.tools.profile.report import kind_of, name_of
from deep_ep_py.tools.profile.sass import find_nvdisasm, read_sass
from places import ROOT
from ptx_kernels import cache_folder, load_builtins

SMALL = ("--ranks=2", "--tokens=8", "--hidden=512", "--topk=2", "--experts=8", "--warps=4")
BUILT = any((ROOT / "deep_ep_py").glob("_C_exact.*"))
counts = pytest.mark.skipif(C.WARP_SIZE != 32, reason="warps have 32 threads in PTX")


@pytest.fixture(autouse=True)
def nvrtc(monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        require_nvrtc()
    except NvrtcUnavailableError as error:
        pytest.skip(str(error))
    load_builtins()
    monkeypatch.setenv("DEEP_EP_CACHE_DIR", str(cache_folder()))


def profile(*options: str) -> Result:
    """Run the command in this process."""
    return CliRunner().invoke(command, options)


@counts
@pytest.mark.parametrize("mode", ["normal", "low-latency"])
@pytest.mark.thorough
def test_a_report(tmp_path: Path, mode: str) -> None:
    done = profile(f"--mode={mode}", *SMALL, f"--json={tmp_path / 'report.json'}", "--lines=3")
    assert done.exit_code == 0, done.output
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "row sectors moved/needed" in done.stdout and "the hottest lines" in done.stdout
    report = json.loads((tmp_path / "report.json").read_text())
    prefix = "" if mode == "normal" else "low_latency_"
    kernels = {kernel["name"]: kernel for kernel in report["kernels"]}
    dispatch, combine = kernels[f"{prefix}dispatch"], kernels[f"{prefix}combine"]
    assert (dispatch["launches"], combine["launches"]) == (2, 2)
    assert 0 < report["rows"] <= 2 * 8 * 2
    for kernel in (dispatch, combine):
        assert all((ROOT / "csrc" / line["file"]).is_file() for line in kernel["lines"])
        assert 1.0 <= kernel["sectors_ratio"] < 1.1
        assert kernel["peer_sectors"] > 0 and kernel["row_bytes_in_flight"] > 0
        assert kernel["grid_barriers"] >= 1
        assert sum(kernel["kinds"].values()) == kernel["instructions"] + kernel["waiting"]
    times = {time["name"]: time for time in report["times"]}
    for name in (f"{prefix}dispatch", f"{prefix}combine"):
        time = times[name]
        assert 5 < time["us"] < 500 and time["us"] == max(time[f"{kind}_us"] for kind in ("path", "bandwidth", "issue"))
        assert min(time[figure] for figure in ("instructions", "waits", "fences", "barriers")) > 0
        assert 0 < sum(line["us"] for line in time["lines"]) <= time["path_us"]


@counts
def test_only_times(tmp_path: Path) -> None:
    """The halves of a call are launches of their own; without counts their times are the same."""
    found = []
    for options in (("--time",), ()):
        file = tmp_path / f"report{len(found)}.json"
        done = profile("--mode=low-latency", "--halves", "--dtype=fp8", *SMALL, f"--json={file}", "--lines=2", *options)
        assert done.exit_code == 0, done.output
        found.append(json.loads(file.read_text()))
    only, both = found
    assert only["kernels"] == [] and both["kernels"] and only["times"] == both["times"]
    assert [(time["name"], time["number"]) for time in only["times"]] == [
        (f"low_latency_{name}", number) for name in ("dispatch", "combine") for number in (0, 1)
    ]


@counts
def test_ranks_that_share_a_gpu_are_nearer_to_each_other(tmp_path: Path) -> None:
    found = []
    for options in (("--one-gpu",), ()):
        file = tmp_path / f"report{len(found)}.json"
        done = profile(*SMALL, *options, "--time", "--kernel=combine", "--lines=0", f"--json={file}")
        assert done.exit_code == 0, done.output
        (combine,) = json.loads(file.read_text())["times"]
        found.append(combine["us"])
    shared, apart = found
    assert shared < apart


@counts
def test_a_dispatch_is_no_faster_than_the_nics(tmp_path: Path) -> None:
    found = []
    for rate in (0, 0.1):
        file = tmp_path / f"report{rate}.json"
        options = (*SMALL, "--fabric=ibgda", "--kernel=dispatch", f"--nic-rate={rate}", "--lines=99", f"--json={file}")
        done = profile(*options, "--time")
        assert done.exit_code == 0 and "NICs" in done.output, done.output
        found += json.loads(file.read_text())["times"]
    free, bound = found
    in_nic = {line["place"]: line["us"] for line in bound["lines"]}["NIC"]
    assert free["nic_rate"] > 0.1 and 0 < bound["nic_rate"] <= 0.1
    assert free["us"] < in_nic < bound["us"]


@counts
def test_a_post_waits_for_stores_across_the_bus(tmp_path: Path) -> None:
    found = []
    for puts in (2, 6):
        file = tmp_path / f"report{puts}.json"
        done = profile("--mode=posting", "--ranks=2", f"--tokens={puts}", "--warps=1", "--blocks=1", f"--json={file}")
        assert done.exit_code == 0, done.output
        found.append(json.loads(file.read_text()))
    few, many = found
    assert (few["rows"], many["rows"]) == (2, 6)
    # Of the requests, and of the doorbell record: 1400 cycles each, less what is done meanwhile.
    assert many["times"][0]["us"] - few["times"][0]["us"] > 4 * 2 * 1000 / 1900


@counts
def test_rows_between_nodes_go_in_two_hops(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    options = ("--ranks=4", "--nodes=2", "--fabric=ibgda", "--tokens=4", "--hidden=64", "--topk=2", "--experts=8")
    done = profile(*options, "--time", "--kernel=two_hops_dispatch", "--kernel=two_hops_combine", f"--json={file}")
    assert done.exit_code == 0, done.output
    times = json.loads(file.read_text())["times"]
    assert [time["name"] for time in times] == ["two_hops_dispatch", "two_hops_combine"]
    assert all(time["nic_rate"] > 0 for time in times)


@counts
def test_the_same_seed_counts_the_same(tmp_path: Path) -> None:
    reports = []
    for name in ("one", "other"):
        done = profile(*SMALL, "--kernel=dispatch", f"--json={tmp_path / name}", "--lines=0")
        assert done.exit_code == 0, done.output
        reports.append((tmp_path / name).read_text())
    assert reports[0] == reports[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--hidden=12",), "a row must be a multiple of 16 bytes"),
        (("--experts=9", "--ranks=2"), "9: expected a multiple of --ranks=2"),
        (("--ranks=4", "--nodes=3", "--fabric=ibgda"), "3: expected a divisor of --ranks=4"),
        (("--ranks=4", "--nodes=2"), "2: expected --fabric=ibgda, which joins nodes"),
        (("--experts=8", "--topk=9"), "9: expected at most --experts=8"),
        (("--arch=banana",), "'banana': expected one of sm_75, "),
        (("--arch=sm_999",), "'sm_999': expected one of sm_75, "),
        (("--mode=low-latency", "--kernel=combine"), "combine: expected one of low_latency_dispatch, low"),
        (("--json=/proc/no/report.json",), "Invalid value for '--json': /proc/no/report.json cannot be written"),
    ],
)
def test_what_cannot_be(options: tuple[str, ...], message: str) -> None:
    done = profile(*options)
    assert done.exit_code != 0 and message in done.output, done.output
    assert isinstance(done.exception, SystemExit), "the error must be meant for users"


@pytest.mark.skipif(C.WARP_SIZE == 32, reason="this build is one that can count")
def test_a_build_whose_warps_are_not_a_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEP_EP_BUILD", "fast")
    done = profile(*SMALL)
    assert done.exit_code == 1 and "DEEP_EP_BUILD=fast: expected exact" in done.output


@pytest.mark.once
@pytest.mark.skipif(not BUILT, reason="the build 'exact' does not exist")
def test_it_finds_the_build_that_can_count() -> None:
    """As a user starts it, in a process that begins with another build."""
    environment = {name: value for name, value in os.environ.items() if name != "DEEP_EP_BUILD"}
    done = subprocess.run(
        [sys.executable, "-m", "deep_ep_py", "profile", *SMALL, "--lines=0"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0 and "warp instructions" in done.stdout, done.stdout + done.stderr


def test_names_of_kernels() -> None:
    assert name_of("_ZN7deep_ep8dispatchINS_11StaticShapeILj8ELj14336ELj8EEEEEvNS_12DispatchArgsE") == "dispatch"
    assert name_of("_ZN7deep_ep11low_latency7combineINS_1XEEEvv") == "low_latency_combine"


@pytest.mark.parametrize(
    ("opcode", "kind"),
    [
        ("ld.acquire.sys.b64", "system scope"),
        ("atom.acq_rel.gpu.cas.b32", "device and block scope"),
        ("cp.async.bulk.global.shared::cta.bulk_group", "bulk copies"),
        ("ld.shared.u32", "shared memory"),
        ("ld.param.u64", "local memory, parameters"),
        ("st.global.v4.b32", "global memory"),
        ("shfl.sync.idx.b32", "warp and block"),
        ("setp.eq.s32", "branches, calls"),
        ("cvt.rn.bf16x2.f32", "moves, conversions"),
        ("add.f32", "floating point"),
        ("mad.lo.s32", "integers"),
    ],
)
def test_kinds_of_instructions(opcode: str, kind: str) -> None:
    assert kind_of(opcode, "dispatch.h:1") == kind
    assert kind_of(opcode, "memory.h:2 < wait.h:25 < dispatch.h:1") == "waiting"


def test_machine_code() -> None:
    """Loads that no instruction has used yet are in flight together, up to the next branch target."""
    text = """
        /*0000*/                   LDG.E.128 R4, desc[UR16][R2.64] ;
        /*0010*/              @!P0 LDG.E.128.CONSTANT R8, desc[UR16][R2.64+0x200] ;
        /*0020*/                   LDG.E.64 R20, desc[UR16][R2.64+0x400] ;
        /*0030*/                   UBLKCP.S.G [UR4], [UR8], UR6 ;
        /*0040*/                   FADD R12, R9, R4 ;
        /*0050*/                   LDG.E.128 R4, desc[UR16][R2.64] ;
.L_x_1:
        /*0060*/                   LDG.E.128 R8, desc[UR16][R2.64] ;
        /*0070*/                   EXIT ;
    """
    code = read_sass(text)
    assert (code.instructions, code.bulk_copies, code.loaded_before_use) == (8, 1, 2 * 16 * 32)
    assert code.code_bytes == 8 * 16


LOOP = """
_Zmain:
        /*0000*/                   MEMBAR.ALL.SYS ;
        /*0010*/                   ATOM.E.ADD.64.STRONG.SYS P0, RZ, desc[UR8][R2.64], R4 ;
        /*0020*/                   ATOM.E.ADD.64.STRONG.SYS P0, R6, desc[UR8][R2.64], R4 ;
.L_x_1:
        /*0030*/                   LDL.64 R8, [R1] ;
        /*0040*/                   LD.E.64 R8, desc[UR8][R2.64] ;
        /*0050*/                   LD.E.64.STRONG.SYS R8, desc[UR8][R2.64] ;
        /*0060*/                   CALL.REL.NOINC `($_Zmain$_Zhot) ;
        /*0070*/              @!P1 CALL.REL.NOINC `($_Zmain$_Zcold) ;
        /*0080*/               @P0 BRA `(.L_x_1) ;
        /*0090*/                   LDL.64 R8, [R1] ;
        /*00a0*/                   EXIT ;
$_Zmain$_Zhot:
        /*00b0*/                   MEMBAR.ALL.GPU ;
        /*00c0*/                   MEMBAR.ALL.CTA ;
        /*00d0*/                   CALL.REL.NOINC `($__internal_0_$__cuda_sm20_div_u64) ;
        /*00e0*/                   RET.REL.NODEC R2 `(_Zmain) ;
$_Zmain$_Zcold:
        /*00f0*/                   MEMBAR.ALL.SYS ;
        /*0100*/                   RET.REL.NODEC R2 `(_Zmain) ;
$__internal_0_$__cuda_sm20_div_u64:
        /*0110*/                   RET.REL.NODEC R2 `(_Zmain) ;
"""


def test_what_stands_in_loops() -> None:
    """What a function called there executes does too, unless it is one that hardly ever runs."""
    code = read_sass(LOOP, cold=["cold"])
    assert (code.fences_in_loops, code.local_loads_in_loops, code.generic_loads_in_loops) == (1, 1, 1)
    assert (code.divisions_in_loops, code.unused_atomics) == (1, 1)
    assert read_sass(LOOP).fences_in_loops == 2


def test_a_loop_without_a_way_back_is_none() -> None:
    assert read_sass(LOOP.replace("@P0 BRA", "@P0 FOO"), cold=["cold"]).fences_in_loops == 0


@counts
@pytest.mark.thorough
def test_what_a_block_keeps_in_flight(tmp_path: Path) -> None:
    """Bytes of rows that are on their way while a warp waits for one of them; fewer would leave an SM's share of the
    memory's bandwidth unused.
    """
    sizes = ("--ranks=2", "--tokens=16", "--hidden=7168", "--topk=2", "--experts=8", "--blocks=1", "--warps=16")
    done = profile("--kernel=dispatch", "--kernel=combine", *sizes, f"--json={tmp_path / 'report.json'}", "--no-sass")
    assert done.exit_code == 0, done.output
    kernels = json.loads((tmp_path / "report.json").read_text())["kernels"]
    assert [kernel["name"] for kernel in kernels] == ["dispatch", "combine"]
    assert all(kernel["in_flight_per_block"] >= 64 * 1024 for kernel in kernels), kernels


@counts
def test_a_report_with_machine_code(tmp_path: Path) -> None:
    if find_nvdisasm() is None:
        pytest.skip("nvdisasm is not installed")
    file = tmp_path / "report.json"
    done = profile("--kernel=combine", *SMALL, f"--json={file}", "--sass")
    assert done.exit_code == 0, done.output
    (combine,) = json.loads(file.read_text())["kernels"]
    assert combine["sass"]["bulk_copies"] > 0 and combine["sass"]["instructions"] > 1000


def test_machine_code_without_a_disassembler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "find_nvdisasm", lambda: None)
    done = profile("--sass")
    assert done.exit_code == 2 and "pip install nvidia-cuda-nvdisasm" in done.output
