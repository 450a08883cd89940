"""The list of experiments, in the order of their worth."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.gpu_lab import sizes

ROOT = Path(__file__).resolve().parents[2]
LONGEST_SECONDS = 40
"""The longest time limit of an experiment."""
DEFAULT_SECONDS = 300
"""What the limits of a machine's default list add up to at most."""
JSON = "{json}"
"""Stands in a command for the file that receives the figures."""

PYTHON = sys.executable
_DEEP_EP = (PYTHON, "-m", "deep_ep_py")
_BENCH = (*_DEEP_EP, "bench", "--device=cuda", "--no-plot", f"--json={JSON}", *sizes.SHAPE)
# A dry run: if the rates were kept, Buffers on such a GPU would choose their numbers of blocks by them.
_RATES = (
    *(*_DEEP_EP, "rates", "--dry-run", f"--json={JSON}", f"--tokens={sizes.NORMAL_TOKENS}"),
    *(f"--hidden={sizes.HIDDEN}", "--iterations=5"),
)
# A kernel that never ends must not take the time of all tests.
_PYTEST = (PYTHON, "-m", "pytest", "-rs", "--durations=5", "--timeout=20", "--timeout-method=signal", "-o", "addopts=")
_GPU = "tests/device/gpu"
_LOW_LATENCY = (
    *("--mode=low-latency", "--dtype=fp8"),
    f"--tokens={sizes.LOW_LATENCY_TOKENS}",
    f"--iterations={sizes.LOW_LATENCY_ITERATIONS}",
)
_NORMAL = (f"--tokens={sizes.NORMAL_TOKENS}", f"--iterations={sizes.NORMAL_ITERATIONS}")
_SHARED = f"--num-sms={sizes.NORMAL_BLOCKS}"
# Cases from tests/support/cases.py, and those of low-latency mode from low_latency_gpu.py there.
WATCHED = {
    "normal": ("one_rank_alone", "two_ranks", "uniform"),
    "low_latency": ("low_latency_one_rank", "low_latency_two_ranks", "low_latency_several_units"),
}
SANITIZERS = ("memcheck", "racecheck", "synccheck")
FAILED_BEFORE = (
    f"{_GPU}/test_gpu.py::test_random_routings[2]",
    f"{_GPU}/test_gpu.py::test_a_recorded_stream_keeps_an_output",
    f"{_GPU}/test_low_latency.py::test_statistics",
    f"{_GPU}/test_gpu.py::test_case[sixty_four_ranks]",
    f"{_GPU}/test_gpu.py::test_an_arena_grows_between_processes",
)
"""The tests that failed in the first run on a GPU (results/2026-11-26_h200_gpu_check.md)."""
ELASTIC = (
    f"{_GPU}/test_elastic.py::test_case[uniform]",
    f"{_GPU}/test_elastic.py::test_events_and_streams",
    f"{_GPU}/test_elastic.py::test_a_graph_without_a_host_wait",
    f"{_GPU}/test_eplb.py",
)


@dataclass(frozen=True)
class Experiment:
    """A command that answers a question within a time limit.

    Parameters
    ----------
    name
        Its name in the report, in `--only` and in files.
    question
        What it answers, in a line.
    command
        The command; `JSON` in it stands for the file that receives its figures.
    seconds
        Its time limit.
    default
        On which machines it is in the default list: "all", those with "one" GPU, those with "several", or "none".
    environment
        Its environment variables.
    needs
        A program that it needs, besides Python.
    gpus
        How many GPUs it needs.
    shares
        Whether ranks on one GPU launch for themselves, so that their kernels must run side by side.
    """

    name: str
    question: str
    command: tuple[str, ...]
    seconds: int
    default: str = "none"
    environment: dict[str, str] = field(default_factory=dict)
    needs: str | None = None
    gpus: int = 1
    shares: bool = False

    def in_default_list(self, gpus: int) -> bool:
        """Return whether a machine with so many GPUs runs it without being asked to."""
        return self.default == "all" or self.default == ("several" if gpus > 1 else "one")


def experiments(gpus: int) -> list[Experiment]:
    """Return all experiments for a machine with so many GPUs: the default list first, in the order of worth."""
    found = [*_foundations(), *_on_several_gpus(gpus), *_never_run(), *_probes(), *_benchmarks(), *_by_name()]
    return sorted(found, key=lambda one: not one.in_default_list(gpus))


def program(name: str, *options: str) -> tuple[str, ...]:
    """Return the command of a program in this folder."""
    return (PYTHON, "-m", f"benchmarks.gpu_lab.{name}", *options)


def _per_gpu(gpus: int, *arguments: str) -> tuple[str, ...]:
    """Return the command that runs a Python program as a process per GPU."""
    return (PYTHON, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks_on(gpus)}", *arguments)


def ranks_on(gpus: int) -> int:
    """Return how many ranks with a GPU each a machine runs, among which experts are divided evenly; at least 2."""
    return max(ranks for ranks in (2, 4, 8) if ranks <= max(2, gpus))


def _foundations() -> Iterator[Experiment]:
    yield Experiment("build", "Does the extension compile here?", program("build"), 36, "all")
    yield Experiment(
        "canary",
        "What do this GPU and its driver do that is not documented, and which kind of launch lets ranks share the GPU?",
        (*_DEEP_EP, "canary", f"--json={JSON}"),
        20,
        "all",
    )


def _on_several_gpus(gpus: int) -> Iterator[Experiment]:
    worker = "tests/support/workers"
    yield Experiment(
        "links_normal",
        "Is every row of normal mode right where each rank has a GPU of its own?",
        _per_gpu(gpus, f"{worker}/round_trip.py", "--device=cuda:local"),
        30,
        "several",
        gpus=2,
    )
    yield Experiment(
        "links_low_latency",
        "The same in low-latency mode.",
        _per_gpu(gpus, f"{worker}/low_latency_layers.py", "--device=cuda:local", "--fabric=peer"),
        30,
        "several",
        gpus=2,
    )
    yield Experiment(
        "links_hidden",
        "The same in normal mode where each process sees its own GPU alone, so that NVML has to know of the links.",
        _per_gpu(gpus, f"{worker}/round_trip.py", "--device=cuda:own"),
        20,
        "several",
        gpus=2,
    )
    yield Experiment(
        "links_recovery",
        "Do the ranks name a killed process, recover without it, and go on with right results?",
        program("kill_and_recover", f"--ranks={ranks_on(gpus)}", f"--json={JSON}"),
        30,
        "several",
        gpus=2,
    )
    yield Experiment(
        "links_low_latency_benchmark",
        "How long do low-latency calls take over the links?",
        _per_gpu(gpus, *_BENCH[1:], *_LOW_LATENCY),
        30,
        "several",
        gpus=2,
    )
    yield Experiment(
        "links_normal_benchmark",
        "How long do calls of normal mode take over the links?",
        _per_gpu(gpus, *_BENCH[1:], f"--num-sms={sizes.BLOCKS_PER_GPU}", *_NORMAL),
        40,
        "several",
        gpus=2,
    )
    yield Experiment(
        "links_rates",
        "How much do 1, 2, 4, ... blocks move over the links?",
        _per_gpu(gpus, *_RATES[1:]),
        30,
        "several",
        gpus=2,
    )


def _never_run() -> Iterator[Experiment]:
    yield Experiment(
        "failed_before",
        "Do the 5 tests pass that failed in the first run on a GPU?",
        (*_PYTEST, *FAILED_BEFORE),
        26,
        "all",
        shares=True,
    )
    yield Experiment(
        "recovery",
        "Do ranks on a GPU go on after a failure, by `recover` and by `enable_shrink`?",
        (*_PYTEST, f"{_GPU}/test_recovery.py"),
        16,
        "one",
        shares=True,
    )
    yield Experiment(
        "elastic", "Do ElasticBuffer and redundant experts work?", (*_PYTEST, *ELASTIC), 30, "one", shares=True
    )
    yield Experiment(
        "layers",
        "Do MoELayer, ExpandedMoELayer and DecodeLayer work, also compiled by torch?",
        (*_PYTEST, f"{_GPU}/test_gpu_layers.py", f"{_GPU}/test_moe.py::test_a_layer_and_its_backward[counted]"),
        30,
        "one",
        shares=True,
    )
    yield Experiment(
        "vector_copies",
        "Are rows right that are copied by 16-byte accesses instead of bulk copies?",
        (*_PYTEST, f"{_GPU}/test_gpu.py::test_case[uniform]"),
        15,
        "one",
        {"DEEP_EP_COPIES": "vector"},
        shares=True,
    )


def _probes() -> Iterator[Experiment]:
    yield Experiment(
        "stage_times",
        "Where does the time of each kernel go, by the stages of its warps?",
        program("stage_times", f"--json={JSON}"),
        24,
        "one",
        shares=True,
    )
    for name, question, seconds in (
        ("fences", "What do fences, atomics, loads, bulk loads and empty launches cost, idle and under load?", 11),
        ("stream_hops", "What does a call cost on the caller's stream, on two of them, and on the library's?", 9),
        ("abort_word", "How many stores and exchanges of a host are lost to a GPU's on the same word?", 8),
        ("memory", "How fast are a fill, a copy, and a kernel that writes 5.3 bytes for each that it reads?", 8),
        ("ring", "How fast do 1 to 48 blocks copy with 1 to 4 loads ahead of a warp's stores?", 8),
        ("cold_code", "How much longer does a dispatch take after a kernel whose code fills the caches?", 13),
    ):
        yield Experiment(name, question, program(name, f"--json={JSON}"), seconds, "one")
    yield Experiment(
        "combine_fence",
        "How much faster is combine if a ring of pieces in shared memory is fenced for shared memory alone?",
        program("combine_fence", f"--json={JSON}", "--seconds=18"),
        20,
        shares=True,
    )


def _benchmarks() -> Iterator[Experiment]:
    normal, copied, pushed = (_SHARED, *_NORMAL), {"DEEP_EP_COPIES": "vector"}, {"DEEP_EP_COMBINE": "push"}
    for name, question, options, environment, seconds, default in (
        ("low_latency_benchmark", "How long do low-latency calls take?", _LOW_LATENCY, {}, 20, "one"),
        ("normal_benchmark", "How long do calls of normal mode take?", normal, {}, 26, "one"),
        ("fp8_benchmark", "The same with FP8 rows.", (*normal, "--dtype=fp8"), {}, 40, "none"),
        ("small_benchmark", "The same with few tokens.", (_SHARED, "--tokens=128,1024"), {}, 40, "none"),
        ("vector_benchmark", "The same without bulk copies.", normal, copied, 40, "none"),
        ("pushed_combine", "The same if combine sends rows in chunks.", normal, pushed, 40, "none"),
    ):
        command = (*_BENCH, f"--ranks={sizes.RANKS}", *options)
        yield Experiment(name, question, command, seconds, default, environment, shares=True)


def _by_name() -> Iterator[Experiment]:
    """Yield what does not fit the default list."""
    gpu, low_latency = f"{_GPU}/test_gpu.py", f"{_GPU}/test_low_latency.py"
    elastic = (f"{_GPU}/test_elastic.py", f"{_GPU}/test_eplb.py")
    for name, question, tests in (
        ("normal_cases", "Is every row of normal mode right?", (gpu, "-k", "test_case and not nodes")),
        ("normal_nodes", "The same between nodes.", (gpu, "-k", "nodes or link")),
        ("normal_rest", "The other tests of normal mode.", (gpu, "-k", "not test_case and not link")),
        ("low_latency_tests", "The tests of low-latency mode.", (low_latency,)),
        ("moe_tests", "The tests of MoELayer and of Triton's kernels.", (f"{_GPU}/test_moe.py",)),
        ("elastic_tests", "All tests of ElasticBuffer and redundant experts.", elastic),
    ):
        yield Experiment(name, question, (*_PYTEST, *tests), LONGEST_SECONDS, shares=True)
    compile_all = (*_DEEP_EP, "compile", "--all", f"--hidden={sizes.HIDDEN}", f"--json={JSON}")
    yield Experiment("all_kernels", "Do all kernels compile, without spills?", compile_all, LONGEST_SECONDS)
    posting = (*_DEEP_EP, "bench-posting", f"--json={JSON}")
    yield Experiment("posting", "What does it cost a kernel to post work requests?", posting, 30)
    yield Experiment("rates", "How much do 1, 2, 4, ... blocks of a rank alone move?", _RATES, LONGEST_SECONDS)
    yield from _watched()


def _watched() -> Iterator[Experiment]:
    """Yield experiments under tools that may run kernels one by one: all ranks of a case are one launch."""
    case = (PYTHON, "tests/support/workers/gpu_case.py")
    for tool in SANITIZERS:
        watch = ("compute-sanitizer", f"--tool={tool}", "--error-exitcode=9", "--print-limit=10")
        for mode, cases in WATCHED.items():
            yield Experiment(
                f"{tool}_{mode}",
                f"What does {tool} find in the kernels of {mode.replace('_', '-')} mode?",
                (*watch, *case, *cases),
                LONGEST_SECONDS,
                needs="compute-sanitizer",
            )
    sections = ("SpeedOfLight", "MemoryWorkloadAnalysis", "WarpStateStats", "LaunchStats")
    watch = ("ncu", "--print-details=body", *(f"--section={section}" for section in sections))
    for name, ranks in (("ncu_alone", 1), ("ncu_one_launch", 8)):
        yield Experiment(
            name,
            f"What limits each kernel, with {ranks} rank{'s in one launch' if ranks > 1 else ' alone'}?",
            (*watch, *program("one_launch", f"--ranks={ranks}")),
            LONGEST_SECONDS,
            needs="ncu",
        )


def environment_of(experiment: Experiment) -> dict[str, str]:
    """Return the environment of an experiment, without the choices that depend on the machine."""
    paths = [str(ROOT), str(ROOT / "tests" / "support"), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "PYTHONUNBUFFERED": "1",
        "DEEP_EP_REQUIRE_GPU": "1",
        # Hardware queues for ranks that share the GPU: effective only if set before a process starts.
        "CUDA_DEVICE_MAX_CONNECTIONS": "32",
        **experiment.environment,
    }
