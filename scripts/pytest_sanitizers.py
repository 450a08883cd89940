"""The pytest plugin of run_tests.py: a race that ThreadSanitizer reports fails the test that was running.

Tests named "planted", in which the build must find a bug, run first: only if they pass is a clean run meaningful.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from pathlib import Path

import pytest

REPORT = "WARNING: ThreadSanitizer"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: "planted" not in item.nodeid)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Fail a phase that passed but left a report on stderr."""
    report = yield
    if report.passed and any(
        name == f"Captured stderr {report.when}" and REPORT in text for name, text in report.sections
    ):
        report.outcome = "failed"
        report.longrepr = f"{REPORT}: see the captured stderr"
    return report


def pytest_runtest_logstart(nodeid: str) -> None:
    """Record the name of the test for the runner, in case a sanitizer ends the process."""
    if path := os.environ.get("DEEP_EP_CURRENT_TEST"):
        Path(path).write_text(nodeid)
