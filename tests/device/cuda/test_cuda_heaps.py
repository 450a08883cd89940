"""Heaps on a GPU over a stand-in for the driver: which parts a process maps when, and what is left behind."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from test_cuda_launcher import PREAMBLE, calls, run, run_logged

pytestmark = pytest.mark.once


@pytest.fixture(scope="module")
def double(idle_double: Path) -> Path:
    """Return the folder of the stand-in for libcuda.so.1; its kernels do nothing."""
    return idle_double


def test_heaps_are_shared_between_processes(double: Path, tmp_path: Path) -> None:
    """One process creates a heap, another maps it by its descriptor; each loads the words that the other stores."""
    program = """
import gc, sys
context = cuda.Context(0)
memory = cuda.Memory(context)
heap = cuda.make_heap(context, 3 << 20, 3 << 20, 0, True)
words = [heap.base, heap.base + heap.bytes - 8]
memory.store_words(words, 7 << 32 | 5)
print(heap.bytes == 4 << 20, [hex(memory.load_word(word)) for word in words])
sys.stdout.flush()
child = os.fork()
if child == 0:
    peer = cuda.map_heap(context, heap.descriptor, heap.bytes, heap.bytes)
    assert peer.base != heap.base and peer.bytes == heap.bytes
    assert memory.load_word(peer.base) == 7 << 32 | 5
    memory.store_words([peer.base + 8], 99)
    del peer
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
print(memory.load_word(heap.base + 8))
heap.close_descriptor()
del heap, memory, context
gc.collect()
"""
    printed, log = run_logged(double, tmp_path, program)
    assert printed == ["True ['0x700000005', '0x700000005']", "99"]
    assert calls(log, "cuDevicePrimaryCtxRelease") == ["alive=0"]


@pytest.mark.parametrize(
    "call, said",
    [
        ("cuMemCreate=218", "allocating a heap of 2097152 bytes on Double: "),
        ("cuMemAddressReserve=218", "reserving addresses for a heap: "),
        ("cuMemMap=218", "mapping a heap: "),
        ("cuMemSetAccess=218", "letting Double access a heap: "),
        ("cuMemExportToShareableHandle=218", "exporting a heap to other processes: "),
    ],
)
def test_a_heap_that_fails_leaves_nothing(double: Path, tmp_path: Path, call: str, said: str) -> None:
    program = """
import gc
context = cuda.Context(0)
print(refused(cuda.make_heap, context, 1000, 1000, 1000, True))
del context
gc.collect()
"""
    printed, log = run_logged(double, tmp_path, program, DOUBLE_FAIL=call)
    assert printed == [f"CudaError: {said}CUDA_ERROR_INVALID_PTX (218): a PTX JIT compilation failed"]
    assert calls(log, "cuDevicePrimaryCtxRelease") == ["alive=0"]


def test_words_are_clear_before_peers_can_reach_them(double: Path, tmp_path: Path) -> None:
    """Memory keeps its previous contents: at first a pattern, later the contents of a freed heap."""
    program = """
context = cuda.Context(0)
memory = cuda.Memory(context)
for turn in range(2):
    heap = cuda.make_heap(context, 4 << 20, 2 << 20, 8192, True)
    words = [hex(memory.load_word(heap.base + offset)) for offset in (0, 4096, 8184, 8192, (2 << 20) - 8)]
    print(words)
    memory.store_words([heap.base + offset for offset in (0, 4096, 8184, 8192, (2 << 20) - 8)], 0x5eed)
    del heap
"""
    printed, log = run_logged(double, tmp_path, program)
    old = "0xeeeeeeeeeeeeeeee"
    assert [ast.literal_eval(line) for line in printed] == [
        ["0x0"] * 3 + [old] * 2,
        ["0x0"] * 3 + ["0x5eed"] * 2,
    ]
    names = [line.split()[0] for line in log]
    cleared, exported = names.index("cuMemsetD8Async"), names.index("cuMemExportToShareableHandle")
    assert "cuStreamSynchronize" in names[cleared:exported], "a peer's first word could be overwritten"


def test_no_more_is_cleared_than_there_is(double: Path) -> None:
    (said,) = run(double, "print(refused(cuda.make_heap, cuda.Context(0), 4 << 20, 2 << 20, 3 << 20, False))")
    assert said == f"ValueError: cleared={3 << 20}: expected at most {2 << 20}"


def test_a_heap_of_the_host_is_pinned_as_long_as_it_lives(double: Path, tmp_path: Path) -> None:
    program = """
import gc
context = cuda.Context(0)
memory = cuda.Memory(context)
for heap in (C.Heap.make_plain(3 << 20), C.Heap.make_shared(3 << 20)):
    cuda.pin_heap(context, heap)
    last = heap.base + heap.bytes - 8
    memory.store_words([last], 7 << 32 | 5)
    print(hex(memory.load_word(last)))
del heap, memory, context
gc.collect()
"""
    printed, log = run_logged(double, tmp_path, program)
    assert printed == ["0x700000005"] * 2
    assert len(calls(log, "cuMemHostRegister")) == len(calls(log, "cuMemHostUnregister")) == 2
    assert calls(log, "cuDevicePrimaryCtxRelease") == ["alive=0"]


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        (
            {"DOUBLE_FAIL": "cuMemHostRegister=218"},
            "pinning a heap of 4096 bytes in host memory: CUDA_ERROR_INVALID_PTX (218): a PTX JIT compilation failed",
        ),
        ({"DOUBLE_OLD": "1"}, "Double cannot access host memory at its host address, which software NICs need"),
    ],
)
def test_a_heap_that_cannot_be_pinned(double: Path, variables: dict[str, str], said: str) -> None:
    program = """
print(refused(cuda.pin_heap, cuda.Context(0), C.Heap.make_plain(4096)))
"""
    assert run(double, program, **variables) == [f"CudaError: {said}"]


def test_only_other_processes_get_descriptors(double: Path, tmp_path: Path) -> None:
    """A heap for this process alone is not exported and need not be exportable."""
    program = """
heap = cuda.make_heap(cuda.Context(0), 4 << 20, 2 << 20, 4096, False)
print(heap.descriptor, heap.bytes, heap.mapped)
"""
    printed, log = run_logged(double, tmp_path, program)
    assert printed == [f"-1 {4 << 20} {2 << 20}"]
    assert not calls(log, "cuMemExportToShareableHandle")


def test_a_process_that_sees_its_own_gpu_alone_maps_a_peers_heap(double: Path) -> None:
    """The peer's GPU is cuda:1 in its own process; this process has only cuda:0, which gets the access."""
    program = """
import subprocess, sys
heap = cuda.make_heap(cuda.Context(1), 2 << 20, 2 << 20, 4096, True)
memory = cuda.Memory(cuda.Context(1))
memory.store_words([heap.base + 8], 0x5eed)
os.set_inheritable(heap.descriptor, True)
peer = f'''
heap = cuda.map_heap(cuda.Context(0), {heap.descriptor}, {heap.bytes}, {heap.bytes})
print(hex(cuda.Memory(cuda.Context(0)).load_word(heap.base + 8)))
print(refused(cuda.Context, 1))
'''
environment = {**os.environ, "DOUBLE_DEVICES": "1"}
subprocess.run([sys.executable, "-c", PREAMBLE + peer], env=environment, close_fds=False, check=True)
"""
    printed = run(double, f"PREAMBLE = {PREAMBLE!r}\n{program}")
    assert printed == ["0x5eed", "CudaError: cuda:1: there are 1 GPUs"]


def test_nothing_ends_the_process_once_the_driver_is_shut_down(double: Path) -> None:
    """Objects that still exist when the process ends are dropped quietly; a call says why it is not possible."""
    program = """
import ctypes, gc
context = cuda.Context(0)
launcher, memory = make(), cuda.Memory(context)
launcher.launch("dispatch", SHAPE, 1, 1, 0, bytes(8))
gathering = cuda.Gathering(context, 2)
own, pinned = cuda.make_heap(context, 4 << 20, 2 << 20, 4096, True), C.Heap.make_plain(4096)
peer = cuda.map_heap(context, own.descriptor, 4 << 20, 2 << 20)
cuda.pin_heap(context, pinned)
ctypes.CDLL("libcuda.so.1").double_shut_down()
print(refused(launcher.launch, "dispatch", SHAPE, 1, 1, 0, bytes(8)))
del launcher, memory, gathering, own, peer, pinned, context
gc.collect()
print("goes on")
"""
    text = "the CUDA driver has been shut down, as it is when a process ends"
    assert run(double, program, DOUBLE_QUERIES="9") == [f"CudaError: entering the context of Double: {text}", "goes on"]


def test_pinned_words_are_clear(double: Path) -> None:
    """Even if their memory was used before."""
    program = """
memory = cuda.Memory(cuda.Context(0))
for _ in range(2):
    words = memory.pinned_words(3)
    print([words.load(index) for index in range(3)])
    for index in range(3):
        words.store(index, 0x5eed)
    words.add(2, 2)
    print(hex(words.load(2)))
    del words
print(refused(memory.pinned_words(1).load, 1))
"""
    clear, used = "[0, 0, 0]", "0x5eef"
    assert run(double, program) == [clear, used, clear, used, "IndexError: word 1: there are 1"]
