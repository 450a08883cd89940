"""Each build finds its kind of bug: small kernels with one bug each, and the same kernels without it.

The programs are in tests/native/planted, where each bug has a name. A ThreadSanitizer report makes the exit code 66.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from builds import BUILD
from native_programs import NATIVE, build_aarch64, build_for_large_pages, build_planted, build_portable, run

WRONG_VALUE, BROKEN_RULE, DEADLOCK, RACE = 3, 4, 5, 66
SEEDS = range({"fast": 8, "exact": 8, "tsan": 4, "asan": 3}[BUILD])  # 0 is first come, first served

# At least one race per kind of agent: CUDA threads of two ranks, two warps, one warp; a copy engine; a host thread.
RACES = [
    ("ring", "relaxed tail"),
    ("ring", "missing syncwarp"),
    ("ring", "missing barrier"),
    ("ring", "shuffle for barrier"),
    ("block", "missing syncwarp"),
    ("block", "missing syncthreads"),
    ("copy engine", "relaxed flag"),
    ("copy engine", "relaxed post"),
    ("copy engine", "source reused"),
    ("host", "relaxed flag"),
]
# Races that also make values wrong, or stop the run, under some schedule. Wrong memory orders do not: on one processor
# the values are right regardless of the order. If a warp has a single lane, its lanes cannot race.
VISIBLE = [
    ("ring", "missing barrier"),
    ("ring", "shuffle for barrier"),
    ("block", "missing syncthreads"),
    ("copy engine", "source reused"),
    ("host", "no wait"),
    *([] if BUILD == "fast" else [("block", "missing syncwarp")]),
]
RULES = [
    ("barrier counts", "joined with count"),
    ("barrier count too large", "is more than the block's"),
    *(
        []
        if BUILD == "fast"  # with one lane per warp, lanes break no rules
        else [
            ("mixed collectives", "lanes of one warp meet in __(any_sync and __syncwarp|syncwarp and __any_sync)"),
            ("exited lane", "a thread exits while lanes of its warp wait for it|names a lane that has exited"),
            ("masks differ", "wait for each other with different masks"),
            ("not in the mask", "is not in the mask"),
            ("outside the mask", "reads from a lane outside its mask"),
            ("narrow scope", "needs Scope::kSystem"),
            ("block scope outside a block", "kBlock to a word that is not in shared memory"),
            ("wider scope in a block", "wider scope than kBlock to a word in shared memory"),
            ("a third row loaded ahead", "RowCopies: a third row is loaded ahead"),
            ("another row than the one loaded", "RowCopies: another row is copied than the one loaded ahead"),
        ]
    ),
]


def line_of(program: str, marker: str) -> str:
    """Return the source position that a message must name: the line with `// line: marker`."""
    lines = (NATIVE / "planted" / program).read_text().splitlines()
    (number,) = (i for i, line in enumerate(lines, 1) if line.endswith(f"// line: {marker}"))
    return f"planted/{program}:{number}"


@pytest.mark.parametrize("scenario", ["ring", "block", "copy engine", "host", "misuse"])
def test_programs_without_a_planted_bug_are_clean(scenario: str) -> None:
    for seed in SEEDS:
        result = run(build_planted(), scenario, "none", str(seed))
        assert result.returncode == 0, f"seed {seed}\n{result.stderr}"


if BUILD == "tsan":

    @pytest.mark.parametrize("scenario, bug", RACES)
    def test_planted_race_is_reported(scenario: str, bug: str) -> None:
        results = (run(build_planted(), scenario, bug, str(seed)) for seed in SEEDS)
        report = next((result.stderr for result in results if result.returncode == RACE), "")
        assert "WARNING: ThreadSanitizer: data race" in report
        file = scenario.replace(" ", "_") + ".h"
        assert re.search(rf"planted/{file}:\d+", report), "the report must name the line of the kernel"

else:

    @pytest.mark.parametrize("scenario, bug", VISIBLE)
    def test_planted_bug_shows_under_some_schedule(scenario: str, bug: str) -> None:
        codes = [run(build_planted(), scenario, bug, str(seed)).returncode for seed in SEEDS]
        assert WRONG_VALUE in codes or DEADLOCK in codes, codes


@pytest.mark.parametrize("bug, message", RULES)
def test_planted_misuse_is_an_error(bug: str, message: str) -> None:
    for seed in SEEDS:
        result = run(build_planted(), "misuse", bug, str(seed))
        # In "barrier counts", both warps may find the barrier empty after the first one has passed it alone.
        allowed = (BROKEN_RULE, DEADLOCK) if bug == "barrier counts" else (BROKEN_RULE,)
        assert result.returncode in allowed, f"seed {seed}\n{result.stderr}"
        if result.returncode == BROKEN_RULE:
            assert re.search(message, result.stderr), result.stderr
            assert re.search(r"planted/misuse\.h:\d+ \(rank 0, break_rule, block 0, thread \d+\)", result.stderr)


def test_planted_misuse_names_the_line() -> None:
    result = run(build_planted(), "misuse", "barrier counts", "1")
    assert line_of("misuse.h", "barrier counts") in result.stderr
    if BUILD != "fast":
        result = run(build_planted(), "misuse", "narrow scope", "1")
        assert line_of("misuse.h", "narrow scope") in result.stderr


def test_planted_deadlock_names_who_waits_where_for_what() -> None:
    for seed in SEEDS:
        result = run(build_planted(), "ring", "lost head", str(seed))
        assert result.returncode == DEADLOCK, f"seed {seed}\n{result.stderr}"
        assert "deadlock: no thread can ever run again" in result.stderr
        assert re.search(
            r"rank 0, send, block 0, warp 0: 1 thread: waits: room in the ring, peer 1, expected 1, sees 0 at \S*"
            + line_of("ring.h", "waits for room"),
            result.stderr,
        ), result.stderr
        assert re.search(r"rank 1, receive, block 0, warp 0: 1 thread: waits: an item, peer 0", result.stderr)
        assert "rank 1, host: waits: synchronize" in result.stderr


def test_planted_deadlock_at_a_barrier_names_the_line() -> None:
    result = run(build_planted(), "misuse", "barrier never met", "1")
    assert result.returncode == DEADLOCK, result.stderr
    place = line_of("misuse.h", "barrier never met")
    assert re.search(rf"warp 0: \d+ threads?: barrier: barrier_or at \S*{place}", result.stderr), result.stderr
    assert re.search(r"warp 1: \d+ threads?: barrier: __syncthreads", result.stderr), result.stderr


@pytest.mark.slow
@pytest.mark.once
@pytest.mark.parametrize("build", [build_portable, build_aarch64, build_for_large_pages])
@pytest.mark.thorough
def test_planted_bugs_show_on_other_processors(tmp_path: Path, build: Callable[[Path], list[str]]) -> None:
    """On processors for which the executor has no context switch, and by emulation on one for which it has; with warps
    of 4 lanes."""
    program = build(tmp_path)
    for scenario in ("ring", "block", "copy engine", "host", "misuse"):
        result = run(*program, scenario, "none", "1")
        assert result.returncode == 0, result.stderr
    assert run(*program, "ring", "lost head", "1").returncode == DEADLOCK
    assert run(*program, "misuse", "mixed collectives", "1").returncode == BROKEN_RULE
    assert run(*program, "block", "missing syncwarp", "1").returncode == WRONG_VALUE
