"""Profiles: counts by kernel, kind of instruction and source line."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from deep_ep_py.device.jit.registry import KERNELS

SECTOR_BYTES = 32
_KIB = 1024
_ROW_LOAD_BYTES = 16  # per thread, at least
_WAITING = "wait.h:"
_GRID_BARRIER = "atom.acq_rel.gpu.add"  # Operation::is_last_at
_KINDS = (
    ("system scope", re.compile(r"^(ld|st|atom|red)\..*\bsys\b")),
    ("device and block scope", re.compile(r"^(ld|st|atom|red)\..*\b(gpu|cta)\b(?!.*bulk)")),
    ("bulk copies", re.compile(r"^(cp\.async|mbarrier|fence\.proxy)")),
    ("shared memory", re.compile(r"^(ld|st)\.shared")),
    ("local memory, parameters", re.compile(r"^(ld|st)\.(local|param)")),
    ("global memory", re.compile(r"^(ld|st)\b")),
    ("warp and block", re.compile(r"^(shfl|vote|bar|barrier|activemask|match)\b")),
    ("branches, calls", re.compile(r"^(bra|call|ret|exit|nanosleep|setp|selp)\b")),
    ("moves, conversions", re.compile(r"^(mov|cvt|cvta|prmt|bfe|bfi|shl|shr)\b")),
    ("floating point", re.compile(r"^\w+\..*\b(f16|f16x2|bf16|bf16x2|f32|f64)\b")),
    ("integers", re.compile(r"")),
)
_LINE_FIGURES = ("warps", "bytes", "sectors", "trips", "trip_bytes")
KINDS = (*(name for name, _ in _KINDS), "waiting")


@dataclass(frozen=True)
class Line:
    """The figures of a source line.

    Parameters
    ----------
    place : str
        The position and where it was inlined, for example "copy.h:52 < rows.h:31".
    file : str
        The path of the position, relative to the sources.
    line : int
        The line number in that file.
    warps : int
        Instructions that warps have executed.
    bytes, sectors : int
        Bytes of global memory that threads have accessed, and sectors of 32 bytes that were transferred.
    trips, trip_bytes : int
        How often threads have waited for data loaded from here on, and for how many bytes.
    """

    place: str
    file: str
    line: int
    warps: int
    bytes: int
    sectors: int
    trips: int
    trip_bytes: int


@dataclass(frozen=True)
class KernelProfile:
    """The profile of a kernel, over all its launches.

    Parameters
    ----------
    name : str
        Name of the kernel.
    launches, blocks, warps : int
        Totals over all ranks.
    instructions : int
        Instructions that warps have executed, except those spent waiting.
    waiting : int
        Instructions spent waiting, which depend on the schedule of threads.
    kinds : dict
        Instructions by kind.
    instructions_per_kib : float
        Instructions per KiB of rows.
    bytes, sectors, peer_bytes, peer_sectors : int
        Bytes of global memory that threads have accessed, sectors that were transferred, and the share of a peer in
        each.
    row_sectors_needed, row_sectors_moved : int
        Sectors of accesses of at least 16 bytes per thread.
    wavefronts, min_wavefronts : int
        Wavefronts of accesses to shared memory, and their minimum.
    row_bytes_in_flight : float
        Average number of bytes of rows that a warp has loaded when it waits for them.
    trips : float
        Average number of times that a warp has waited for rows.
    moves_rows : bool
        Whether the kernel loads or stores at least half as many bytes as the rows have.
    block_barriers : int
        Number of block barriers of the thread that has executed the most.
    grid_barriers : float
        How often a block synchronizes with the others of its grid, by an acquire-release atomic at device scope.
    system_scope : int
        Accesses of warps at system scope, except those spent waiting.
    lines : tuple of Line
        Source lines, those with the most instructions first.
    """

    name: str
    launches: int
    blocks: int
    warps: int
    instructions: int
    waiting: int
    kinds: dict[str, int]
    instructions_per_kib: float
    bytes: int
    sectors: int
    peer_bytes: int
    peer_sectors: int
    row_sectors_needed: int
    row_sectors_moved: int
    wavefronts: int
    min_wavefronts: int
    row_bytes_in_flight: float
    trips: float
    moves_rows: bool
    block_barriers: int
    grid_barriers: float
    system_scope: int
    lines: tuple[Line, ...]

    @property
    def sectors_ratio(self) -> float:
        """Ratio of row sectors transferred to those needed; nan without rows."""
        return self.row_sectors_moved / self.row_sectors_needed if self.row_sectors_needed else float("nan")

    @property
    def in_flight_per_block(self) -> float:
        """Bytes of rows that a block has in flight when all its warps load."""
        return self.row_bytes_in_flight * self.warps / max(self.blocks, 1)

    def as_json(self, lines: int) -> dict[str, Any]:
        """Return the profile for a JSON file, with the first `lines` source lines."""
        return {
            **dataclasses.asdict(dataclasses.replace(self, lines=self.lines[:lines])),
            "sectors_ratio": self.sectors_ratio if self.row_sectors_needed else None,
            "in_flight_per_block": self.in_flight_per_block,
        }


def kind_of(opcode: str, place: str) -> str:
    """Return the kind of an instruction."""
    if _WAITING in place:
        return "waiting"
    return next(name for name, pattern in _KINDS if pattern.search(opcode))


def name_of(symbol: str) -> str:
    """Return a kernel's name from its symbol: the namespaces below `deep_ep`, followed by the function."""
    parts, rest = [], symbol.removeprefix("_ZN7deep_ep")
    while (found := re.match(r"\d+", rest)) is not None:
        begin = found.end()
        end = begin + int(found[0])
        parts.append(rest[begin:end])
        rest = rest[end:]
    return "_".join(parts) or symbol


def profiles(counted: dict[str, Any], rows: int, row_bytes: int) -> list[KernelProfile]:
    """Build profiles from the result of `C.ptx.counted`.

    Parameters
    ----------
    counted
        Counts by symbol.
    rows, row_bytes
        Number of rows that all ranks have received, and the size of a row.

    Returns
    -------
    list of KernelProfile
        In the order of `deep_ep_py.device.jit.KERNELS`.
    """
    kib = rows * row_bytes / _KIB
    found = [_profile(name_of(symbol), kernel, reports, kib) for symbol, (kernel, reports) in counted.items()]
    order = list(KERNELS)
    return sorted(found, key=lambda profile: order.index(profile.name) if profile.name in order else len(order))


def _below_sources(file: str) -> str:
    """Return the path relative to the sources: PTX may have been compiled from a copy in another folder."""
    return file.rpartition("/csrc/")[2]


def _profile(name: str, kernel: Any, reports: Iterable[Any], kib: float) -> KernelProfile:
    kinds: Counter[str] = Counter()
    totals: Counter[str] = Counter()
    lines: defaultdict[tuple[str, str, int], Counter[str]] = defaultdict(Counter)
    for one in reports:
        kind = kind_of(one.opcode, one.place)
        totals["grid_barriers"] += one.threads if one.opcode.startswith(_GRID_BARRIER) else 0
        kinds[kind] += one.warps
        if kind == "waiting":
            continue
        here = lines[one.place, _below_sources(one.file), one.file_line]
        for figure in _LINE_FIGURES:
            here[figure] += getattr(one, figure)
        for figure in ("bytes", "sectors", "peer_bytes", "peer_sectors", "wavefronts", "min_wavefronts"):
            totals[figure] += getattr(one, figure)
        if one.bytes >= _ROW_LOAD_BYTES * one.threads:
            totals["row_sectors_moved"] += one.sectors
            totals["row_bytes"] += one.bytes
    instructions = sum(count for kind, count in kinds.items() if kind != "waiting")
    ordered = sorted(lines.items(), key=lambda line: -line[1]["warps"])
    return KernelProfile(
        name=name,
        launches=kernel.launches,
        blocks=kernel.blocks,
        warps=kernel.warps,
        instructions=instructions,
        waiting=kinds["waiting"],
        kinds={kind: kinds[kind] for kind in KINDS if kinds[kind]},
        instructions_per_kib=instructions / kib if kib else float("nan"),
        bytes=totals["bytes"],
        sectors=totals["sectors"],
        peer_bytes=totals["peer_bytes"],
        peer_sectors=totals["peer_sectors"],
        row_sectors_needed=-(-totals["row_bytes"] // SECTOR_BYTES),
        row_sectors_moved=totals["row_sectors_moved"],
        wavefronts=totals["wavefronts"],
        min_wavefronts=totals["min_wavefronts"],
        row_bytes_in_flight=kernel.row_bytes / kernel.row_trips if kernel.row_trips else 0.0,
        trips=kernel.row_trips / kernel.warps if kernel.warps else 0.0,
        moves_rows=totals["row_bytes"] >= kib * _KIB / 2 > 0,
        block_barriers=kernel.max_block_barriers,
        grid_barriers=totals["grid_barriers"] / max(kernel.blocks, 1),
        system_scope=kinds["system scope"],
        lines=tuple(Line(*where, *(counts[figure] for figure in _LINE_FIGURES)) for where, counts in ordered),
    )
