"""Benchmarks of these sources and of others, such as an export of another commit, by turns.

Each pair is an experiment of its own: a run of one and a run of the other right after it, in an order that alternates.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from benchmarks.gpu_lab import sizes
from benchmarks.gpu_lab.experiments import JSON, LONGEST_SECONDS, PYTHON, ROOT, Experiment, program, ranks_on
from benchmarks.gpu_lab.machine import hash_of, identify

PAIRS = 3
MODES = {
    "low_latency": ("--mode=low-latency", "--dtype=fp8", f"--tokens={sizes.LOW_LATENCY_TOKENS}"),
    "normal": (f"--num-sms={sizes.NORMAL_BLOCKS}", f"--tokens={sizes.NORMAL_TOKENS}"),
}
_ITERATIONS = "--iterations=15"


def pairs_with(folder: Path, gpus: int) -> list[Experiment]:
    """Return the experiments that compare with the sources in a folder.

    Their names tell one state of those sources from another, so that no result of an earlier one is taken for theirs.
    """
    name, there = f"against_{hash_of(folder)[:6]}", f"--folder={folder}"
    question = f"Do the sources in {folder.name} compile here?"
    found = [Experiment(f"{name}_build", question, program("against", there, "--build"), LONGEST_SECONDS)]
    for number in range(1, PAIRS + 1):
        for mode in MODES:
            options = (there, f"--mode={mode}", f"--number={number}", f"--gpus={gpus}", f"--json={JSON}")
            question = f"How do calls of {mode.replace('_', '-')} mode compare with those of {folder.name}?"
            command = program("against", *options)
            found.append(Experiment(f"{name}_{mode}_{number}", question, command, LONGEST_SECONDS, shares=gpus == 1))
    return found


def run_benchmark(folder: Path, options: list[str], gpus: int) -> dict[str, Any]:
    """Run the benchmark of the sources in a folder, and return its report."""
    with tempfile.TemporaryDirectory() as name:
        file = Path(name) / "report.json"
        per_gpu = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks_on(gpus)}"]
        start = [PYTHON, *(per_gpu if gpus > 1 else []), "-m", "deep_ep_py", "bench", "--device=cuda", "--no-plot"]
        ranks = [] if gpus > 1 else [f"--ranks={sizes.RANKS}"]
        command = [*start, *ranks, *sizes.SHAPE, *options, f"--json={file}"]
        subprocess.run(command, cwd=folder, env={**os.environ, "PYTHONPATH": str(folder)}, check=True)
        report: dict[str, Any] = json.loads(file.read_text())
        return report


def compare(folder: Path, mode: str, number: int, gpus: int) -> dict[str, Any]:
    """Run both benchmarks; odd pairs begin with these sources, even ones with the others."""
    options = [*MODES[mode], _ITERATIONS]
    order = [ROOT, folder] if number % 2 else [folder, ROOT]
    reports = {one: run_benchmark(one, options, gpus) for one in order}
    ours, others = reports[ROOT], reports[folder]
    ratios = [
        {"call": call, "kernel": kernel, "ours_ms": own, "others_ms": other, "ratio": other / own}
        for call, kernel, own, other in _both(ours["ops"], others["ops"])
    ]
    return {
        "pair": {"mode": mode, "number": number, "first": "ours" if number % 2 else "others", "ratios": ratios},
        "others": identify(folder),
        "copies_gb_per_s": [report["sizes"][0]["copy_gb_per_s"] for report in (ours, others)],
        "verified": ours["verified"] and others["verified"],
    }


def _both(ours: dict[str, Any], others: dict[str, Any]) -> Iterator[tuple[str, str, float, float]]:
    """Yield the times that both reports have: call, kernel or nothing, ours, the others'."""
    for call in (call for call in ours if call in others):
        yield call, "", ours[call]["ms"]["median"], others[call]["ms"]["median"]
        own, other = ours[call].get("kernels", {}), others[call].get("kernels", {})
        for kernel in (kernel for kernel in own if kernel in other):
            yield call, kernel, own[kernel]["ms"]["median"], other[kernel]["ms"]["median"]


def summary_of_pairs(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return, for each time that was compared, the median of the pairs' ratios and their range."""
    ratios: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for result in results:
        for one in ((result.get("figures") or {}).get("pair") or {}).get("ratios", []):
            ratios[result["figures"]["pair"]["mode"], one["call"], one["kernel"]].append(one["ratio"])
    return [
        {
            "benchmark": mode,
            "call": call,
            "kernel": kernel,
            "ratio": statistics.median(found),
            "min": min(found),
            "max": max(found),
            "pairs": len(found),
        }
        for (mode, call, kernel), found in ratios.items()
    ]


@click.command()
@click.option("--folder", type=click.Path(path_type=Path), required=True, help="The other sources.")
@click.option("--build", is_flag=True, help="Only build them.")
@click.option("--mode", type=click.Choice(list(MODES)), default="normal", show_default=True)
@click.option("--number", type=int, default=1, help="The pair's number, which says which run comes first.")
@click.option("--gpus", type=int, default=1, help="Number of GPUs.")
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Write the figures here.")
def main(folder: Path, build: bool, mode: str, number: int, gpus: int, json_file: Path | None) -> None:
    """Run a pair of benchmarks."""
    if build:
        command = [PYTHON, "setup.py", "--quiet", "build_ext", "--inplace"]
        subprocess.run(command, cwd=folder, env={**os.environ, "PYTHONPATH": str(folder)}, check=True)
        return
    figures = compare(folder, mode, number, gpus)
    for one in figures["pair"]["ratios"]:
        print(
            f"{one['call']} {one['kernel']}: {one['ours_ms']:.4g} ms, others {one['others_ms']:.4g}, {one['ratio']:.3f}"
        )
    if json_file is not None:
        json_file.write_text(json.dumps(figures, indent=2) + "\n")
    if not figures["verified"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
