"""The default number of blocks of a call."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from deep_ep_py.device.cuda import CudaDevice
from deep_ep_py.device.rates import SLACK, Rates, destinations, rates_file
from deep_ep_py.tools.bench.rates import command
from places import ROOT

pytestmark = pytest.mark.once

MEASURED = ROOT / "benchmarks" / "results" / "2026-11-26_h200_rates.json"


@st.composite
def some_rates(draw: st.DrawFn) -> Rates:
    blocks = [1, *sorted(draw(st.sets(st.integers(2, 256), max_size=6)))]
    return Rates(tuple((count, draw(st.floats(1e9, 1e13))) for count in blocks), draw(st.floats(0, 1e-3)))


def linear(per_block: float, most: float, startup: float = 0.0) -> Rates:
    """Rates that grow with the number of blocks up to a limit."""
    return Rates(tuple((blocks, min(blocks * per_block, most)) for blocks in range(1, 257)), startup)


@given(some_rates(), st.integers(0, 10**11), st.integers(1, 256), st.sampled_from([1, 2, 8]))
def test_the_fewest_blocks_that_are_fast_enough(rates: Rates, moved: int, most: int, share: int) -> None:
    blocks = rates.blocks_for(moved, most, share)
    allowed = (1 + SLACK) * rates.seconds(moved, most, share)
    assert 1 <= blocks <= most
    assert rates.seconds(moved, blocks, share) <= allowed * (1 + 1e-9)
    if blocks > 1:
        assert rates.seconds(moved, blocks - 1, share) >= allowed * (1 - 1e-9)


def test_what_the_rates_say_of_some_calls() -> None:
    """Worked out by hand: 3 GB at 3 TB/s take 1 ms, so 1.05 ms is allowed, in which a block moves 105 MB."""
    rates = linear(100e9, 3e12)
    assert rates.blocks_for(3e9, 132) == 29
    # Memory shared with 7 other ranks: an eighth of the rate, an eighth of the blocks.
    assert rates.blocks_for(3e9, 16, share=8) == 4
    # A call that takes no longer than its startup needs no more blocks than one.
    assert linear(100e9, 3e12, 20e-6).blocks_for(1e5, 132) == 1
    assert rates.blocks_for(0, 132) == 1


def test_the_rates_of_an_h200() -> None:
    """The measured times are those of the rates, so the promise holds for the call that was measured."""
    report = json.loads(MEASURED.read_text())
    times = {point["blocks"]: point["seconds"] for point in report["points"]}
    moved, startup = report["moved_bytes"], report["rates"]["startup"]
    rates = Rates(tuple((blocks, moved / (seconds - startup)) for blocks, seconds in times.items()), startup)
    for blocks, seconds in times.items():
        assert rates.seconds(moved, blocks) == pytest.approx(seconds, rel=0.01)
    chosen = rates.blocks_for(moved, 132)
    assert 64 < chosen < 128, "64 blocks take 12% longer than 128, which is more than promised"
    assert rates.blocks_for(moved / 100, 132) < 16


def test_bad_rates() -> None:
    for points in ((), ((2, 1.0),), ((1, 1.0), (1, 2.0))):
        with pytest.raises(ValueError, match="expected numbers of blocks that increase from 1"):
            Rates(points, 0.0)
    with pytest.raises(ValueError, match="a rate=nan: expected a positive number"):
        Rates(((1, 1.0), (2, float("nan"))), 0.0)
    with pytest.raises(ValueError, match="startup=-1: expected a positive number"):
        Rates(((1, 1.0),), -1)


def test_rates_are_kept(tmp_path: Path) -> None:
    file = rates_file(tmp_path / "new", "NVIDIA H200 (SXM)", "bulk", linked=True)
    assert file.name == "rates-nvidia-h200-sxm-bulk-linked.json"
    assert Rates.load(file) is None
    rates = Rates(((1, 1.5e11), (8, 4e11), (132, 4e12)), 3e-6)
    rates.save(file)
    assert Rates.load(file) == rates
    file.write_text('{"startup": 1}')
    with pytest.raises(ValueError, match=f"{file}: expected what `python -m deep_ep_py rates` writes"):
        Rates.load(file)


def test_a_file_that_cannot_be_read_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("DEEP_EP_CACHE_DIR", str(tmp_path))
    file = rates_file(tmp_path, "Double", "bulk", linked=False)
    file.write_text("{")
    device = CudaDevice.__new__(CudaDevice)  # there is no GPU to make one of
    device.name, device.copies, device._linked, device._gathered = "Double", "bulk", False, False
    device.blocks, device.max_blocks, device._sharers = 24, 132, 1
    assert device.blocks_for(1e9) == 24
    assert f"not used: {file}" in caplog.text
    del device._rates
    linear(1e9, 7e9).save(file)
    assert device.blocks_for(1e9) == 7
    device._gathered = True
    assert device.blocks_for(1e9) == 24


def test_destinations() -> None:
    assert destinations(1, 8) == pytest.approx(1)
    assert destinations(8, 1) == 1
    assert destinations(8, 8) == pytest.approx(5.25, abs=0.01)  # of all 8^8 choices


def test_measuring_needs_a_gpu() -> None:
    result = CliRunner().invoke(command, [])
    assert result.exit_code == 2 and "torch sees no GPU here" in result.output
