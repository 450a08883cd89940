"""What a person sees beside results: log lines, descriptions, versions, and texts of bounded length."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import deep_ep_py as deep_ep
from cases import Case, build
from deep_ep_py import __main__ as command_line
from deep_ep_py.base.arguments import describe
from deep_ep_py.base.native import C
from deep_ep_py.device import cpu
from deep_ep_py.errors import brief
from deep_ep_py.modes.normal import rows
from deep_ep_py.testing import run_ranks
from forks import run_python
from harness import dispatch_arguments
from places import ROOT

LOGGED = """
import sys
sys.path[:0] = {paths!r}
import deep_ep_py as deep_ep
from deep_ep_py.testing import run_ranks
from harness import Trial, round_trip
from cases import Case

def on_each_rank(group):
    with deep_ep.Buffer(group, 1 << 20) as buffer:
        round_trip(buffer, group.rank(), Trial.of(Case("log", 2, 20, hidden=264, topk=2, experts=4)), 1)

run_ranks(2, on_each_rank)
"""


def logged(level: str) -> subprocess.CompletedProcess[str]:
    program = LOGGED.format(paths=[str(ROOT), str(ROOT / "tests" / "support")])
    environment = {**os.environ, "DEEP_EP_LOG": level}
    return run_python(["-c", program], environment)


@pytest.mark.once
def test_a_line_for_each_operation() -> None:
    done = logged("info")
    assert done.returncode == 0, done.stderr
    line = re.compile(
        r"\S+ \S+ deep_ep_py INFO rank [01]: (dispatch|cached dispatch|combine), operation [0-3], "
        r"\d+ rows (received|returned), \d+ bytes, direct, \d+\.\d{3} ms"
    )
    lines = done.stderr.splitlines()
    assert len(lines) == 2 * 4 and all(line.fullmatch(one) for one in lines), done.stderr


@pytest.mark.once
def test_no_log() -> None:
    done = logged("")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.once
def test_a_level_that_there_is_not() -> None:
    done = logged("loud")
    assert done.returncode == 1 and done.stderr.strip().endswith("DEEP_EP_LOG='loud': expected info or debug")


def test_a_buffer_describes_itself() -> None:
    def on_each_rank(group: Any) -> tuple[str, str]:
        buffer = deep_ep.Buffer(group, 1 << 20, num_rdma_bytes=4 << 20, low_latency_mode=True, arena_bytes=1 << 20)
        living = repr(buffer)
        buffer.destroy()
        return living, repr(buffer)

    assert run_ranks(3, on_each_rank)[1] == (
        "<deep_ep_py.Buffer, rank 1 of 3 on cpu, normal and low-latency mode, peer to 2; 2 regions of 2.0 MiB, "
        "arena 1.0 MiB, 0 bytes of it used; 0 operations>",
        "<deep_ep_py.Buffer, rank 1 of 3, destroyed>",
    )


def test_the_version() -> None:
    said = CliRunner().invoke(command_line.main, ["--version"]).output
    assert re.fullmatch(rf"deep_ep_py {deep_ep.__version__}, build \w+, torch \S+, kernels [0-9a-f]{{12}}\n", said)


@pytest.mark.parametrize(
    "value",
    [[[1.5] * 1000] * 1000, "x" * 10_000_000, {str(i): i for i in range(100_000)}, (torch.zeros(1),) * 1000],
    ids=["list", "text", "dict", "tensors"],
)
def test_descriptions_are_short(value: Any) -> None:
    assert len(describe(value)) < 1000


@pytest.mark.parametrize("call", [lambda b, x: b.dispatch(x), lambda b, x: b.combine(x, None)])
def test_errors_of_absurd_arguments_are_short(call: Callable[[deep_ep.Buffer, Any], Any]) -> None:
    def on_each_rank(group: Any) -> int:
        with deep_ep.Buffer(group, 1 << 20) as buffer:
            with pytest.raises((TypeError, ValueError)) as info:
                call(buffer, [[0.5] * 7168] * 256)
            return len(str(info.value))

    assert run_ranks(1, on_each_rank)[0] < 1000


def test_more_memory_than_there_is() -> None:
    with pytest.raises(ValueError, match=r"arena_bytes=1099511627776: expected at most \d+, the memory that this pro"):
        run_ranks(2, lambda group: deep_ep.Buffer(group, 1 << 20, arena_bytes=1 << 40))


def test_rows_in_transit_beyond_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """`run_ranks` writes over all of it, so nothing is allocated before."""
    monkeypatch.setattr(cpu, "free_memory", lambda files: 8 << 20)
    said = (
        f"num_nvl_bytes or num_rdma_bytes={5 << 20}: expected at most {4 << 20}, the share of each of 2 ranks in the "
        "memory that is free"
    )
    with pytest.raises(ValueError, match=said):
        run_ranks(2, lambda group: deep_ep.Buffer(group, 5 << 20))
    with pytest.raises(ValueError, match=said):
        run_ranks(2, lambda group: deep_ep.Buffer(group, 0, 5 << 20, low_latency_mode=True))
    assert run_ranks(2, lambda group: deep_ep.Buffer(group, 4 << 20).num_nvl_bytes) == [4 << 20] * 2


def test_the_default_follows_the_limit_of_a_container(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "usable_memory", lambda: 2 << 30)
    assert run_ranks(1, lambda group: deep_ep.Buffer(group, 1 << 20).stats()["arena_bytes"]) == [1 << 30]


def test_memory_that_the_system_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(size: int, gives_back: bool) -> Any:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(cpu.C.Heap, "make_plain", refuse)
    with pytest.raises(
        deep_ep.DeepEPError, match=r"a heap of \d+ bytes \(\d+\.\d GiB\) cannot be allocated: .*pass less of"
    ):
        run_ranks(2, lambda group: deep_ep.Buffer(group, 1 << 20))


def test_the_reason_of_another_rank_is_given() -> None:
    work = build(Case("reason", 2, 20, hidden=264, topk=2, experts=4))

    def on_each_rank(group: Any) -> str:
        try:
            with deep_ep.Buffer(group, 1 << 20) as buffer:
                if group.rank() == 1:
                    raise KeyError("no such expert\nand more")
                buffer.dispatch(**dispatch_arguments(work, 0))
        except KeyError as error:
            return brief(error)
        except deep_ep.DeepEPError as error:
            return str(error)
        return ""

    told, raised = run_ranks(2, on_each_rank)
    assert raised.startswith("KeyError: ")
    assert told.endswith(f". Rank 1 said: {raised}")


def test_results_have_names() -> None:
    """They unpack as DeepEP's tuples do."""
    work = build(Case("names", 2, 20, hidden=264, topk=2, experts=4))

    def on_each_rank(group: Any) -> None:
        rank = group.rank()
        with deep_ep.Buffer(group, 1 << 20, num_rdma_bytes=4 << 20, low_latency_mode=True) as buffer:
            layout = buffer.get_dispatch_layout(work.topk_idx[rank], work.num_experts)
            assert layout.is_token_in_rank is layout[3] and len(layout) == 5
            received = buffer.dispatch(**dispatch_arguments(work, rank))
            x, *_, handle, _ = received
            assert received.recv_x is x and received.handle is handle and len(received) == 6
            combined = buffer.combine(received.recv_x, received.handle)
            assert combined.combined_x is combined[0] and len(combined) == 3
            packed = buffer.low_latency_dispatch(work.x[rank][:, :256].contiguous(), work.topk_idx[rank], 32, 4)
            assert packed.packed_recv_count is packed[1] and packed.hook is None and len(packed) == 5
            rows = torch.zeros(2, 2 * 32, 256, dtype=torch.bfloat16)
            returned = buffer.low_latency_combine(rows, work.topk_idx[rank], work.topk_weights[rank], packed.handle)
            assert returned.combined_x is returned[0] and len(returned) == 3

    run_ranks(2, on_each_rank)


STEPS = {"dispatch": "order_after_caller", "hook": "launch_on_callers_stream"}
"""What a call asks of the device on its way."""


@pytest.mark.parametrize("inside_of", STEPS)
def test_a_second_thread_is_told(inside_of: str) -> None:
    """Its call has done nothing: the one that is under way ends well, and so does the next."""
    work = build(Case("threads", 2, 20, hidden=264, topk=2, experts=4))

    def on_each_rank(group: Any) -> None:
        rank = group.rank()
        hint = deep_ep.Buffer.get_low_latency_rdma_size_hint(20, 264, 2, 4)
        with deep_ep.Buffer(group, 1 << 20, hint, low_latency_mode=True) as buffer:
            sent = (work.x[rank], work.topk_idx[rank], 20, work.num_experts)
            hook = buffer.low_latency_dispatch(*sent, use_fp8=False, return_recv_hook=True).hook
            if inside_of == "dispatch":
                hook()
            device, step = buffer._engine.device, STEPS[inside_of]
            inside = getattr(device, step)

            def meanwhile(*args: Any) -> Any:
                setattr(device, step, inside)
                with ThreadPoolExecutor(1, "other") as pool:
                    error = pool.submit(buffer.get_dispatch_layout, work.topk_idx[rank], work.num_experts).exception()
                said = (
                    rf"get_dispatch_layout: thread '.*' is inside {inside_of} of this Buffer, which serves one thread"
                )
                assert isinstance(error, deep_ep.DeepEPError) and re.match(said, str(error)), error
                return inside(*args)

            setattr(device, step, meanwhile)
            if inside_of == "hook":
                hook()
            received = buffer.dispatch(**dispatch_arguments(work, rank))
            buffer.combine(received.recv_x, received.handle)

    run_ranks(2, on_each_rank)


def test_an_interrupted_call_does_not_occupy_the_buffer() -> None:
    work = build(Case("interrupted", 1, 20, hidden=264, topk=2, experts=4))

    def on_each_rank(group: Any) -> None:
        with deep_ep.Buffer(group, 1 << 20) as buffer:
            inside = buffer._engine.device.order_after_caller

            def interrupted(*args: Any) -> Any:
                raise KeyboardInterrupt

            buffer._engine.device.order_after_caller = interrupted
            with pytest.raises(KeyboardInterrupt):
                buffer.dispatch(**dispatch_arguments(work, 0))
            buffer._engine.device.order_after_caller = inside
            buffer.recover()
            assert not buffer._engine.occupancy
            buffer.dispatch(**dispatch_arguments(work, 0))

    run_ranks(1, on_each_rank)


def test_reasons_are_of_their_generation() -> None:
    """What a rank has said before a recovery is not quoted for a later failure."""

    def on_each_rank(group: Any) -> list[str]:
        said = []
        with deep_ep.Buffer(group, 1 << 20) as buffer:
            for generation in (1, 2):
                if group.rank() == 1 and generation == 1:
                    buffer._engine.break_off("of the first generation")
                elif group.rank() == 1:
                    buffer._engine.runtime.abort(C.EXCEPTION)
                with pytest.raises(deep_ep.DeepEPError) as info:
                    work = build(Case("reasons", 2, 20, hidden=264, topk=2, experts=4))
                    buffer.dispatch(**dispatch_arguments(work, group.rank()))
                said.append(str(info.value))
                buffer.recover()
        return said

    first, second = run_ranks(2, on_each_rank)[0]
    assert "Rank 1 said: of the first generation" in first
    assert "rank 1 raised an exception" in second and "said" not in second


@pytest.mark.once
def test_every_count_of_stats_is_documented() -> None:
    def on_each_rank(group: Any) -> list[str]:
        with deep_ep.Buffer(group, 1 << 20, low_latency_mode=True, num_rdma_bytes=1 << 20) as buffer:
            return [name for name in buffer.stats() if f"`{name}`" not in (deep_ep.Buffer.stats.__doc__ or "")]

    assert run_ranks(1, on_each_rank) == [[]]


@pytest.mark.once
def test_fp8_rows_without_scales_are_noticed_once(caplog: pytest.LogCaptureFixture) -> None:
    rows._say_how_scales_travel.cache_clear()
    x = torch.zeros(3, 32)
    for _ in range(2):
        rows.Rows.of("x", x.to(torch.float8_e4m3fn), x.device)
        rows.Rows.of("x", (x.to(torch.float8_e4m3fn), torch.ones(3)), x.device)
        rows.Rows.of("x", x.to(torch.uint8), x.device)
    (record,) = caplog.records
    assert record.getMessage() == (
        "x: torch.float8_e4m3fn rows without scales move as they are; scales travel only in x=(rows, scales)"
    )
