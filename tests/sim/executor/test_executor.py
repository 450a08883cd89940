"""The SIMT executor outside a world: launches, streams, barriers, collectives, waits, agents, errors."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch

from deep_ep_py.errors import DeadlockError, SimtError
from native_programs import build_selftest


@pytest.fixture(scope="module")
def native() -> ModuleType:
    return build_selftest()


@pytest.fixture(params=[0, 1, 2], ids=lambda seed: f"seed{seed}")
def schedule(native: ModuleType, request: pytest.FixtureRequest) -> Iterator[int]:
    native.executor.set_schedule(request.param, 32)
    yield request.param
    native.executor.set_schedule(0)


def words(count: int = 4) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.int64)


NEVER = words()  # no kernel writes to it


@pytest.mark.parametrize("blocks, warps", [(1, 1), (3, 4), (16, 2)])
def test_every_thread_runs_once(native: ModuleType, schedule: int, blocks: int, warps: int) -> None:
    count = words()
    for _ in range(3):
        serial = native.launch("add", blocks=blocks, warps=warps, word=count.data_ptr())
    native.synchronize()
    assert native.finished(serial)
    assert count[0] == 3 * blocks * warps * native.WARP_SIZE


@pytest.mark.parametrize("kernel", ["shared", "collectives", "barriers"])
def test_kernels_that_check_themselves(native: ModuleType, schedule: int, kernel: str) -> None:
    wrong = words()
    for rank in range(3):
        native.launch(kernel, rank=rank, blocks=2, warps=4, word=wrong.data_ptr(), value=rank + 7, shared_bytes=300)
    for rank in range(3):
        native.synchronize(rank)
    assert wrong[0] == 0


def test_a_stream_runs_one_kernel_at_a_time(native: ModuleType, schedule: int) -> None:
    word, result = words(), words()
    deadline = native.executor.now_ns() + 20_000_000
    native.launch("wait", word=word.data_ptr(), value=1, deadline=deadline, result=result.data_ptr())
    native.launch("signal", word=word.data_ptr(), value=1)
    native.synchronize()
    assert result[0] == 2, "the signal was queued after the wait for it"
    assert result[1] >= deadline


def test_streams_and_ranks_run_side_by_side(native: ModuleType, schedule: int) -> None:
    word, results = words(), words(8)
    for i in range(4):  # each kernel waits for the signal of the next
        native.launch("wait", rank=i % 2, stream=i, word=word.data_ptr(), value=1, result=results[2 * i :].data_ptr())
    native.launch("signal", stream=9, word=word.data_ptr(), value=1)
    for i in range(4):
        native.synchronize(i % 2, i)
    assert results[::2].tolist() == [1, 1, 1, 1]


def test_ranks_wait_for_each_other(native: ModuleType, schedule: int) -> None:
    word, flag = words(), words()
    native.launch("ping_pong", rank=0, word=word.data_ptr(), value=100)
    native.launch("ping_pong", rank=1, word=word.data_ptr(), value=100, result=flag.data_ptr())
    native.synchronize(1)
    assert word[0] == 200


def test_a_host_wait_ends_at_its_deadline(native: ModuleType) -> None:
    word = words()
    start = time.monotonic()
    assert not native.wait_word(word.data_ptr(), 1, deadline=native.executor.now_ns() + 30_000_000)
    assert 0.03 <= time.monotonic() - start < 5
    native.launch("signal", word=word.data_ptr(), value=1)
    assert native.wait_word(word.data_ptr(), 1, deadline=native.executor.now_ns() + 60_000_000_000)
    native.synchronize()


def test_host_threads_drive_by_turns(native: ModuleType) -> None:
    """The first thread that waits drives the executor; when it leaves, one of the others must take over."""
    word = words()
    arrived: list[int] = []

    def wait_for(value: int) -> None:
        assert native.wait_word(word.data_ptr(), value)
        arrived.append(value)

    threads = [threading.Thread(target=wait_for, args=(value,)) for value in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for value, thread in zip((1, 2, 3), threads):
        native.launch("signal", word=word.data_ptr(), value=value)
        thread.join(60)
        assert not thread.is_alive()
        assert arrived[-1] == value
    native.synchronize()


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def test_ctrl_c_ends_a_wait(native: ModuleType) -> None:
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(KeyboardInterrupt):
            native.wait_word(NEVER.data_ptr(), 1)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_agents_serve_until_they_are_removed(native: ModuleType, schedule: int) -> None:
    word = words()
    agent = native.add_echo(0, word.data_ptr())
    for i in range(1, 6):
        native.launch("add", word=word.data_ptr())
        assert native.wait_word(word[1:].data_ptr(), i * native.WARP_SIZE)
    native.remove_agent(agent)
    native.remove_agent(agent)  # a second removal does nothing
    native.launch("add", word=word.data_ptr())
    native.synchronize()
    assert word[1] == 5 * native.WARP_SIZE


def test_an_agent_that_is_removed_finishes_its_work(native: ModuleType, schedule: int) -> None:
    word = words()
    agent = native.add_echo(0, word.data_ptr())
    native.launch("add", word=word.data_ptr())
    native.synchronize()
    native.remove_agent(agent)
    assert word[1] == native.WARP_SIZE


def test_ctrl_c_comes_when_an_agent_has_been_removed(native: ModuleType) -> None:
    """Not earlier: destructors remove agents and must not throw."""
    word = words()
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        agent = native.add_echo(0, word.data_ptr())
        time.sleep(0.3)  # long enough for a wait to begin with a check for signals
        with pytest.raises(KeyboardInterrupt):
            native.remove_agent(agent, signal.SIGALRM)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert "agent echo" not in native.executor.dump()


def test_an_agent_that_throws_is_an_error(native: ModuleType) -> None:
    native.add_thrower(0)
    with pytest.raises(SimtError, match="agent thrower threw: out of paper"):
        native.wait_word(NEVER.data_ptr(), 1)


def test_a_deadlock_at_barriers_needs_no_world(native: ModuleType, schedule: int) -> None:
    """No thread of another process can arrive at a block's barrier, so waiting for other processes is pointless."""
    native.launch("half_barrier", warps=2)
    dropped = words()
    native.launch("add", word=dropped.data_ptr())
    with pytest.raises(DeadlockError) as error:
        native.synchronize()
    assert "rank 0, half_barrier, block 0, warp 0" in str(error.value)
    assert "kernels.cpp:" in str(error.value)
    assert "launches queued behind these: 1" in str(error.value)
    # Everything was dropped; later launches run.
    assert dropped[0] == 0
    count = words()
    native.launch("add", word=count.data_ptr())
    native.synchronize()
    assert count[0] == native.WARP_SIZE


def test_a_deadlock_is_told_to_all_who_wait(native: ModuleType) -> None:
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            native.wait_word(NEVER.data_ptr(), 1)
        except DeadlockError as error:
            errors.append(error)

    threads = [threading.Thread(target=wait) for _ in range(3)]
    for thread in threads:
        thread.start()
    time.sleep(0.05)
    native.launch("half_barrier", warps=2)
    for thread in threads:
        thread.join(60)
    assert len(errors) == 3


@pytest.mark.parametrize(
    "options, message",
    [
        ({"blocks": 0}, "blocks must be positive"),
        ({"warps": 1025}, "threads must be 1 to 1024"),
        ({"shared_bytes": 300 << 10}, "227 KiB"),
    ],
)
def test_impossible_launches_are_refused(native: ModuleType, options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        native.launch("add", **options)
