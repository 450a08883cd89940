"""A pytest plugin of run_tests.py: a race that ThreadSanitizer reports fails the test during which it was reported.

Tests named "planted", in which a build must find a bug, run first: only then does a clean run mean something.
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
    """Turns a passed phase that left a report on stderr into a failed one."""
    report = yield
    if report.passed and any(
        name == f"Captured stderr {report.when}" and REPORT in text for name, text in report.sections
    ):
        report.outcome = "failed"
        report.longrepr = f"{REPORT}: see the captured stderr"
    return report


def pytest_runtest_logstart(nodeid: str) -> None:
    """Leaves the test's name for the runner, should a sanitizer end the process."""
    if path := os.environ.get("DEEP_EP_CURRENT_TEST"):
        Path(path).write_text(nodeid)
