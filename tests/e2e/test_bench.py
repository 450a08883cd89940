"""The benchmark: routings, the error bound of its oracle, and small end-to-end runs."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from builds import BUILD, in_long
from deep_ep_py.base.pictures import get_pyplot
from deep_ep_py.testing import run_ranks
from deep_ep_py.tools.bench import BenchConfig, CapabilityError
from deep_ep_py.tools.bench.cli import command
from deep_ep_py.tools.bench.host_time import HostTimes
from deep_ep_py.tools.bench.inputs import Inputs
from deep_ep_py.tools.bench.oracle import Oracle
from deep_ep_py.tools.bench.plots import begin_at_zero
from deep_ep_py.tools.bench.results import report
from deep_ep_py.tools.bench.routing import limit_to_groups, route, tokens_in_rank
from deep_ep_py.tools.bench.timing import three_digits
from forks import run_python
from low_latency import Sizes, Work, dispatch, make_buffer
from places import python_path

pytestmark = pytest.mark.once

SMALL = ["--ranks=2", "--hidden=64", "--experts=16", "--topk=4", "--iterations=2", "--warmup=1", "--chain=2"]
TIMED = {"layout_notify", "dispatch", "combine", "combine_private", "pair"}


def bench(*arguments: str, launcher: tuple[str, ...] = (), cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "DEEP_EP_BUILD": BUILD, "PYTHONPATH": python_path()}
    return run_python([*launcher, "-m", "deep_ep_py", "bench", *arguments], environment, cwd=cwd)


# --- routings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["uniform", "deepseek", "skewed"])
def test_a_routing_is_a_function_of_its_numbers(name: str) -> None:
    topk_idx, weights = route(name, 200, 8, 64, seed=1, rank=2, iteration=3)
    assert topk_idx.shape == weights.shape == (200, 8)
    assert topk_idx.min() >= 0 and topk_idx.max() < 64
    assert all(len(set(row)) == 8 for row in topk_idx.tolist()), "a token chose an expert twice"
    torch.testing.assert_close(weights.sum(dim=1), torch.ones(200))
    assert torch.equal(topk_idx, route(name, 200, 8, 64, seed=1, rank=2, iteration=3)[0])
    for other in ({"seed": 2}, {"rank": 3}, {"iteration": 4}):
        numbers = {"seed": 1, "rank": 2, "iteration": 3} | other
        assert not torch.equal(topk_idx, route(name, 200, 8, 64, **numbers)[0]), other


def test_uniform_routing_spreads_tokens() -> None:
    topk_idx, _ = route("uniform", 4096, 8, 64, seed=0, rank=0, iteration=0)
    loads = torch.bincount(topk_idx.flatten(), minlength=64)
    assert loads.max() < 1.25 * loads.float().mean()


def test_deepseek_routing_stays_in_four_of_eight_groups() -> None:
    topk_idx, _ = route("deepseek", 500, 8, 256, seed=0, rank=0, iteration=0)
    assert max(len(set(row)) for row in (topk_idx // 32).tolist()) == 4
    assert tokens_in_rank(topk_idx, 256, 8).sum(dim=1).max() == 4


def test_group_limit_keeps_the_groups_with_the_best_two() -> None:
    scores = torch.zeros(1, 16)
    scores[0, [0, 2, 3, 4, 6, 8]] = torch.tensor([0.9, 0.5, 0.5, 0.8, 0.3, 0.2])
    kept = limit_to_groups(scores, topk=4)[0].isfinite().nonzero().flatten().tolist()
    assert kept == [0, 1, 2, 3, 4, 5, 6, 7]
    with pytest.raises(ValueError, match="topk is 9"):
        limit_to_groups(scores, topk=9)


def test_skewed_routing_crowds_the_same_experts_everywhere() -> None:
    loads = [
        torch.bincount(route("skewed", 2000, 8, 64, seed=5, rank=rank, iteration=rank)[0].flatten(), minlength=64)
        for rank in range(2)
    ]
    busiest = [set(load.topk(4).indices.tolist()) for load in loads]
    assert len(busiest[0] & busiest[1]) >= 3
    assert all(load.max() > 4 * load.float().mean() for load in loads)


def test_tokens_in_rank_counts_a_rank_once_and_leaves_out_minus_one() -> None:
    topk_idx = torch.tensor([[0, 1, 7], [-1, -1, 4], [-1, -1, -1]])
    assert tokens_in_rank(topk_idx, 8, 4).tolist() == [
        [True, False, False, True],
        [False, False, True, False],
        [False, False, False, False],
    ]


# --- options ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--ranks=0"], "--ranks is 0; expected between 1 and 64"),
        (["--ranks=-1"], "--ranks is -1; expected between 1 and 64"),
        (["--ranks=3"], "--experts is 256; expected a multiple of ranks (3)"),
        (["--hidden=12"], "--hidden is 12; expected at most 1048576, and such that a row is a multiple of 16 bytes"),
        (["--topk=33"], "--topk is 33; expected between 1 and 32"),
        (["--tokens=0"], "--tokens is 0; expected one or more sizes"),
        (["--tokens=many"], "expected whole numbers"),
        (["--iterations=0"], "--iterations is 0"),
        (["--baseline=mpi"], "--baseline is mpi; expected one of memcpy, gloo_bare, gloo"),
        (["--routing=odd"], "'odd' is not one of"),
        (["--routing=deepseek", "--experts=8", "--topk=8"], "group-limited"),
        (["--device=cuda"], "--device cuda: torch sees no GPU here"),
        (["--num-sms=-1"], "--num-sms is -1; expected between 0 and 256"),
        (
            ["--mode=low-latency", "--baseline=gloo"],
            "expected one of memcpy, gloo_bare, normal, barrier with --mode low",
        ),
        (["--mode=low-latency", "--keep=2"], "--keep 2: in normal mode only"),
        (["--mode=low-latency", "--num-sms=2"], "--num-sms 2: in normal mode only"),
        (["--nodes=3"], "--nodes is 3; expected a divisor of the 8 ranks"),
        (["--dtype=fp8", "--hidden=64", "--experts=16"], "--hidden is 64; expected a multiple of 128 with --dtype fp8"),
        (["--dtype=fp8", "--corrupt=combine"], "--corrupt combine: no combine is measured with --dtype fp8"),
        (["--keep=-1"], "--keep is -1; expected between 0 and 64"),
    ],
)
def test_bad_options_are_refused_before_anything_starts(options: list[str], message: str) -> None:
    result = CliRunner().invoke(command, options)
    assert result.exit_code == 2
    assert message in result.output


def test_what_is_not_there_yet_is_told_from_what_is_wrong() -> None:
    with pytest.raises(CapabilityError):
        BenchConfig(device="cuda", baselines=("gloo",)).validate()
    BenchConfig(device="cuda").validate()
    with pytest.raises(ValueError, match="topk"):
        BenchConfig(topk=0).validate()


# --- reports ----------------------------------------------------------------------------------------------------------


def measured(dispatch: list[float], baseline: dict[str, list[float]]) -> dict[str, Any]:
    series = {name: dispatch for name in ("layout_notify", "dispatch", "combine", "combine_private", "pairs")}
    return {
        "tokens": 4,
        "series": series | baseline,
        "late_starts": 0,
        "rows": [10, 20, 30],
        "checks": {"dispatch": []},
        "variants": {"memcpy": ("memcpy", "streaming")},
    }


def test_a_report_takes_medians_and_the_faster_variant() -> None:
    config = BenchConfig(ranks=2, tokens=(4,), hidden=8, experts=2, topk=1, baselines=("memcpy",), chain=4)
    copies = {"memcpy.dispatch.memcpy": [9.0, 1.0, 8.0], "memcpy.dispatch.streaming": [6.0, 5.0, 7.0]}
    back = {"memcpy.combine.memcpy": [3.0, 3.0, 3.0], "memcpy.combine.streaming": [4.0, 4.0, 4.0]}
    result = report(config, [measured([4.0, 2.0, 12.0], copies | back)])
    assert result["ops"]["dispatch"]["ms"] == {"median": 4.0, "min": 2.0, "max": 12.0}
    assert result["ops"]["pair"]["ms"]["median"] == 1.0
    assert result["ops"]["dispatch"]["bytes"] == 20 * 16
    assert result["ops"]["dispatch"]["logical_gb_per_s"] == pytest.approx(320 / 4e-3 / 1e9)
    assert result["baselines"]["memcpy"]["dispatch"]["variant"] == "streaming"
    assert result["baselines"]["memcpy"]["combine"]["variant"] == "memcpy"
    assert result["baselines"]["memcpy"]["pair"]["ms"] == 9.0
    assert result["ratios"]["dispatch"]["memcpy"] == 1.5
    assert result["ratios"]["combine_private"]["memcpy"] == 0.75
    assert result["verified"]


@pytest.mark.parametrize(
    ("value", "written"),
    [(0.01234, "0.0123"), (1.1, "1.10"), (20, "20.0"), (99.96, "100"), (314.2, "314"), (2317.2, "2317")],
)
def test_numbers_are_written_as_a_person_writes_them(value: float, written: str) -> None:
    assert three_digits(value) == written


def test_an_axis_is_cut_above_all_but_outliers() -> None:
    axis = get_pyplot().figure().add_subplot()
    begin_at_zero(axis, {"ours": [(4, 2.0, [2.0, 2.1, 50.0])], "memcpy": [(4, 1.0, [1.0, 1.0, 1.0])]})
    (note,) = axis.texts
    assert axis.get_ylim()[0] == 0 and 2.1 < axis.get_ylim()[1] < 4
    assert "1 of 6 iterations beyond, up to 50.0" in note.get_text()


# --- runs -------------------------------------------------------------------------------------------------------------


def test_a_run_reports_every_figure(tmp_path: Path) -> None:
    baselines = ["--baseline=memcpy", "--baseline=gloo_bare,gloo"]
    files = ["--json=report.json", "--plot=pictures/plot.png"]
    done = bench(*SMALL, "--tokens=24", "--tokens=7", "--routing=skewed", *baselines, *files, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("Timing dispatch and combine in normal mode on 2 ranks, for 24 and 7 tokens on")
    assert "verified: the results are right" in done.stdout and max(map(len, lines)) <= 80, done.stdout
    result = json.loads((tmp_path / "report.json").read_text())
    assert result["verified"] is True
    config = result["config"]
    assert (config["tokens"], config["all_tokens"], config["ranks"]) == (24, [24, 7], 2)
    assert {"cpu", "cores", "torch", "python", "commit"} <= set(config["machine"])
    assert "slowest rank" in config["timing"]
    assert [size["tokens"] for size in result["sizes"]] == [24, 7]
    for figures in (result, *result["sizes"]):
        assert set(figures["ops"]) == TIMED
        for op in figures["ops"].values():
            assert 0 < op["ms"]["min"] <= op["ms"]["median"] <= op["ms"]["max"]
            assert op["bytes"] > 0 and op["logical_gb_per_s"] > 0
        assert set(figures["baselines"]) == {"memcpy", "gloo_bare", "gloo"}
        for op in ("dispatch", "combine", "pair"):
            for name, baseline in figures["baselines"].items():
                ratio = baseline[op]["ms"] / figures["ops"][op]["ms"]["median"]
                assert figures["ratios"][op][name] == pytest.approx(ratio)
        assert set(figures["checks"]) == {
            *("dispatch", "combine", "combine_private", "pair"),
            *("baseline memcpy", "baseline gloo_bare", "baseline gloo"),
        }
    assert (tmp_path / "pictures" / "plot.png").read_bytes().startswith(b"\x89PNG")


LOW_LATENCY = {"dispatch", "combine", "combine_private", "pair"} | {
    f"{op}_{half}" for op in ("dispatch", "combine") for half in ("send", "receive")
}


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
@pytest.mark.thorough
def test_a_run_in_low_latency_mode(dtype: str, tmp_path: Path) -> None:
    options = ["--mode=low-latency", f"--dtype={dtype}", "--hidden=128", "--tokens=24,1", "--json=report.json"]
    baselines = "--baseline=memcpy,gloo_bare,normal,barrier"
    done = bench(*SMALL, *options, baselines, "--plot=plot.png", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "report.json").read_text())
    assert result["verified"] is True
    row = 256 if dtype == "bf16" else 128 + 4
    for size in result["sizes"]:
        assert set(size["ops"]) == LOW_LATENCY
        assert size["rows"] == 2 * size["tokens"] * 4
        assert size["ops"]["dispatch"]["bytes"] == size["rows"] * row
        assert size["ops"]["combine"]["bytes"] == size["rows"] * 256
        assert set(size["ratios"]["pair"]) == {"memcpy", "gloo_bare", "normal", "barrier"}
        for op in ("dispatch", "combine"):
            host, whole = size["host_us"][op], size["ops"]["pair"]["ms"]
            assert 0 < host["min"] <= host["median"] <= host["max"]
            assert host["median"] < 1e3 * whole["max"], "the host time must be part of the call"
    assert done.stdout.count("host time per eager call") == len(result["sizes"])
    assert set(result["host_us"]) == {"dispatch", "combine"} and "launch" in result["config"]["notes"]["host_us"]
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("nodes", [in_long(1), 2])
@pytest.mark.thorough
def test_a_run_of_the_elastic_buffer(nodes: int, tmp_path: Path) -> None:
    options = ["--mode=elastic", "--tokens=24,1", "--json=report.json", f"--nodes={nodes}", "--baseline=memcpy"]
    done = bench(*SMALL, *options, "--plot=plot.png", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "report.json").read_text())
    assert result["verified"] is True
    assert set(result["ops"]) == set(result["config"]["notes"]["ops"]) >= {"dispatch_permuted", "expanded_no_wait"}
    assert set(result["checks"]) == set(result["ops"]), "every call is checked"
    assert set(result["ratios"]) == set(result["ops"])
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.thorough
def test_what_the_elastic_buffer_is_not_measured_with(tmp_path: Path) -> None:
    for options, why in (
        (["--dtype=fp8", "--hidden=128"], "--dtype bf16 only"),
        (["--baseline=normal"], "one of memcpy, gloo_bare, gloo"),
    ):
        done = bench(*SMALL, "--mode=elastic", *options, "--no-plot", cwd=tmp_path)
        assert done.returncode == 2 and why in done.stdout + done.stderr


@pytest.mark.parametrize("operation", ["dispatch", pytest.param("combine", marks=pytest.mark.thorough)])
def test_one_wrong_element_is_seen_in_low_latency_mode(operation: str, tmp_path: Path) -> None:
    options = ["--mode=low-latency", "--tokens=16", "--no-plot", f"--corrupt={operation}"]
    done = bench(*SMALL, *options, cwd=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "NOT verified" in done.stdout


@pytest.mark.parametrize("operation", ["dispatch", pytest.param("combine", marks=pytest.mark.thorough)])
def test_one_wrong_element_is_seen(operation: str, tmp_path: Path) -> None:
    done = bench(*SMALL, "--tokens=16", "--no-plot", "--json=report.json", f"--corrupt={operation}", cwd=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    result = json.loads((tmp_path / "report.json").read_text())
    assert result["verified"] is False
    assert len(result["checks"][operation]) == 1 and "1 elements" in result["checks"][operation][0]
    assert result["checks"]["pair"] == []


@pytest.mark.thorough
def test_fp8_rows_go_with_their_scales_and_without_combine(tmp_path: Path) -> None:
    options = ["--dtype=fp8", "--hidden=256", "--keep=2", "--baseline=memcpy,gloo_bare,gloo", "--tokens=24"]
    done = bench(*SMALL, *options, "--json=report.json", "--plot=plot.png", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "report.json").read_text())
    assert result["verified"] is True and result["config"]["dtype"] == "fp8"
    assert set(result["ops"]) == {"layout_notify", "dispatch"} == set(result["config"]["notes"]["ops"])
    assert set(result["ratios"]) == {"dispatch"}
    rows = result["ops"]["dispatch"]["bytes"] / (256 + 4 * 2)
    assert abs(rows - result["sizes"][0]["rows"]) <= 0.5, "expected the mean number of rows, each with its scales"
    assert set(result["checks"]) == {"dispatch", "baseline memcpy", "baseline gloo_bare", "baseline gloo"}


def test_host_times_end_with_the_launch() -> None:
    """The figure includes neither the time of the kernel nor later work of the caller."""
    sizes = Sizes("one", 1, (3,), 4, 128, 2, 4)
    work = Work.of(sizes)

    def on_each_rank(group: Any) -> tuple[list[float], list[float]]:
        with make_buffer(group, sizes, "peer") as buffer:
            host, whole = HostTimes(buffer), []

            def slow_call() -> None:
                dispatch(buffer, work)
                time.sleep(0.02)

            host.time("dispatch", slow_call)  # must not be counted while it is not recording
            host.recording = True
            for _ in range(3):
                begin = time.monotonic_ns()
                host.time("dispatch", slow_call)
                whole.append((time.monotonic_ns() - begin) / 1e3)
            return host._samples["dispatch"], whole

    for host, whole in run_ranks(1, on_each_rank, seed=1):
        assert len(host) == len(whole)
        assert all(0 < part < all_of_it - 20_000 for part, all_of_it in zip(host, whole, strict=True))


def test_wrong_scales_are_seen() -> None:
    config = BenchConfig(ranks=1, tokens=(5,), hidden=128, experts=4, topk=2, dtype="fp8", warmup=0, iterations=1)
    inputs = Inputs(config, 5, 0, lambda counts: [counts])
    inputs.advance(0)
    x, scales = inputs.payload
    assert Oracle(inputs, 0).check_dispatch((x, scales.clone())) is None
    scales.view(torch.int32)[3, 0] ^= 1
    assert "scales" in (Oracle(inputs, 0).check_dispatch((x, scales)) or "")


@pytest.mark.thorough
def test_ranks_on_several_nodes(tmp_path: Path) -> None:
    done = bench(*SMALL, "--nodes=2", "--tokens=24", "--no-plot", "--json=report.json", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "report.json").read_text())
    assert result["verified"] is True and result["config"]["nodes"] == 2
    assert "2 nodes" in done.stdout
    # Each rank is a node: a row for the other rank crosses, a row for the rank itself does not.
    ops, crossing = result["ops"], 2 * 64 * crossing_tokens(24, result["config"])
    for op in ("dispatch", "combine", "combine_private"):
        assert crossing <= ops[op]["wire_bytes"] <= 2 * crossing + 4096
        assert ops[op]["messages"] > 0 and ops[op]["wire_gb_per_s"] > 0
    assert ops["layout_notify"]["wire_bytes"] < ops["dispatch"]["wire_bytes"]
    assert "messages" in done.stdout and "NICs" in result["config"]["notes"]["wire"]


@pytest.mark.thorough
def test_low_latency_on_several_nodes(tmp_path: Path) -> None:
    """Crossing rows are counted there too: one for each choice of an expert on the other node, in both directions."""
    options = ("--mode=low-latency", "--nodes=2", "--tokens=8", "--no-plot", "--json=report.json")
    done = bench(*SMALL, *options, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "report.json").read_text())
    assert result["verified"] is True
    ops, row = result["ops"], 2 * result["config"]["hidden"]
    assert row * crossing_tokens(8, result["config"]) <= ops["dispatch"]["wire_bytes"] < ops["combine"]["wire_bytes"]
    halves = [ops[f"dispatch_{half}"]["wire_bytes"] for half in ("send", "receive")]
    assert halves[0] > halves[1] and sum(halves) == pytest.approx(ops["dispatch"]["wire_bytes"], rel=0.3)


def crossing_tokens(tokens: int, config: dict[str, Any]) -> int:
    """Return the tokens of two ranks that go to the other rank, as a mean over the timed iterations."""
    count, timed = 0, range(config["warmup"], config["warmup"] + config["iterations"])
    for iteration in timed:
        for rank in range(2):
            topk_idx, _ = route("uniform", tokens, config["topk"], config["experts"], config["seed"], rank, iteration)
            count += int(tokens_in_rank(topk_idx, config["experts"], 2)[:, 1 - rank].sum())
    return count // len(timed)


@pytest.mark.thorough
def test_it_runs_under_torchrun(tmp_path: Path) -> None:
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    done = bench(*SMALL[1:], "--tokens=8", "--json=report.json", "--no-plot", launcher=torchrun, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "report.json").read_text())
    assert result["verified"] is True and result["config"]["ranks"] == 2
    assert done.stdout.count("tokens per rank,") == 1, "more than one rank printed"
