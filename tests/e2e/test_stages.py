"""The stages of kernels in timelines: which there are, whose they are, and what is not kept."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import deep_ep_py as deep_ep
import recordings
from cases import AMPLE, Case
from deep_ep_py.__main__ import main
from deep_ep_py.base.choices import STAGES
from deep_ep_py.base.native import C
from deep_ep_py.session.timeline import recording
from deep_ep_py.session.timeline.stages import Stages
from deep_ep_py.testing import run_ranks, sleep
from deep_ep_py.tools.trace.merge import merge, read
from deep_ep_py.tools.trace.stages import stages_of
from harness import Trial, dispatch_arguments, make_buffer

pytestmark = pytest.mark.once

CASE = Case("staged", 4, 20, hidden=64, topk=3, experts=8, num_nvl_bytes=AMPLE)
NODES = Case("staged_nodes", 4, 20, hidden=64, topk=3, experts=8, ranks_per_node=2, num_nvl_bytes=AMPLE)
LATE = 2
TOKENS, HIDDEN, TOPK = 6, 128, 2
NORMAL = {
    "notify": {"enter", "number tokens", "signal", "await counts", "sum counts", "finish"},
    "dispatch": {"enter", "await offers", "store rows", "serve chunks", "finish"},
    "combine": {"enter", "await offers", "sum rows", "finish"},
}
TWO_HOPS = {
    "two_hops_notify": {"enter", "number tokens", "signal", "finish"},
    "two_hops_dispatch": {"enter", "await offers", "serve chunks", "finish"},
    "two_hops_combine": {"enter", "await offers", "sum rows", "finish"},
}
SENDING = {"enter", "send routings", "store rows", "signal", "note own choices"}
RECEIVING = {"await routings", "place rows"}
LOW_LATENCY = {
    "low_latency_dispatch": {*SENDING, *RECEIVING, "finish"},
    "low_latency_combine": {"enter", "store rows", "signal", "await results", "sum rows", "finish"},
}


@pytest.fixture(autouse=True)
def noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(STAGES, "on")


def stage_slices(path: Path) -> list[dict[str, Any]]:
    return [e for e in read(path)["traceEvents"] if e["ph"] == "X" and e["cat"] == "stage"]


def names_by_kernel(path: Path) -> dict[str, set[str]]:
    found: dict[str, set[str]] = defaultdict(set)
    for entry in stage_slices(path):
        found[entry["args"]["kernel"]].add(entry["name"])
    return found


def files_of(folder: Path, ranks: int = CASE.ranks) -> list[Path]:
    return [folder / f"t.rank{rank}.json" for rank in range(ranks)]


def record(folder: Path, case: Case = CASE, late_seconds: float = 0.0) -> None:
    """Record a dispatch and a combine; one rank comes late to the dispatch."""
    recordings.record(folder / "t.json", case, "peer" if case is CASE else "ibgda", LATE, late_seconds)


def record_low_latency(folder: Path, in_halves: bool = False) -> None:
    """Record a low-latency dispatch and its combine, or a dispatch in halves alone."""

    def on_each_rank(group: Any) -> None:
        size = deep_ep.Buffer.get_low_latency_rdma_size_hint(TOKENS, HIDDEN, 2, 4, num_topk=TOPK)
        with deep_ep.Buffer(group, 0, size, low_latency_mode=True) as buffer, buffer.trace(folder / "t.json"):
            x = torch.ones(TOKENS, HIDDEN, dtype=torch.bfloat16)
            ids = torch.arange(2 * TOKENS).view(TOKENS, TOPK) % 4
            options = {"use_fp8": False, "return_recv_hook": in_halves}
            packed, _, handle, _, hook = buffer.low_latency_dispatch(x, ids, TOKENS, 4, **options)
            if in_halves:
                hook()
                return
            sums, _, _ = buffer.low_latency_combine(packed, ids, torch.ones(TOKENS, TOPK), handle)
            assert torch.equal(sums, 2 * x)

    run_ranks(2, on_each_rank)


def test_the_stages_of_each_kernel(tmp_path: Path) -> None:
    """A kernel without the one or the other, or a stage that no warp ends, is not what the table of stages says."""
    record(tmp_path)
    for path in files_of(tmp_path):
        assert names_by_kernel(path) == NORMAL
    record_low_latency(tmp_path)
    for path in files_of(tmp_path, 2):
        assert names_by_kernel(path) == LOW_LATENCY
    record(tmp_path, NODES)
    for path in files_of(tmp_path):
        assert names_by_kernel(path) == TWO_HOPS


def test_the_time_is_that_of_the_stage_which_takes_it(tmp_path: Path) -> None:
    """Ranks wait for the counts of one that comes half a second late; every warp begins and ends."""
    record(tmp_path, late_seconds=0.5)
    for rank, path in enumerate(files_of(tmp_path)):
        longest = max(stage_slices(path), key=lambda entry: entry["dur"])
        if rank != LATE:
            assert (longest["args"]["kernel"], longest["name"]) == ("notify", "await counts")
            assert longest["dur"] == pytest.approx(0.5e6, rel=0.01)
        by_warp = defaultdict(list)
        for entry in stage_slices(path):
            args = entry["args"]
            by_warp[args["launch"], args["block"], args["warp"]].append(entry)
        for entries in by_warp.values():
            names = [entry["name"] for entry in entries]
            assert {"enter", "finish"} <= set(names) and len(set(names)) == len(names)


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record(tmp_path, late_seconds=0.5)
    files = [str(path) for path in files_of(tmp_path)]
    result = CliRunner().invoke(main, ["trace", "stages", *files])
    assert result.exit_code == 0, result.output
    lines = [line.split("  ") for line in result.output.splitlines()]
    (awaited,) = [[cell.strip() for cell in line if cell.strip()] for line in lines if " await counts" in line]
    assert awaited[:2] == ["notify", "await counts"] and awaited[-1] == "4" and float(awaited[2]) > 4.9e5
    rows = stages_of(merge([read(Path(file)) for file in files])["traceEvents"])
    assert [one.name for one in rows if one.kernel == "combine"][-1] == "finish"
    monkeypatch.setenv(STAGES, "off")
    record(tmp_path)
    assert not stage_slices(tmp_path / "t.rank0.json")
    result = CliRunner().invoke(main, ["trace", "stages", *files])
    assert result.exit_code == 1 and "no stages in these timelines: set DEEP_EP_STAGES=on" in result.output


def test_launches_without_room_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record(tmp_path)
    threads = {tuple(e["args"][name] for name in ("block", "warp")) for e in stage_slices(tmp_path / "t.rank0.json")}
    monkeypatch.setattr(recording, "STAGE_BYTES", 2 * 8 * len(threads) * len(C.STAGES))
    record(tmp_path)
    for path in files_of(tmp_path):
        assert set(names_by_kernel(path)) == {"notify", "dispatch"} and read(path)["metadata"]["events_lost"] == 1


def test_a_kernel_that_still_runs_leaves_no_trace_in_the_next_recording(tmp_path: Path) -> None:
    """It stores its stages after the end of the recording, which waits for a second and no longer."""
    trial = Trial.of(CASE)

    def on_each_rank(group: Any) -> None:
        with make_buffer(group, CASE, "peer") as buffer:
            rank = buffer.rank
            handle = buffer.dispatch(**dispatch_arguments(trial.work, rank))[4]
            group.barrier()
            if rank == LATE:
                sleep(3.0)
            with buffer.trace(tmp_path / "t.json"):
                event = buffer.dispatch(trial.work.x[rank], handle=handle, async_finish=True)[5]
            if rank == LATE:
                event.current_stream_wait()
                group.barrier()
                return
            assert not stage_slices(buffer_file(rank)) and read(buffer_file(rank))["metadata"]["events_lost"] >= 1
            with buffer.trace(tmp_path / "next.json"):
                event.current_stream_wait()
                group.barrier()
            assert not stage_slices(tmp_path / f"next.rank{rank}.json")

    def buffer_file(rank: int) -> Path:
        return tmp_path / f"t.rank{rank}.json"

    run_ranks(CASE.ranks, on_each_rank)


def launch(kernel: str, launched: int, times: list[list[int]]) -> Any:
    ended = [time for of_warp in times for time in [*of_warp, *[0] * (len(C.STAGES) - len(of_warp))]]
    return SimpleNamespace(kernel=kernel, blocks=1, warps=len(times), launched_ns=launched, ended_ns=ended)


def test_clocks_that_differ() -> None:
    """No kernel begins before its launch, one begins right then, and one that has not begun is left out."""
    launches = [
        launch("a", 1000, [[50, 70], [40, 60]]),
        launch("never", 1500, [[], []]),
        launch("b", 2000, [[1030, 1200], [1035]]),
    ]
    stages = Stages(launches, True)
    assert [one.kernel for one in stages.launches] == ["a", "b"]
    assert [stages.interval(number) for number in range(2)] == [(1010, 1040), (2000, 2170)]
    assert list(stages.of(1)) == [(0, 0, "enter", 2000, 2170)]
    same = Stages(launches, False)
    assert same.interval(0) == (40, 70) and list(same.of(0))[1] == (0, 1, "enter", 40, 60)


def test_a_wrong_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(STAGES, "1")
    with pytest.raises(ValueError, match="DEEP_EP_STAGES='1': expected 'off' or 'on'"):
        run_ranks(1, lambda group: make_buffer(group, CASE, "peer"))
    monkeypatch.setenv(STAGES, "")
    run_ranks(1, lambda group: make_buffer(group, CASE, "peer").destroy())


def test_halves_are_shown_one_by_one(tmp_path: Path) -> None:
    """A kernel that is launched for its first half and for its second is two kernels in the table."""
    record_low_latency(tmp_path, in_halves=True)
    found = stages_of(merge([read(path) for path in files_of(tmp_path, 2)])["traceEvents"])
    first, second = {*SENDING, "finish"}, {"enter", *RECEIVING, "finish"}
    assert [{one.name for one in found[: len(first)]}, {one.name for one in found[len(first) :]}] == [first, second]
    assert {len(one.ends) for one in found} == {2}


def test_the_kernels_of_an_operation_that_runs_on_are_there(tmp_path: Path) -> None:
    """The end of the recording waits for them."""
    trial = Trial.of(CASE)

    def on_each_rank(group: Any) -> None:
        with make_buffer(group, CASE, "peer") as buffer:
            rank = buffer.rank
            handle = buffer.dispatch(**dispatch_arguments(trial.work, rank))[4]
            with buffer.trace(tmp_path / "t.json"):
                event = buffer.dispatch(trial.work.x[rank], handle=handle, async_finish=True)[5]
            event.current_stream_wait()

    run_ranks(CASE.ranks, on_each_rank)
    for path in files_of(tmp_path):
        kernels = [e["name"] for e in read(path)["traceEvents"] if e["ph"] == "X" and e["cat"] == "kernel"]
        assert kernels == ["dispatch"] and set(names_by_kernel(path)) == {"dispatch"}


def test_a_recording_that_cannot_begin_leaves_none_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def on_each_rank(group: Any) -> None:
        with make_buffer(group, CASE, "peer") as buffer:
            with monkeypatch.context() as there:
                there.setattr(recording, "STAGE_BYTES", 1 << 60)
                with pytest.raises(MemoryError):
                    buffer.trace(tmp_path / "t.json").__enter__()
            with buffer.trace(tmp_path / "t.json"):
                pass

    run_ranks(1, on_each_rank)
    assert read(tmp_path / "t.json")["metadata"]["events_lost"] == 0
