"""What a Buffer and its operations share: the native runtime, which operations are open, and what has failed."""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from deep_ep_py.bootstrap.connections import Connections
from deep_ep_py.bootstrap.groups import Bootstrap
from deep_ep_py.core import choices
from deep_ep_py.core.events import EventHandle, EventOverlap, Streams
from deep_ep_py.core.native import C
from deep_ep_py.device.device import Device
from deep_ep_py.errors import DeepEPError
from deep_ep_py.session.driver import Driver
from deep_ep_py.session.failures import error_of
from deep_ep_py.session.growth import Growth
from deep_ep_py.session.needs import Needs
from deep_ep_py.session.opening import Opening, TellingOthers
from deep_ep_py.session.recovery import ranks_of, recover
from deep_ep_py.session.setup_ranks import MemoryPlan, make_runtime
from deep_ep_py.topology.membership import Membership, name_of
from deep_ep_py.topology.topology import Topology

if TYPE_CHECKING:
    from deep_ep_py.nvshmem.memory import NvshmemMemory

_log = logging.getLogger("deep_ep_py")

Memory = tuple[tuple[int, ...], torch.dtype]
"""Shape and type of a tensor that is to be made."""

_SETTLE_SECONDS = 5.0
"""How long kernels that have been told to leave are waited for."""


@dataclass(eq=False)
class _OnItsWay:
    """An operation whose launches are all queued. On a CPU, with what its kernels touch."""

    call: C.Call
    tensors: list[torch.Tensor | None]
    driven: C.Run | None = None
    ended: bool = False


class Engine:
    """The state of a Buffer, without its interface.

    Parameters
    ----------
    bootstrap : Bootstrap
        The ranks, as `connect` has returned them. If this raises, the caller closes it.
    device : Device
        Where they compute.
    num_nvl_bytes, arena_bytes, timeout, regions
        As `Buffer` takes them, checked.
    topology : Topology
        Which ranks there are, and how this one reaches them.
    needs : Needs
        Of the mode whose calls it holds.
    masks_ranks : bool
        A rank that is waited for in vain is masked, and the others go on; else all fail.
    symmetric : NvshmemMemory, optional
        Where heaps lie. None: in memory of their own.

    Attributes
    ----------
    topology : Topology
        The ranks, and how this one reaches them.
    rank, ranks : int
        This rank, and how many there are.
    region_bytes : int
        Of each of the regions that operations work in.
    membership : Membership
        Which ranks they are.
    growth : Growth
        Of the heaps.
    generation : int
        Of operations: one more, or some more, with each recovery. The same on all ranks.
    mask : int
        Ranks that are left out, a bit each.
    runtime : native.C.Runtime
        Raises DeepEPError once destroyed.
    stats : dict
        Counts for `Buffer.stats`.
    dropped : collections.deque of callable
        What callers have dropped and peers wait for: `run_dropped` does it.
    """

    def __init__(
        self,
        bootstrap: Bootstrap,
        device: Device,
        num_nvl_bytes: int,
        arena_bytes: int | None,
        topology: Topology,
        timeout: float,
        regions: int,
        needs: Needs,
        masks_ranks: bool,
        symmetric: NvshmemMemory | None = None,
    ) -> None:
        self._process = os.getpid()
        self.pulls = choices.chosen(choices.COMBINE) == "pull"
        self.topology, self.rank, self.ranks, self.device = topology, topology.rank, topology.ranks, device
        self.regions, self.timeout, self.num_nvl_bytes = regions, timeout, num_nvl_bytes
        self._symmetric = symmetric
        memory = MemoryPlan.of(bootstrap, device, topology, num_nvl_bytes, regions, arena_bytes, self.is_symmetric)
        self.region_bytes = memory.region_bytes
        self._bootstrap = bootstrap
        self.membership = Membership.agree(bootstrap, name_of(bootstrap))
        self._runtime: C.Runtime | None = None
        self._needs, self.masks_ranks = needs, masks_ranks
        self.stats = dict.fromkeys(("operations", *needs.stats), 0)
        self._publishes_rows = self.ranks == 1 or sum(topology.mapped) > 1
        self._issued = 0
        self._open: dict[int, list[torch.Tensor | None]] = {}
        self._on_their_way: deque[_OnItsWay] = deque()
        self._collecting = threading.RLock()
        self._driver: Driver | None = None
        self._alone: list[tuple[torch.Tensor | None, ...]] = []  # what kernels that no call waits for any more use
        self._captured: list[_OnItsWay] = []
        self._in_capture = False  # the open operations
        self.dropped: deque[Callable[[], None]] = deque()
        self._broken: DeepEPError | None = None
        self._results_told = False  # of a broken Buffer: its caller has been told what the calls failed of
        self.generation, self.mask = 1, 0
        self._attempts = 0
        runtime, self._regions_offset = make_runtime(
            bootstrap, device, topology, memory, timeout, needs.call_words, masks_ranks, symmetric
        )
        try:
            self.growth = Growth(bootstrap, runtime)
            if not bootstrap.in_process and not device.asynchronous:  # threads' kernels run while all of them wait
                self._driver = Driver(runtime, self._end_with_process)
        except BaseException:
            runtime.leave()  # or the others would take this process for dead
            raise
        self._runtime = runtime

    @property
    def runtime(self) -> C.Runtime:
        """What launches kernels and waits for them."""
        if self._runtime is None:
            raise DeepEPError(f"rank {self.rank}: the Buffer has been destroyed")
        return self._runtime

    @property
    def destroyed(self) -> bool:
        """Whether there is no runtime any more."""
        return self._runtime is None

    @property
    def is_symmetric(self) -> bool:
        """Whether heaps lie in NVSHMEM's symmetric heap."""
        return self._symmetric is not None

    def _process_of(self, rank: int) -> str:
        """Name a rank's process."""
        connections = self._bootstrap
        return connections.process_of(rank) if isinstance(connections, Connections) else f"pid {os.getpid()}"

    def _let_go(self) -> None:
        """Close the connections to other processes: they take it that this rank has left."""
        if isinstance(self._bootstrap, Connections):
            self._bootstrap.close()

    @property
    def _inherited(self) -> bool:
        """Whether this process is a child of the one that made the Buffer: it must not act as its parent's rank."""
        return os.getpid() != self._process

    def check_process(self) -> None:
        """Raise in a forked child."""
        # As `_inherited`, without the property's call: every call of a Buffer comes here.
        if os.getpid() != self._process:
            raise DeepEPError(
                f"rank {self.rank}: this Buffer belongs to process {self._process}; it cannot be used in a forked child"
            )

    def check_usable(self) -> None:
        """Raise in a forked child, or if the Buffer is destroyed or broken, or if an earlier operation has failed."""
        self.check_process()
        runtime = self.runtime
        if self._broken is None:
            if self._on_their_way or self._captured:
                self._collect()
            # A captured call looks for itself, whenever it is replayed.
            if runtime.others_have_failed() and not self.device.capturing():
                self._leave_behind()
        self.check_whole()
        remark = runtime.take_remark()
        if remark != -1:
            raise self._needs.explain(remark)

    def check_whole(self) -> None:
        """Raise if the Buffer is broken, naming what failed first."""
        if self._broken is not None:
            raise DeepEPError(
                f"rank {self.rank}: the Buffer is broken, recover() it or make a new one; what broke it: {self._broken}"
            ) from self._broken

    def _leave_behind(self) -> None:
        """Another Buffer of this rank has failed: what was queued here meanwhile fails too; later calls do not."""
        if self._captured:  # replays are not the runtime's launches
            self.device.synchronize()
        if not self._run("settle", seconds=self.timeout):
            return  # what still waits here may have been queued behind the failure
        self._collect()
        self._run("forgive", seconds=self.timeout)

    @property
    def broken(self) -> DeepEPError | None:
        """What has failed since the Buffer was made, or last recovered."""
        return self._broken

    def prepare(self, row_bytes: int, topk: int, *kernels: str) -> None:
        """Have an operation's kernels ready, before it takes its number."""
        self.device.prepare(kernels, (self.ranks, row_bytes, topk), self._compiling)

    def meet(self) -> None:
        """Wait until all ranks have come so far, where they know of each other."""
        if self.mask == 0 or isinstance(self._bootstrap, Connections):  # others know of no mask
            self._bootstrap.all_gather(None)

    @contextmanager
    def _compiling(self) -> Iterator[None]:
        """Let peers that wait for this rank know what it does."""
        self.runtime.set_compiling(True)
        try:
            yield
        finally:
            self.runtime.set_compiling(False)

    def opening(self, kind: str, *tensors: torch.Tensor | None) -> Opening:
        """Count a new operation; refuse it where the last use of its region is still open.

        For a `with` statement, at once: the body is given the operation's number, and launches its first kernel.
        `tensors`, what its kernels read and write, are held as long as the operation is open.
        """
        if self.dropped:
            self.run_dropped()
        operation, before = self._issued, self._issued - self.regions
        if before in self._open:
            raise DeepEPError(
                f"rank {self.rank}: operation {operation} needs the region of operation {before}, which is still open; "
                f"finish that one first, or make the Buffer with regions={self.regions + 1} or more"
            )
        capturing = self.device.capturing()
        if self._open and capturing != self._in_capture:
            inside, outside = ("in", "outside") if capturing else ("outside", "in")
            raise DeepEPError(
                f"rank {self.rank}: {kind} {inside} a capture while operation {min(self._open)}, begun {outside} it, "
                "is open; finish that one first"
            )
        self._in_capture = capturing
        return Opening(self, kind, tensors)

    def issue(self, tensors: Iterable[torch.Tensor | None]) -> int:
        """Count the operation that `opening` has found nothing against, and return its number."""
        operation = self._issued
        self._issued += 1
        self._open[operation] = [*tensors]
        self.stats["operations"] += 1
        return operation

    def is_open(self, operation: int) -> bool:
        """Tell whether an operation's last kernel is still to be launched."""
        return operation in self._open

    def hold(self, operation: int, *tensors: torch.Tensor | None) -> None:
        """Keep tensors as long as an operation is open, even if its caller leaves it by an exception."""
        self._open[operation] += tensors

    def end_operation(
        self, call: C.Call, operation: int, streams: Streams, handle: Iterable[torch.Tensor | None] = ()
    ) -> EventOverlap:
        """End a call whose kernels are all launched: on a CPU wait for them, unless `async_finish`; on a GPU they end
        when they do. What they fail of later is raised by the wait for the event, or by the Buffer's next call.

        An interrupt may come between any two lines: at each of them something holds what the kernels use. `handle`: the
        tensors of one that was made before the call, which a graph does not keep.
        """
        tensors = self._open[operation]
        event = None
        if self.device.asynchronous:
            event = self.device.order_caller_after(tensors, streams.async_finish, streams.allocate_on_comm)
        # A GPU's memory is given away in the order of its streams; a CPU's at once.
        launched = _OnItsWay(call, [] if self.device.asynchronous else tensors)
        if call.captured:
            launched.tensors = [*handle]
            self._captured.append(launched)
        else:
            self._on_their_way.append(launched)
        del self._open[operation]
        if event is not None:
            return EventOverlap(event)
        if streams.async_finish:
            if self._driver is not None:
                launched.driven = self._driver.drive("wait", call=call)
            return EventOverlap(EventHandle(until=partial(self._await_end, launched)))
        self._await_end(launched)
        return EventOverlap(EventHandle())

    def _await_end(self, launched: _OnItsWay) -> None:
        """Wait for a call's kernels on a CPU; raise unless they have ended well."""
        if not launched.ended:
            self.check_process()
        if not launched.ended and not self.destroyed and self._broken is None and launched in self._on_their_way:
            if launched.driven is not None:
                launched.driven.result()
            else:
                self._run("wait", call=launched.call)
            self._collect()
        self._note_ended(self._runtime)
        if not launched.ended:
            why = self._broken or "the Buffer has been destroyed, or has recovered, before it ended"
            raise DeepEPError(f"rank {self.rank}: what a {launched.call.kind} returned is not complete: {why}")

    def _note_ended(self, runtime: C.Runtime | None) -> None:
        """What calls have returned that ended well is complete, whatever has become of the Buffer since."""
        if runtime is None:
            return
        for launched in tuple(self._on_their_way):  # another thread may collect meanwhile
            driven = launched.driven
            if runtime.finished(launched.call) and launched.call.failure.reason == 0:
                launched.ended = driven is None or (driven.done and not driven.failed)

    def await_half(self, call: C.Call) -> None:
        """On a CPU wait for a launch of an operation that stays open, on a GPU let the caller's next work do so."""
        if self.device.asynchronous:
            self.device.order_caller_after((), async_finish=False, on_comm_stream=False)
            return
        self._run("wait", call=call)
        self.check_failure(call)

    def go_on_alone(self, serial: int) -> None:
        """Have a launch of an operation that stays open run to its end, for which only other ranks wait; 0: none."""
        if serial != 0 and self._driver is not None:
            self._driver.drive("wait_launch", serial=serial)

    def run_dropped(self) -> None:
        """Do what callers have dropped."""
        while self.dropped and not self.device.capturing():
            self.dropped.popleft()()

    def wait_counts(self, call: C.Call) -> None:
        """Wait until a call's kernels have told what its mode waits for; raise if it has failed."""
        self._run("wait_counts", call=call)
        self.check_failure(call)
        self.growth.follow(self.runtime, call)

    def _run(self, job: str, **what: Any) -> bool:
        """Do one of the runtime's waits, named by its method; -> what it returns, if anything."""
        if self._driver is None:
            return bool(getattr(self.runtime, job)(**what))
        return self._driver.run(job, **what)

    def _collect(self) -> None:
        """Retire the operations that have ended; raise what one has failed of.

        Calls take turns, but a thread may wait for an event, or ask for `stats`, while another one calls: each
        operation is retired once.
        """
        with self._collecting:
            while self._on_their_way and self.runtime.finished(self._on_their_way[0].call):
                launched = self._on_their_way[0]
                self.check_failure(launched.call)  # tensors of one that has failed stay: peers may still store there
                if launched.driven is not None:  # of kernels that the executor has dropped, this alone says so
                    self._end_well(launched.driven)
                launched.ended = True
                self._on_their_way.popleft()
                self.runtime.retire(launched.call)
            for captured in [*self._captured]:  # calls of graphs, which may have been replayed
                gone = captured.call.graph_gone  # before its last failure is looked for
                self.check_failure(captured.call)
                if gone:
                    self._captured.remove(captured)
                    self.runtime.retire(captured.call)

    def _end_well(self, driven: C.Run) -> None:
        """Break the Buffer with what the thread that waited for a call's kernels has thrown, if it has."""
        with self.telling_others("a call's kernels"):
            driven.result()

    def launch_alone(self, tensors: tuple[torch.Tensor | None, ...], launch: Callable[[], int]) -> None:
        """Launch a kernel that has to do with no other rank, and uses `tensors`; `launch` returns its serial number."""
        # An interrupt may come before the kernel's end, and then it still uses them: until a later one has ended.
        self._alone.append(tensors)
        serial = launch()
        if not self.device.asynchronous:
            self._run("wait_launch", serial=serial)
        self._alone.clear()

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Make an output that peers can see; an ordinary tensor where it is empty or there is no room."""
        tensor = self._shared(shape, dtype)
        return torch.empty(shape, dtype=dtype, device=self.device.torch_device) if tensor is None else tensor

    def empty_private(self, *memories: Memory) -> list[torch.Tensor]:
        """Make outputs that no peer uses."""
        if self.device.fresh_memory_is_slow:
            return [self.empty(shape, dtype) for shape, dtype in memories]
        where = self.device.torch_device
        return [torch.empty(shape, dtype=dtype, device=where) for shape, dtype in memories]

    def region_memory(self) -> torch.Tensor:
        """Return this rank's regions as bytes. Not to be used after the runtime."""
        address = self.runtime.peer_base(self.rank) + self._regions_offset
        return self.device.view(address, self.regions * self.region_bytes)

    def visible(self, *tensors: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """Return the tensors, or copies, where peers can read them; as they are if no peer can or there is no room."""
        if not self._publishes_rows:
            return tensors
        copies = [None if tensor is None else self._copy_if_private(tensor) for tensor in tensors]
        if any(copy is None and tensor is not None for copy, tensor in zip(copies, tensors, strict=True)):
            return tensors
        return tuple(copies)

    def _copy_if_private(self, tensor: torch.Tensor) -> torch.Tensor | None:
        if tensor.nbytes == 0 or self.runtime.arena_contains(tensor.data_ptr(), tensor.nbytes):
            return tensor
        copy = self._shared(tuple(tensor.shape), tensor.dtype)
        if copy is not None:
            self.device.copy(copy, tensor, self.ranks)
        return copy

    def _shared(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor | None:
        return None if 0 in shape else self.device.allocate(self.runtime, shape, dtype, self.growth.helps)

    def check_failure(self, call: C.Call) -> None:
        """Raise what a call failed of, and tell the other ranks."""
        if call.failure.reason == 0:
            return
        self.check_whole()
        call = self._where_it_began(call)
        self._broken = error_of(call, self.rank, self.runtime, self._process_of)
        self.runtime.note_told()
        if call.failure.reason == C.ABORTED:
            self.runtime.pass_abort_on()
        else:
            self.runtime.abort(call.failure.reason, call.mismatch[0] if call.mismatch[0] >= 0 else call.failure.peer)
        self._results_told = True
        raise self._broken  # no local refers to it: what its frames hold would stay until a collection

    def _where_it_began(self, call: C.Call) -> C.Call:
        """Of a call that has failed and those before it, the one that gave up by itself, else the first: what is queued
        behind a failure only hears of it, and must not hide what was waited for.
        """
        on_their_way = [one.call for one in tuple(self._on_their_way) if self.runtime.finished(one.call)]
        failed = [one for one in on_their_way if one.failure.reason != 0] + [call]
        return next((one for one in failed if one.failure.reason != C.ABORTED), failed[0])

    def break_off(self, why: str) -> None:
        """Break the Buffer, and tell the other ranks. Nothing where it is broken or destroyed already, and nothing in a
        forked child, whose failures are not this rank's.
        """
        if self._inherited:
            return
        if self._runtime is not None and self._broken is None:
            self._broken = DeepEPError(f"rank {self.rank}: {why}")
            self._runtime.abort(C.EXCEPTION)

    def _end_with_process(self) -> None:
        self.break_off("the process ends with calls on their way")

    def _stop_kernels(self, seconds: float) -> bool:
        """Have this rank's kernels leave, and the driver's thread stop waiting for them; -> whether both have."""
        return self._run("stop_all", seconds=seconds) and (self._driver is None or self._driver.rest(seconds))

    def masked(self) -> list[int]:
        """Return the ranks that are masked in this generation, as far as is known here; none once it is destroyed."""
        runtime = self._runtime
        return [] if runtime is None or not self.masks_ranks or self._inherited else runtime.masked

    def lost_ranks(self) -> list[int]:
        """Return the other ranks that are known to store nothing any more."""
        self.check_process()
        runtime = self.runtime
        return [rank for rank in range(self.ranks) if rank != self.rank and runtime.gone(rank)]

    def recover(self, mask: int, seconds: float) -> None:
        """Go on without the ranks of `mask` and those left out before. Collective among the others."""
        self.check_process()
        runtime = self.runtime
        self.break_off("recover was called")
        # An interrupted recovery may have left this rank broken in a generation in which the others know of nothing.
        if not runtime.aborted():
            runtime.abort(C.EXCEPTION)
        self._attempts += 1
        if not self._stop_kernels(seconds):
            raise DeepEPError(f"rank {self.rank}: recover: kernels of this rank have not ended within {seconds:g} s")
        if not self._results_told:
            self._warn_of_void_results()
        recover(runtime, self.rank, mask | self.mask, self._attempts, seconds)
        try:
            self._begin_generation(mask | self.mask)
        except BaseException:  # the others have begun it too
            runtime.abort_generation(self._attempts + 1, C.EXCEPTION)
            raise

    def _begin_generation(self, mask: int) -> None:
        """Forget what belongs to the previous generation, which all remaining ranks have left."""
        # Only now may memory of operations that broke be used again: no rank stores into it any longer (P16).
        self._note_ended(self.runtime)
        self._alone.clear()
        self._open.clear()
        self._on_their_way.clear()
        self._issued = 0
        self.generation, self.mask = self._attempts + 1, mask
        self._broken, self._results_told = None, False
        if isinstance(self._bootstrap, Connections):
            self._bootstrap.drop(ranks_of(self.mask))

    def _warn_of_void_results(self) -> None:
        """Say what calls have failed of that have returned, on a rank on which none has raised it."""
        calls = [launched.call for launched in (*self._on_their_way, *self._captured)]
        for call in calls:
            if call.failure.reason != 0:
                why = error_of(self._where_it_began(call), self.rank, self.runtime, self._process_of)
                _log.warning("rank %d: recover: results that no check has covered are void: %s", self.rank, why)
                break
        self._results_told = True

    @contextmanager
    def timeout_of(self, seconds: float) -> Iterator[None]:
        """Give the waits of the calls begun in the body another bound."""
        self.check_process()
        before, self.timeout = self.timeout, seconds
        self._set_timeout()
        try:
            yield
        finally:
            self.timeout = before
            self._set_timeout()

    def _set_timeout(self) -> None:
        if self._runtime is not None:
            self._runtime.set_timeout(self.timeout)

    def telling_others(self, kind: str) -> TellingOthers:
        """Break the Buffer if the body raises: peers would wait for what this rank will not do."""
        return TellingOthers(self, kind)

    def destroy(self) -> None:
        """Let go of the runtime, after what peers still wait for has left. Captured graphs cannot be replayed then.

        Nothing in a forked child: the Buffer is its parent's.

        Raises
        ------
        DeepEPError
            What an operation has failed of that no call has raised yet.
        """
        if self._runtime is None or self._inherited:
            return
        runtime, well, settled = self._runtime, False, False
        try:
            with self.telling_others("destroy"):
                if self._broken is None:
                    self.run_dropped()
                well = not self._open and self._broken is None
                # Operations that were begun and never ended, or failed: their kernels may still run on what is held.
                if self._open and self._broken is None:
                    runtime.abort(C.EXCEPTION)
                if self._captured:  # replays are not the runtime's launches
                    self.device.synchronize()
                settled = self._settle(self.timeout if well else _SETTLE_SECONDS)
                if well:
                    self._collect()
            if settled and well and runtime.drain() and self._symmetric is not None:
                self._symmetric.leave()
        finally:
            self._runtime = None
            self._note_ended(runtime)
            if settled:
                self._alone.clear()
                self._open.clear()
                self._on_their_way.clear()
                runtime.leave()
                self._let_go()
            else:
                self._abandon(runtime)
            self._driver = None  # its thread ends when it has nothing to do

    def _settle(self, seconds: float) -> bool:
        """Wait for all kernels, first for the thread that waits for some of them already."""
        rests = self._driver is None or self._driver.rest(seconds)
        return rests and self.runtime.settle(seconds)

    def __del__(self) -> None:
        runtime = getattr(self, "_runtime", None)
        if runtime is None or self._inherited:
            return
        self.dropped.clear()  # it would wait for other ranks, in a garbage collection
        try:
            if not all(captured.call.graph_gone for captured in self._captured):  # graphs may be replayed
                self._abandon(runtime)
            elif self._open or self._on_their_way or self._alone or (self._driver is not None and self._driver.busy):
                # Kernels may still be about.
                self.destroy()
            else:
                # What peers still wait for. A world of threads may have ended, and its NICs with it.
                if self._broken is None and isinstance(self._bootstrap, Connections):
                    drained = runtime.drain()
                    if drained and self._symmetric is not None:
                        self._symmetric.leave()
                runtime.leave()
                self._let_go()
        except DeepEPError as error:
            _log.error("a Buffer was dropped, and no caller is told that %s", error)
        except RuntimeError:
            pass  # what a dead executor throws has been raised before

    def _abandon(self, runtime: C.Runtime) -> None:
        _abandoned.append((runtime, self._open, self._on_their_way, self._alone, self._bootstrap, self._driver))


_abandoned: list[tuple[Any, ...]] = []
"""Runtimes whose kernels never left, with what those may still touch, and what tells others of this process's end."""
