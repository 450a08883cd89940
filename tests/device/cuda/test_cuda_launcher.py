"""Launches through the CUDA driver, over a stand-in for it: no GPU is needed, and none is touched."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from deep_ep_py.base import native
from forks import run_python
from native_programs import NATIVE, native_build

pytestmark = pytest.mark.once

# The extension alone, without the package, which imports torch.
PREAMBLE = f"""
import importlib.util, os
spec = importlib.util.spec_from_file_location({native.C.__name__!r}, {native.C.__file__!r})
C = importlib.util.module_from_spec(spec)
spec.loader.exec_module(C)
cuda = C.cuda
CUBIN = b"\\x7fELF and more"
SHAPE = (8, 14336, 8)

def refused(call, *arguments):
    try:
        call(*arguments)
    except (RuntimeError, ValueError, IndexError) as error:
        return f"{{type(error).__name__}}: {{error}}"
    raise AssertionError("not refused")

def make(ordinal=0, **options):
    launcher = cuda.Launcher(cuda.Context(ordinal), **options)
    launcher.load("dispatch", SHAPE, CUBIN, "_Zdispatch")
    return launcher

"""


@pytest.fixture(scope="module")
def double(idle_double: Path) -> Path:
    """Return the folder of the stand-in for libcuda.so.1; its kernels do nothing."""
    return idle_double


def run(folder: Path, program: str, **variables: str) -> list[str]:
    environment = {**os.environ, **variables, "LD_LIBRARY_PATH": str(folder), "PYTHONPATH": str(native_build.ROOT)}
    result = run_python(["-c", PREAMBLE + program], environment)  # errors import the package, and so torch
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


def run_logged(folder: Path, tmp_path: Path, program: str, **variables: str) -> tuple[list[str], list[str]]:
    log = tmp_path / "log"
    printed = run(folder, program, DOUBLE_LOG=str(log), **variables)
    return printed, log.read_text().splitlines()


def calls(log: list[str], name: str) -> list[str]:
    return [line.removeprefix(f"{name} ") for line in log if line.split()[0] == name]


def test_what_gpu_there_is(double: Path) -> None:
    program = """
for ordinal in (0, 1):
    context = cuda.Context(ordinal)
    print(cuda.driver_version(), context.name, context.architecture, context.multiprocessors)
"""
    assert run(double, program) == ["13000 Double sm_90a 4", "13000 Double sm_80 4"]


def test_a_launch(double: Path, tmp_path: Path) -> None:
    program = """
launcher = make()
print(launcher.max_blocks("dispatch", SHAPE, 4, 1000))
serials = [launcher.launch("dispatch", SHAPE, 8, 4, 1000, bytes([n] + 15 * [0])) for n in (1, 2)]
launcher.wait(serials[-1])
print(serials, [launcher.finished(serial) for serial in serials])
"""
    printed, log = run_logged(double, tmp_path, program, DOUBLE_QUERIES="3")
    assert printed == ["8", "[1, 2] [True, True]"]
    launched = "grid=8,1,1 block=128,1,1 shared=1000 cooperative=1 args="
    assert calls(log, "launch") == [launched + "1", launched + "2"]
    assert calls(log, "stream") == ["flags=1 priority=-5"], "the stream must not wait for others and must have priority"
    asked = len(calls(log, "cuOccupancyMaxActiveBlocksPerMultiprocessor"))
    assert asked == 2, "once when loaded, once for this block size"


def test_serials_end_in_order(double: Path) -> None:
    program = """
launcher = make()
first = launcher.launch("dispatch", SHAPE, 1, 1, 0, bytes(8))
second = launcher.launch("dispatch", SHAPE, 1, 1, 0, bytes(8))
seen = []
while not launcher.finished(second):
    seen.append(launcher.finished(first))
print(seen == sorted(seen), launcher.finished(first), seen[0])
"""
    assert run(double, program, DOUBLE_QUERIES="5") == ["True True False"]


STREAMS = """
import ctypes
driver = ctypes.CDLL("libcuda.so.1")
streams = [0]  # the default stream
for _ in range(2):
    with cuda.Context(0).current():
        made = ctypes.c_void_p()
        assert driver.cuStreamCreateWithPriority(ctypes.byref(made), 0, 0) == 0
    streams.append(made.value)
launcher = make()

def launch(*order, ends=False):
    for stream in order:
        launcher.launch_on(None if stream is None else streams[stream], ends)
        launcher.launch("dispatch", SHAPE, 1, 1, 0, bytes(8))

"""
IN_ORDER = ("cuEventRecord", "cuStreamWaitEvent", "launch")


def in_order(log: list[str]) -> list[str]:
    """Return the operations of streams, in order."""
    short = {"cuEventRecord": "record", "cuStreamWaitEvent": "wait", "launch": "launch"}
    return [short[line.split()[0]] for line in log if line.split()[0] in IN_ORDER]


@pytest.mark.parametrize("stream", [None, 0, 1])
def test_launches_on_one_stream_need_no_event(double: Path, tmp_path: Path, stream: int | None) -> None:
    _, log = run_logged(double, tmp_path, STREAMS + f"launch(*4 * [{stream}])")
    assert in_order(log) == ["launch"] * 4


def test_launches_on_several_streams_run_in_their_order(double: Path, tmp_path: Path) -> None:
    """The first change records behind what is queued already; from then on, an event follows each launch."""
    _, log = run_logged(double, tmp_path, STREAMS + "launch(1, 1, 2, 2, None, 0)")
    first, then = ["launch", "launch"], ["wait", "launch", "record"]
    assert in_order(log) == [*first, "record", *then, "launch", "record", *then, *then]


def test_a_stream_that_may_end(double: Path, tmp_path: Path) -> None:
    """It need not exist at the next launch, and its handle may then be another stream's."""
    program = """
launch(1, 1, ends=True)
with cuda.Context(0).current():
    assert driver.cuStreamDestroy_v2(ctypes.c_void_p(streams[1])) == 0
launch(2)
"""
    _, log = run_logged(double, tmp_path, STREAMS + program)
    assert in_order(log) == ["launch", "record", "wait", "launch", "record", "wait", "launch", "record"]


def test_a_graph_orders_its_own_launches(double: Path, tmp_path: Path) -> None:
    """Those outside it, and those of other graphs, are ordered by its replays: it must not wait for them."""
    program = """
launch(1)
with cuda.Context(0).current():
    for streams_of_graph in ((1, 2), (2, 1)):
        driver.double_capture(1)
        launch(*streams_of_graph)
        driver.double_capture(0)
launch(1)
"""
    _, log = run_logged(double, tmp_path, STREAMS + program)
    graph = ["launch", "record", "wait", "launch", "record"]
    assert in_order(log) == ["launch", *graph, *graph, "launch"]


def test_times_of_launches(double: Path, tmp_path: Path) -> None:
    """Only of those that are asked for; their events take no part in whether a launch has ended, and are released."""
    program = """
launcher = make()
launcher.launch("dispatch", SHAPE, 1, 1, 0, bytes(8))
launcher.time_launches(True)
for _ in range(2):
    launcher.launch("dispatch", SHAPE, 1, 1, 0, bytes(8))
launcher.time_launches(False)
launcher.wait(launcher.launch("dispatch", SHAPE, 1, 1, 0, bytes(8)))
first, second = launcher.take_launch_times()
print(first[:2], second[0], 0 <= first[2] <= second[1] <= second[2], launcher.take_launch_times())
launcher.time_launches(True)
launcher.launch("dispatch", SHAPE, 1, 1, 0, bytes(8))
del launcher
"""
    printed, log = run_logged(double, tmp_path, program)
    assert printed == ["('dispatch', 0.0) dispatch True []"]
    assert len(calls(log, "cuEventRecord")) == 3 * 2
    assert len(calls(log, "cuEventElapsedTime")) == 2 * 2
    assert calls(log, "cuDevicePrimaryCtxRelease") == ["alive=0"]


def test_nothing_is_left(double: Path, tmp_path: Path) -> None:
    """Streams, events and code are released, including those of launches that no call waited for."""
    program = """
for n in range(3):
    launcher = make()
    for _ in range(4):
        launcher.launch("dispatch", SHAPE, 1, 1, 0, bytes(8))
    del launcher
"""
    _, log = run_logged(double, tmp_path, program, DOUBLE_QUERIES="1000000")
    assert calls(log, "cuDevicePrimaryCtxRelease") == ["alive=0"] * 3


def test_a_stream_that_was_handed_out_is_kept_for_the_next(double: Path, tmp_path: Path) -> None:
    """Tensors that were used on it may be freed later; ranks that share the GPU each get a new one."""
    program = """
streams = []
for sharers, keeps in ((1, True), (1, False), (1, False), (2, False), (2, True), (1, False)):
    launcher = make(sharers=sharers)
    streams.append(launcher.stream)
    if keeps:
        launcher.keep_stream()
    del launcher
print([streams.index(stream) for stream in streams])
"""
    printed, log = run_logged(double, tmp_path, program)
    assert printed == ["[0, 0, 0, 3, 4, 0]"], "the first is reused wherever a rank has the GPU to itself"
    assert len(calls(log, "stream")) == 3
    # The first and the fifth, and the context that they belong to.
    assert calls(log, "cuDevicePrimaryCtxRelease")[-1] == "alive=2"


def test_a_busy_stream_is_not_taken_over(double: Path) -> None:
    """Its kernel may wait for a failed rank."""
    program = """
launcher = make()
launcher.keep_stream()
first = launcher.stream
del launcher
print(make().stream == first)
"""
    assert run(double, program, DOUBLE_FAIL="cuStreamQuery=600") == ["False"], "600: not ready"


def test_ranks_share_a_gpu(double: Path) -> None:
    program = """
launcher = cuda.Launcher(cuda.Context(0), sharers=4)
launcher.load("dispatch", SHAPE, CUBIN, "_Zdispatch")
print(launcher.max_blocks("dispatch", SHAPE, 4, 0))
print(refused(launcher.launch, "dispatch", SHAPE, 3, 4, 0, bytes(8)))
"""
    most, said = run(double, program)
    assert most == "2" and said.endswith("Double holds at most 2 at once for each of 4 ranks"), said


def test_threads_launch_at_once(double: Path) -> None:
    """Ranks that are threads: each has a launcher and calls the driver independently."""
    program = """
from concurrent.futures import ThreadPoolExecutor

def rank(number):
    launcher = make()
    for _ in range(500):
        launcher.wait(launcher.launch("dispatch", SHAPE, 1, 1, 0, bytes(8)))
    return number

with ThreadPoolExecutor(8) as pool:
    print(list(pool.map(rank, range(8))))
"""
    assert run(double, program, DOUBLE_QUERIES="20") == [str(list(range(8)))]


TOGETHER = """
from concurrent.futures import ThreadPoolExecutor

def gathered(ranks, timeout=30.0):
    gathering = cuda.Gathering(cuda.Context(0), ranks)
    launchers = [cuda.GatheredLauncher(gathering, rank, timeout) for rank in range(ranks)]
    for launcher in launchers:
        if not launcher.loaded("dispatch", SHAPE):
            launcher.load("dispatch", SHAPE, CUBIN, "_Zof_each_rank")
    return gathering, launchers

def each(launchers, call):
    with ThreadPoolExecutor(len(launchers)) as pool:
        return list(pool.map(call, range(len(launchers)), launchers))

"""


def test_ranks_launch_together(double: Path, tmp_path: Path) -> None:
    """All ranks share one launch of all their blocks, with an array of their arguments that no other launch uses."""
    program = """
_, launchers = gathered(4)
def rank(number, launcher):
    return [launcher.launch("dispatch", SHAPE, 2, 4, 1000, bytes([16 * n + number] + 23 * [0])) for n in (1, 2)]
serials = each(launchers, rank)
print(serials, len({launcher.stream for launcher in launchers}))
each(launchers, lambda number, launcher: launcher.wait(serials[number][-1]))
print(all(launcher.finished(2) for launcher in launchers))
each(launchers, lambda number, launcher: launcher.launch("dispatch", SHAPE, 2, 4, 1000, bytes([number] + 23 * [0])))
"""
    printed, log = run_logged(double, tmp_path, TOGETHER + program, DOUBLE_QUERIES="3")
    assert printed == ["[[1, 2], [1, 2], [1, 2], [1, 2]] 1", "True"]
    assert len(calls(log, "cuModuleLoadData")) == 1, "one rank loads for all"
    launched = "grid=2,4,1 block=128,1,1 shared=1000 cooperative=1 args="
    assert all(launch.startswith(launched) for launch in calls(log, "launch"))
    arrays = [launch.removeprefix(launched).split(":") for launch in calls(log, "launch")]
    assert [words for _, words in arrays] == ["10,11,12,13", "20,21,22,23", "0,1,2,3"]
    first, second, third = (address for address, _ in arrays)
    assert first != second and third in (first, second), "must be reused once its launch has ended"


def test_launches_together_end_in_order(double: Path, tmp_path: Path) -> None:
    program = """
import gc
_, launchers = gathered(8)
def rank(number, launcher):
    for n in range(200):
        launcher.wait(launcher.launch("dispatch", SHAPE, 1, 1, 0, n.to_bytes(8, "little")))
    return n
print(each(launchers, rank))
del launchers, _
gc.collect()
"""
    printed, log = run_logged(double, tmp_path, TOGETHER + program, DOUBLE_QUERIES="20")
    assert printed == [str([199] * 8)]
    expected = [",".join([f"{n:x}"] * 8) for n in range(200)]
    assert [launch.rpartition(":")[2] for launch in calls(log, "launch")] == expected
    assert calls(log, "cuDevicePrimaryCtxRelease") == ["alive=0"]


def test_ranks_that_do_not_launch_together(double: Path) -> None:
    """All ranks are told which rank came with what, immediately if waiting cannot help."""
    program = """
def said(ranks, call, timeout=30.0):
    gathering, launchers = gathered(ranks, timeout)
    print(sorted(set(each(launchers, lambda number, launcher: call(gathering, number, launcher)))))

def other_blocks(gathering, number, launcher):
    return refused(launcher.launch, "dispatch", SHAPE, 1 + number % 2, 4, 0, bytes(8))

def other_kernel(gathering, number, launcher):
    return refused(launcher.launch, "combine" if number else "dispatch", SHAPE, 1, 4, 0, bytes(8))

def other_shape(gathering, number, launcher):
    return refused(launcher.launch, "dispatch", SHAPE if number else (8, 128, 8), 1, 4, 0, bytes(8))

def two_of_five(gathering, number, launcher):
    return refused(launcher.launch, "dispatch", SHAPE, 1, 4, 0, bytes(8)) if number in (1, 3) else ""

def one_leaves(gathering, number, launcher):
    return refused(launcher.launch, "dispatch", SHAPE, 1, 4, 0, bytes(8)) if number else gathering.leave(0) or ""

def too_many_blocks(gathering, number, launcher):
    return refused(launcher.launch, "dispatch", SHAPE, 5, 4, 0, bytes(8))

said(2, other_blocks)
said(2, other_kernel)
said(2, other_shape)
said(5, two_of_five, 0.5)
said(2, one_leaves)
said(2, too_many_blocks)
print(refused(cuda.GatheredLauncher, cuda.Gathering(cuda.Context(0), 2), 2, 0))
"""
    printed = run(double, TOGETHER + program)
    kind = "DeepEPError: all {} ranks go to the GPU in one launch, expected the same of each: "
    shape, one = "for 8 ranks, rows of 14336 bytes and top-8", "1 block of 4 warps with 0 bytes of shared memory"
    other = one.replace("1 block", "2 blocks")
    two = kind.format(2)
    assert [ast.literal_eval(line) for line in printed[:-1]] == [
        [f"{two}rank 0 came with dispatch {shape}, {one}; rank 1 came with dispatch {shape}, {other}"],
        [f"{two}rank 0 came with dispatch {shape}, {one}; rank 1 came with combine {shape}, {one}"],
        [
            f"{two}rank 0 came with dispatch for 8 ranks, rows of 128 bytes and top-8, {one}; "
            f"rank 1 came with dispatch {shape}, {one}"
        ],
        [
            "",
            f"{kind.format(5)}ranks 0, 2, 4 did not come within 0.5 s; ranks 1, 3 came with dispatch {shape}, {one}",
        ],
        ["", f"{two}rank 0 will not come again; rank 1 came with dispatch {shape}, {one}"],
        [
            "CudaError: dispatch, 5 blocks of 128 threads with 0 bytes of shared memory: they wait for each other, and "
            "Double holds at most 4 at once for each of 2 ranks"
        ],
    ]
    assert printed[-1] == "ValueError: rank=2: expected 0 to 1"


def test_large_shared_memory_is_asked_for_once(double: Path, tmp_path: Path) -> None:
    """When the kernel is loaded: everything that its static shared memory leaves."""
    program = """
launcher = make()
for shared in (48 << 10, 100 << 10, 64 << 10, 100 << 10):
    launcher.launch("dispatch", SHAPE, 1, 1, shared, bytes(8))
print(refused(launcher.launch, "dispatch", SHAPE, 1, 1, 227 << 10, bytes(8)))
"""
    printed, log = run_logged(double, tmp_path, program)
    assert calls(log, "attribute") == [f"8={225 << 10}"]
    assert printed == [
        f"CudaError: dispatch with {227 << 10} bytes of shared memory for each block: Double has {225 << 10}"
    ]


def without_func_load(double: Path, folder: Path) -> Path:
    """Make a driver that predates cuFuncLoad: a function that is missing from the hash table cannot be found."""
    library = (double / "libcuda.so.1").read_bytes()
    (folder / "libcuda.so.1").write_bytes(library.replace(b"\0cuFuncLoad\0", b"\0cuFuncLoax\0"))
    return folder


@pytest.mark.parametrize("version", ["new", "old"])
def test_nothing_is_loaded_or_allocated_at_a_launch(double: Path, tmp_path: Path, version: str) -> None:
    """Loading would wait for kernels that wait for this one. Local memory is also allocated earlier."""
    program = """
launcher = make()
print(open(os.environ["DOUBLE_LOG"]).read().count("\\n"))
for _ in range(3):
    launcher.wait(launcher.launch("dispatch", SHAPE, 1, 1, 100 << 10, bytes(8)))
"""
    folder = double if version == "new" else without_func_load(double, tmp_path)
    variables = {"DOUBLE_LOADS_WHEN_ASKED": "1"} if version == "old" else {}
    printed, log = run_logged(folder, tmp_path, program, DOUBLE_LOCAL_BYTES="5000", **variables)
    before, after = log[: int(printed[0])], log[int(printed[0]) :]
    assert calls(before, "limit") == ["5000"] and bool(calls(before, "cuFuncLoad")) == (version == "new")
    assert len(calls(after, "launch")) == 3
    loading = {"loads", "cuModuleLoadData", "cuFuncLoad", "cuEventCreate", "cuCtxSetLimit", "cuFuncSetAttribute"}
    assert not loading & {line.split()[0] for line in after}, after


@pytest.mark.parametrize("call", ["cuFuncLoad", "cuFuncGetAttribute"])
def test_a_kernel_that_cannot_be_made_resident_is_not_loaded(double: Path, tmp_path: Path, call: str) -> None:
    """Otherwise it would be loaded at its first launch. Loading may be retried, and nothing leaks."""
    program = f"""
import gc
os.environ["DOUBLE_FAIL"] = "{call}=218"
launcher = cuda.Launcher(cuda.Context(0))
refused(launcher.load, "dispatch", SHAPE, CUBIN, "_Zdispatch")
print(launcher.loaded("dispatch", SHAPE))
del os.environ["DOUBLE_FAIL"]
launcher.load("dispatch", SHAPE, CUBIN, "_Zdispatch")
print(launcher.loaded("dispatch", SHAPE))
del launcher
gc.collect()
"""
    printed, log = run_logged(double, tmp_path, program)
    assert printed == ["False", "True"]
    assert calls(log, "cuDevicePrimaryCtxRelease") == ["alive=0"]


def test_launches_without_the_cooperative_attribute(double: Path, tmp_path: Path) -> None:
    """Also if the GPU does not support them; residency is still checked."""
    program = """
launcher = cuda.Launcher(cuda.Context(0), cooperative=False)
launcher.load("dispatch", SHAPE, CUBIN, "_Zdispatch")
launcher.launch("dispatch", SHAPE, 8, 4, 1000, bytes(8))
print(refused(launcher.launch, "dispatch", SHAPE, 9, 4, 0, bytes(8)))
"""
    printed, log = run_logged(double, tmp_path, program, DOUBLE_OLD="1")
    assert calls(log, "launch") == ["grid=8,1,1 block=128,1,1 shared=1000 cooperative=0 args=0"]
    assert printed[0].endswith("they wait for each other, and Double holds at most 8 at once")


def test_refusals(double: Path) -> None:
    program = """
print(refused(cuda.Context, 2))
launcher = make()
print(refused(launcher.launch, "dispatch", SHAPE, 9, 4, 0, bytes(8)))
print(refused(launcher.launch, "dispatch", (4, 14336, 8), 1, 4, 0, bytes(8)))
print(refused(launcher.load, "dispatch", SHAPE, CUBIN, "_Zdispatch"))
print(refused(launcher.load, "combine", SHAPE, b"no code at all", "_Zcombine"))
print(refused(launcher.load, "combine", SHAPE, CUBIN, "combine"))
"""
    assert run(double, program) == [
        "CudaError: cuda:2: there are 2 GPUs",
        "CudaError: dispatch, 9 blocks of 128 threads with 0 bytes of shared memory: they wait for each other, and "
        "Double holds at most 8 at once",
        "IndexError: no kernel named dispatch is loaded for this shape: Engine.prepare comes first",
        "ValueError: kernel dispatch is loaded already",
        "CudaError: loading kernel combine: unknown error (200)",
        "CudaError: finding combine in kernel combine: unknown error (500)",
    ]


@pytest.mark.parametrize(
    "call, said",
    [
        ("cuInit=218", "initializing the CUDA driver: "),
        ("cuDevicePrimaryCtxRetain=218", "making the context of cuda:0: "),
        ("cuStreamCreateWithPriority=218", "making a stream: "),
        ("cuModuleLoadData=218", "loading kernel dispatch: "),
        ("cuEventCreate=218", "making an event: "),
        ("cuLaunchKernelEx=218", "launching dispatch, 1 blocks of 32 threads with 0 bytes of shared memory: "),
        ("cuStreamQuery=218", "running kernels: "),
    ],
)
def test_the_drivers_errors_say_what_we_were_doing(double: Path, call: str, said: str) -> None:
    program = """
def everything():
    launcher = make()
    launcher.wait(launcher.launch("dispatch", SHAPE, 1, 1, 0, bytes(8)))

print(refused(everything))
"""
    expected = f"CudaError: {said}CUDA_ERROR_INVALID_PTX (218): a PTX JIT compilation failed"
    assert run(double, program, DOUBLE_FAIL=call) == [expected]


def test_a_driver_that_is_too_old(tmp_path: Path) -> None:
    (tmp_path / "old.cpp").write_text('extern "C" int cuInit(unsigned) { return 0; }\n')
    library = tmp_path / "libcuda.so.1"
    subprocess.run(["g++", "-shared", "-fPIC", str(tmp_path / "old.cpp"), "-o", str(library)], check=True)
    (said,) = run(tmp_path, "print(refused(cuda.driver_version))")
    assert said == "CudaError: the CUDA driver is too old: libcuda.so.1 has no cuDriverGetVersion"


def test_a_gpu_without_cooperative_launches(double: Path) -> None:
    (said,) = run(double, "print(refused(make))", DOUBLE_OLD="1")
    what = "cannot launch kernels whose blocks wait for each other"
    assert said == f"CudaError: Double {what}; DEEP_EP_LAUNCH=plain does not require that"


def test_ctrl_c_ends_a_wait(double: Path) -> None:
    program = """
import signal
launcher = make()
serial = launcher.launch("dispatch", SHAPE, 1, 1, 0, bytes(8))
signal.setitimer(signal.ITIMER_REAL, 0.2)
signal.signal(signal.SIGALRM, signal.default_int_handler)
try:
    launcher.wait(serial)
except KeyboardInterrupt:
    print("interrupted")
"""
    assert run(double, program, DOUBLE_QUERIES="2000000000") == ["interrupted"]


def test_without_a_driver(tmp_path: Path) -> None:
    """Importing the package and using a Buffer on CPU tensors opens no driver; a GPU request names what is missing."""
    program = """
import torch, deep_ep_py
from deep_ep_py.testing import run_ranks

def on_each_rank(group):
    buffer = deep_ep_py.Buffer(group, num_nvl_bytes=1 << 16, arena_bytes=1 << 16)
    return buffer.get_dispatch_layout(torch.zeros(4, 1, dtype=torch.int64), 2)[0].tolist()

print(run_ranks(2, on_each_rank, seed=1))
print("libcuda" in open("/proc/self/maps").read())
"""
    printed = run(tmp_path, program)
    assert printed == ["[[4, 0], [4, 0]]", "False"]
    with_driver = subprocess.run(["ldconfig", "-p"], capture_output=True, text=True).stdout
    if "libcuda.so.1" in with_driver:
        pytest.skip("this machine has a CUDA driver")
    (said,) = run(tmp_path, "print(refused(cuda.driver_version))")
    assert said.startswith("CudaError: there is no CUDA driver: libcuda.so.1: cannot open"), said


def test_our_declarations_are_the_headers(tmp_path: Path) -> None:
    """Compare types, numbers and arguments with cuda.h, if a toolkit is installed."""
    candidates = [Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "include"]
    if compiler := shutil.which("nvcc"):
        candidates.append(Path(compiler).resolve().parent.parent / "include")
    include = next((folder for folder in candidates if (folder / "cuda.h").exists()), None)
    if include is None:
        pytest.skip("no cuda.h is installed")
    source = NATIVE / "driver_double" / "cuda_header.cpp"
    flags = ["-std=c++17", "-fsyntax-only", f"-I{native_build.SOURCE_ROOT}", f"-I{include}"]
    result = subprocess.run(["g++", *flags, str(source)], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
