"""Compiled code executes ops in the order of the program, whatever the sizes on a rank."""

from __future__ import annotations

import shutil
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from torch._library.custom_ops import OPDEFS

from builds import in_long
from deep_ep_py import ops
from launches import forked

pytestmark = pytest.mark.once


def test_every_op_of_a_buffer_is_lowered_in_order() -> None:
    """Those of several ranks are those that take the name of a Buffer."""
    collective = [
        one for one in OPDEFS.values() if one._qualname.startswith("deep_ep::") and "str group" in one._schema
    ]
    assert len(collective) >= 10 and ops.dispatch
    assert all(len(one._opoverload._schema.returns) > 1 or "-> Tensor[]" in one._schema for one in collective)
    assert {one._abstract_fn.__wrapped__.__module__.rpartition(".")[0] for one in collective} == {ops.__name__}


def run(workers: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> CompletedProcess[str]:
    """Run a case on two ranks. Inductor's cache would return code from before a change of the lowering."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++: inductor compiles C++")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(cache))
    return forked(workers / "compiled_order.py", 2, *arguments)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        in_long(("rows",)),
        ("rows", "--checkpointed"),
        ("expanded",),
    ],
    ids=" ".join,
)
@pytest.mark.thorough
def test_ranks_with_other_sizes_agree(
    workers: Path, case: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = run(workers, tmp_path, monkeypatch, *case)
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(f"rank {rank} is done" in done.stdout for rank in range(2)), done.stdout


@pytest.mark.slow
@pytest.mark.thorough
def test_they_would_not_without_it(workers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = run(workers, tmp_path, monkeypatch, "rows", "--unordered")
    assert done.returncode != 0 and "does not match among the ranks" in done.stderr, done.stdout + done.stderr
