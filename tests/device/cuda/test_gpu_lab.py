"""`make gpu-lab`: its list, its limits, what it keeps, and all of it over the stand-in for the driver."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner
from rich.console import Console

from benchmarks.gpu_lab import __main__ as gpu_lab
from benchmarks.gpu_lab import against, experiments, report
from benchmarks.gpu_lab.experiments import DEFAULT_SECONDS, JSON, LONGEST_SECONDS, WATCHED, Experiment
from benchmarks.gpu_lab.machine import Machine
from benchmarks.gpu_lab.runner import Runner
from cases import BY_NAME
from deep_ep_py.tools.bench import BenchConfig
from deep_ep_py.tools.bench.cli import command as bench
from forks import run_python
from low_latency_gpu import WATCHED as LOW_LATENCY_WATCHED
from places import ROOT, WORKERS, python_path

pytestmark = pytest.mark.once

MACHINE = Machine("A GPU", "580.1", 1, "abc", "2026-01-01 00:00 UTC", "3.11", "2.13", "6.1", 2)
NUMBERS_OF_GPUS = (1, 2, 7, 8)


# --- the list ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gpus", NUMBERS_OF_GPUS)
def test_limits_add_up(gpus: int) -> None:
    """Whatever happens, a machine's default list ends within five minutes, and each experiment within its limit."""
    known = experiments.experiments(gpus)
    default = [one for one in known if one.in_default_list(gpus)]
    assert sum(one.seconds for one in default) <= DEFAULT_SECONDS == 300
    assert all(0 < one.seconds <= LONGEST_SECONDS == 40 for one in known)
    assert known[: len(default)] == default and [one.name for one in default][:2] == ["build", "canary"]
    assert len({one.name for one in known}) == len(known)
    assert all(one.gpus <= gpus for one in default)
    assert any(one.gpus > 1 for one in default) == (gpus > 1)


def test_every_name_is_accepted() -> None:
    known = experiments.experiments(1)
    for one in known:
        chosen = gpu_lab.chosen_of(known, (one.name,), 1)
        assert {other.name for other in chosen} == {one.name, *gpu_lab.FIRST}
    with pytest.raises(
        click.UsageError, match="--only speed: expected one of build; canary; failed_before; recovery; "
    ):
        gpu_lab.chosen_of(known, ("speed",), 1)


@pytest.mark.parametrize("gpus", NUMBERS_OF_GPUS)
def test_what_experiments_are_told(gpus: int) -> None:
    """The programs accept their commands, and the files and cases in them exist."""
    benchmarks = 0
    for one in experiments.experiments(gpus):
        words = list(one.command)
        for word in words:
            if word.startswith("tests/"):
                assert (ROOT / word.partition("::")[0]).exists(), word
        if "bench" in words:
            options = bench.make_context("bench", words[words.index("bench") + 1 :]).params
            given = {key.name: options[key.name] for key in fields(BenchConfig) if options.get(key.name)}
            if "torch.distributed.run" in words:
                (per_node,) = [word for word in words if word.startswith("--nproc-per-node=")]
                given["ranks"] = int(per_node.partition("=")[2])
            config = BenchConfig(**given)
            config.validate()
            assert (config.device, config.hidden, config.topk, config.experts) == ("cuda", 7168, 8, 256)
            assert one.shares == ("torch.distributed.run" not in words), (
                "kernels of ranks that share wait for each other"
            )
            benchmarks += 1
    assert benchmarks == 8
    assert {*WATCHED["normal"]} <= {*BY_NAME} and WATCHED["low_latency"] == LOW_LATENCY_WATCHED


# --- one experiment ---------------------------------------------------------------------------------------------------


@pytest.fixture
def runner(tmp_path: Path) -> Runner:
    return Runner(MACHINE, tmp_path, Console(file=(tmp_path / "console").open("w")))


def shell(name: str, script: str, seconds: int = 20, **options: Any) -> Experiment:
    return Experiment(name, "Does it?", ("sh", "-c", script), seconds, "all", **options)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_one_that_hangs_is_ended_with_all_that_it_has_started(runner: Runner, tmp_path: Path) -> None:
    """Also what leads a group of its own, as torchrun's ranks do. The end of its output is kept."""
    script = f"trap '' INT; echo busy; sleep 99 & echo $! > {tmp_path}/child; "
    script += f"setsid sleep 99 & echo $! > {tmp_path}/leader; wait; sleep 99"
    began = time.monotonic()
    result = runner.run(shell("hangs", script, 1))
    assert time.monotonic() - began < 15
    assert (result["result"], result["note"], result["tail"]) == ("too slow", "unfinished after 1 s", ["busy"])
    pids = [int((tmp_path / name).read_text()) for name in ("child", "leader")]
    deadline = time.monotonic() + 10
    while any(map(is_running, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(is_running, pids))
    assert runner.run(shell("next", "echo fine"))["result"] == "passed"


def test_what_is_kept_of_an_experiment(runner: Runner, tmp_path: Path) -> None:
    """With the machine and the commit, and its figures; where it has failed, the end of its output."""
    good = runner.run(shell("good", f"""echo '{{"speed": 3}}' > {JSON}; echo the last line"""))
    bad = runner.run(shell("bad", "echo cause; exit 3"))
    absent = runner.run(shell("absent", "true", needs="no-such-tool"))
    links = runner.run(shell("links", "true", gpus=2))
    assert good["figures"] == {"speed": 3} and good["note"] == "the last line" and "tail" not in good
    assert (bad["result"], bad["note"], bad["tail"]) == ("failed", "exit code 3", ["cause"])
    assert (absent["result"], absent["note"]) == ("skipped", "there is no no-such-tool")
    assert (links["result"], links["note"]) == ("skipped", "needs 2 GPUs, there is one")
    for result in (good, bad, absent, links):
        assert json.loads((tmp_path / f"{result['name']}.json").read_text()) == result
        assert (result["gpu"], result["driver"], result["commit"], result["date"][:4]) == (
            "A GPU",
            "580.1",
            "abc",
            "2026",
        )
    assert runner.kept("good") == good and runner.kept("bad") == bad and runner.kept("absent") is None


@pytest.mark.parametrize(
    ("found", "chosen", "shared"),
    [
        ({"side_by_side": {}, "launch": "plain"}, "plain", "passed"),
        ({"side_by_side": {}, "launch": "cooperative"}, "cooperative", "passed"),
        ({"side_by_side": {}, "launch": None}, "unset", "skipped"),
        ({"errors": ["no answer within 5 s"]}, "unset", "passed"),
    ],
    ids=["plain", "cooperative", "none", "unknown"],
)
def test_the_canary_chooses_for_those_behind_it(
    runner: Runner, monkeypatch: pytest.MonkeyPatch, found: dict[str, Any], chosen: str, shared: str
) -> None:
    monkeypatch.delenv("DEEP_EP_LAUNCH", raising=False)
    runner.run(shell("canary", f"cat > {JSON} <<'END'\n{json.dumps(found)}\nEND"))
    assert runner.run(shell("shared", "true", shares=True))["result"] == shared
    assert runner.run(shell("alone", "echo ${DEEP_EP_LAUNCH:-unset}"))["note"] == chosen


def test_tests_that_find_no_gpu_have_not_passed(runner: Runner) -> None:
    """Skipped is not passed: it would be reported as a success."""
    (recovery,) = [one for one in experiments.experiments(1) if one.name == "recovery"]
    assert runner.run(Experiment("recovery", "", (*recovery.command, "-x"), 40))["result"] == "failed"


# --- a run ------------------------------------------------------------------------------------------------------------


class Lab:
    """The command with experiments of a test, each of which leaves a line with its name in a file."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.out, self._trace = folder / "out", folder / "trace"
        self._set = monkeypatch.setattr
        self._set(gpu_lab, "describe", lambda: MACHINE)
        self.scripts = {"build": "true", "canary": "true", "one": "true", "two": "exit 1", "three": "true"}

    def run(self, *arguments: str) -> tuple[int, list[str]]:
        """Return the exit code and the experiments that have run."""
        self._trace.write_text("")
        known = [shell(name, f"echo {name} >> {self._trace}; {script}") for name, script in self.scripts.items()]
        self._set(gpu_lab, "experiments", lambda gpus: known)
        done = CliRunner().invoke(gpu_lab.main, [f"--out={self.out}", *arguments])
        self.printed = done.output
        return done.exit_code, self._trace.read_text().split()

    def report(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.out / "report.json").read_text())
        assert (self.out / "report.md").read_text().startswith("# A GPU, 2026")
        return found


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lab]:
    before = signal.getsignal(signal.SIGTERM)
    yield Lab(tmp_path, monkeypatch)
    signal.signal(signal.SIGTERM, before)


def test_a_second_run_continues(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """What has a result is not run again, also where it has failed, but the build is; unless it is named, everything is
    to be run again, or the sources or the machine have changed."""
    everything = list(lab.scripts)
    assert lab.run() == (1, everything)
    assert {name: result["result"] for name, result in lab.report()["results"].items()} == {
        **dict.fromkeys(everything, "passed"),
        "two": "failed",
    }
    assert lab.run() == (1, ["build"])
    assert lab.run("--only=three") == (0, ["build", "three"])
    lab.scripts["two"] = "true"
    assert lab.run("--only=two", "--only=one") == (0, ["build", "one", "two"])
    assert lab.run("--fresh") == (0, everything)
    monkeypatch.setattr(gpu_lab, "describe", lambda: Machine(**{**vars(MACHINE), "commit": "def"}))
    assert lab.run() == (0, everything)


def test_without_a_build_nothing_else_is_tried(lab: Lab) -> None:
    lab.scripts["build"] = "exit 1"
    assert lab.run() == (1, ["build"])
    assert lab.report()["not_run"] == ["canary", "one", "two", "three"]


def test_an_interrupted_run_leaves_a_report(lab: Lab) -> None:
    """And the next one continues with what was interrupted."""
    lab.scripts["two"] = "kill -TERM $PPID; sleep 60"
    assert lab.run() == (130, ["build", "canary", "one", "two"])
    assert "interrupted: the same command continues" in lab.printed
    assert list(lab.report()["results"]) == ["build", "canary", "one"]
    assert lab.report()["not_run"] == ["two", "three"]
    assert "| two | not run |" in (lab.out / "report.md").read_text()
    lab.scripts["two"] = "true"
    assert lab.run() == (0, ["build", "two", "three"])


def test_without_a_gpu(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu_lab", f"--out={tmp_path}"]
    environment = {**os.environ, "PATH": "/usr/bin:/bin"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "there is no GPU here" in done.stderr


def test_what_python_lacks_is_said_in_a_line() -> None:
    """A Python without site-packages has none of the packages."""
    command = [sys.executable, "-S", "-m", "benchmarks.gpu_lab"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "lacks click, rich, torch" in done.stderr and len(done.stderr.splitlines()) == 1


# --- other sources ----------------------------------------------------------------------------------------------------


def benchmark(milliseconds: float) -> dict[str, Any]:
    times = {"median": milliseconds}
    ops = {"combine": {"ms": times, "kernels": {"combine": {"ms": times}}}}
    return {"ops": ops, "sizes": [{"copy_gb_per_s": 100.0}], "verified": True}


def test_two_sources_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The order alternates from pair to pair, and what is reported is the median of the pairs' ratios."""
    ran: list[str] = []
    others = iter([3.0, 8.0, 4.0])

    def run_benchmark(folder: Path, options: list[str], gpus: int) -> dict[str, Any]:
        assert gpus == 1 and "--mode=low-latency" in options
        ran.append("ours" if folder == ROOT else "others")
        return benchmark(2.0 if folder == ROOT else next(others))

    monkeypatch.setattr(against, "run_benchmark", run_benchmark)
    results = [{"figures": against.compare(tmp_path, "low_latency", number, 1)} for number in (1, 2, 3)]
    assert ran == ["ours", "others", "others", "ours", "ours", "others"]
    call, kernel = against.summary_of_pairs(results)
    expected = {"benchmark": "low_latency", "call": "combine", "ratio": 2.0, "min": 1.5, "max": 4.0, "pairs": 3}
    assert (call, kernel) == ({**expected, "kernel": ""}, {**expected, "kernel": "combine"})
    report.write(MACHINE, [{**EMPTY, **result} for result in results], [], tmp_path)
    assert "| low_latency | combine | combine | 2.000 | 1.500 to 4.000 | 3 |" in (tmp_path / "report.md").read_text()


EMPTY = {"name": "pair", "question": "", "result": "passed", "seconds": 1.0, "limit": 40, "note": ""}


def test_only_pairs_run_against_others(lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After what they depend on; the report keeps what was found before. Without the others' build there are none."""
    trace, built = tmp_path / "trace", ["exit 1", "true"]

    def pairs_with(folder: Path, gpus: int) -> list[Experiment]:
        assert (folder, gpus) == (tmp_path, 1)
        scripts = {"against_x_build": built.pop(), "against_x_normal_1": "true"}
        return [shell(name, f"echo {name} >> {trace}; {script}") for name, script in scripts.items()]

    monkeypatch.setattr(gpu_lab, "pairs_with", pairs_with)
    assert lab.run("--only=one") == (0, ["build", "canary", "one"])
    assert lab.run(f"--against={tmp_path}") == (0, ["build", "against_x_build", "against_x_normal_1"])
    assert list(lab.report()["results"]) == ["build", "canary", "one", "against_x_build", "against_x_normal_1"]
    assert lab.run(f"--against={tmp_path}", "--fresh") == (1, ["build", "canary", "against_x_build"])


def test_pairs_are_experiments_like_others(tmp_path: Path) -> None:
    """Their names change with the other sources."""
    (tmp_path / "csrc").mkdir()
    first = against.pairs_with(tmp_path, 1)
    (tmp_path / "csrc" / "new.h").write_text("int x;")
    second = against.pairs_with(tmp_path, 8)
    assert [one.name[15:] for one in first] == [one.name[15:] for one in second]
    kinds = [f"{mode}_{number}" for number in (1, 2, 3) for mode in ("low_latency", "normal")]
    assert [one.name[15:] for one in first] == ["build", *kinds]
    assert not {one.name for one in first} & {one.name for one in second}
    assert all(one.seconds <= LONGEST_SECONDS for one in first)
    with against.main.make_context("against", list(first[1].command[3:])) as context:
        assert context.params["mode"] == "low_latency" and context.params["folder"] == tmp_path


# --- over the stand-in ------------------------------------------------------------------------------------------------

# Of the tests that experiments run, a few that are short here; tests/device/cuda/test_cuda_buffer.py runs the others.
NOT_HERE = (
    *("compiled", "recorded", "sixty_four", "between_processes", "graph", "streams", "moves", "dtype0"),
    "random_routings",
)


@pytest.mark.parametrize("gpus", [1, 2])
@pytest.mark.thorough
def test_all_of_it_over_the_stand_in(double: Path, tmp_path: Path, gpus: int) -> None:
    """Each experiment of the default list runs; its times mean nothing here."""
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "nvidia-smi").write_text("#!/bin/sh\n" + "echo Double, 580.1\n" * gpus)
    (tools / "nvidia-smi").chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{tools}:{os.environ['PATH']}",
        "LD_LIBRARY_PATH": str(double),
        "DOUBLE_MULTIPROCESSORS": "132" if gpus == 1 else "8",
        "CUDA_DEVICE_MAX_CONNECTIONS": "32",
        "PYTHONPATH": python_path(WORKERS),
        "PYTEST_ADDOPTS": f"-k 'not ({' or '.join(NOT_HERE)})'",
        "OMP_NUM_THREADS": "1",
    }
    out = tmp_path / "out"
    done = run_python([str(WORKERS / "lab_on_double.py"), str(gpus), f"--out={out}"], environment, timeout=400)
    found = json.loads((out / "report.json").read_text())
    assert done.returncode == 0, done.stdout + done.stderr
    default = [one for one in experiments.experiments(gpus) if one.in_default_list(gpus)]
    assert list(found["results"]) == [one.name for one in default] and found["not_run"] == []
    assert {result["result"] for result in found["results"].values()} == {"passed"}, done.stdout
    markdown = (out / "report.md").read_text()
    for one in default:
        assert f"| {one.name} | passed |" in markdown
        if JSON in " ".join(one.command):
            assert found["results"][one.name]["figures"], one.name
    benchmark = found["results"]["low_latency_benchmark" if gpus == 1 else "links_low_latency_benchmark"]["figures"]
    for op in benchmark["ops"].values():
        assert op["of_copy"] > 0 and all(kernel["over_copy"] > 0 for kernel in op["kernels"].values())
    assert {"gpu", "date", "commit", "cuda_driver", "driver"} <= benchmark["config"]["machine"].keys()
