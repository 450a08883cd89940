"""The benchmarks on ranks that torchrun has started, each with its own GPU, over the stand-in for the driver."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import pretend_torch_cuda
from deep_ep_py.tools.bench import gpu_ranks, rates
from deep_ep_py.tools.bench.cli import command
from deep_ep_py.tools.bench.gpu_ranks import choose_gpu, gpu_per_rank
from deep_ep_py.tools.bench.gpu_timing import EventTimer, LinkedTimer
from launches import forked, shared_memory

pytestmark = pytest.mark.once


@pytest.fixture
def driver(double: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let processes find the stand-in; the returned file is the log of its calls."""
    monkeypatch.setenv("LD_LIBRARY_PATH", os.pathsep.join([str(double), os.environ.get("LD_LIBRARY_PATH", "")]))
    monkeypatch.setenv("DOUBLE_LOG", str(tmp_path / "log"))
    monkeypatch.setenv("DOUBLE_MULTIPROCESSORS", "132")
    monkeypatch.setenv("DEEP_EP_CACHE_DIR", str(tmp_path / "kernels"))
    return tmp_path / "log"


def test_the_benchmark_with_a_gpu_per_rank(driver: Path, workers: Path, tmp_path: Path) -> None:
    """Everything but the timings, which mean nothing here."""
    before = shared_memory()
    sizes = ["--tokens=16", "--hidden=128", "--topk=4", "--experts=16", "--iterations=3", "--warmup=1"]
    files = ["--no-plot", f"--json={tmp_path / 'report.json'}"]
    done = forked(workers / "gpu_per_rank.py", 2, "bench", "all", "--device=cuda", *sizes, *files, teardown=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert shared_memory() <= before
    assert done.stdout.count("2 ranks on 2 linked GPUs, a process and a GPU each (Double)") == 1, done.stdout
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["verified"] is True
    assert set(report["checks"]) == {"dispatch", "dispatch_cached", "combine", "combine_private", "pair"}
    assert (report["config"]["ranks"], report["config"]["gpus"]) == (2, 2)
    assert (
        "a GPU of its own" in report["config"]["timing"] and "mean over the ranks" in report["config"]["notes"]["moved"]
    )
    (size,) = report["sizes"]
    assert size["copy_gb_per_s"] == 100, "must be that of the GPU that copies slowest"
    assert size["ops"]["dispatch"]["moved_bytes"] == pytest.approx((size["rows"] + 2 * 16) * 2 * 128 / 2, rel=0.02)
    # Each maps the heap of its peer, and before that a little of its memory; they are not shared as threads do.
    assert driver.read_text().count("cuMemImportFromShareableHandle") == 4


def test_low_latency_mode_with_a_gpu_per_rank(driver: Path, workers: Path, tmp_path: Path) -> None:
    """Normal-mode dispatches align its ranks, also between the halves of a call."""
    sizes = ["--tokens=16", "--hidden=128", "--topk=4", "--experts=16", "--iterations=3", "--warmup=1"]
    files = ["--no-plot", f"--json={tmp_path / 'report.json'}"]
    options = ["bench", "all", "--device=cuda", "--mode=low-latency", "--dtype=fp8", *sizes, *files]
    done = forked(workers / "gpu_per_rank.py", 2, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["verified"] is True and report["config"]["gpus"] == 2
    (size,) = report["sizes"]
    rows, tokens = 2 * 4 * 16, 2 * 16
    assert size["ops"]["dispatch"]["moved_bytes"] == (rows * (128 + 4) + tokens * 2 * 128) / 2


@pytest.mark.thorough
def test_the_rates_of_gpus_that_are_linked(driver: Path, workers: Path, tmp_path: Path) -> None:
    """Everything but the times. Each rank sees only its own GPU."""
    options = ["--tokens=64", "--hidden=64", "--iterations=2", f"--json={tmp_path / 'report.json'}"]
    done = forked(workers / "gpu_per_rank.py", 2, "rates", "own", *options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("linked GPUs") == 1, done.stdout
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["ranks"], report["linked"]) == (2, True)
    moved = 3 * 64 * 64 * 2  # each row is read once and written on both ranks
    assert report["moved_bytes"] == moved
    points = report["rates"]["points"]
    assert points[0] == [1, pytest.approx(moved / 1e-3)], "must be those of the slowest rank"
    assert max(rate for _, rate in points) == pytest.approx(20 * moved / 1e-3)
    assert report["rates"]["startup"] == pytest.approx(1e-5)
    assert [path.name for path in (tmp_path / "kernels").glob("rates-*")] == ["rates-double-bulk-linked.json"]


# --- which GPU --------------------------------------------------------------------------------------------------------


def test_which_gpu_is_a_ranks_own() -> None:
    assert [choose_gpu(rank, 4, 4) for rank in range(4)] == [0, 1, 2, 3]
    assert choose_gpu(2, 3, 8) == 2
    assert [choose_gpu(rank, 4, 1) for rank in range(4)] == [0] * 4, "CUDA_VISIBLE_DEVICES may have chosen"
    with pytest.raises(ValueError, match="8 ranks on this machine: expected a GPU for each, torch sees 4"):
        choose_gpu(0, 8, 4)


def test_ranks_that_have_one_gpu_among_them_are_refused() -> None:
    gpu_ranks._require_distinct(["a", "b"])
    with pytest.raises(ValueError, match="3 ranks: expected a GPU for each, they have 2 among them"):
        gpu_ranks._require_distinct(["a", "b", "a"])


@pytest.fixture
def torchruns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pose as rank 1 of 4 that torchrun has started."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "test")
    for name, value in {"RANK": 1, "WORLD_SIZE": 4, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 4}.items():
        monkeypatch.setenv(name, str(value))


@pytest.mark.usefixtures("torchruns")
def test_what_cannot_work_is_told_before_ranks_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_torch_cuda.install(["a", "b"], monkeypatch.setattr)
    for start, options in ((command, ["--device=cuda"]), (rates.command, [])):
        result = CliRunner().invoke(start, options)
        assert result.exit_code == 2
        assert "4 ranks on this machine: expected a GPU for each, torch sees 2" in result.output
    result = CliRunner().invoke(command, ["--device=cuda", "--ranks=2"])
    assert result.exit_code == 2
    assert "--ranks is 2; expected 4, the number of ranks that torchrun started" in result.output
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    with pytest.raises(ValueError, match="4 ranks, 3 of them on this machine"), gpu_per_rank():
        pass
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.delenv("LOCAL_RANK")
    with pytest.raises(ValueError, match="LOCAL_RANK='': expected a number in the environment"), gpu_per_rank():
        pass


@pytest.mark.usefixtures("torchruns")
@pytest.mark.skipif(torch.backends.cuda.is_built(), reason="this torch is built with CUDA")
def test_a_torch_without_cuda_says_so() -> None:
    for start, options in ((command, ["--device=cuda"]), (rates.command, [])):
        result = CliRunner().invoke(start, options)
        assert result.exit_code == 2
        said = " ".join(result.output.split())
        assert f"torch sees no GPU here: torch {torch.__version__} is built without CUDA" in said, result.output


# --- the clocks -------------------------------------------------------------------------------------------------------


class TwoRanks:
    """Rank 0 of two, with the value of the other in what it gathers."""

    rank, size, in_process = 0, 2, False

    def __init__(self, other_gate_open: bool) -> None:
        self.other_gate_open = other_gate_open

    def all_gather(self, value: Any) -> list[Any]:
        if isinstance(value, bool):
            return [value, self.other_gate_open]
        if isinstance(value, dict):
            return [value, {name: [(0.0, 1000.0)] * len(samples) for name, samples in value.items()}]
        return [value, value]


@pytest.mark.timed
@pytest.mark.parametrize("other_gate_open", [False, True])
def test_gpus_without_a_common_clock(monkeypatch: pytest.MonkeyPatch, other_gate_open: bool) -> None:
    """A sample begins after the work that aligns the ranks, and is that of the slowest rank. It is late if no gate was
    still closed when all ranks had queued their work; the next gates are then closed for longer."""
    pretend_torch_cuda.install(["a"], monkeypatch.setattr)
    order: list[str] = []

    def align() -> None:
        order.append("align")
        time.sleep(0.05)

    timer = LinkedTimer(TwoRanks(other_gate_open), align)
    timer.recording = True
    assert timer.time("call", lambda: order.append("call") or 7) == 7
    assert order == ["align", "call"]
    assert timer._samples["call"][0][1] < 50, "the work that aligns the ranks must not be timed"
    assert timer.series() == {"call": [1000.0]}
    # Its own gate of 20 ms is open by then.
    assert timer.late_starts() == (2 if other_gate_open else 0)
    assert timer._gate_ms["call"] == (40 if other_gate_open else 20)


@pytest.mark.timed
def test_an_aligned_call_is_timed_from_then_on(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_torch_cuda.install(["a"], monkeypatch.setattr)
    stream: Any = pretend_torch_cuda.Stream()
    result, milliseconds = EventTimer().time(lambda: 7, stream, align=lambda: time.sleep(0.05))
    assert result == 7 and milliseconds < 50
