"""CPU lists, in the format of DEEP_EP_PROXY_CPUS."""

from __future__ import annotations

import os

import pytest

from deep_ep_py.base.cpus import cpus_of, proxy_cpus
from deep_ep_py.base.environment import PROXY_CPUS

pytestmark = pytest.mark.once


@pytest.mark.parametrize(
    ("text", "cpus"),
    [("0", (0,)), ("0-3", (0, 1, 2, 3)), ("0-1,8", (0, 1, 8)), ("8, 0-1\n", (0, 1, 8)), ("3,3,2-3", (2, 3))],
)
def test_lists(text: str, cpus: tuple[int, ...]) -> None:
    assert cpus_of(text) == cpus


@pytest.mark.parametrize("text", ["", "a", "1-", "-1", "1,,2", "3-1", "0x1", "1.5"])
def test_what_is_no_list(text: str) -> None:
    with pytest.raises(ValueError, match="expected CPUs as 0-3,8"):
        cpus_of(text)


def test_no_more_than_a_set_holds() -> None:
    with pytest.raises(ValueError, match="expected CPUs below 1024, not '0-9999999999'"):
        cpus_of("0-9999999999")


def test_what_the_process_may_not_use_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    allowed = min(os.sched_getaffinity(0))
    monkeypatch.setenv(PROXY_CPUS, f"{allowed},1023")
    assert proxy_cpus() == (allowed,)
    monkeypatch.setenv(PROXY_CPUS, "1023")
    with pytest.raises(ValueError, match=f"{PROXY_CPUS}='1023': expected some of the CPUs that this process may use"):
        proxy_cpus()
    monkeypatch.setenv(PROXY_CPUS, "many")
    with pytest.raises(ValueError, match=f"{PROXY_CPUS}='many': expected CPUs as 0-3,8"):
        proxy_cpus()
    monkeypatch.delenv(PROXY_CPUS)
    assert proxy_cpus() == ()
