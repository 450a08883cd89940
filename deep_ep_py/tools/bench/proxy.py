"""The cost of the proxy: compared with bare calls of its libfabric provider, by itself, and after a rest."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from rich import box
from rich.console import Console
from rich.table import Table

from deep_ep_py.base.files import write_json
from deep_ep_py.base.native import C
from deep_ep_py.base.options import OutputFile
from deep_ep_py.tools.bench.launch import launch
from deep_ep_py.tools.bench.machine import describe_machine
from deep_ep_py.tools.bench.processes import RankFailed
from deep_ep_py.tools.bench.proxy_pair import LARGE, SMALL, SMALL_WINDOW, WINDOW, PairOptions, run

BOUNDARY = (
    "Two processes on this machine, each bound to a core, with two endpoints of the same provider in each; a loop in "
    "C++ alternates between them. `raw` is libfabric's own calls, the minimum that moves puts: for each, an "
    "fi_writemsg with an immediate and FI_DELIVERY_COMPLETE, which is the call that the proxy makes, and fi_cq_read. "
    "`proxy` is a command in the ring, written by a host thread in place of a kernel, then the proxy, stepped by "
    "the waiting thread as when kernels run on a CPU, and the receiver's signal word. A put's time ends when its "
    "sender has the completion, a round trip's when the immediate or word of the answer has arrived. A ratio is the "
    "median of the ratios of all turns. The proxy by itself: one thread steps it and another stands in for a kernel, "
    "over the loopback in one process; commands per second are with a transport that completes and delivers each at "
    "once. First puts are one-way, by the machine's clock, from before the command until the word or the immediate has "
    "arrived; on the named side the proxy is a thread, on its process's core like the waiting thread, which yields; "
    "asleep means that it was left alone until it slept."
)
_OWN_PUTS = 20000
_OWN_COMMANDS = 200000


def measure(
    provider: str = "",
    iterations: int = 20,
    asleep: int = 0,
    on_event: Callable[[dict[str, Any]], None] = lambda event: None,
) -> dict[str, Any]:
    """Time the proxy.

    Parameters
    ----------
    provider
        The libfabric provider; empty for the best available.
    iterations
        Samples, alternating between the proxy and bare calls.
    asleep
        Number of puts of each kind and size after a rest of 1.5 seconds each; 0 for none.
    on_event
        Receives a text, `doing`, for each step that begins.

    Returns
    -------
    dict
        The report. `beside_raw`: for `large_puts` (bytes per second), `round_trip` (seconds) and `small_puts` (per
        second), the spread of `raw`, of `proxy`, and of `ratio`, which is proxy over raw. `own`: spreads in
        nanoseconds, and `commands_per_s`. `first_puts`: spreads in seconds. A spread has median, min and max.
        `verified`: everything sent has arrived.

    Raises
    ------
    ValueError
        libfabric or the provider is not available.
    """
    offered = C.proxy_providers()
    if not offered:
        raise ValueError("libfabric: expected its library here, and its headers when this was built (docs/nodes.md)")
    if provider and provider not in offered:
        raise ValueError(f"provider={provider!r}: expected one that is available: {', '.join(offered)}")
    pair: dict[str, Any] = launch(run, 2, (PairOptions(provider, iterations, asleep),), on_event)
    own = C.proxy.own_cost(_OWN_PUTS)
    return {
        "machine": describe_machine(),
        "boundary": BOUNDARY,
        "provider": pair["provider"],
        "iterations": iterations,
        "large_bytes": LARGE,
        "large_window": WINDOW,
        "small_bytes": SMALL,
        "small_window": SMALL_WINDOW,
        "beside_raw": {what: _beside(by_lane["proxy"], by_lane["raw"]) for what, by_lane in pair["samples"].items()},
        "own": {
            "command_to_post_ns": _spread(own.command_to_post),
            "completion_to_word_ns": _spread(own.completion_to_word),
            "arrival_to_word_ns": _spread(own.arrival_to_word),
            "commands_per_s": _spread([C.proxy.command_rate(_OWN_COMMANDS) for _ in range(iterations)]),
        },
        "first_puts": {what: _spread(times) for what, times in pair["first_puts"].items()},
        "verified": pair["verified"],
    }


def _spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def _beside(proxy: list[float], raw: list[float]) -> dict[str, dict[str, float]]:
    ratios = [ours / theirs for ours, theirs in zip(proxy, raw, strict=True)]
    return {"raw": _spread(raw), "proxy": _spread(proxy), "ratio": _spread(ratios)}


def as_tables(report: dict[str, Any]) -> list[Table]:
    """Return the report as tables for people."""
    beside = Table(title=f"Beside {report['provider']}", box=box.SIMPLE_HEAD, title_justify="left")
    for column in ("", "raw", "proxy", "proxy / raw", "min .. max"):
        beside.add_column(column, justify="right" if column else "left")
    rows = {
        "large_puts": (f"{report['large_bytes'] >> 20} MiB puts, GB/s", 1e-9),
        "round_trip": (f"{report['small_bytes']} B round trip, us", 1e6),
        "small_puts": (f"{report['small_bytes']} B puts, thousands/s", 1e-3),
    }
    for what, (title, scale) in rows.items():
        figures = report["beside_raw"][what]
        raw, proxy, ratio = figures["raw"], figures["proxy"], figures["ratio"]
        spread = f"{ratio['min']:.2f} .. {ratio['max']:.2f}"
        beside.add_row(
            title, f"{scale * raw['median']:.3g}", f"{scale * proxy['median']:.3g}", f"{ratio['median']:.2f}", spread
        )
    own = _of_spreads("The proxy by itself", report["own"], {"commands_per_s": ("commands, millions/s", 1e-6)})
    first = _of_spreads("First puts, ms", report["first_puts"], {}, 1e3)
    return [beside, own, first] if report["first_puts"] else [beside, own]


def _of_spreads(title: str, spreads: dict[str, Any], named: dict[str, tuple[str, float]], scale: float = 1.0) -> Table:
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left")
    for column in ("", "median", "min .. max"):
        table.add_column(column, justify="right" if column else "left")
    for what, spread in spreads.items():
        name, by = named.get(what, (what.replace("_", " ").replace(" ns", ", ns"), scale))
        table.add_row(name, f"{by * spread['median']:.3g}", f"{by * spread['min']:.3g} .. {by * spread['max']:.3g}")
    return table


@click.command(context_settings={"show_default": True, "help_option_names": ["-h", "--help"]})
@click.option("--provider", default="", show_default="the best available", help="libfabric provider.")
@click.option(
    "--iterations", type=click.IntRange(1), default=20, help="Samples, alternating between proxy and bare calls."
)
@click.option("--asleep", type=click.IntRange(0), default=0, help="First puts after a rest to time, for each kind.")
@click.option("--json", "json_file", type=OutputFile(), help="Write the report here.")
def command(provider: str, iterations: int, asleep: int, json_file: Path | None) -> None:
    """Time the proxy between two processes, against bare calls of the same libfabric provider, and by itself."""
    console = Console()
    try:
        with console.status("starting two processes") as status:
            report = measure(provider, iterations, asleep, lambda event: status.update(event["doing"]))
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    except RankFailed as error:
        raise click.ClickException(str(error)) from error
    for table in as_tables(report):
        console.print(table)
    console.print(report["boundary"], style="dim")
    if json_file is not None:
        write_json(json_file, report)
        console.print(f"report: {json_file}")
    if not report["verified"]:
        raise click.ClickException("what has arrived is not what was sent")
