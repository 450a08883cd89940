"""Runs under torchrun, over the stand-ins for NVSHMEM's host library and for the driver.

    nvshmem_calls.py SCENARIO MODULE

MODULE is a cubin with NVSHMEM's symbols.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from nvshmem_library import DEVICE, IBGDA, Driver, Nvshmem

CHUNK = 1 << int(os.environ.get("NVSHMEM_DOUBLE_CHUNK_LOG2", "20"))
PE, PES = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
PER_NODE = int(os.environ.get("NVSHMEM_DOUBLE_PES_PER_NODE", "0")) or PES


class Scene:
    """A process that has initialized nothing."""

    def __init__(self, module: Path) -> None:
        self.nvshmem, self.driver = Nvshmem(os.environ["NVSHMEM_DOUBLE_VERSION"]), Driver()
        self.golden, self.image = self.nvshmem.golden, module

    def common_id(self) -> bytes:
        """Return a unique id that PE 0 has made, broadcast through gloo."""
        made = torch.zeros(self.golden.bytes_of("UniqueId"), dtype=torch.uint8)
        if PE == 0:
            made = torch.frombuffer(bytearray(self.nvshmem.new_id()), dtype=torch.uint8)
        dist.broadcast(made, 0)
        return bytes(made.tolist())

    def start(self) -> None:
        self.driver.make_current()
        assert self.nvshmem.init(self.common_id(), PE, PES) == 0
        assert self.nvshmem.status() == 2

    def end(self) -> None:
        self.nvshmem.library.nvshmemx_hostlib_finalize()
        assert self.nvshmem.status() == 0

    def register(self) -> ctypes.c_void_p:
        module = self.driver.load(self.image)
        assert self.nvshmem.library.nvshmemx_cumodule_init(module) == 0
        return module

    def device(self, module: ctypes.c_void_p, field: str) -> int:
        return self.golden.get(self.driver.symbol(module, DEVICE), f"DeviceState.{field}")

    def ibgda(self, module: ctypes.c_void_p, field: str) -> int:
        return self.golden.get(self.driver.symbol(module, IBGDA), f"IbgdaState.{field}")

    def row(self, table: int, index: int) -> bytes:
        size = self.golden.bytes_of("QueuePair")
        return self.driver.read(table + index * size, size)


def initialisations(scene: Scene) -> None:
    """Initialize by unique ids: first without a device, then joined by a second call, each with its own
    finalization."""
    nvshmem = scene.nvshmem
    assert nvshmem.status() == 0 and nvshmem.library.nvshmem_my_pe() == -1
    version = [ctypes.c_int() for _ in range(3)]
    nvshmem.library.nvshmemx_vendor_get_version_info(*map(ctypes.byref, version))
    assert ".".join(str(part.value) for part in version) == os.environ["NVSHMEM_DOUBLE_VERSION"]
    assert nvshmem.init(scene.common_id(), PE, PES) == 0
    assert nvshmem.status() == 1, "there is no context yet"
    assert (nvshmem.library.nvshmem_my_pe(), nvshmem.library.nvshmem_n_pes()) == (PE, PES)
    scene.driver.make_current()
    module = scene.driver.load(scene.image)
    assert nvshmem.library.nvshmemx_cumodule_init(module) != 0, "the device is not initialised"
    assert nvshmem.malloc(100) is not None
    assert nvshmem.status() == 2
    assert nvshmem.init(scene.common_id(), PE, PES) == 0
    assert nvshmem.init(scene.common_id(), PE ^ 1, PES) != 0, "another PE cannot join"
    nvshmem.library.nvshmemx_hostlib_finalize()
    assert nvshmem.status() == 2
    scene.end()
    scene.start()
    scene.end()


def memory(scene: Scene) -> None:
    """Memory is symmetric, dirty, and mapped where PEs are near."""
    scene.start()
    nvshmem, library = scene.nvshmem, scene.nvshmem.library
    module = scene.register()
    base = scene.device(module, "heap")
    first, second = nvshmem.malloc(3000), nvshmem.align(1 << 16, 3 * CHUNK)
    assert first is not None and second is not None
    assert (first - base) % CHUNK != 0, "the heap begins with a chunk"
    assert (second - base) % (1 << 16) == 0 and second % (1 << 16) == 0
    offsets = torch.tensor([first - base, second - base])
    everyones = [torch.zeros_like(offsets) for _ in range(PES)]
    dist.all_gather(everyones, offsets)
    assert all(torch.equal(offsets, others) for others in everyones), "not symmetric"
    assert ctypes.string_at(first, 3000) == b"\xcd" * 3000
    zeros = library.nvshmem_calloc(ctypes.c_size_t(10), ctypes.c_size_t(8))
    assert ctypes.string_at(zeros, 80) == bytes(80)
    ctypes.memset(second, PE + 1, 64)
    dist.barrier()
    p2p = os.environ.get("NVSHMEM_DISABLE_P2P") != "1"
    for pe in range(PES):
        near = pe == PE or (p2p and pe // PER_NODE == PE // PER_NODE)
        there = nvshmem.near(second + 8, pe)
        assert (there is not None) == near
        if there is not None:
            assert ctypes.string_at(there, 8) == bytes([pe + 1]) * 8
    assert nvshmem.near(second, PE) == second and nvshmem.near(base - 1, PE) is None
    assert nvshmem.malloc(1 << 30) is None, "the heap has no room for it"
    nvshmem.free(second)
    assert nvshmem.align(1 << 16, 3 * CHUNK) == second
    library.nvshmemx_cumodule_finalize(module)
    scene.end()


def states(scene: Scene) -> None:
    """Check the contents of a registered module's symbols against the golden layout, also after the heap has grown."""
    scene.start()
    golden, module = scene.golden, scene.register()
    assert (scene.device(module, "pe"), scene.device(module, "pes")) == (PE, PES)
    assert scene.device(module, "heap_bytes") % CHUNK == 0
    with_ibgda = os.environ.get("NVSHMEM_IB_ENABLE_IBGDA") == "1"
    if golden.has("DeviceState.transport"):
        transport = "kIbgda" if with_ibgda else "kProxy"
        assert scene.device(module, "transport") == golden.bytes_of(transport)
    assert scene.device(module, "has_ibgda") == with_ibgda
    if not with_ibgda:
        assert scene.driver.symbol(module, IBGDA) == bytes(golden.bytes_of("IbgdaState"))
    else:
        nics, rcs = int(os.environ.get("NVSHMEM_DOUBLE_NICS", "1")), 2
        assert scene.ibgda(module, "nics") == nics and scene.ibgda(module, "rcs_per_pe") == rcs
        assert 1 << scene.ibgda(module, "chunk_log2") == CHUNK
        table = scene.ibgda(module, "queue_pairs")
        numbers = set()
        for pe in range(PES):
            for i in range(rcs * nics):
                row = scene.row(table, i * PES + pe if golden.minor >= 5 else pe * rcs * nics + i)
                number = golden.get(row, "QueuePair.number")
                if pe == PE:
                    assert number == golden.bytes_of("kNoNumber")
                    continue
                numbers.add(number)
                assert golden.get(row, "QueuePair.kind") == golden.bytes_of("kRc")
                assert golden.get(row, "QueuePair.blocks") == 1024
                assert golden.get(row, "QueuePair.reserved") == 0
                completions = scene.driver.read(
                    golden.get(row, "QueuePair.completion"), golden.bytes_of("CompletionQueue")
                )
                assert scene.driver.read(golden.get(completions, "CompletionQueue.cqe"), 64) == b"\xff" * 64
        assert len(numbers) == (PES - 1) * rcs * nics
        before = scene.ibgda(module, "keys")
        assert scene.nvshmem.malloc(4 * CHUNK) is not None
        assert scene.ibgda(module, "keys") != before, "the module was not updated after the heap grew"
        assert scene.nvshmem.library.nvshmemx_cumodule_finalize(module) == 0
        told = scene.ibgda(module, "keys")
        assert scene.nvshmem.malloc(4 * CHUNK) is not None
        assert scene.ibgda(module, "keys") == told, "the module was updated although it is no longer registered"
        module = scene.register()
    scene.nvshmem.library.nvshmemx_cumodule_finalize(module)
    scene.end()


def created_queue_pairs(scene: Scene) -> None:
    """nvshmemx_qp_create moves the table, with the counters in it."""
    scene.start()
    golden, module = scene.golden, scene.register()
    for _ in range(3):
        scene.nvshmem.library.nvshmem_barrier_all()
    old = scene.ibgda(module, "queue_pairs")
    peer = (PE + 1) % PES
    before = scene.row(old, peer)
    assert golden.get(before, "QueuePair.reserved") > 0
    handles = scene.nvshmem.create_queue_pairs(3)
    assert handles == [2 * PES, 3 * PES, 4 * PES]
    table = scene.ibgda(module, "queue_pairs")
    assert table != old and scene.row(table, peer) == before
    assert scene.ibgda(module, "rcs_per_pe") == 5 and scene.ibgda(module, "default_rcs_per_pe") == 2
    numbers = {golden.get(scene.row(table, handle + peer), "QueuePair.number") for handle in handles}
    assert len(numbers) == 3 and golden.get(before, "QueuePair.number") not in numbers
    assert scene.nvshmem.create_queue_pairs(1) == [5 * PES]
    for _ in range(3):
        scene.nvshmem.library.nvshmem_barrier_all()
    scene.nvshmem.library.nvshmemx_cumodule_finalize(module)
    scene.end()


def barriers(scene: Scene) -> None:
    """No PE passes a barrier before all have arrived, while another thread posts to the same queue pairs."""
    scene.start()
    library, module = scene.nvshmem.library, scene.register()
    far = PER_NODE < PES or os.environ.get("NVSHMEM_DISABLE_P2P") == "1"
    posted: list[int] = []
    thread = threading.Thread(target=lambda: posted.append(library.nvshmem_double_foreign_posts(700)))
    if far:
        thread.start()
    times = torch.zeros(20, dtype=torch.float64)
    came = torch.zeros(20, dtype=torch.float64)
    for i in range(20):
        if (i + PE) % PES == 0:
            time.sleep(0.01)
        came[i] = time.monotonic()
        library.nvshmem_barrier_all()
        times[i] = time.monotonic()
    if far:
        thread.join()
        assert posted == [0]
        library.nvshmem_barrier_all()
    last, first = came.clone(), times.clone()
    dist.all_reduce(last, dist.ReduceOp.MAX)
    dist.all_reduce(first, dist.ReduceOp.MIN)
    assert bool((first >= last).all()), "a PE passed before another arrived"
    if far:
        size, golden = scene.golden.bytes_of("QueuePair"), scene.golden
        table = scene.driver.read(scene.ibgda(module, "queue_pairs"), 2 * PES * size)
        reserved = 0
        for at in range(0, len(table), size):
            if golden.get(table, "QueuePair.number", at) == golden.bytes_of("kNoNumber"):
                continue
            counts = {
                golden.get(table, f"QueuePair.{name}", at) for name in ("reserved", "filled", "rung", "completed")
            }
            assert len(counts) == 1, counts
            reserved += counts.pop()
        peers = PES if os.environ.get("NVSHMEM_DISABLE_P2P") == "1" else PES - PER_NODE + 1
        assert reserved == (PES - 1) * 2 * 700 + (peers - 1) * 21
    library.nvshmemx_cumodule_finalize(module)
    scene.end()


def wrong_calls(scene: Scene) -> None:
    """Each call fails, and prints the reason to stderr."""
    nvshmem, library = scene.nvshmem, scene.nvshmem.library
    given = nvshmem.arguments(nvshmem.new_id(), PE, PES)
    assert library.nvshmemx_hostlib_init_attr(0, given) != 0
    scene.golden.put(versions := bytearray(given.raw), "InitArguments.version", 1 << 16 | 24)
    given.raw = bytes(versions)
    assert library.nvshmemx_hostlib_init_attr(8, given) != 0
    assert nvshmem.init(bytes(128), PE, PES) != 0
    assert nvshmem.malloc(100) is None
    scene.start()
    assert nvshmem.malloc(100 if PE == 0 else 200) is None, "of two sizes"
    assert nvshmem.align(24, 100) is None
    assert nvshmem.malloc(100) is not None, "a mistake that all PEs have seen is not fatal"
    module = scene.register()
    assert library.nvshmemx_cumodule_finalize(ctypes.c_void_p(0x77)) != 0
    scene.driver.unload(module)
    assert nvshmem.malloc(8 * CHUNK) is None, "the unloaded module cannot be updated"
    assert library.nvshmemx_cumodule_finalize(module) == 0
    assert library.nvshmemx_cumodule_finalize(module) != 0
    scene.end()


def refused_modules(scene: Scene) -> None:
    """Modules that this host library cannot serve."""
    scene.start()
    for image in sorted(scene.image.parent.glob("bad_*.cubin")):
        assert scene.nvshmem.library.nvshmemx_cumodule_init(scene.driver.load(image)) != 0, image.name
    scene.end()


def alone(scene: Scene) -> None:
    """Only PE 0 makes a collective call."""
    scene.start()
    if PE == 0:
        assert scene.nvshmem.malloc(100) is None
    dist.barrier()
    scene.nvshmem.library.nvshmemx_hostlib_finalize()


def faults(scene: Scene) -> None:
    """PE 0's queue pairs to PE 1 fail."""
    scene.start()
    assert scene.nvshmem.library.nvshmem_double_foreign_posts(20) == 0
    if PE == 0:
        scene.nvshmem.library.nvshmem_barrier_all()
    dist.barrier()
    scene.end()


def invalid_requests(scene: Scene) -> None:
    """Ring a doorbell for another queue pair: the NIC stops, with an error that kernels can see."""
    scene.start()
    module, peer = scene.register(), (PE + 1) % PES
    golden, table = scene.golden, scene.ibgda(module, "queue_pairs")
    row = scene.row(table, peer if golden.minor >= 5 else 2 * peer)
    completions = golden.get(row, "QueuePair.completion")
    cqe = golden.get(scene.driver.read(completions, golden.bytes_of("CompletionQueue")), "CompletionQueue.cqe")
    doorbell = ctypes.c_uint64.from_address(golden.get(row, "QueuePair.doorbell"))
    doorbell.value = 0x12345600000100
    until = time.monotonic() + 10
    while scene.driver.read(cqe, 64)[63] >> 4 != 0xD:
        assert time.monotonic() < until
    assert scene.nvshmem.library.nvshmem_double_foreign_posts(1) != 0
    assert scene.nvshmem.library.nvshmemx_cumodule_finalize(module) == 0
    scene.end()


def wanted_failures(scene: Scene) -> None:
    """Calls fail as the environment requests."""
    nvshmem = scene.nvshmem
    scene.driver.make_current()
    os.environ["NVSHMEM_DOUBLE_FAIL"] = "nvshmemx_hostlib_init_attr=7"
    unique_id = scene.common_id()
    assert nvshmem.init(unique_id, PE, PES) == 7 and nvshmem.status() == 0
    os.environ["NVSHMEM_DOUBLE_FAIL"] = "nvshmem_align=1"
    assert nvshmem.init(unique_id, PE, PES) == 0
    assert nvshmem.align(64, 64) is None and nvshmem.malloc(64) is not None
    scene.end()


def damaged_images(scene: Scene) -> None:
    """The driver's stand-in finds no variables if an image's numbers point out of their tables."""
    scene.driver.make_current()
    sound = scene.image.read_bytes()
    address, size = ctypes.c_ulonglong(), ctypes.c_size_t()

    def found(image: bytes) -> bool:
        module = ctypes.c_void_p()
        scene.driver.call("cuModuleLoadData", ctypes.byref(module), image)
        sought = (ctypes.byref(address), ctypes.byref(size), module, DEVICE.encode())
        result = scene.driver.library.cuModuleGetGlobal_v2(*sought)
        scene.driver.unload(module)
        assert result in (0, 500)
        return bool(result == 0)

    assert found(sound) and size.value == 776
    assert not found(b"\x7fELF")
    sections = int.from_bytes(sound[0x28:0x30], "little")
    count = int.from_bytes(sound[0x3C:0x3E], "little")
    kinds = [int.from_bytes(sound[sections + 64 * i + 4 :][:4], "little") for i in range(count)]
    table = sections + 64 * kinds.index(2)  # of symbols
    first = int.from_bytes(sound[table + 24 :][:8], "little")
    length = int.from_bytes(sound[table + 32 :][:8], "little")
    names = sections + 64 * int.from_bytes(sound[table + 40 :][:4], "little")
    everywhere = [first + at for at in range(0, length, 24)]
    for name, places, size_of in (
        ("sections' size", [0x3A], 2),
        ("sections' place", [0x28], 8),
        ("table's place", [table + 24], 8),
        ("table's size", [table + 32], 8),
        ("table's names", [table + 40], 4),
        ("size of an entry", [table + 56], 8),
        ("place of the names", [names + 24], 8),
        ("symbol's name", everywhere, 4),
        ("symbol's section", [at + 6 for at in everywhere], 2),
        ("symbol's place", [at + 8 for at in everywhere], 8),
        ("symbol's size", [at + 16 for at in everywhere], 8),
    ):
        damaged = bytearray(sound)
        for at in places:
            damaged[at : at + size_of] = b"\xff" * size_of
        assert not found(bytes(damaged)), name


def through_nvshmem4py(scene: Scene) -> None:
    """NVIDIA's Python bindings find all functions that they call, with the types that they expect."""
    from nvshmem import bindings

    scene.driver.make_current()
    unique_id, arguments = bindings.uniqueid(), bindings.InitAttr()
    unique_id._data.view("int8")[:] = list(memoryview(scene.common_id()).cast("b"))
    bindings.set_attr_uniqueid_args(PE, PES, unique_id.ptr, arguments.ptr)
    bindings.hostlib_init_attr(bindings.Flags.INIT_WITH_UNIQUEID, arguments.ptr)
    assert bindings.init_status() == 2 and (bindings.my_pe(), bindings.n_pes()) == (PE, PES)
    address = bindings.malloc(4096)
    assert bindings.ptr(address, PE) == address
    module = scene.driver.load(scene.image)
    assert bindings.cumodule_init(module.value) == 0
    bindings.barrier_all()
    assert bindings.cumodule_finalize(module.value) == 0
    bindings.free(address)
    bindings.hostlib_finalize()
    assert bindings.init_status() == 0


SCENARIOS: dict[str, Callable[[Scene], None]] = {
    scenario.__name__: scenario
    for scenario in (
        *(initialisations, memory, states, created_queue_pairs, barriers),
        *(wrong_calls, refused_modules, alone, faults, invalid_requests),
        *(wanted_failures, damaged_images, through_nvshmem4py),
    )
}


def main() -> None:
    dist.init_process_group("gloo")
    SCENARIOS[sys.argv[1]](Scene(Path(sys.argv[2])))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
