"""`doctor` as a user runs it, on fictitious machines and on this one."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console

from deep_ep_py.base.machine_files import Files
from deep_ep_py.tools.cli.doctor import command
from deep_ep_py.tools.doctor.findings import Finding, Section, Verdict, count, worst
from deep_ep_py.tools.doctor.gpus import gpus
from deep_ep_py.tools.doctor.host import host
from deep_ep_py.tools.doctor.job import Job, Machine
from deep_ep_py.tools.doctor.limits import limits
from deep_ep_py.tools.doctor.network import network
from deep_ep_py.tools.doctor.nvshmem import TRAFFIC_CLASS, Process
from deep_ep_py.tools.doctor.printed import COMMAND_INDENT, print_job
from deep_ep_py.tools.doctor.runnable import TITLE
from forks import run_python
from launches import of_ranks
from machine_trees import Tree, efa, roce, two_gpus_and_nics

pytestmark = pytest.mark.once

DOCTOR = [sys.executable, "-m", "deep_ep_py", "doctor"]
MACHINES: dict[str, Callable[[Path], object]] = {
    "infiniband": two_gpus_and_nics,
    "roce": roce,
    "efa": efa,
    "nothing": Tree,
}


def printed(*findings: Finding, width: int = 80, encoding: str = "utf-8") -> str:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding=encoding)
    print_job(
        Job([Machine("here", sections=[Section.of("Title", findings)])], [], [], ""), Console(file=stream, width=width)
    )
    stream.flush()
    return raw.getvalue().decode(encoding)


def on_copy(root: Path, *arguments: str) -> Any:
    return CliRunner().invoke(command, ["--root", str(root), *arguments])


@pytest.mark.parametrize("name", MACHINES)
def test_a_copy_of_a_machine(tmp_path: Path, name: str) -> None:
    MACHINES[name](tmp_path)
    done = on_copy(tmp_path)
    assert done.exit_code == 0, done.output
    for line in done.output.splitlines():
        assert len(line) <= 80 or line.startswith(COMMAND_INDENT), line


def test_nothing_of_here_judges_a_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    two_gpus_and_nics(tmp_path)
    monkeypatch.setenv(TRAFFIC_CLASS, "many")
    monkeypatch.setenv("DEEP_EP_FABRIC", "copper")
    done = on_copy(tmp_path, "--json")
    assert done.exit_code == 0 and "many" not in done.output and "copper" not in done.output
    findings = [one for section in json.loads(done.output)["machines"][0]["sections"] for one in section["findings"]]
    unread = [one["name"] for one in findings if one["value"] == "not read: --root"]
    of_the_process = ["GPUs of this process", "Software", "Environment", "Paths", TITLE]
    assert unread == ["limits", "NVSHMEM's settings", *of_the_process]


def test_what_makes_no_sense_is_not_believed(tmp_path: Path) -> None:
    tree, ports = roce(tmp_path)
    tree.gid(ports[0], 5, "not an address", "RoCE v2", "eth2")
    tree.file(f"{ports[0]}/gids/odd", "fe80::1")
    tree.file(f"{ports[0]}/rate", b"\xff\xfe")
    tree.file("/sys/class/infiniband/mlx5_0/ports/x/state", "4: ACTIVE")
    tree.file("/proc/sys/kernel/osrelease", "\x1b[31mred\n")
    circle = tmp_path / "sys/class/infiniband/mlx5_9"
    circle.mkdir()
    (circle / "device").symlink_to("device")
    done = on_copy(tmp_path)
    assert done.exit_code == 0, done.output
    assert "RoCEv2 at 10.0.1.2 of eth2 (GID 3)" in " ".join(done.output.split())
    assert "\x1b" not in done.output and r"\x1b[31mred" in done.output


@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize("process", [None, Process({TRAFFIC_CLASS: "1"}, "3.4.5"), Process({}, None)])
def test_what_is_no_good_says_why(tmp_path: Path, name: str, process: Process | None) -> None:
    MACHINES[name](tmp_path)
    files = Files(tmp_path, live=process is not None)
    for section in (host(files), limits(files), gpus(files, process), network(files, process)):
        for finding in section.findings:
            assert finding.reason or finding.verdict not in (Verdict.WARNING, Verdict.ERROR), finding
            assert bool(finding.command) == finding.note.endswith(":"), finding
            assert "\n" not in finding.command, finding


def test_commands_are_lines_of_their_own() -> None:
    long = "sudo " + " ".join(f"word{number}" for number in range(40))
    text = printed(Finding("name", Verdict.WARNING, "value", "reason", "type this:", long))
    assert f"\n{COMMAND_INDENT}{long}\n" in text
    assert text.index("type this:") < text.index(long)


def test_what_does_not_fit_beside_its_name_is_below_in_one_piece() -> None:
    """Neither a name nor a value is folded into a column, let alone inside a word."""
    name, value = "DEEP_EP_A_VARIABLE_WITH_A_LONG_NAME", f"/{'folder/' * 8}file"
    text = printed(Finding("short", Verdict.INFO, "beside"), Finding(name, Verdict.INFO, value, "why it matters"))
    assert [line.strip() for line in text.splitlines()[1:5]] == [
        "info    short                       beside",
        f"info    {name}",
        value,
        "why it matters",
    ]


@pytest.mark.parametrize(
    ("text", "shown"),
    [("a\x1b[2Jb", r"a\x1b[2Jb"), ("a\nb", r"a\nb"), ("a\u202eb", r"a\u202eb"), ("[red]", "[red]"), ("ü", "ü")],
)
def test_what_a_terminal_would_obey_is_escaped(text: str, shown: str) -> None:
    output = printed(Finding(text, Verdict.INFO, text, text, text + ":", text))
    assert output.count(shown) == 5 and "\x1b" not in output and "\u202e" not in output


def test_what_a_terminal_cannot_show_is_escaped() -> None:
    assert r"T\xfcr" in printed(Finding("name", Verdict.INFO, "Tür"), encoding="ascii")


def test_an_error_is_the_exit_code(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    tree.gpu("pci0000:00/0000:00:1e.0", "0000:01:00.0")
    report = tmp_path / "report.json"
    done = on_copy(tmp_path, "--json", str(report))
    assert done.exit_code == 1 and "1 error" in done.output
    verdicts = [one["verdict"] for one in json.loads(report.read_text())["machines"][0]["sections"][2]["findings"]]
    assert verdicts[0] == "error"


def here(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run_python([*DOCTOR[1:], *arguments], of_ranks())


def test_this_machine(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    done = here("--json", str(file))
    assert done.returncode in (0, 1), done.stderr
    for line in done.stdout.splitlines():
        assert len(line) <= 80 or line.startswith(COMMAND_INDENT), line
    report = json.loads(file.read_text())
    assert report.keys() == {"machines", "routes", "gpus", "pairs", "failure"}
    titles = [section["title"] for section in report["machines"][0]["sections"]]
    assert titles == [
        "Host",
        "Limits of this process",
        "GPUs",
        "GPUs of this process",
        "RDMA NICs",
        "Software",
        "Environment",
        "Paths",
        TITLE,
    ]


def test_json_on_the_standard_output_is_all_there_is() -> None:
    done = here("--json")
    assert json.loads(done.stdout)["routes"] == [] and not done.stderr


def test_a_reader_that_stops() -> None:
    """As with `head`: there is no traceback."""
    reading, writing = os.pipe()
    with subprocess.Popen(DOCTOR, env=of_ranks(), stdout=writing, stderr=subprocess.PIPE, text=True) as started:
        os.close(writing)
        os.close(reading)
        _, errors = started.communicate(timeout=120)
    assert "Traceback" not in errors and "BrokenPipe" not in errors


def test_the_worst_verdict() -> None:
    sections = [Section.of("x", [Finding("a", verdict, "") for verdict in (Verdict.GOOD, Verdict.WARNING)])]
    assert worst(sections) is Verdict.WARNING and worst([]) is Verdict.GOOD


@pytest.mark.parametrize(("number", "text"), [(0, "no GPUs"), (1, "1 GPU"), (2, "2 GPUs")])
def test_counts(number: int, text: str) -> None:
    assert count(number, "GPU") == text
