"""What has been counted, by kernel, kind of instruction and line of the sources."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from deep_ep_py.jit.registry import KERNELS

SECTOR_BYTES = 32
_KIB = 1024
_ROW_LOAD_BYTES = 16  # of a thread, and more
_WAITING = "wait.h:"
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
    """A line of the sources.

    Parameters
    ----------
    place : str
        "copy.h:52 < rows.h:31": where it is, and where it was inlined.
    file : str
        The path of the first of these, below the sources.
    line : int
        There.
    warps : int
        Instructions of it that warps have executed.
    bytes, sectors : int
        Of global memory that threads have asked for, and sectors of 32 bytes that came with them.
    trips, trip_bytes : int
        How often threads have waited for what they have loaded from here on, and for how many bytes.
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
    """What a kernel has executed, in all its launches.

    Parameters
    ----------
    name : str
        Of the kernel.
    launches, blocks, warps : int
        In all, over all ranks.
    instructions : int
        That warps have executed, but for those of waiting.
    waiting : int
        Those of waiting, which depend on how threads were scheduled.
    kinds : dict
        By kind of instruction.
    instructions_per_kib : float
        Per KiB of rows.
    bytes, sectors, peer_bytes, peer_sectors : int
        Of global memory: what threads have asked for; sectors that moved; and what of it was a peer's.
    row_sectors_needed, row_sectors_moved : int
        By accesses of 16 bytes a thread and more.
    wavefronts, min_wavefronts : int
        Of accesses to shared memory.
    row_bytes_in_flight : float
        Bytes of rows that a warp has loaded when it waits for them, on average.
    trips : float
        How often a warp has waited for rows, on average.
    moves_rows : bool
        It loads or stores as many bytes as the rows have, or half of them.
    block_barriers : int
        Of the thread that has met its block most often.
    system_scope : int
        Accesses of warps at system scope, but for those of waiting.
    lines : tuple of Line
        Those with the most instructions first.
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
    system_scope: int
    lines: tuple[Line, ...]

    @property
    def sectors_ratio(self) -> float:
        """Sectors of rows that moved, over those that were needed; nan: no rows."""
        return self.row_sectors_moved / self.row_sectors_needed if self.row_sectors_needed else float("nan")

    @property
    def in_flight_per_block(self) -> float:
        """Bytes of rows that a block has in flight if all its warps load."""
        return self.row_bytes_in_flight * self.warps / max(self.blocks, 1)

    def bandwidth(self, blocks: int, latency_ns: float) -> float:
        """What latency allows, in GB/s, by Little's law: bytes in flight over the time that they take."""
        return blocks * self.in_flight_per_block / latency_ns

    def as_json(self, lines: int) -> dict[str, Any]:
        """All of it, for a file, with so many lines of the sources."""
        return {
            **dataclasses.asdict(dataclasses.replace(self, lines=self.lines[:lines])),
            "sectors_ratio": self.sectors_ratio if self.row_sectors_needed else None,
            "in_flight_per_block": self.in_flight_per_block,
        }


def kind_of(opcode: str, place: str) -> str:
    """Tell of which kind an instruction is."""
    if _WAITING in place:
        return "waiting"
    return next(name for name, pattern in _KINDS if pattern.search(opcode))


def name_of(symbol: str) -> str:
    """Return a kernel's name by its symbol: its namespaces below `deep_ep`, and its own."""
    parts, rest = [], symbol.removeprefix("_ZN7deep_ep")
    while (found := re.match(r"\d+", rest)) is not None:
        begin = found.end()
        end = begin + int(found[0])
        parts.append(rest[begin:end])
        rest = rest[end:]
    return "_".join(parts) or symbol


def profiles(counted: dict[str, Any], rows: int, row_bytes: int) -> list[KernelProfile]:
    """Put together what `C.ptx.counted` returns.

    Parameters
    ----------
    counted
        By symbol.
    rows, row_bytes
        What all ranks have received, and the size of each.

    Returns
    -------
    list of KernelProfile
        In the order of `deep_ep_py.jit.KERNELS`.
    """
    kib = rows * row_bytes / _KIB
    found = [_profile(name_of(symbol), kernel, reports, kib) for symbol, (kernel, reports) in counted.items()]
    order = list(KERNELS)
    return sorted(found, key=lambda profile: order.index(profile.name) if profile.name in order else len(order))


def _below_sources(file: str) -> str:
    """PTX may have been compiled in another folder, from the same sources."""
    return file.rpartition("/csrc/")[2]


def _profile(name: str, kernel: Any, reports: Iterable[Any], kib: float) -> KernelProfile:
    kinds: Counter[str] = Counter()
    totals: Counter[str] = Counter()
    lines: defaultdict[tuple[str, str, int], Counter[str]] = defaultdict(Counter)
    for one in reports:
        kind = kind_of(one.opcode, one.place)
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
        system_scope=kinds["system scope"],
        lines=tuple(Line(*where, *(counts[figure] for figure in _LINE_FIGURES)) for where, counts in ordered),
    )
