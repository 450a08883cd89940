"""Compiles many kernels and reports what each takes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from deep_ep_py.jit.cache import Compile
from deep_ep_py.jit.compiler import CompiledKernel, CompileError
from deep_ep_py.jit.registry import Kernel, Shape

_COLUMNS = (
    "registers",
    "static\nshared B",
    "dynamic\nshared B",
    "spill\nstores B",
    "spill\nloads B",
    "stack B",
    "code B",
    "seconds",
)


@dataclass(frozen=True)
class Outcome:
    """A kernel on one architecture: compiled, or why not."""

    kernel: str
    architecture: str
    compiled: CompiledKernel | None
    error: str = ""


def compile_each(
    kernels: Iterable[Kernel], architectures: Iterable[str], shape: Shape, compile_: Compile
) -> Iterator[Outcome]:
    """Compile every kernel for every architecture and yield each outcome as it is there.

    Parameters
    ----------
    kernels, architectures
        What to compile, and for what.
    shape
        Constants of the instantiations.
    compile_
        `compile_kernel`, or the `get` of a cache.

    Yields
    ------
    Outcome
    """
    kernels = list(kernels)
    for architecture in architectures:
        for kernel in kernels:
            try:
                yield Outcome(kernel.name, architecture, compile_(kernel, shape, architecture))
            except CompileError as error:
                yield Outcome(kernel.name, architecture, None, str(error))


def as_table(outcomes: Iterable[Outcome], shape: Shape) -> Table:
    """Return the outcomes as a table.

    Parameters
    ----------
    outcomes
        Its lines.
    shape
        Names the table.

    Returns
    -------
    rich.table.Table
    """
    title = (
        f"{shape.ranks} ranks, rows of {shape.row_bytes} bytes, top-{shape.topk} of {shape.experts} experts, "
        f"{shape.warps} warps per block"
    )
    table = Table(title=title, box=box.ROUNDED)
    for name in ("arch", "kernel"):
        table.add_column(name)
    for name in _COLUMNS:
        table.add_column(name, justify="right")
    for outcome in outcomes:
        if outcome.compiled is None:
            table.add_row(outcome.architecture, outcome.kernel, Text("does not compile", style="red"))
            continue
        of = outcome.compiled.resources
        cells = (of.registers, of.static_shared, of.dynamic_shared, of.spill_stores, of.spill_loads, of.local, of.code)
        style = "red" if of.spill_stores or of.spill_loads else ""
        seconds = f"{outcome.compiled.seconds:.2f}"
        table.add_row(outcome.architecture, outcome.kernel, *map(str, cells), seconds, style=style)
    return table


def as_json(outcomes: Iterable[Outcome], shape: Shape) -> dict[str, Any]:
    """Return the outcomes as plain values.

    Parameters
    ----------
    outcomes
        What to report.
    shape
        What they were compiled for.

    Returns
    -------
    dict
        `shape`, and `kernels`: per kernel and architecture whether it compiled, and its resources or the error.
    """
    kernels = []
    for outcome in outcomes:
        entry: dict[str, Any] = {"kernel": outcome.kernel, "arch": outcome.architecture}
        if outcome.compiled is None:
            entry |= {"compiled": False, "error": outcome.error}
        else:
            entry |= {"compiled": True, "seconds": outcome.compiled.seconds, "symbol": outcome.compiled.symbol}
            entry |= dataclasses.asdict(outcome.compiled.resources)
        kernels.append(entry)
    return {"shape": dataclasses.asdict(shape), "kernels": kernels}
