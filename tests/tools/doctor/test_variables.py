"""The findings of `doctor` on the environment variables of the library."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from deep_ep_py.base.choices import COMBINE, COPIES, LAUNCH, STAGES
from deep_ep_py.base.environment import ADDRESS, FABRIC, PROVIDER, PROXY_CPUS, RANKS_PER_NODE, SECRET, TIMEOUT
from deep_ep_py.base.logs import VARIABLE
from deep_ep_py.base.machine_files import Files
from deep_ep_py.base.native import C
from deep_ep_py.device.jit.cache import FOLDER_VARIABLE
from deep_ep_py.tools.doctor.findings import Finding, Verdict
from deep_ep_py.tools.doctor.paths import paths
from deep_ep_py.tools.doctor.variables import NEAR_PROVIDER, variables
from machine_trees import by_name
from places import ROOT

pytestmark = pytest.mark.once

HERE = Files(Path("/"), live=True)
DOCUMENTED = re.findall(
    r"`(DEEP_EP_[A-Z_]+)`", (ROOT / "docs" / "tuning.md").read_text().partition("## All environment")[2]
)
OFFERED = [provider.name for provider in C.libfabric_here().providers]
NEAR = pytest.param(
    PROVIDER, NEAR_PROVIDER, Verdict.WARNING, marks=pytest.mark.skipif(NEAR_PROVIDER not in OFFERED, reason="no shm")
)


@pytest.fixture(autouse=True)
def _nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("DEEP_EP_")]:
        monkeypatch.delenv(name)


def of(name: str) -> Finding:
    return by_name(variables())[name]


def test_nothing_is_set() -> None:
    assert of("DEEP_EP_*").value == "none is set"


@pytest.mark.parametrize(
    ("name", "value", "verdict"),
    [
        (RANKS_PER_NODE, "8", Verdict.INFO),
        (TIMEOUT, "400", Verdict.INFO),
        (TIMEOUT, "never", Verdict.ERROR),
        (TIMEOUT, "0", Verdict.ERROR),
        (RANKS_PER_NODE, "0", Verdict.ERROR),
        (RANKS_PER_NODE, "-1", Verdict.ERROR),
        (RANKS_PER_NODE, "eight", Verdict.ERROR),
        (FABRIC, "proxy", Verdict.INFO),
        (FABRIC, "copper", Verdict.ERROR),
        (PROVIDER, "carrier pigeon", Verdict.ERROR),
        NEAR,
        (ADDRESS, "127.0.0.1", Verdict.WARNING),
        (ADDRESS, "192.0.2.77", Verdict.ERROR),
        (ADDRESS, "somewhere", Verdict.ERROR),
        (SECRET, "/nowhere/at/all", Verdict.ERROR),
        (SECRET, "/dev/null", Verdict.ERROR),
        (SECRET, __file__, Verdict.INFO),
        (PROXY_CPUS, "0-", Verdict.ERROR),
        (PROXY_CPUS, "1023", Verdict.ERROR),
        (COPIES, "vector", Verdict.INFO),
        (COPIES, "scalar", Verdict.ERROR),
        (COMBINE, "pushed", Verdict.ERROR),
        (LAUNCH, "plain", Verdict.INFO),
        (STAGES, "yes", Verdict.ERROR),
        (VARIABLE, "warning", Verdict.ERROR),
        ("DEEP_EP_DEVICE", "cpu", Verdict.INFO),
        ("DEEP_EP_DEVICE", "tpu", Verdict.ERROR),
        ("DEEP_EP_FABRICS", "proxy", Verdict.WARNING),
        ("DEEP_EP_PROXY_CPU", "3", Verdict.WARNING),
        ("DEEP_EP_BUILDS", "all", Verdict.INFO),
        ("DEEP_EP_SOMETHING_ELSE", "1", Verdict.INFO),
    ],
)
def test_each(monkeypatch: pytest.MonkeyPatch, name: str, value: str, verdict: Verdict) -> None:
    monkeypatch.setenv(name, value)
    found = of(name)
    assert (found.verdict, found.value) == (verdict, value)
    assert found.reason and (found.command == f"unset {name}") == (verdict is not Verdict.INFO)


@pytest.mark.parametrize("name", sorted(set(DOCUMENTED) - {"DEEP_EP_BUILDS", "DEEP_EP_JOBS", "DEEP_EP_SEED"}))
def test_what_is_documented_is_read(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Those of the build and the tests are not the library's."""
    monkeypatch.setenv(name, "?")
    assert of(name).reason != "the library itself does not read it"


def test_cpus_of_which_some_may_not_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    allowed = sorted(os.sched_getaffinity(0))
    monkeypatch.setenv(PROXY_CPUS, f"{allowed[0]},1023")
    assert of(PROXY_CPUS).verdict is Verdict.WARNING
    monkeypatch.setenv(PROXY_CPUS, str(allowed[0]))
    assert of(PROXY_CPUS).verdict is Verdict.INFO


def test_a_cache_that_others_may_write(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    assert of(FOLDER_VARIABLE).verdict is Verdict.INFO
    tmp_path.chmod(0o777)
    assert of(FOLDER_VARIABLE).verdict is Verdict.ERROR


def test_what_is_wrong_is_an_error_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PROVIDER, "carrier pigeon")
    monkeypatch.setenv(ADDRESS, "somewhere")
    found = by_name(paths(HERE))
    assert {found[name].verdict for name in ("proxy", "address for other machines")} <= {Verdict.INFO, Verdict.ABSENT}


@pytest.mark.skipif(NEAR_PROVIDER not in OFFERED, reason="libfabric has no shm")
def test_shm_is_no_way_between_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PROVIDER, NEAR_PROVIDER)
    found = by_name(paths(HERE))["proxy"]
    assert found.verdict is Verdict.WARNING and "only on this machine" in found.value
