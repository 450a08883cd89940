"""The command that times the proxy, between processes and in a single one."""

from __future__ import annotations

import json
import math
import os
import subprocess
from pathlib import Path

import pytest

from builds import BUILD
from deep_ep_py.base.native import C
from forks import run_python
from places import python_path

PROVIDERS = C.proxy_providers()

pytestmark = [
    pytest.mark.once,
    pytest.mark.skipif(not PROVIDERS, reason="no libfabric (Debian: libfabric-dev, then `make clean build`)"),
]


def bench_proxy(*options: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "DEEP_EP_BUILD": BUILD, "PYTHONPATH": python_path(), "COLUMNS": "200"}
    return run_python(["-m", "deep_ep_py", "bench-proxy", *options], environment)


@pytest.mark.slow
@pytest.mark.parametrize(
    "provider",
    [one for one in ("net", "tcp;ofi_rxm", "shm") if one in PROVIDERS],
)
@pytest.mark.thorough
def test_report(provider: str, tmp_path: Path) -> None:
    """Data arrives, sent by bare calls and through the proxy, whose thread wakes for a command and for an arrival."""
    file = tmp_path / "report.json"
    done = bench_proxy(f"--provider={provider}", "--iterations=2", "--asleep=1", f"--json={file}")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(file.read_text())
    assert report["verified"] and report["provider"] == f"libfabric's {provider}"
    spreads = [spread for figures in report["beside_raw"].values() for spread in figures.values()]
    spreads += [*report["own"].values(), *report["first_puts"].values()]
    assert len(spreads) == 3 * 3 + 4 + 2 * 2 * 2
    for spread in spreads:
        assert 0 < spread["min"] <= spread["median"] <= spread["max"] and math.isfinite(spread["max"]), report
    assert all(spread["median"] < 1.0 for spread in report["first_puts"].values()), report["first_puts"]
    assert "16 B round trip, us" in done.stdout and "arrival, 1048576 bytes, asleep" in done.stdout


def test_a_provider_that_is_not_there() -> None:
    done = bench_proxy("--provider=carrier pigeons")
    assert done.returncode == 2
    assert "provider='carrier pigeons': expected one that is available: " in done.stderr
