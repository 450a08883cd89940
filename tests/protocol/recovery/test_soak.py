"""Minutes of random work, failures and recoveries: all results are right; memory, descriptors and threads stay flat.

Only in `make test-long`: 10 minutes, or DEEP_EP_SOAK_SECONDS. Samples and a plot go to `out/long`.
"""

from __future__ import annotations

import os
import statistics
from collections import Counter
from typing import Any

import pytest
from rich import box
from rich.console import Console
from rich.table import Table

from builds import LONG
from deep_ep_py.examples.picture import pyplot_for, save_picture
from places import LONG_RESULTS
from worker_runs import lines_of, show

pytestmark = [
    pytest.mark.timed,
    pytest.mark.once,
    pytest.mark.long,
    pytest.mark.skipif(not LONG, reason="takes 10 minutes: `make test-long` runs it"),
]

SECONDS = float(os.environ.get("DEEP_EP_SOAK_SECONDS", 600))
# How much the median of the last quarter may exceed that of the second: random shapes cause fragmentation.
MORE_OF, MORE_MIB = 0.02, 8.0
MEASURES = {"anonymous": "MiB", "private": "MiB", "descriptors": "", "threads": "", "mappings": ""}

Samples = list[dict[str, Any]]


@pytest.fixture(scope="module")
def lines() -> list[dict[str, Any]]:
    return lines_of("soak.py", f"--seconds={SECONDS}", seconds=2 * SECONDS + 120)


@pytest.fixture(scope="module")
def samples(lines: list[dict[str, Any]]) -> Samples:
    found = [line for line in lines if line["kind"] == "sample"]
    report(found)
    return found


def quarter(samples: Samples, rank: int, number: int, quiet: bool) -> Samples:
    """Return the samples of one rank in a quarter of the time, numbered from 0, with or without a Buffer."""
    last = max(sample["at"] for sample in samples)
    mine = (sample for sample in samples if sample["rank"] == rank and sample["quiet"] == quiet)
    found = [sample for sample in mine if number * last / 4 <= sample["at"] <= (number + 1) * last / 4]
    assert found, f"rank {rank}: no sample in quarter {number + 1} of {last:.0f} s: soak longer"
    return found


def median(samples: Samples, measure: str) -> float:
    return statistics.median(sample[measure] for sample in samples)


def ranks_of(samples: Samples) -> list[int]:
    return sorted({sample["rank"] for sample in samples})


def report(samples: Samples) -> None:
    """Print a table and save a plot."""
    console = Console(highlight=False)
    table = Table("rank", "with a Buffer", "", "second quarter", "last quarter", box=box.SIMPLE)
    for rank in ranks_of(samples):
        for quiet in (False, True):
            for measure, unit in MEASURES.items():
                medians = (median(quarter(samples, rank, number, quiet), measure) for number in (1, 3))
                cells = [f"{value:.1f} {unit}" if unit else f"{value:g}" for value in medians]
                table.add_row(str(rank), "no" if quiet else "yes", measure, *cells)
    console.print(table)
    pyplot = pyplot_for(console)
    if pyplot is None:
        return
    figure, axes = pyplot.subplots(len(MEASURES), 1, figsize=(10, 11), sharex=True, layout="constrained")
    for axis, (measure, unit) in zip(axes, MEASURES.items()):
        for rank in ranks_of(samples):
            for quiet, style in ((False, "-"), (True, ".")):
                points = [one for one in samples if one["rank"] == rank and one["quiet"] == quiet]
                axis.plot([p["at"] for p in points], [p[measure] for p in points], style, color=f"C{rank}")
        axis.set_ylabel(f"{measure}, {unit}" if unit else measure)
        axis.set_ylim(bottom=0)
    axes[0].set_title("memory of four ranks: lines with a Buffer, dots without")
    axes[-1].set_xlabel("seconds")
    save_picture(figure, LONG_RESULTS / "soak.png", console)


def test_all_goes_well(lines: list[dict[str, Any]]) -> None:
    """No result is wrong, on arrival or later; there is no hang; nothing leaks; a Buffer's memory is freed with it."""
    end = lines[-1]
    done: Counter[str] = Counter()
    for one in end["done"].values():
        done.update(one)
    show("soak, all ranks", seconds=SECONDS, **{name.replace(" ", "_"): count for name, count in sorted(done.items())})
    assert end["errors"] == [] and not any(end["statuses"]) and end["left"] == [], end
    assert done["results"] > 0 and done["exceptions"] > 0, done


def test_memory_is_flat(samples: Samples) -> None:
    """Without a Buffer: the median of the last quarter exceeds that of the second by at most 2 % and 8 MiB."""
    for rank in ranks_of(samples):
        early, late = (median(quarter(samples, rank, number, True), "anonymous") for number in (1, 3))
        assert late <= early * (1 + MORE_OF) + MORE_MIB, f"rank {rank}: {early} MiB, then {late} MiB"


def test_memory_of_buffers_is_flat(samples: Samples) -> None:
    """With a Buffer, per kind, since software NICs take memory too: the maximum of the second half against that of the
    first, within the same bound. Only while no results are kept, as the soak owns these and their references."""
    half = max(sample["at"] for sample in samples) / 2
    most: dict[tuple[int, str, bool], float] = {}
    for one in samples:
        if not one["quiet"] and one["kept"] == 0:
            key = one["rank"], one["buffer"], one["at"] > half
            most[key] = max(most.get(key, 0.0), one["anonymous"])
    for (rank, buffer, late), amount in most.items():
        before = most.get((rank, buffer, False))
        if late and before is not None:
            assert amount <= before * (1 + MORE_OF) + MORE_MIB, (
                f"rank {rank}, {buffer}: {before} MiB, then {amount} MiB"
            )


def test_without_a_buffer_nothing_is_held(samples: Samples) -> None:
    """Descriptors, threads and mapped heaps are the same each time."""
    for rank in ranks_of(samples):
        quiet = [sample for sample in samples if sample["quiet"] and sample["rank"] == rank]
        assert len(quiet) > 1 and len({(one["descriptors"], one["threads"]) for one in quiet}) == 1, quiet
        assert not any(one["heaps"] or one["shared"] for one in quiet), quiet


def test_mappings_are_flat(samples: Samples) -> None:
    """Small differences are due to the allocator."""
    for rank in ranks_of(samples):
        early, late = (median(quarter(samples, rank, number, True), "mappings") for number in (1, 3))
        assert late <= early * (1 + MORE_OF) + 4, (rank, early, late)
