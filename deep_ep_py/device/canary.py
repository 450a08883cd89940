"""Probes undocumented behavior of a GPU and its driver in a few seconds, before anything depends on it.

`look` runs in a process of its own (`python -m deep_ep_py.device.canary`), which may be killed at any moment. So each
finding is printed as a line of JSON as soon as it is known, the most telling first. `observe` starts that process and
reads the findings.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

from deep_ep_py.errors import CudaError

READY_SECONDS = 60.0
"""Time to import torch, compile a kernel and open the GPU."""

SECONDS = 5.0
"""Time for all questions together."""

_LAST_SECONDS = 2.0  # for a process to end
_KINDS = ("cooperative", "plain")
_RANKS = (2, 8)
_TURNS = 100
_TIMEOUT_NS = 250_000_000  # of a kernel that waits
_SHAKEN, _TIMED_OUT = 1, 2  # csrc/kernels/measure/handshake.h
_NAME, _NO_SHAPE = "handshake", (0, 0, 0)
_JUNK = 0x5EED

Finding = dict[str, Any]


class _Gpu:
    """The current GPU, and the means to launch handshakes on it."""

    def __init__(self) -> None:
        import torch

        from deep_ep_py.base.native import C
        from deep_ep_py.device.jit import KERNELS, KernelCache, Shape
        from deep_ep_py.device.jit.compiler import check_driver

        self.cuda = C.cuda
        self.context = C.cuda.Context(torch.cuda.current_device() if torch.cuda.is_available() else 0)
        self.memory = C.cuda.Memory(self.context)
        check_driver(C.cuda.driver_version())
        self._kernel = KernelCache().get_all([KERNELS[_NAME]], Shape(*_NO_SHAPE), self.context.architecture, start=0)[0]

    def launcher(self, kind: str, ranks: int) -> Any:
        """Return a launcher with a stream of its own and the kernel loaded."""
        launcher = self.cuda.Launcher(self.context, sharers=ranks, warps=1, cooperative=kind == "cooperative")
        launcher.load(_NAME, _NO_SHAPE, self._kernel.cubin, self._kernel.symbol)
        return launcher

    def warm_up(self) -> None:
        """Run the first launch, which may take longer than a handshake is allowed to take."""
        launcher, words = self.launcher("plain", 1), self.memory.pinned_words(3)
        words.store(0, 1)
        launcher.wait(self.launch(launcher, words.address(0), words.address(1), 1, words.address(2)))

    @staticmethod
    def launch(launcher: Any, own: int, following: int, turns: int, outcome: int) -> int:
        """Launch a handshake between the words at these addresses."""
        words = (own, following, turns, _TIMEOUT_NS, outcome)
        arguments = b"".join(word.to_bytes(8, sys.byteorder) for word in words)
        serial: int = launcher.launch(_NAME, _NO_SHAPE, 1, 1, 0, arguments)
        return serial


def _ring(gpu: _Gpu, kind: str, ranks: int) -> bool:
    """Return whether kernels that each wait for their predecessor run side by side."""
    launchers = [gpu.launcher(kind, ranks) for _ in range(ranks)]
    words = gpu.memory.pinned_words(2 * ranks)
    serials = [
        gpu.launch(
            launcher, words.address(rank), words.address((rank + 1) % ranks), _TURNS, words.address(ranks + rank)
        )
        for rank, launcher in enumerate(launchers)
    ]
    for launcher, serial in zip(launchers, serials, strict=True):
        launcher.wait(serial)
    return all(words.load(ranks + rank) == _SHAKEN for rank in range(ranks))


def _side_by_side(gpu: _Gpu) -> Finding:
    """Find how many ranks' kernels run side by side, by kind of launch, and the kind to use: None if neither works."""
    found = dict.fromkeys(_KINDS, 1)
    for ranks in _RANKS:
        for kind in _KINDS:
            if ranks == _RANKS[0] or found[kind] == _RANKS[0]:
                try:
                    found[kind] = ranks if _ring(gpu, kind, ranks) else found[kind]
                except CudaError:  # some GPUs have no cooperative launches
                    found[kind] = 0
    most = max(found.values())
    launch = next(kind for kind in _KINDS if found[kind] == most) if most > 1 else None
    return {"side_by_side": found, "launch": launch}


def _pinned_atomics(gpu: _Gpu) -> Finding:
    """Find whether a kernel and the host can add to the same word of host memory without losing additions."""
    turns, most = 20_000, 1_000_000
    launcher, words = gpu.launcher("plain", 1), gpu.memory.pinned_words(3)
    words.store(0, turns)  # the kernel waits for no other
    serial = gpu.launch(launcher, words.address(0), words.address(1), turns, words.address(2))
    added = 0
    while not launcher.finished(serial):
        if added < most:
            words.add(1, 1000)
            added += 1000
    total = added + turns
    if words.load(2) != _SHAKEN:
        return {"pinned_atomics": "did not end in time"}
    return {"pinned_atomics": "atomic" if words.load(1) == total else f"{total - words.load(1)} of {total} lost"}


def _stores_among_atomics(gpu: _Gpu) -> Finding:
    """Find whether a host's stores stay while a kernel adds to the word: by copies to the GPU, or in host memory."""
    stores, turns = 200, 100  # turns of the kernel beside each store
    launcher, words = gpu.launcher("plain", 1), gpu.memory.pinned_words(3)
    heap = gpu.cuda.make_heap(gpu.context, 2 << 20, 2 << 20, 4096, False)

    def store_and_load(place: str, value: int) -> int:
        if place == "gpu":
            gpu.memory.store_words([heap.base], value)
            return int(gpu.memory.load_word(heap.base))
        words.store(1, value)
        return int(words.load(1))

    found = {}
    for place, address in (("gpu", heap.base), ("pinned", words.address(1))):
        words.store(0, 0)
        words.store(2, 0)
        serial = gpu.launch(launcher, words.address(0), address, stores * turns, words.address(2))
        lost = 0
        for stored in range(1, stores + 1):
            words.store(0, stored * turns)
            lost += store_and_load(place, stored << 40) < stored << 40
        launcher.wait(serial)
        found[place] = f"{lost} of {stores} lost" if lost else "stay"
    return {"stores_among_atomics": found}


def _heaps(gpu: _Gpu) -> Finding:
    """Find whether a heap's words are clear although its memory was used before, and whether the rest is dirty."""
    size, cleared = 2 << 20, 4096
    offsets = (0, cleared - 8, cleared, size - 8)
    for _ in range(2):
        heap = gpu.cuda.make_heap(gpu.context, size, size, cleared, False)
        seen = [gpu.memory.load_word(heap.base + offset) for offset in offsets]
        gpu.memory.store_words([heap.base + offset for offset in offsets], _JUNK)
        del heap
    return {"heap_words_clear": not any(seen[:2]), "memory_is_handed_out_dirty": any(seen[2:])}


def _import(gpu: _Gpu) -> Finding:
    """Find whether a heap's memory can be exported, imported and used at two addresses."""
    size = 2 << 20
    own = gpu.cuda.make_heap(gpu.context, size, size, 4096, True)
    peer = gpu.cuda.map_heap(gpu.context, own.descriptor, own.bytes, own.mapped)
    gpu.memory.store_words([own.base + size - 8], _JUNK)
    return {"heap_import": gpu.memory.load_word(peer.base + size - 8) == _JUNK}


def _mapping_beside_a_kernel(gpu: _Gpu) -> Finding:
    """Find whether memory can be allocated and mapped while a kernel waits."""
    launcher, words = gpu.launcher("plain", 1), gpu.memory.pinned_words(3)
    serial = gpu.launch(launcher, words.address(0), words.address(1), 1, words.address(2))
    heap = gpu.cuda.make_heap(gpu.context, 2 << 20, 2 << 20, 0, False)
    words.store(0, 1)
    launcher.wait(serial)
    del heap
    return {"mapping_beside_a_kernel": words.load(2) == _SHAKEN}


_QUESTIONS: tuple[Callable[[_Gpu], Finding], ...] = (
    _side_by_side,
    _pinned_atomics,
    _stores_among_atomics,
    _heaps,
    _import,
    _mapping_beside_a_kernel,
)


def look() -> Iterator[Finding]:
    """Yield the answer to one question after another; the first answer, once the GPU is open, is its name."""
    try:
        gpu = _Gpu()
        gpu.warm_up()
    except Exception as error:  # whatever keeps the GPU from being used is the finding
        yield {"error": f"{type(error).__name__}: {error}"}
        return
    yield {"gpu": gpu.context.name}
    for question in _QUESTIONS:
        try:
            yield question(gpu)
        except Exception as error:  # the others may still be answered
            yield {"error": f"{question.__name__.strip('_')}: {type(error).__name__}: {error}"}


def observe(
    command: list[str] | None = None, seconds: float = SECONDS, ready_seconds: float = READY_SECONDS
) -> Finding:
    """Probe the GPU in a process of its own and return the findings; the process is killed when its time is up.

    Parameters
    ----------
    command
        The probe: prints one JSON object per line, the first when it is ready. Default: this module.
    seconds
        Time for its findings.
    ready_seconds
        Time until it is ready.

    Returns
    -------
    dict
        `gpu`: name of the GPU, once it could be used. `launch`: "cooperative", "plain", or None if ranks cannot share
        this GPU. `side_by_side`: for each kind of launch, how many kernels that waited for each other completed.
        `pinned_atomics`: "atomic", or what was lost. `stores_among_atomics`: "stay", or what was lost, by the place of
        the word: "gpu" or "pinned". `heap_words_clear`, `memory_is_handed_out_dirty`, `heap_import`,
        `mapping_beside_a_kernel`: bool. `errors`: what was raised, or a note that findings stopped coming. Keys without
        an answer are absent.
    """
    command = command or [sys.executable, "-m", "deep_ep_py.device.canary"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout is not None
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(process.stdout, lines), daemon=True).start()
    found: Finding = {"errors": []}
    deadline = time.monotonic() + ready_seconds
    try:
        while line := lines.get(timeout=max(0.0, deadline - time.monotonic())):
            if len(found) == 1:
                deadline = time.monotonic() + seconds
            finding = json.loads(line)
            found["errors"] += [finding.pop("error")] if "error" in finding else []
            found.update(finding)
        if code := process.wait(_LAST_SECONDS):
            found["errors"].append(f"it ended with exit code {code}")
    except subprocess.TimeoutExpired:
        found["errors"].append("it did not end, so it was killed")
    except queue.Empty:
        limit = ready_seconds if len(found) == 1 else seconds
        found["errors"].append(f"no answer within {limit:g} s, so it was killed")
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):  # a process that the driver holds in the kernel cannot be killed
            process.wait(_LAST_SECONDS)
    return found


def _read(source: Any, lines: queue.SimpleQueue[str]) -> None:
    """Forward JSON lines, followed by an empty one at the end."""
    for line in source:
        if line.startswith("{"):
            lines.put(line)
    lines.put("")


if __name__ == "__main__":
    for finding in look():
        print(json.dumps(finding), flush=True)
