"""Timelines: what they contain, joined over ranks, explained and drawn."""

from __future__ import annotations

import gc
import json
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import deep_ep_py as deep_ep
import recordings
from cases import AMPLE, Case
from deep_ep_py.__main__ import main
from deep_ep_py.session.timeline.recording import Words
from deep_ep_py.session.timeline.tracks import Tracks
from deep_ep_py.testing import run_ranks, sleep
from deep_ep_py.tools.trace.explain import explain
from deep_ep_py.tools.trace.merge import merge, read
from deep_ep_py.tools.trace.picture import shortened
from harness import Trial, dispatch_arguments, make_buffer
from launches import forked

pytestmark = pytest.mark.once

CASE = Case("traced", 4, 20, hidden=64, topk=3, experts=8, ranks_per_node=2, num_nvl_bytes=AMPLE)
LATE = 2


def record(folder: Path, fabric: str, late_seconds: float = 0.0) -> list[Path]:
    """Record a dispatch and a combine of two nodes, in which one rank comes late to the dispatch."""
    return recordings.record(folder / "t.json", CASE, fabric, LATE, late_seconds)


def slices(timeline: dict[str, Any], category: str, rank: int | None = None) -> list[dict[str, Any]]:
    entries = timeline["traceEvents"]
    return [e for e in entries if e["ph"] == "X" and e["cat"] == category and rank in (None, e["pid"])]


@pytest.mark.parametrize("fabric", ["ibgda", "proxy"])
def test_what_a_timeline_of_two_nodes_has(tmp_path: Path, fabric: str) -> None:
    merged = merge([read(path) for path in record(tmp_path, fabric)])
    for rank in range(CASE.ranks):
        assert [e["name"] for e in slices(merged, "operation", rank)] == ["dispatch", "combine"]
        names = [e["name"] for e in slices(merged, "kernel", rank)]
        assert "two_hops_dispatch" in names and "two_hops_combine" in names
    # Every wait for a signal that came over the network has an arrow from it.
    ends = {ph: {e["id"] for e in merged["traceEvents"] if e["ph"] == ph} for ph in "sf"}
    # Some signals arrive before anything waits for them.
    assert ends["s"] == ends["f"] and len(ends["s"]) >= CASE.ranks
    if fabric == "ibgda":
        far = [e for e in slices(merged, "put") if e["pid"] // 2 == e["args"]["peer"] // 2]
        assert slices(merged, "put") and not far, "only rows between nodes go through NICs"
        moved = sum(e["args"]["bytes"] for e in slices(merged, "put"))
        assert moved > CASE.ranks * CASE.tokens_of(0) * CASE.hidden


def test_words_outside_the_heaps_have_no_name() -> None:
    """A NIC adds to none of those in near parts, and their addresses mean nothing on other ranks."""
    words = Words(0, (4096, 0), heap_bytes=64)
    assert [words.name(0, address) for address in (4096, 4152, 4160, 4088)] == ["0:0", "0:56", None, None]
    assert words.name(1, 8) is None


@pytest.mark.parametrize("fabric", ["ibgda", "proxy"])
def test_slices_of_a_track_nest(tmp_path: Path, fabric: str) -> None:
    """Otherwise Perfetto draws them over each other."""
    for path in record(tmp_path, fabric, 0.01):
        tracks: dict[int, list[tuple[float, float]]] = {}
        for entry in read(path)["traceEvents"]:
            if entry["ph"] == "X":
                tracks.setdefault(entry["tid"], []).append((entry["ts"], entry["ts"] + entry["dur"]))
        for intervals in tracks.values():
            for a in intervals:
                for b in intervals:
                    apart = a[1] <= b[0] or b[1] <= a[0]
                    inside = (a[0] <= b[0] and b[1] <= a[1]) or (b[0] <= a[0] and a[1] <= b[1])
                    assert apart or inside, (a, b)


def test_the_waits_for_a_late_rank_explain_the_dispatch(tmp_path: Path) -> None:
    """In a world of ranks the clock stands still while they work, so waits are all there is."""
    merged = merge([read(path) for path in record(tmp_path, "ibgda", 0.5)])
    for found in explain(merged):
        if found.name != "dispatch" or found.rank == LATE:
            continue
        assert found.duration == pytest.approx(0.5e6, rel=0.01)
        assert found.share == pytest.approx(1.0, abs=0.05)
    # Ranks of the other node wait for the rank of theirs that forwards the late one's rows, or for the late one itself.
    own_node = next(found for found in explain(merged) if found.name == "dispatch" and found.rank == LATE + 1)
    assert next(iter(own_node.waits))[1] == LATE, own_node.waits


@pytest.mark.thorough
def test_two_nodes_of_processes(workers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By real clocks, over the environment variable and the command line."""
    monkeypatch.setenv("DEEP_EP_TRACE", str(tmp_path / "t.json"))
    done = forked(workers / "traced.py", 4, f"--late={LATE}", "--seconds=1")
    assert done.returncode == 0, done.stdout + done.stderr
    files = [str(tmp_path / f"t.rank{rank}.json") for rank in range(4)]
    joined, picture = tmp_path / "all.json", tmp_path / "all.svg"
    result = CliRunner().invoke(main, ["trace", "merge", *files, "-o", str(joined)])
    assert result.exit_code == 0 and "4 ranks" in result.output and " arrows, from" in result.output, result.output
    dispatches = [one for one in explain(read(joined)) if one.name == "dispatch" and one.rank != LATE]
    for rank in (0, 1, 3):
        longest = max((one for one in dispatches if one.rank == rank), key=lambda one: one.duration)
        assert longest.duration > 0.4e6 and longest.share > 0.95, longest
    result = CliRunner().invoke(main, ["trace", "explain", str(joined)])
    assert result.exit_code == 0 and "dispatch" in result.output and f"rank {LATE}" in result.output, result.output
    assert all(len(line) <= 80 for line in result.output.splitlines())
    draws = ["trace", "draw", str(joined), "-o", str(picture), "--title=Two nodes"]
    result = CliRunner().invoke(main, [*draws, "--operation=0"])
    assert result.exit_code == 0 and picture.read_text().count("<path") > 100, result.output
    result = CliRunner().invoke(main, [*draws, "--operation=1000"])
    assert result.exit_code == 1 and "--operation 1000: expected one of 0 to" in result.output


def test_a_timeline_without_arrows_says_why(tmp_path: Path) -> None:
    (alone, *_) = record(tmp_path, "ibgda")  # the waits that its signals end are in the timelines of other ranks
    result = CliRunner().invoke(main, ["trace", "merge", str(alone), "-o", str(tmp_path / "merged.json")])
    assert result.exit_code == 0 and "no arrows: no signal of a NIC ended a wait" in result.output


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("chunk arrived of rank 1", ["chunk arrived of rank 1", "chunk arrived", "chunk"]),
        ("put to rank 12", ["put to rank 12", "put"]),
        ("dispatch", ["dispatch"]),
    ],
)
def test_a_name_is_shortened_between_words(name: str, shown: list[str]) -> None:
    assert shortened(name) == shown


def test_what_is_refused(tmp_path: Path) -> None:
    def on_each_rank(group: Any) -> None:
        with make_buffer(group, CASE, "peer") as buffer:
            in_progress = pytest.raises(deep_ep.DeepEPError, match=r"trace: a recording of rank \d is in progress")
            with buffer.trace(tmp_path / "a.json"), in_progress:
                buffer.trace(tmp_path / "b.json").__enter__()
            (tmp_path / "file").touch()
            with pytest.raises(OSError, match="file"):
                buffer.trace(tmp_path / "file" / "c.json").__enter__()
            with buffer.trace(tmp_path / "again.json"):
                pass

    run_ranks(CASE.ranks, on_each_rank)
    files = sorted(path.name for path in tmp_path.glob("*.json"))
    assert files == [f"{name}.rank{rank}.json" for name in ("a", "again") for rank in range(CASE.ranks)]
    (tmp_path / "other.json").write_text('{"traceEvents": []}')
    result = CliRunner().invoke(main, ["trace", "explain", str(tmp_path / "other.json")])
    assert result.exit_code == 1 and "other.json: expected a timeline that deep_ep_py has written" in result.output
    twice = [str(tmp_path / "a.rank0.json")] * 2
    result = CliRunner().invoke(main, ["trace", "explain", *twice])
    assert result.exit_code == 1 and "of ranks [0, 0]: expected different ranks of one group" in result.output


def test_two_buffers_of_a_process_write_two_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEP_EP_TRACE", str(tmp_path / "t.json"))

    def on_each_rank(group: Any) -> None:
        for _ in range(2):
            make_buffer(group, CASE, "peer").destroy()

    run_ranks(2, on_each_rank)
    names = {path.name for path in tmp_path.iterdir()}
    assert len(names) == 4 and all("rank" in name for name in names), names


def test_events_beyond_the_limit_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deep_ep_py.session.timeline.recording.MAX_EVENTS", 5)
    files = record(tmp_path, "ibgda")
    kept = [e for path in files for e in read(path)["traceEvents"] if e["ph"] == "X" and e["cat"] != "operation"]
    assert len(kept) <= 5 * CASE.ranks and all(read(path)["metadata"]["events_lost"] > 0 for path in files)
    assert json.loads(files[0].read_text())["metadata"]["rank"] == 0


def spans_of(path: Path) -> list[str]:
    return [e["name"] for e in slices(read(path), "operation")]


def test_a_buffer_that_is_dropped_still_writes_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without `destroy`, as programs do that leave a function; the next Buffer's file has its own events only."""
    monkeypatch.setenv("DEEP_EP_TRACE", str(tmp_path / "t.json"))
    trial = Trial.of(CASE)

    def on_each_rank(group: Any) -> None:
        buffer = make_buffer(group, CASE, "peer")
        buffer.dispatch(**dispatch_arguments(trial.work, buffer.rank))
        group.barrier()

    for _ in range(2):
        run_ranks(CASE.ranks, on_each_rank)
        gc.collect()
    for rank in range(CASE.ranks):
        for number in ("", ".2"):
            found = read(tmp_path / f"t{number}.rank{rank}.json")
            assert [e["name"] for e in slices(found, "operation")] == ["dispatch"]
            assert [e["name"] for e in slices(found, "kernel")].count("dispatch") == 1


def test_a_file_that_cannot_be_written_hides_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEP_EP_TRACE", str(tmp_path / "gone" / "t.json"))

    def on_each_rank(group: Any) -> None:
        with pytest.raises(KeyError, match="the caller's"), make_buffer(group, CASE, "peer") as buffer:
            shutil.rmtree(tmp_path / "gone", ignore_errors=True)
            raise KeyError("the caller's")
        assert "destroyed" in repr(buffer)

    run_ranks(1, on_each_rank)
    (tmp_path / "gone").touch()  # no folder can be made there: the Buffer works without a recording
    run_ranks(1, lambda group: make_buffer(group, CASE, "peer").destroy())
    monkeypatch.delenv("DEEP_EP_TRACE")

    def later(group: Any) -> None:
        with make_buffer(group, CASE, "peer") as buffer, buffer.trace(tmp_path / "later.json"):
            pass

    run_ranks(1, later)
    assert spans_of(tmp_path / "later.json") == []


def test_an_operation_that_fails_is_in_the_timeline(tmp_path: Path) -> None:
    trial = Trial.of(CASE)

    def on_each_rank(group: Any) -> None:
        with make_buffer(group, CASE, "peer", timeout=0.5) as buffer:
            rank = buffer.rank
            group.barrier()
            with buffer.trace(tmp_path / "t.json"), suppress(deep_ep.DeepEPError):
                if rank == LATE:
                    sleep(2.0)
                buffer.dispatch(**dispatch_arguments(trial.work, rank))

    with suppress(deep_ep.DeepEPError):
        run_ranks(CASE.ranks, on_each_rank)
    (found,) = explain(read(tmp_path / "t.rank0.json"))
    assert found.name == "dispatch" and found.share > 0.95 and next(iter(found.waits))[1] == LATE
    (entry,) = slices(read(tmp_path / "t.rank0.json"), "operation")
    assert entry["args"]["unfinished"] is True


def test_kernels_that_a_destroy_waits_for_are_in_the_timeline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEP_EP_TRACE", str(tmp_path / "t.json"))
    trial = Trial.of(CASE)

    def on_each_rank(group: Any) -> None:
        with make_buffer(group, CASE, "peer") as buffer:
            rank = buffer.rank
            handle = buffer.dispatch(**dispatch_arguments(trial.work, rank))[4]
            buffer.dispatch(trial.work.x[rank], handle=handle, async_finish=True)

    run_ranks(CASE.ranks, on_each_rank)
    for rank in range(CASE.ranks):
        kernels = [e["name"] for e in slices(read(tmp_path / f"t.rank{rank}.json"), "kernel")]
        assert kernels.count("dispatch") == 2, kernels


def test_a_clock_that_stands_still_is_explained(tmp_path: Path) -> None:
    files = [str(path) for path in record(tmp_path, "ibgda")]
    result = CliRunner().invoke(main, ["trace", "explain", *files])
    assert result.exit_code == 0 and "the clock is virtual" in result.output, result.output
    picture = tmp_path / "picture.png"
    result = CliRunner().invoke(main, ["trace", "draw", *files, "-o", str(picture)])
    assert result.exit_code == 0 and picture.stat().st_size > 0, result.output


def test_slices_that_overlap_are_on_several_tracks() -> None:
    tracks = Tracks(0)
    for begin in range(30):
        tracks.track(3, 0, "queue pair").add("put", "put", begin, begin + 40, {})
    tracks.track(3, 1, "another").add("put", "put", 0, 1, {})
    entries = list(tracks.entries())
    names = {e["tid"]: e["args"]["name"] for e in entries if e["name"] == "thread_name"}
    assert len(names) == 31 and list(names.values()).count("another") == 1
    assert len({e["tid"] for e in entries if e["ph"] == "X"}) == 31


def test_waits_of_another_stream_explain_nothing() -> None:
    def entry(category: str, ts: float, dur: float, **args: Any) -> dict[str, Any]:
        return {"ph": "X", "cat": category, "name": category, "pid": 0, "ts": ts, "dur": dur, "args": args}

    waits = [entry("wait", 10, 50, phase="data", peer=1, stream=stream, block=0, thread=0) for stream in (1, 2)]
    kernel = entry("kernel", 0, 100, stream=1)
    (found,) = explain({"traceEvents": [entry("operation", 0, 100, operation=7), kernel, *waits]})
    assert found.waits == {("data", 1): 50} and found.share == 0.5
