"""The report, made from measured series: a plain dict, the content of the JSON file."""

from __future__ import annotations

import statistics
from typing import Any

from deep_ep_py.tools.bench import (
    elastic,
    gpu_low_latency,
    gpu_normal,
    gpu_timing,
    host_time,
    kernel_times,
    low_latency,
    low_latency_baselines,
    ours,
    timing,
    wire,
)
from deep_ep_py.tools.bench.baselines import BASELINE_NOTES
from deep_ep_py.tools.bench.config import BenchConfig
from deep_ep_py.tools.bench.machine import describe_machine
from deep_ep_py.tools.bench.timing import summary

BYTES_NOTE = (
    "Logical bytes: one row (with FP8 its scales too, which the baselines leave out) per "
    "(token, destination rank) pair, the own rank included, for all ranks together; mean over "
    "the timed iterations. layout_notify: a 4-byte count per (source, destination rank) and per (source, expert). "
    "GB/s are 10^9 of these bytes per second of the median."
)
RATIO_NOTE = (
    "Median time of the baseline over median time of ours: above 1, ours is faster. combine_private is compared with "
    "the baselines' combine; a baseline's pair is the sum of its dispatch and combine of the same iteration."
)
MOVED_NOTE = (
    "Moved bytes: what {gpus} must at least read and write: in a dispatch each token's row once "
    "and each received row once, in a combine the reverse; what combine_private copies is not counted. A sending half "
    "reads the rows and writes each once where its destination keeps it, a receiving half reads them there and writes "
    "its results. layout_notify reads the expert ids and writes the counts. "
    "of_copy: these bytes per second over those of a large copy on {copying} in the same run, read and written."
)
CROSSING_NOTE = (
    "Crossing bytes: what a rank sends to other nodes in a dispatch, the mean over the ranks: a row (with FP8 its "
    "scales too) for each token and {target}; combine receives as many. Computed from the routings, not counted, and "
    "without top-k ids, weights, counts and signals. GB/s are 10^9 of these bytes per second of the median, per rank."
)
_ONE_GPU = {"gpus": "one GPU that holds all ranks", "copying": "this GPU"}
_GPU_EACH = {
    "gpus": "a GPU with one rank, the mean over the ranks,",
    "copying": "the slowest-copying GPU, within its own memory,",
}
_PASSED_ON = " Forwarding inside a node, and what NICs read and write, is not counted either."
_COUNT_BYTES = 4
_EXPERT_ID_BYTES = 8
_RESULT_BYTES = 2
"""Size of an element that goes into a low-latency dispatch or combine, whatever the format in transit."""
SELECTION_BYTES_NOTE = (
    "Logical bytes: one row (with FP8 cast, and with its scales) per (token, expert) selection, the own rank's "
    "included, for all ranks together; a combine's rows are BF16. GB/s are 10^9 of these bytes per second of the "
    "median."
)
COMBINING = ("combine", "combine_private", "pair")
BASELINE_OP = {
    "dispatch": "dispatch",
    **dict.fromkeys(("dispatch_permuted", *elastic.DISPATCHES), "dispatch"),
    **dict.fromkeys(("combine", "combine_private", "combine_v2", "combine_expanded"), "combine"),
    "pair": "pair",
}


def report(config: BenchConfig, sizes: list[dict[str, Any]]) -> dict[str, Any]:
    """Assemble the report of a run.

    Parameters
    ----------
    config
        The run.
    sizes
        The result of `worker.run_bench` or `gpu.run_bench_on_gpu`.

    Returns
    -------
    dict
        `config`, then `ops`, `baselines`, `ratios`, `checks` and `host_us` of the largest size, then `sizes` with the
        same for every size, and `verified` for all of them.
    """
    results = [_size_report(config, size) for size in sizes]
    largest = max(results, key=lambda result: int(result["tokens"]))
    gpus = sizes[0].get("gpus", 0)
    described = {
        **config.as_dict(),
        **({"gpus": gpus} if gpus else {}),
        "tokens": largest["tokens"],
        "all_tokens": [result["tokens"] for result in results],
        "machine": describe_machine(),
        **({"transport": sizes[0]["transport"]} if gpus else {}),
        "timing": _boundary(gpus, config.nodes),
        "notes": {
            "ops": _ops(config),
            "baselines": {name: _baseline_notes(config)[name] for name in config.baselines},
            "bytes": SELECTION_BYTES_NOTE if config.mode == "low-latency" else BYTES_NOTE,
            "ratios": RATIO_NOTE,
            **({"host_us": host_time.NOTE} if config.mode == "low-latency" and not gpus else {}),
            **({"wire": wire.NOTE} if any(size.get("wire") for size in sizes) else {}),
            **({"kernels": kernel_times.NOTE} if any(size.get("kernels") for size in sizes) else {}),
            **({"moved": _moved_note(gpus, config.nodes)} if gpus else {}),
            **({"crossing": _crossing_note(config)} if any("crossing_rows" in size for size in sizes) else {}),
        },
    }
    headline = {key: largest[key] for key in ("ops", "baselines", "ratios", "checks", "host_us")}
    verified = all(result["verified"] for result in results)
    return {"config": described, **headline, "sizes": results, "verified": verified}


def _boundary(gpus: int, nodes: int) -> str:
    if not gpus:
        return timing.BOUNDARY
    if gpus == 1:
        return gpu_timing.BOUNDARY
    return gpu_timing.LINKED_BOUNDARY + (gpu_timing.NODES_BOUNDARY if nodes > 1 else "")


def _moved_note(gpus: int, nodes: int) -> str:
    return MOVED_NOTE.format(**(_GPU_EACH if gpus > 1 else _ONE_GPU)) + (_PASSED_ON if nodes > 1 else "")


def _crossing_note(config: BenchConfig) -> str:
    target = "other node that it goes to" if config.two_hops else "rank of another node that it goes to"
    return CROSSING_NOTE.format(target=target)


def _baseline_notes(config: BenchConfig) -> dict[str, str]:
    return low_latency_baselines.BASELINE_NOTES if config.mode == "low-latency" else BASELINE_NOTES


def _ops(config: BenchConfig) -> dict[str, str]:
    if config.mode == "low-latency":
        return gpu_low_latency.OPS if config.device == "cuda" else low_latency.OPS
    if config.mode == "elastic":
        return elastic.OPS
    ops = gpu_normal.OPS if config.device == "cuda" else ours.OPS
    return ops if config.combines else {name: what for name, what in ops.items() if name not in COMBINING}


def _size_report(config: BenchConfig, size: dict[str, Any]) -> dict[str, Any]:
    series = dict(size["series"])
    if "pairs" in series:
        series["pair"] = [milliseconds / config.chain for milliseconds in series.pop("pairs")]
    rows = statistics.mean(size["rows"])
    payload = round(rows * config.payload_bytes)
    counts = _COUNT_BYTES * config.ranks * (config.ranks + config.experts)
    results = round(rows * _RESULT_BYTES * config.hidden) if config.mode == "low-latency" else payload
    logical_bytes = {"layout_notify": counts, "pair": payload + results}
    logical_bytes |= {name: results for name in _ops(config) if name.startswith("combine")}
    ops = {name: _op_report(config, series[name], logical_bytes.get(name, payload)) for name in _ops(config)}
    for name, sent in size.get("wire", {}).items():
        ops[name] |= {"wire_bytes": sent["bytes"], "messages": sent["messages"]}
        ops[name]["wire_gb_per_s"] = sent["bytes"] / ops[name]["ms"]["median"] / 1e6
    if "copy_gb_per_s" in size:
        for name, moved in _moved_bytes(config, size, payload, results).items():
            op = ops[name]
            op["moved_bytes"] = round(moved / size["gpus"])
            op["of_copy"] = op["moved_bytes"] / op["ms"]["median"] / 1e6 / size["copy_gb_per_s"]
        for name, kernels in size.get("kernels", {}).items():
            _add_kernels(ops, name, kernels, config.chain, size["copy_gb_per_s"])
    if "crossing_rows" in size:
        crossing = round(statistics.mean(size["crossing_rows"]) * config.payload_bytes / size["gpus"])
        for name, op in ops.items():
            if name != "layout_notify":
                op["crossing_bytes"] = crossing * (2 if name == "pair" else 1)
                op["crossing_gb_per_s"] = op["crossing_bytes"] / op["ms"]["median"] / 1e6
    baselines = {name: _baseline_report(series, name, variants) for name, variants in size["variants"].items()}
    ratios = {
        op: {name: baseline[of]["ms"] / ops[op]["ms"]["median"] for name, baseline in baselines.items()}
        for op, of in BASELINE_OP.items()
        if op in ops
    }
    copy = {"copy_gb_per_s": size["copy_gb_per_s"]} if "copy_gb_per_s" in size else {}
    return {
        "tokens": size["tokens"],
        "rows": round(rows),
        "ops": ops,
        "baselines": baselines,
        "ratios": ratios,
        "checks": size["checks"],
        "late_starts": size["late_starts"],
        "host_us": size.get("host_us", {}),
        **copy,
        "verified": all(not errors for errors in size["checks"].values()),
    }


def _moved_bytes(config: BenchConfig, size: dict[str, Any], payload: int, results: int) -> dict[str, int]:
    """Return what all ranks together must at least read and write in each operation."""
    tokens = config.ranks * size["tokens"]
    row_bytes = _RESULT_BYTES * config.hidden if config.mode == "low-latency" else config.payload_bytes
    dispatched, combined = payload + tokens * row_bytes, results + tokens * row_bytes
    moved = {name: combined if name.startswith("combine") else dispatched for name in _ops(config)}
    moved |= {"pair": dispatched + combined} if config.combines else {}
    counts = _COUNT_BYTES * config.ranks * (config.ranks + config.experts)
    other = {
        "layout_notify": tokens * config.topk * _EXPERT_ID_BYTES + counts,
        "dispatch_receive": 2 * payload,
        "combine_send": 2 * results,
    }
    return {name: other.get(name, count) for name, count in moved.items()}


def _add_kernels(
    ops: dict[str, Any], name: str, kernels: dict[str, dict[str, Any]], chain: int, copy_gb_per_s: float
) -> None:
    """Put the times of an operation's kernels beside the operation's own; those of a chain are divided among it."""
    share = chain if name == "pairs" else 1
    op = ops["pair" if name == "pairs" else name]
    op["kernels"] = {
        kernel: {
            "ms": {which: value / share for which, value in times["ms"].items()},
            "fastest_rank_ms": times["fastest_rank_ms"] / share,
            "over_copy": times["ms"]["median"] / share * 1e6 * copy_gb_per_s / op["moved_bytes"],
        }
        for kernel, times in kernels.items()
    }


def _op_report(config: BenchConfig, milliseconds: list[float], logical_bytes: int) -> dict[str, Any]:
    times = summary(milliseconds)
    rate = logical_bytes / times["median"] / 1e6
    return {
        "ms": times,
        "samples_ms": milliseconds,
        "bytes": logical_bytes,
        "logical_gb_per_s": rate,
        "logical_gb_per_s_per_rank": rate / config.ranks,
    }


def _baseline_report(series: dict[str, list[float]], name: str, variants: tuple[str, ...]) -> dict[str, Any]:
    measured = [op for op in ("dispatch", "combine") if f"{name}.{op}.{variants[0]}" in series]
    chosen = {op: _fastest(series, f"{name}.{op}", variants) for op in measured}
    result = {op: _baseline_op(times) | variant for op, (times, variant) in chosen.items()}
    if len(measured) == 1:
        return result
    pair = [sum(parts) for parts in zip(*(times for times, _ in chosen.values()), strict=True)]
    return result | {"pair": _baseline_op(pair)}


def _fastest(
    series: dict[str, list[float]], prefix: str, variants: tuple[str, ...]
) -> tuple[list[float], dict[str, Any]]:
    """Return the series with the smallest median, and its variant if there are several."""
    medians = {variant: statistics.median(series[f"{prefix}.{variant}"]) for variant in variants}
    best = min(medians, key=medians.__getitem__)
    return series[f"{prefix}.{best}"], {"variant": best, "variants_ms": medians} if len(variants) > 1 else {}


def _baseline_op(milliseconds: list[float]) -> dict[str, Any]:
    times = summary(milliseconds)
    return {"ms": times["median"], "ms_min": times["min"], "ms_max": times["max"], "samples_ms": milliseconds}
