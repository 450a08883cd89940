"""Compilation of many kernels, and a report of the resources of each."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from deep_ep_py.device.jit.cache import Compile
from deep_ep_py.device.jit.compiler import CompiledKernel, CompileError
from deep_ep_py.device.jit.registry import Kernel, Shape

_COLUMNS = ("regs", "shared\nKiB", "spills\nB", "stack\nB", "code\nKiB", "s")


@dataclass(frozen=True)
class Outcome:
    """The outcome for a kernel on one architecture: the compiled kernel, or the error."""

    kernel: str
    architecture: str
    compiled: CompiledKernel | None
    error: str = ""


def compile_each(
    kernels: Iterable[Kernel], architectures: Iterable[str], shape: Shape, compile_: Compile
) -> Iterator[Outcome]:
    """Compile every kernel for every architecture, and yield each outcome as soon as it is known.

    Parameters
    ----------
    kernels, architectures
        The kernels and the architectures.
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
        The rows of the table.
    shape
        The shape, for the title.

    Returns
    -------
    rich.table.Table
    """
    title = (
        f"{shape.ranks} ranks, rows of {shape.row_bytes} bytes, top-{shape.topk} of {shape.experts} experts, "
        f"{shape.warps} warps per block"
    )
    table = Table(title=title, box=box.SIMPLE)
    for name in ("arch", "kernel"):
        table.add_column(name, no_wrap=True)
    for name in _COLUMNS:
        table.add_column(name, justify="right")
    for outcome in outcomes:
        if outcome.compiled is None:
            table.add_row(outcome.architecture, outcome.kernel, Text("does not compile", style="red"))
            continue
        of = outcome.compiled.resources
        style = "red" if of.spill_stores or of.spill_loads else ""
        cells = (
            str(of.registers),
            f"{(of.static_shared + of.dynamic_shared) / 1024:.1f}",
            str(of.spill_stores + of.spill_loads),
            str(of.local),
            f"{of.code / 1024:.1f}",
            f"{outcome.compiled.seconds:.1f}",
        )
        table.add_row(outcome.architecture, outcome.kernel, *cells, style=style)
    return table


def as_json(outcomes: Iterable[Outcome], shape: Shape) -> dict[str, Any]:
    """Return the outcomes as plain values.

    Parameters
    ----------
    outcomes
        The outcomes to report.
    shape
        The shape that they were compiled for.

    Returns
    -------
    dict
        `shape`, and `kernels`: for each kernel and architecture, whether it compiled, and its resources or the error.
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
