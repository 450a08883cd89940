"""Stand-in for `deep_ep.utils.testing`: times a function, or the kernels it launches."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

_MORE_THAN_L2_BYTES = 1 << 28


def _evict_l2() -> None:
    torch.empty(_MORE_THAN_L2_BYTES, dtype=torch.uint8, device="cuda").zero_()


def bench(
    fn: Callable[[], Any],
    num_warmups: int = 50,
    num_tests: int = 50,
    post_fn: Callable[[], Any] | None = None,
    flush_l2: bool = True,
) -> tuple[float, float, float]:
    """Time a function: by events on the current stream if this process uses CUDA, otherwise by the clock.

    Parameters
    ----------
    fn : callable
        The function to time.
    num_warmups, num_tests : int
        Untimed runs, and timed runs after them. There must be at least 2 timed runs; the first does not count.
    post_fn : callable, optional
        Called after each timed run, not timed itself.
    flush_l2 : bool
        Overwrite the GPU's L2 cache before each timed run.

    Returns
    -------
    mean, shortest, longest : float
        Seconds.
    """
    if num_tests < 2:
        raise ValueError(f"num_tests={num_tests}: expected at least 2")
    for _ in range(num_warmups):
        fn()
    seconds = (_seconds_by_events if torch.cuda.is_initialized() else _seconds_by_clock)(
        fn, num_tests, post_fn, flush_l2
    )[1:]
    return sum(seconds) / len(seconds), min(seconds), max(seconds)


def _seconds_by_clock(
    fn: Callable[[], Any], num_tests: int, post_fn: Callable[[], Any] | None, flush_l2: bool
) -> list[float]:
    del flush_l2  # there is no GPU
    seconds = []
    for _ in range(num_tests):
        start = time.perf_counter()
        fn()
        seconds.append(time.perf_counter() - start)
        if post_fn is not None:
            post_fn()
    return seconds


def _seconds_by_events(
    fn: Callable[[], Any], num_tests: int, post_fn: Callable[[], Any] | None, flush_l2: bool
) -> list[float]:
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(num_tests)]
    for start, end in pairs:
        if flush_l2:
            _evict_l2()
        start.record()
        fn()
        end.record()
        if post_fn is not None:
            post_fn()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) / 1e3 for start, end in pairs]


def bench_kineto(
    fn: Callable[[], Any],
    kernel_names: str | tuple[str, ...],
    num_tests: int = 30,
    suppress_kineto_output: bool = False,
    trace_path: str | None = None,
    flush_l2: bool = True,
    barrier_comm_profiling: bool = False,
    num_kernels_per_period: int = 1,
    barrier: Callable[[], Any] | None = None,
) -> Any:
    """Time the kernels that a function launches on the GPU, with torch's profiler.

    Parameters
    ----------
    fn : callable
        The function that launches them.
    kernel_names : str or tuple of str
        Parts of kernel names; each must match exactly one kernel.
    num_tests : int
        Number of profiled runs; as many unprofiled runs precede them.
    suppress_kineto_output : bool
        Suppress the process's standard output and standard error during the runs.
    trace_path : str, optional
        File to write a Chrome trace to.
    flush_l2 : bool
        Overwrite the GPU's L2 cache before each run.
    barrier_comm_profiling : bool
        Synchronize the ranks before each run, so that no kernel's time includes the wait for a slower rank. The
        environment variable EP_DISABLE_BARRIER_PROFILING=1 overrides this.
    num_kernels_per_period : int
        Launches of each kernel per run.
    barrier : callable, optional
        Synchronizes the ranks. Default: an all-reduce over the default group.

    Returns
    -------
    float, list of float, or a list of these
        Mean seconds of the kernel; one value per launch if a run launches it several times; one entry per name if
        `kernel_names` is a tuple. With the environment variable EP_USE_NVIDIA_TOOLS=1, for runs under a tool that
        admits no second profiler, nothing runs, and each name has 1.

    Raises
    ------
    RuntimeError
        There is no GPU, or a name matches no kernel or several.
    """
    if _is_set("EP_USE_NVIDIA_TOOLS"):
        return 1 if isinstance(kernel_names, str) else (1,) * len(kernel_names)
    if not torch.cuda.is_available():
        raise RuntimeError("bench_kineto: expected a GPU; torch's profiler does not see kernels that run on a CPU")

    synchronize = barrier_comm_profiling and not _is_set("EP_DISABLE_BARRIER_PROFILING")

    def run() -> None:
        for _ in range(num_tests):
            if flush_l2:
                _evict_l2()
            if synchronize:
                torch.cuda._sleep(20_000_000)  # hosts get ahead of their GPUs, so launches cost nothing
                barrier() if barrier is not None else dist.all_reduce(torch.ones(1, device="cuda"))
            fn()
        torch.cuda.synchronize()

    with _silence() if suppress_kineto_output else contextlib.nullcontext():
        run()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            run()
    if trace_path is not None:
        profiler.export_chrome_trace(trace_path)
    kernels = [
        (event.name, event.time_range.start, event.time_range.elapsed_us() / 1e6)
        for event in profiler.events()
        if event.device_type.name == "CUDA"
    ]
    if isinstance(kernel_names, str):
        return kernel_seconds(kernels, kernel_names, num_kernels_per_period)
    return [kernel_seconds(kernels, name, num_kernels_per_period) for name in kernel_names]


def _is_set(variable: str) -> bool:
    return int(os.environ.get(variable) or 0) != 0


def kernel_seconds(kernels: list[tuple[str, float, float]], name: str, period: int) -> float | list[float]:
    """Return the mean seconds of the kernel whose name contains `name`, for each of its `period` launches.

    `kernels`: name, start and seconds of every launch.
    """
    found = sorted({kernel for kernel, _, _ in kernels if name in kernel})
    if len(found) != 1:
        seen = found or sorted({kernel for kernel, _, _ in kernels})
        raise RuntimeError(f"kernel_names={name!r}: expected a part of exactly one kernel's name, found {seen}")
    launches = [seconds for _, _, seconds in sorted(k for k in kernels if k[0] == found[0])]
    if len(launches) % period:
        raise RuntimeError(f"num_kernels_per_period={period}: expected a divisor of the {len(launches)} launches")
    means = [sum(launches[i::period]) / len(launches[i::period]) for i in range(period)]
    return means if period > 1 else means[0]


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Discard what the process writes to file descriptors 1 and 2."""
    saved = {descriptor: os.dup(descriptor) for descriptor in (1, 2)}
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        for descriptor in saved:
            os.dup2(nowhere, descriptor)
        yield
    finally:
        os.close(nowhere)
        for descriptor, copy in saved.items():
            os.dup2(copy, descriptor)
            os.close(copy)
