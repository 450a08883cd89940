"""Tables of profiles."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from deep_ep_py.base.sources import include_root
from deep_ep_py.tools.profile.report import KINDS, KernelProfile
from deep_ep_py.tools.profile.sass import Sass
from deep_ep_py.tools.profile.times import KernelTime

_KIB = 1024
_TEXT = 36  # characters of a source line
_PLACE = 66  # of a place
_COLUMNS = 4  # kernels side by side in 80 columns


def overview(found: Sequence[KernelProfile], sass: dict[str, Sass]) -> Group:
    """Return the counts of kernels side by side, with those of their machine code, by kernel, if there is any."""
    groups = [found[begin : begin + _COLUMNS] for begin in range(0, len(found), _COLUMNS)]
    return Group(*(_overview(group, sass) for group in groups))


def durations(predicted: Sequence[KernelTime]) -> Table:
    """Return the predicted times of launches, what their longest paths consist of, and what NICs have sent."""
    table = Table(box=box.SIMPLE, title="Predicted microseconds, and the longest path", title_justify="left")
    table.add_column("launch", no_wrap=True)
    sends = any(time.nic_rate for time in predicted)
    for name in ("us", "path", "bytes", "issue", "instr.", "waits", "fences", "bars.", *(("NICs",) if sends else ())):
        table.add_column(name, justify="right", no_wrap=True)
    for time in predicted:
        us = map(_microseconds, (time.us, time.path_us, time.bandwidth_us, time.issue_us))
        path = (f"{value:,}" for value in (time.instructions, time.waits, time.fences, time.barriers))
        table.add_row(_short(time.title), *us, *path, *((f"{time.nic_rate:.1f}",) if sends else ()))
    if sends:
        table.caption = "NICs: GB/s that those of the rank that sends most have sent meanwhile"
    return table


def longest_path(time: KernelTime, count: int) -> Table:
    """Return the places at which the longest path of a launch takes most time."""
    table = Table(box=box.SIMPLE, title=f"{time.title}: the longest path", title_justify="left")
    table.add_column("us", justify="right", min_width=6)
    table.add_column("place", no_wrap=True)
    for line in time.lines[:count]:
        table.add_row(f"{line.us:,.2f}", line.place if len(line.place) <= _PLACE else line.place[: _PLACE - 3] + "...")
    return table


def _microseconds(value: float) -> str:
    return f"{value:,.1f}" if value < 100 else f"{value:,.0f}"


def _short(name: str) -> str:
    return name.replace("low_latency_", "ll_")


def _overview(found: Sequence[KernelProfile], sass: dict[str, Sass]) -> Table:
    table = Table("", *(_short(profile.name) for profile in found), box=box.SIMPLE)
    for column in table.columns[1:]:
        column.justify = "right"

    def row(name: str, *values: str) -> None:
        table.add_row(name, *values)

    row("launches", *(str(one.launches) for one in found))
    row("warp instructions", *(f"{one.instructions:,}" for one in found))
    for kind in KINDS:
        if any(kind in one.kinds for one in found) and kind != "waiting":
            row(f"  {kind}", *(f"{one.kinds.get(kind, 0):,}" for one in found))
    row("  per KiB of received rows", *(f"{one.instructions_per_kib:.1f}" for one in found))
    row("and while waiting", *(f"{one.waiting:,}" for one in found))
    row("row sectors moved/needed", *(_ratio(one) for one in found))
    row("  of all sectors, peers'", *(f"{one.peer_sectors / max(one.sectors, 1):.0%}" for one in found))
    row("shared wavefronts/minimum", *(_wavefronts(one) for one in found))
    row("waits for rows per warp", *(_of_rows(one, f"{one.trips:.1f}") for one in found))
    row("KiB in flight per warp", *(_of_rows(one, f"{one.row_bytes_in_flight / _KIB:.2f}") for one in found))
    row("  per block, thus per SM", *(_of_rows(one, f"{one.in_flight_per_block / _KIB:.1f}") for one in found))
    row("block barriers", *(str(one.block_barriers) for one in found))
    row("grid barriers, per block", *(f"{one.grid_barriers:.0f}" for one in found))
    row("accesses at system scope", *(f"{one.system_scope:,}" for one in found))
    if sass:
        codes = [sass.get(one.name) for one in found]
        row("SASS: instructions", *(f"{code.instructions:,}" if code else "-" for code in codes))
        row("  of these, bulk copies", *(str(code.bulk_copies) if code else "-" for code in codes))
        row("  KiB in registers: warp", *(f"{code.loaded_before_use / _KIB:.2f}" if code else "-" for code in codes))
    return table


def hottest(profile: KernelProfile, count: int) -> Table:
    """Return the source lines with the most executed instructions of a kernel, wherever they are inlined."""
    table = Table(box=box.SIMPLE, title=f"{profile.name}: the hottest lines", title_justify="left")
    table.add_column("share", justify="right", min_width=6)
    table.add_column("KiB", justify="right", min_width=7)
    table.add_column("line", no_wrap=True)
    table.add_column("", no_wrap=True)
    warps: Counter[tuple[str, int]] = Counter()
    moved: Counter[tuple[str, int]] = Counter()
    for line in profile.lines:
        warps[line.file, line.line] += line.warps
        moved[line.file, line.line] += line.bytes
    for (file, number), instructions in warps.most_common(count):
        share = instructions / max(profile.instructions, 1)
        kib = f"{moved[file, number] / _KIB:,.0f}" if moved[file, number] else ""
        text = source_line(file, number)
        text = text if len(text) <= _TEXT else text[: _TEXT - 3] + "..."
        table.add_row(f"{share:.1%}", kib, f"{Path(file).name}:{number}", Text(text))
    return table


def source_line(file: str, line: int) -> str:
    """Return a source line, or "" if it does not exist."""
    lines = _lines(file)
    return lines[line - 1].strip() if 0 < line <= len(lines) else ""


@cache
def _lines(file: str) -> list[str]:
    path = include_root() / file
    return path.read_text().splitlines() if path.is_file() else []


def _of_rows(profile: KernelProfile, figure: str) -> str:
    return figure if profile.moves_rows else "-"


def _ratio(profile: KernelProfile) -> str:
    return _of_rows(profile, f"{profile.sectors_ratio:.3f}")


def _wavefronts(profile: KernelProfile) -> str:
    return f"{profile.wavefronts / profile.min_wavefronts:.2f}" if profile.min_wavefronts else "-"
