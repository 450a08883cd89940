"""CUDA Buffers over a stand-in for the driver that runs their kernels on a CPU: everything except torch and the GPU
itself is as on a GPU. This proves nothing about properties that only a GPU can show."""

from __future__ import annotations

import io
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from cases import BY_NAME
from deep_ep_py.base.environment import PROVIDER
from deep_ep_py.base.native import C
from deep_ep_py.device.jit import KERNELS, KernelCache, NvrtcUnavailableError, Shape, require_nvrtc
from deep_ep_py.tools.bench.tables import print_report
from launches import forked, on_threads, shared_memory
from low_latency_gpu import BY_NAME as LOW_LATENCY_CASES
from low_latency_gpu import WATCHED
from machines import two_machines
from places import TESTS

RANKS, ROW_BYTES, TOPK = 4, 528, 4
# By shape; a layout has no rows, and a cached dispatch and its combine have no top-k.
KERNELS_OF = {
    (RANKS, 0, TOPK): ["layout"],
    (RANKS, ROW_BYTES, TOPK): ["notify", "dispatch", "combine"],
    (RANKS, ROW_BYTES, 0): ["dispatch", "combine"],
}

pytestmark = pytest.mark.once


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Callable[[tuple[str, ...]], Path]:
    """Return what fills a cache with the kernels of the worker. NVRTC looks for the driver and must not find the
    stand-in."""
    try:
        require_nvrtc()
    except NvrtcUnavailableError as error:
        pytest.skip(str(error))
    cache = KernelCache(tmp_path_factory.mktemp("kernels"))

    def fill(fabrics: tuple[str, ...]) -> Path:
        for shape, names in KERNELS_OF.items():
            cache.get_all([KERNELS[name] for name in names], Shape(*shape, fabrics=fabrics), "sm_90a")
        return cache.folder

    return fill


# Between processes the proxy uses libfabric.
OVER_LIBFABRIC = pytest.mark.skipif(not C.proxy_providers(), reason="no libfabric (Debian: libfabric-dev)")


@pytest.mark.parametrize("fabric", ["peer", "ibgda", pytest.param("proxy", marks=OVER_LIBFABRIC)])
@pytest.mark.thorough
def test_low_latency_layers(
    double: Path, workers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fabric: str
) -> None:
    """Low-latency calls of 4 processes, complete and with hooks, in one launch or two."""
    monkeypatch.setenv("LD_LIBRARY_PATH", os.pathsep.join([str(double), os.environ.get("LD_LIBRARY_PATH", "")]))
    monkeypatch.setenv("DOUBLE_LOG", str(tmp_path / "log"))
    done = forked(workers / "low_latency_layers.py", RANKS, "--pretend-gpu", f"--fabric={fabric}")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("path", ["direct", "rounds", "ibgda", pytest.param("proxy", marks=OVER_LIBFABRIC)])
@pytest.mark.thorough
def test_round_trip(
    double: Path,
    compiled: Callable[[tuple[str, ...]], Path],
    workers: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
) -> None:
    """Layout, dispatch, cached dispatch and combine of 4 processes against the oracle, with kernel code found by shape
    and heaps allocated by the driver."""
    monkeypatch.setenv("LD_LIBRARY_PATH", os.pathsep.join([str(double), os.environ.get("LD_LIBRARY_PATH", "")]))
    on_host = path in ("ibgda", "proxy")
    monkeypatch.setenv("DEEP_EP_CACHE_DIR", str(compiled((path,) if on_host else ())))
    monkeypatch.setenv("DOUBLE_LOG", str(tmp_path / "log"))
    before = shared_memory()
    done = forked(workers / "round_trip.py", RANKS, "--pretend-gpu", f"--path={path}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert shared_memory() <= before
    calls = (tmp_path / "log").read_text()
    # Each rank maps a little of its peers' memory, then their heaps; heaps that a NIC or a proxy reaches are in host
    # memory.
    assert calls.count("cuMemImportFromShareableHandle") == 4 * 3 * (1 if on_host else 2)
    assert calls.count("cuMemHostRegister") == calls.count("cuMemHostUnregister") == (4 * 4 if on_host else 0)
    # Launches of a turn with 5 blocks: dispatch and combine, twice each, but not notify, which uses one warp per rank.
    assert calls.count("launch grid=5,1,1 ") == 4 * 4
    assert calls.count("cuModuleLoadData") == 4 * sum(len(names) for names in KERNELS_OF.values())


@pytest.mark.parametrize("fabric", ["ibgda", pytest.param("proxy", marks=OVER_LIBFABRIC)])
@pytest.mark.thorough
def test_graphs_between_processes(
    double: Path, workers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fabric: str
) -> None:
    """Replays between recoveries, without any host call of this library."""
    monkeypatch.setenv("LD_LIBRARY_PATH", os.pathsep.join([str(double), os.environ.get("LD_LIBRARY_PATH", "")]))
    monkeypatch.setenv("DOUBLE_LOG", str(tmp_path / "log"))
    done = forked(workers / "replays_between_processes.py", 2, f"--fabric={fabric}")
    assert done.returncode == 0, done.stdout + done.stderr


@OVER_LIBFABRIC
@pytest.mark.thorough
def test_graphs_between_machines(double: Path, workers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same if the two share no memory: network namespaces that are joined by a cable."""
    monkeypatch.setenv("LD_LIBRARY_PATH", os.pathsep.join([str(double), os.environ.get("LD_LIBRARY_PATH", "")]))
    monkeypatch.setenv("DOUBLE_LOG", str(tmp_path / "log"))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "cable")
    with two_machines() as machines:
        launchers = machines.torchrun(1, tmp_path, str(workers / "replays_between_processes.py"), "--fabric=proxy")
    assert [done.returncode for done in launchers] == [0, 0], "\n".join(done.stdout for done in launchers)


@OVER_LIBFABRIC
@pytest.mark.thorough
def test_a_provider_that_is_not_there(
    double: Path, workers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The Buffer reports it before anything is launched."""
    monkeypatch.setenv("LD_LIBRARY_PATH", os.pathsep.join([str(double), os.environ.get("LD_LIBRARY_PATH", "")]))
    monkeypatch.setenv("DOUBLE_LOG", str(tmp_path / "log"))
    monkeypatch.setenv(PROVIDER, "carrier pigeons")
    done = forked(workers / "low_latency_layers.py", 2, "--pretend-gpu", "--fabric=proxy")
    assert done.returncode != 0
    assert "DEEP_EP_PROXY_PROVIDER='carrier pigeons': expected one of efa" in done.stdout + done.stderr
    assert "launch grid" not in (tmp_path / "log").read_text()


@pytest.mark.thorough
def test_the_named_cases(double: Path, workers: Path, tmp_path: Path) -> None:
    """All of them, with ranks as threads, and the other tests of tests/device/gpu/test_gpu.py."""
    assert len(on_threads(double, workers / "ranks_as_threads.py", tmp_path / "log").split()) > 20
    assert "cuMemExportToShareableHandle" not in (tmp_path / "log").read_text(), "no other process may map heaps"


@pytest.mark.thorough
def test_the_named_cases_in_one_launch(double: Path, workers: Path, tmp_path: Path) -> None:
    """With 1 to 8 ranks and as several nodes, where no two kernels run side by side: each launch serves all ranks."""
    printed = on_threads(double, workers / "ranks_in_one_launch.py", tmp_path / "log", DOUBLE_SERIAL="1")
    names = {name.partition("-")[0] for name in printed.split()}
    assert len(names) > 20 and {BY_NAME[name].ranks for name in names} >= {1, 2, 4, 8}
    launches = re.findall(r"^launch grid=\d+,(\d+),1 .* cooperative=1 ", (tmp_path / "log").read_text(), re.MULTILINE)
    assert {int(ranks) for ranks in launches} == {BY_NAME[name].ranks for name in names}


@pytest.mark.parametrize(
    ("which", "least"),
    [("not processes and not low_latency_model", 20), ("low_latency_model", 1)],
)
@pytest.mark.thorough
def test_the_tests_of_low_latency_mode(double: Path, workers: Path, tmp_path: Path, which: str, least: int) -> None:
    """The tests of tests/device/gpu, unchanged, with ranks as threads. Those with processes need a torch with CUDA."""
    chosen = ["pytest", str(TESTS / "device" / "gpu" / "test_low_latency.py"), "-k", which]
    log, queues = tmp_path / "log", {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}
    printed = on_threads(double, workers / "gpu_on_double.py", log, *chosen, **queues)
    passed = re.search(r"^(\d+) passed, \d+ deselected", printed, re.MULTILINE)
    assert passed is not None and int(passed[1]) >= least, printed


@pytest.mark.thorough
def test_the_tests_of_the_elastic_buffer(double: Path, workers: Path, tmp_path: Path) -> None:
    """The same for V2's interface; graphs are replayed in `ranks_as_threads.py`."""
    chosen = ["pytest", str(TESTS / "device" / "gpu" / "test_elastic.py"), "-k", "not graph"]
    log, queues = tmp_path / "log", {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}
    printed = on_threads(double, workers / "gpu_on_double.py", log, *chosen, **queues)
    passed = re.search(r"^(\d+) passed, 1 deselected", printed, re.MULTILINE)
    assert passed is not None and int(passed[1]) == 10, printed


def test_the_tests_of_redundant_experts(double: Path, workers: Path, tmp_path: Path) -> None:
    chosen = ["pytest", str(TESTS / "device" / "gpu" / "test_eplb.py")]
    printed = on_threads(
        double, workers / "gpu_on_double.py", tmp_path / "log", *chosen, CUDA_DEVICE_MAX_CONNECTIONS="32"
    )
    assert re.search(r"^2 passed", printed, re.MULTILINE), printed


def test_steps_that_never_wait_on_the_host(double: Path, workers: Path, tmp_path: Path) -> None:
    """V2's calls without a host wait, forward and backward, as a graph that is replayed on other routings."""
    printed = on_threads(double, workers / "elastic_replays.py", tmp_path / "log")
    cases = ["peer rows", "peer expanded", "proxy rows", "proxy expanded", "peer one by one"]
    assert printed.split("\n")[: len(cases)] == cases


def test_a_layer_as_a_graph(double: Path, workers: Path, tmp_path: Path) -> None:
    """Router, dispatch, experts and combine, forward and backward, replayed on other tokens with other choices."""
    printed = on_threads(double, workers / "layer_replays.py", tmp_path / "log")
    assert printed.split("\n")[:3] == ["bf16", "fp8", "refused"]


def test_low_latency_mode_in_one_launch(double: Path, workers: Path, tmp_path: Path) -> None:
    """The cases that compute-sanitizer runs, where no two kernels run side by side."""
    program, environment = str(workers / "gpu_case.py"), {"CUDA_DEVICE_MAX_CONNECTIONS": "32", "DOUBLE_SERIAL": "1"}
    log = tmp_path / "log"
    printed = on_threads(double, workers / "gpu_on_double.py", log, program, *WATCHED, **environment)
    assert tuple(printed.split()) == WATCHED
    launches = re.findall(r"^launch grid=\d+,(\d+),1 ", log.read_text(), re.MULTILINE)
    assert {int(ranks) for ranks in launches} == {LOW_LATENCY_CASES[name].ranks for name in WATCHED}


@pytest.mark.timed
@pytest.mark.thorough
def test_a_launch_that_ranks_do_not_come_to(double: Path, workers: Path, tmp_path: Path) -> None:
    """All ranks report which rank did not come, or came with what. Without this mode they would wait for each other."""
    on_threads(double, workers / "ranks_in_one_launch.py", tmp_path / "log", "failures", DOUBLE_SERIAL="1")


KERNELS_OF_CALLS = {
    "layout_notify": {"layout", "notify"},
    "dispatch": {"layout", "notify", "dispatch"},
    "dispatch_cached": {"dispatch"},
    "combine": {"combine"},
    "combine_private": {"combine"},
    "pair": {"layout", "notify", "dispatch", "combine"},
}


def check_kernels(op: dict[str, Any], wanted: set[str], copy_gb_per_s: float) -> None:
    """Each kernel of a call has times of its own, also as ratios to a copy."""
    assert set(op["kernels"]) == wanted
    for times in op["kernels"].values():
        ms = times["ms"]
        assert 0 <= times["fastest_rank_ms"] <= ms["max"] and ms["min"] <= ms["median"] <= ms["max"]
        assert times["over_copy"] == pytest.approx(ms["median"] * 1e6 * copy_gb_per_s / op["moved_bytes"])


@pytest.mark.parametrize(
    ("dtype", "corrupt"), [("bf16", None), ("bf16", "dispatch"), ("bf16", "combine"), ("fp8", None)]
)
@pytest.mark.thorough
def test_the_benchmark_on_a_gpu(double: Path, workers: Path, tmp_path: Path, dtype: str, corrupt: str | None) -> None:
    """Everything but the timings, which mean nothing here."""
    arguments = ["normal", dtype] if corrupt is None else ["normal", dtype, corrupt]
    report = json.loads(on_threads(double, workers / "bench_on_threads.py", tmp_path / "log", *arguments))
    assert report["verified"] == (corrupt is None), report["checks"]
    checked = {"dispatch", "dispatch_cached"}
    if dtype == "bf16":
        checked |= {"combine", "combine_private", "pair"}
    assert set(report["checks"]) == checked
    for size in report["sizes"]:
        rows, tokens = size["rows"], 4 * size["tokens"]
        moved = (rows + tokens) * {"bf16": 2 * 128, "fp8": 128 + 4}[dtype]
        for name, op in size["ops"].items():
            check_kernels(op, KERNELS_OF_CALLS[name], copy_gb_per_s=100)
            if name == "layout_notify":
                assert op["moved_bytes"] == tokens * 4 * 8 + 4 * 4 * (4 + 16)
                continue
            assert op["moved_bytes"] == pytest.approx(moved * (2 if name == "pair" else 1), rel=1e-2)
            assert op["of_copy"] == pytest.approx(op["moved_bytes"] / op["ms"]["median"] / 1e6 / 100)
    console = Console(width=120, record=True, file=io.StringIO())
    report["config"]["machine"]["gpu"] = "Double"
    print_report(report, console)
    printed = console.export_text()
    assert "of copy" in printed and "over copy" in printed


@pytest.mark.parametrize(
    ("dtype", "corrupt"), [("bf16", None), ("fp8", None), ("fp8", "dispatch"), ("bf16", "combine")]
)
@pytest.mark.thorough
def test_the_benchmark_of_low_latency_mode_on_a_gpu(
    double: Path, workers: Path, tmp_path: Path, dtype: str, corrupt: str | None
) -> None:
    """The same. The halves are timed too."""
    arguments = ["low-latency", dtype, *filter(None, [corrupt])]
    report = json.loads(on_threads(double, workers / "bench_on_threads.py", tmp_path / "log", *arguments))
    assert report["verified"] == (corrupt is None), report["checks"]
    wrong = {name for name, errors in report["checks"].items() if errors}
    assert wrong == ({corrupt} - {None})
    halves = {f"{op}_{half}" for op in ("dispatch", "combine") for half in ("send", "receive")}
    whole = {"dispatch", "combine", "combine_zero_copy", "pair"}
    assert set(report["ops"]) == halves | whole
    assert set(report["checks"]) == whole | {"dispatch_halves", "combine_halves"}
    for size in report["sizes"]:
        rows, tokens = 4 * 4 * size["tokens"], 4 * size["tokens"]
        dispatched = rows * {"bf16": 2 * 128, "fp8": 128 + 4}[dtype] + tokens * 2 * 128
        combined = (rows + tokens) * 2 * 128
        moved = {name: op["moved_bytes"] for name, op in size["ops"].items() if "moved_bytes" in op}
        assert moved == {
            "dispatch": dispatched,
            "combine": combined,
            "combine_zero_copy": combined,
            "pair": dispatched + combined,
            "dispatch_send": dispatched,
            "dispatch_receive": 2 * rows * {"bf16": 2 * 128, "fp8": 128 + 4}[dtype],
            "combine_send": 2 * rows * 2 * 128,
            "combine_receive": combined,
        }
        for name, op in size["ops"].items():
            kernels = {
                f"low_latency_{kernel}" for kernel in ("dispatch", "combine") if name.startswith((kernel, "pair"))
            }
            check_kernels(op, kernels, copy_gb_per_s=100)


@pytest.mark.thorough
def test_the_measurement_of_rates(double: Path, workers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything but the times; calls use the number of blocks that follows from the stored rates."""
    monkeypatch.setenv("DEEP_EP_CACHE_DIR", str(tmp_path / "kernels"))
    report = json.loads(on_threads(double, workers / "rates_on_threads.py", tmp_path / "log"))
    moved = 2 * 256 * 64 * 2  # each row is read once and written once
    assert report["moved_bytes"] == moved
    assert [point["blocks"] for point in report["points"]] == [1, 2, 4, 8, 16, 32, 64, 128, 132]
    assert report["points"][0]["gb_per_s"] == pytest.approx(moved / 1.01e-3 / 1e9)
    points = report["rates"]["points"]
    assert points[0] == [1, pytest.approx(moved / 1e-3)]
    assert max(rate for _, rate in points) == pytest.approx(20 * moved / 1e-3)
    assert report["rates"]["startup"] == pytest.approx(1e-5)
    assert report["kept"] == str(tmp_path / "kernels" / "rates-double-bulk-alone.json")
    assert "One block moves" in report["table"]
    # For one token, for many tokens, and with a Config.
    assert report["unmeasured"] == [2, 2, 3]
    assert report["one"] == [1, 1, 3]
    assert report["more"] == [2, 2, 3]


def test_the_measurement_of_posting(double: Path, workers: Path, tmp_path: Path) -> None:
    """Everything but the timings: each request is counted and has arrived."""
    report = json.loads(on_threads(double, workers / "posting_on_threads.py", tmp_path / "log"))
    assert report["verified"]
    one, many = report["patterns"]
    assert (one["posting_warps"], one["queue_pairs"], one["requests"]) == (1, 1, 64)
    assert (many["posting_warps"], many["queue_pairs"], many["requests"]) == (8, 2, 128)
    assert one["doorbells"] == dict.fromkeys(("median", "min", "max"), 32), "one warp must ring for every put"
    assert 0 < many["doorbells"]["min"] <= many["doorbells"]["max"] <= 64
    for posted in report["patterns"]:
        times, rates = posted["ns_per_request"], posted["doorbells_per_s"]
        assert 0 < times["min"] <= times["median"] <= times["max"]
        assert 0 < rates["min"] <= rates["median"] <= rates["max"]
    assert "many warps" in report["table"]


def test_what_calls_ask_of_streams(double: Path, workers: Path, tmp_path: Path) -> None:
    """Launches, events that are recorded, and waits for them: a stream that waits for another costs more than a small
    call. A call of normal mode runs beside the caller's work, so the two streams wait for each other."""
    log = tmp_path / "log"
    log.touch()
    counted = json.loads(on_threads(double, workers / "stream_operations.py", log, CUDA_DEVICE_MAX_CONNECTIONS="32"))

    def of(launches: int, records: int, waits: int) -> dict[str, int]:
        return {"launches": launches, "records": records, "waits": waits}

    assert counted == {
        "low latency": dict.fromkeys(("dispatch", "combine", "send", "receive"), of(1, 0, 0)),
        "low latency, async_finish": dict.fromkeys(("dispatch", "combine"), of(1, 2, 1)),
        "normal": {
            "layout": of(1, 2, 2),
            "dispatch": of(2, 3, 3),
            "cached dispatch": of(1, 2, 2),
            "combine": of(1, 2, 2),
        },
    }


def test_calls_on_several_streams(double: Path, workers: Path, tmp_path: Path) -> None:
    """Low-latency calls on two streams by turns, with and without hooks, and among calls of normal mode, while a kernel
    of the program keeps one of the streams busy on one rank."""
    on_threads(double, workers / "several_streams.py", tmp_path / "log")


@pytest.mark.timed
@pytest.mark.parametrize("which", ["", "waiting"])
@pytest.mark.thorough
def test_between_a_failure_and_its_telling(double: Path, workers: Path, tmp_path: Path, which: str) -> None:
    """Other Buffers, graphs, and recoveries that fail half way: nothing succeeds that used the results of a failure."""
    assert "ended" in on_threads(double, workers / "after_failures.py", tmp_path / "log", *filter(None, [which]))


@pytest.mark.timed
@pytest.mark.parametrize(
    "scenarios",
    [
        ("a_driver_for_cuda_12", "little_shared_memory", "serial_cooperative_launches", "a_driver_that_is_shut_down"),
        ("too_few_queues",),
    ],
    ids="+".join,
)
def test_bad_drivers(double: Path, workers: Path, tmp_path: Path, scenarios: tuple[str, ...]) -> None:
    """Permitted behavior of a driver: calls still work, or name the cause within their timeout."""
    assert on_threads(double, workers / "bad_drivers.py", tmp_path / "log", *scenarios).split() == list(scenarios)


def test_stages_of_kernels(double: Path, workers: Path, tmp_path: Path) -> None:
    """Of those that are launched, in a recording; none of a graph."""
    found = on_threads(double, workers / "staged.py", tmp_path / "log", str(tmp_path), DEEP_EP_STAGES="on")
    assert found.count("('dispatch', 'store rows')") == 2 and found.count("('notify', 'await counts')") == 2
    none = on_threads(double, workers / "staged.py", tmp_path / "log", str(tmp_path), DEEP_EP_STAGES="off")
    assert none == "[]\n[]\n"
