"""Plant each bug of tests/mutants in a copy of the sources and run the scenarios that must catch it.

    python scripts/mutants.py                 all bugs; the last line says how many were caught
    python scripts/mutants.py --only ibgda    bugs whose name contains this text
    python scripts/mutants.py --build tsan    bugs that this build catches; repeatable
    python scripts/mutants.py --few           one bug of each folder and build, of those that compile fastest
    python scripts/mutants.py --silent        for bugs that only show as races, also check that all values are right

A scenario that catches a bug must pass with the unmodified sources. Only objects that depend on the changed file are
recompiled.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import click
from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table

import native_build
import sanitizers

ROOT = native_build.ROOT
sys.path.insert(0, str(ROOT / "tests"))
from mutants.mutant import (  # noqa: E402
    BOUNDS,
    EXPANDED,
    LOW_LATENCY,
    NORMAL,
    ONCE_PER_NODE,
    ORDERED,
    RACING,
    REPLAYS,
    TWO_HOPS,
    Mutant,
)
from mutants.table import MUTANTS  # noqa: E402

PROGRAM = sorted((ROOT / "tests" / "native" / "protocol").glob("*.cpp"))
SCENARIOS = (
    *(
        "posters",
        "posters proxy",
        "keys",
        "keys, offset",
        "sharing",
        "sharing, giving up",
        "apart",
        "recover",
        "recover ibgda",
        "recover proxy",
    ),
    *(*NORMAL, *RACING, *ORDERED, *REPLAYS, *BOUNDS, *EXPANDED, *LOW_LATENCY, *ONCE_PER_NODE),
    *TWO_HOPS,
)
SEEDS = {"fast": 24, "exact": 24, "tsan": 60}
SILENT_SEEDS = range(1, 5)  # with each of these, a silent bug must leave the values right
RUN_SECONDS = 20
# Compile time matters more than the speed of the code: each program runs for milliseconds.
QUICK = ["-O1", "-g0", "-w"]
CODES = {3: "wrong values", 4: "broken rule", 5: "deadlock", 66: "race", -6: "abort", -7: "bus error", -11: "crash"}
NO_END = "no end"


@dataclass
class Outcome:
    """The outcome of a mutant."""

    mutant: Mutant
    caught: bool
    by: str = ""
    seconds: float = 0.0
    problem: str = ""


def run(program: Path, variant: native_build.Variant, scenario: str, seed: int) -> str:
    """Run one scenario; return what went wrong, or an empty string."""
    environment = {**sanitizers.environment(variant), "LD_PRELOAD": "", "ASAN_OPTIONS": ""}
    if "TSAN_OPTIONS" in environment:
        environment["TSAN_OPTIONS"] += ":atexit_sleep_ms=0"
    command = [str(program), scenario, str(seed)]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=RUN_SECONDS)
    except subprocess.TimeoutExpired:
        return NO_END
    if done.returncode == 0:
        return ""
    if done.returncode not in CODES:
        raise ValueError(f"{scenario}: exit code {done.returncode}: {done.stderr[-200:]}")
    return CODES[done.returncode]


@cache
def clean_program(name: str) -> Path:
    """Return the program of the unmodified sources in a build."""
    variant = native_build.VARIANTS[name]
    target = native_build.objects_folder(variant) / "tests" / "protocol"
    native_build.build_program(variant, PROGRAM, target)
    return target


@cache
def clean_units(name: str) -> dict[native_build.Unit, tuple[Path, frozenset[str]]]:
    """Return the units of the unmodified program in a build, each with its object and the files that it includes."""
    clean_program(name)
    variant, units = native_build.VARIANTS[name], {}
    for unit in native_build.units_of([*native_build.library_sources(variant), *PROGRAM]):
        clean = native_build.objects_folder(variant) / unit.name.with_suffix(".o")
        units[unit] = clean, frozenset(clean.with_suffix(".d").read_text().replace("\\\n", " ").split())
    return units


def few_of(chosen: list[Mutant]) -> list[Mutant]:
    """Return a bug of each folder and build, the one for which the fewest units are compiled."""
    sets: dict[tuple[Path, str], list[Mutant]] = {}
    for mutant in chosen:
        sets.setdefault((Path(mutant.file).parent, mutant.build), []).append(mutant)

    def compiled(mutant: Mutant) -> int:
        return sum(f"csrc/{mutant.file}" in depends for _, depends in clean_units(mutant.build).values())

    return [min(candidates, key=compiled) for candidates in sets.values()]


def plant(mutant: Mutant, folder: Path) -> None:
    """Copy the sources and plant the bug; raise ValueError unless the text to replace occurs exactly once."""
    for part in ("csrc", "tests/native"):
        shutil.copytree(ROOT / part, folder / part)
    path = folder / "csrc" / mutant.file
    text = path.read_text()
    for before, after in mutant.changes:
        if text.count(before) != 1:
            raise ValueError(f"{mutant.file}: found {text.count(before)} times, expected once: {before!r}")
        text = text.replace(before, after)
    path.write_text(text)


def flags_of(variant: native_build.Variant, source: Path) -> list[str]:
    flags = native_build.compile_flags(variant, source, "")
    return [flag for flag in flags if flag != "-Werror" and not flag.startswith("-O")] + QUICK


def usual_flags(variant: native_build.Variant) -> list[str]:
    """Return the flags of most sources of csrc/."""
    return flags_of(variant, native_build.SOURCE_ROOT / "kernels")


@cache
def precompiled(name: str) -> list[str]:
    """Return the arguments that let a compilation with the usual flags use the precompiled standard headers."""
    variant = native_build.VARIANTS[name]
    compiler, _ = native_build.find_compiler(variant, program=True)
    return native_build.precompiled(variant, compiler, usual_flags(variant), native_build.STANDARD_HEADERS)


def build(mutant: Mutant, name: str, folder: Path) -> Path:
    """Compile the sources that depend on the changed file and link them with the rest of the clean program."""
    variant = native_build.VARIANTS[name]
    compiler, link_flags = native_build.find_compiler(variant, program=True)
    objects = []
    for unit, (clean, depends) in clean_units(name).items():
        if f"csrc/{mutant.file}" not in depends:
            objects.append(clean)
            continue
        output = folder / "-".join([name, *unit.name.with_suffix(".o").parts])
        flags = flags_of(variant, unit.sources[0])
        begin = precompiled(name) if flags == usual_flags(variant) else []
        command = [*compiler, *flags, *begin, "-c", str(unit.file()), "-o", str(output)]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        if done.returncode != 0:
            raise ValueError(f"does not compile: {done.stderr.strip().splitlines()[-1] if done.stderr else ''}")
        objects.append(output)
    program = folder / f"program-{name}"
    command = [*compiler, "-pthread", *map(str, objects), *link_flags, "-ldl", "-o", str(program)]
    subprocess.run(command, check=True, capture_output=True)
    return program


def try_mutant(mutant: Mutant, silent: bool) -> Outcome:
    """Plant, compile, run; with `silent`, also check that a silent bug leaves all values right."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutant.") as place:
        folder = Path(place)
        try:
            plant(mutant, folder)
            program = build(mutant, mutant.build, folder)
            by = _caught_by(mutant, program)
            problem = "" if by else f"not caught by {', '.join(mutant.scenarios)} in {SEEDS[mutant.build]} seeds"
            if by and mutant.silent and silent:
                problem = _not_silent(build(mutant, "fast", folder))
        except ValueError as error:
            by, problem = "", str(error)
    return Outcome(mutant, bool(by) and not problem, by, time.monotonic() - began, problem)


def _caught_by(mutant: Mutant, program: Path) -> str:
    variant = native_build.VARIANTS[mutant.build]
    for seed in range(1, SEEDS[mutant.build] + 1):
        for scenario in mutant.scenarios:
            wrong = run(program, variant, scenario, seed)
            if wrong == NO_END and not mutant.endless:
                raise ValueError(f"{scenario}, seed {seed}: no end after {RUN_SECONDS} s, which says nothing")
            if wrong:
                found = f"{mutant.build}, {scenario}, seed {seed}: {wrong}"
                if run(clean_program(mutant.build), variant, scenario, seed):
                    raise ValueError(f"{found}, also without the bug")
                return found
    return ""


def _not_silent(program: Path) -> str:
    variant = native_build.VARIANTS["fast"]
    for scenario in SCENARIOS:
        for seed in SILENT_SEEDS:
            wrong = run(program, variant, scenario, seed)
            if wrong:
                return f"declared silent, but the fast build finds {wrong} in {scenario}, seed {seed}"
    return ""


def as_table(outcomes: list[Outcome]) -> Table:
    """Return the outcomes as a table."""
    table = Table(box=box.SIMPLE_HEAD)
    for column in ("bug", "file", "caught by", "s"):
        table.add_column(column, justify="right" if column == "s" else "left", overflow="fold")
    for outcome in outcomes:
        how = f"[red]{outcome.problem}" if outcome.problem else outcome.by
        table.add_row(outcome.mutant.name, outcome.mutant.file, how, f"{outcome.seconds:.0f}")
    return table


@click.command(context_settings={"help_option_names": ["-h", "--help"]}, help=__doc__)
@click.option("--only", metavar="TEXT", default="", help="Only those whose name contains this.")
@click.option("--build", "builds", multiple=True, type=click.Choice(list(SEEDS)), help="Only those for this build.")
@click.option("--few", is_flag=True, help="Only one bug of each folder and build.")
@click.option("--silent", is_flag=True, help="Also check that silent bugs leave the values of the fast build right.")
def main(only: str, builds: tuple[str, ...], few: bool, silent: bool) -> None:
    """Try the bugs; the exit code is 1 if one is not caught."""
    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
    chosen = [mutant for mutant in MUTANTS if only in mutant.name and mutant.build in (builds or SEEDS)]
    if not chosen:
        raise click.UsageError(f"--only {only}: no bug has such a name")
    began = time.monotonic()
    if few:
        chosen = few_of(chosen)
    needed = dict.fromkeys([*(mutant.build for mutant in chosen), *(["fast"] if silent else [])])
    for name in needed:  # before other threads are started
        clean_program(name)
        precompiled(name)
    console.print(f"the program is built in {', '.join(needed)} ({time.monotonic() - began:.0f} s)")
    with ThreadPoolExecutor(native_build.job_count()) as pool:
        running = pool.map(partial(try_mutant, silent=silent), chosen)
        outcomes = list(track(running, "mutants", len(chosen), console=console))
    console.print(as_table(outcomes))
    caught = sum(outcome.caught for outcome in outcomes)
    if silent:
        count = sum(outcome.caught and outcome.mutant.silent for outcome in outcomes)
        console.print(f"{count} of them leave every value of the fast build right")
    console.print(f"{time.monotonic() - began:.0f} s in all")
    console.print(f"caught {caught} of {len(outcomes)}")
    if caught != len(outcomes):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
