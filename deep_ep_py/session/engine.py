"""State that a Buffer and its operations share: the native runtime, the open operations, and the first failure."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from deep_ep_py.base import choices
from deep_ep_py.base.events import EventHandle, EventOverlap, Streams
from deep_ep_py.base.kept import kept
from deep_ep_py.base.logs import OperationLog
from deep_ep_py.base.native import C
from deep_ep_py.base.not_copied import NotCopied
from deep_ep_py.base.one_thread import Occupancy
from deep_ep_py.base.unchanged import Unchanged
from deep_ep_py.device.device import Device
from deep_ep_py.errors import DeepEPError, brief
from deep_ep_py.session.call_notes import exchange_among, mismatch_text
from deep_ep_py.session.driver import Driver
from deep_ep_py.session.failures import error_of
from deep_ep_py.session.growth import Growth
from deep_ep_py.session.needs import Needs
from deep_ep_py.session.opening import Opening, TellingOthers
from deep_ep_py.session.recovery import ranks_of, recover
from deep_ep_py.session.setup_ranks import MemoryPlan, make_runtime
from deep_ep_py.transport.bootstrap.connections import Connections
from deep_ep_py.transport.bootstrap.groups import Bootstrap
from deep_ep_py.transport.topology.membership import Membership, name_of
from deep_ep_py.transport.topology.topology import Topology

if TYPE_CHECKING:
    from deep_ep_py.transport.nvshmem.memory import NvshmemMemory

_log = logging.getLogger("deep_ep_py")

Memory = tuple[tuple[int, ...], torch.dtype]
"""Shape and type of a tensor to be allocated."""

_SETTLE_SECONDS = 5.0
"""How long to wait for kernels that have been told to exit."""


@dataclass(eq=False)
class _OnItsWay:
    """An operation whose launches are all queued; on a CPU, with the tensors that its kernels use."""

    call: C.Call
    tensors: list[torch.Tensor | None]
    driven: C.Run | None = None
    ended: bool = False


class Engine(NotCopied):
    """The state of a Buffer, without its interface.

    Parameters
    ----------
    bootstrap : Bootstrap
        The ranks, as returned by `connect`. If this constructor raises, the caller closes it.
    device : Device
        Where the ranks compute.
    num_nvl_bytes, arena_bytes, first_arena_bytes, timeout, regions
        As in `Buffer`, already checked.
    topology : Topology
        The ranks, and how this one reaches them.
    needs : Needs
        Needs of the modes whose calls it holds.
    masks_ranks : bool
        Whether a rank that lets others wait until they time out is masked, so that the others continue; otherwise all
        fail.
    symmetric : NvshmemMemory, optional
        Where heaps are allocated. None: in memory that this library allocates.

    Attributes
    ----------
    topology : Topology
        The ranks, and how this one reaches them.
    rank, ranks : int
        This rank, and the number of ranks.
    region_bytes : int
        Size of each of the regions in which operations work.
    membership : Membership
        Identity of the group of ranks.
    growth : Growth
        Growth of the heaps.
    generation : int
        Generation of operations, the same on all ranks. Each recovery increases it by one or more.
    mask : int
        Ranks that are left out, as a bit mask.
    runtime : native.C.Runtime
        The native runtime. Access raises DeepEPError once the Buffer is destroyed.
    too_small : callable
        Returns, for the bytes that the regions need, the beginning of an error that names the caller's argument.
    stats : dict
        Counts for `Buffer.stats`.
    dropped : collections.deque of callable
        Work that callers have dropped but peers wait for; `run_dropped` does it.
    """

    def __init__(
        self,
        bootstrap: Bootstrap,
        device: Device,
        num_nvl_bytes: int,
        arena_bytes: int | None,
        first_arena_bytes: int,
        topology: Topology,
        timeout: float,
        regions: int,
        needs: Needs,
        masks_ranks: bool,
        symmetric: NvshmemMemory | None = None,
    ) -> None:
        self._process = os.getpid()
        self.pulls = choices.chosen(choices.COMBINE) == "pull"
        self._words = needs.words
        self.senders_expand = choices.chosen(choices.EXPAND) == "senders"
        self.topology, self.rank, self.ranks, self.device = topology, topology.rank, topology.ranks, device
        self.regions, self.timeout, self.num_nvl_bytes = regions, timeout, num_nvl_bytes
        self.too_small: Callable[[int], str] = lambda needed: (
            f"num_nvl_bytes={num_nvl_bytes}: expected at least {needed}"
        )
        self._symmetric = symmetric
        memory = MemoryPlan.of(
            bootstrap, device, topology, num_nvl_bytes, regions, arena_bytes, first_arena_bytes, self.is_symmetric
        )
        self.region_bytes = memory.region_bytes
        self._bootstrap = bootstrap
        self.membership = Membership.agree(bootstrap, name_of(bootstrap))
        self._notes = exchange_among(bootstrap)
        self.log = OperationLog(self.rank, device.asynchronous, C.executor.now_ns, device.profiler_range)
        self._runtime: C.Runtime | None = None
        self._needs, self.masks_ranks = needs, masks_ranks
        self.stats = dict.fromkeys(("operations", *needs.stats), 0)
        self._publishes_rows = self.ranks == 1 or sum(topology.mapped) > 1
        self.counted = Unchanged()  # ids, and the layout that was counted from them
        self._issued = 0
        self._open: dict[int, list[torch.Tensor | None]] = {}
        self._on_their_way: deque[_OnItsWay] = deque()
        self._collecting = threading.RLock()
        self._driver: Driver | None = None
        self._alone: list[tuple[torch.Tensor | None, ...]] = []  # tensors of kernels that no call waits for any longer
        self._captured: list[_OnItsWay] = []
        self._in_capture = False  # whether the open operations are captured
        self.occupancy: Occupancy = {}
        self.dropped: deque[Callable[[], None]] = deque()
        self._broken: DeepEPError | None = None
        self._results_told = False  # for a broken Buffer: whether its caller knows why the calls failed
        self.generation, self.mask = 1, 0
        self._attempts = 0
        # Elements of handles that are all 0, shared by all handles.
        self.zeros = kept(torch.zeros)((self.ranks, 1), dtype=torch.int32, device=device.torch_device)
        runtime, self._regions_offset = make_runtime(
            bootstrap, device, topology, memory, timeout, needs.call_words, masks_ranks, symmetric
        )
        try:
            self.growth = Growth(bootstrap, runtime)
            if not bootstrap.in_process and not device.asynchronous:  # rank threads run kernels while all of them wait
                self._driver = Driver(runtime, self._end_with_process)
        except BaseException:
            runtime.leave()  # otherwise the others would consider this process dead
            raise
        self._runtime = runtime

    @property
    def runtime(self) -> C.Runtime:
        """The native runtime, which launches kernels and waits for them."""
        if self._runtime is None:
            raise DeepEPError(f"rank {self.rank}: the Buffer has been destroyed")
        return self._runtime

    @property
    def destroyed(self) -> bool:
        """Whether the runtime no longer exists."""
        return self._runtime is None

    @property
    def is_symmetric(self) -> bool:
        """Whether heaps are in NVSHMEM's symmetric heap."""
        return self._symmetric is not None

    def _process_of(self, rank: int) -> str:
        """Return the name of a rank's process."""
        connections = self._bootstrap
        return connections.process_of(rank) if isinstance(connections, Connections) else f"pid {os.getpid()}"

    def _let_go(self) -> None:
        """Close the connections to other processes, which tells them that this rank has left."""
        if isinstance(self._bootstrap, Connections):
            self._bootstrap.close()

    @property
    def is_inherited(self) -> bool:
        """Whether this process is a forked child of the one that made the Buffer, and so must not act as that rank."""
        return os.getpid() != self._process

    def check_process(self) -> None:
        """Raise in a forked child."""
        # Same as `is_inherited`, without the cost of a property: every call of a Buffer comes here.
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
            # A captured call checks this itself whenever it is replayed.
            if runtime.others_have_failed() and not self.device.capturing():
                self._leave_behind()
        self.check_whole()
        remark = runtime.take_remark()
        if remark != -1:
            raise self._needs.explain(remark)

    def check_whole(self) -> None:
        """Raise if the Buffer is broken; the message names the first failure."""
        if self._broken is not None:
            raise DeepEPError(
                f"rank {self.rank}: the Buffer is broken, recover() it or make a new one; first failure: {self._broken}"
            ) from self._broken

    def _leave_behind(self) -> None:
        """Let the calls fail that were queued while another Buffer of this rank failed; later calls then succeed."""
        if self._captured:  # replays are not the runtime's launches
            self.device.synchronize()
        if not self._run("settle", seconds=self.timeout):
            return  # kernels that still wait here may have been queued behind the failure
        self._collect()
        self._run("forgive", seconds=self.timeout)

    @property
    def broken(self) -> DeepEPError | None:
        """The first failure since the Buffer was made or last recovered, or None."""
        return self._broken

    def prepare(self, row_bytes: int, topk: int, *kernels: str) -> None:
        """Prepare an operation's kernels, before it takes its number."""
        self.device.prepare(kernels, (self.ranks, row_bytes, topk), self._compiling)

    def meet(self) -> None:
        """Wait until all ranks have reached this point, if the bootstrap knows the mask."""
        if self.mask == 0 or isinstance(self._bootstrap, Connections):  # other bootstraps know of no mask
            self._bootstrap.all_gather(None)

    @contextmanager
    def _compiling(self) -> Iterator[None]:
        """Let peers that wait for this rank know that it is compiling."""
        self.runtime.set_compiling(True)
        try:
            yield
        finally:
            self.runtime.set_compiling(False)

    def opening(self, kind: str, *tensors: torch.Tensor | None) -> Opening:
        """Count a new operation; refuse it if the last operation that used its region is still open.

        Use the result in a `with` statement at once: the body receives the operation's number and launches its first
        kernel. `tensors`, which its kernels read and write, are held as long as the operation is open.
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
        """Count the operation that `opening` has admitted, and return its number."""
        operation = self._issued
        self._issued += 1
        self._open[operation] = [*tensors]
        self.stats["operations"] += 1
        return operation

    def is_open(self, operation: int) -> bool:
        """Return whether an operation's last kernel has yet to be launched."""
        return operation in self._open

    def hold(self, operation: int, *tensors: torch.Tensor | None) -> None:
        """Keep tensors as long as an operation is open, even if its caller abandons it with an exception."""
        self._open[operation] += tensors

    def end_operation(
        self, call: C.Call, operation: int, streams: Streams, handle: Iterable[torch.Tensor | None] = ()
    ) -> EventOverlap:
        """End a call whose kernels have all been launched.

        On a CPU this waits for them unless `async_finish` is set; on a GPU it does not. The wait for the event, or the
        Buffer's next call, raises a later failure of the kernels. `handle` has the tensors of a handle that was made
        before the call, which a graph does not keep alive.

        An interrupt may come between any two lines; at each of them something holds the tensors that the kernels use.
        """
        tensors = self._open[operation]
        event = None
        if self.device.asynchronous:
            event = self.device.order_caller_after(tensors, streams.async_finish, streams.allocate_on_comm)
        # GPU memory is reused in the order of its streams, CPU memory at once.
        launched = _OnItsWay(call, [] if self.device.asynchronous else tensors)
        if call.captured:
            launched.tensors = [*handle]
            self._captured.append(launched)
        else:
            self._on_their_way.append(launched)
        del self._open[operation]
        if event is not None:
            self.log.end(operation)
            return EventOverlap(event)
        if streams.async_finish:
            self.log.end(operation)
            if self._driver is not None:
                launched.driven = self._driver.drive("wait", call=call)
            return EventOverlap(EventHandle(until=partial(self._await_end, launched)))
        self._await_end(launched)
        self.log.end(operation)
        return EventOverlap(EventHandle())

    def _await_end(self, launched: _OnItsWay) -> None:
        """Wait for a call's kernels on a CPU; raise unless they have succeeded."""
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
        """Mark the calls that have succeeded: their results are complete even if the Buffer has failed since."""
        if runtime is None:
            return
        for launched in tuple(self._on_their_way):  # another thread may collect concurrently
            driven = launched.driven
            if runtime.finished(launched.call) and launched.call.failure.reason == 0:
                launched.ended = driven is None or (driven.done and not driven.failed)

    def await_half(self, call: C.Call) -> EventHandle:
        """Wait for a launch of an operation that stays open: on a CPU here, on a GPU in the caller's stream."""
        if self.device.asynchronous:
            return self.device.order_caller_after((), async_finish=False, on_comm_stream=False)
        self._run("wait", call=call)
        self.check_failure(call)
        return EventHandle()

    def go_on_alone(self, serial: int) -> None:
        """Run a launch that only other ranks wait for to its end, while its operation stays open."""
        if self._driver is not None:
            self._driver.drive("wait_launch", serial=serial)

    def run_dropped(self) -> None:
        """Do the work that callers have dropped."""
        while self.dropped and not self.device.capturing():
            self.dropped.popleft()()

    def wait_counts(self, call: C.Call) -> None:
        """Wait until a call's kernels have reported the counts that its mode waits for; raise if it has failed."""
        self._run("wait_counts", call=call)
        self.check_failure(call)
        self.growth.follow(self.runtime, call)

    def _run(self, job: str, **what: Any) -> bool:
        """Make one of the runtime's waits, named by its method. Returns its result, if any."""
        if self._driver is None:
            return bool(getattr(self.runtime, job)(**what))
        return self._driver.run(job, **what)

    def _collect(self) -> None:
        """Retire the operations that have ended; raise if one has failed.

        Calls are serialized, but a thread may wait for an event or read `stats` during another thread's call; the lock
        ensures that each operation is retired only once.
        """
        with self._collecting:
            while self._on_their_way and self.runtime.finished(self._on_their_way[0].call):
                launched = self._on_their_way[0]
                self.check_failure(launched.call)  # a failed call keeps its tensors: peers may still store there
                if launched.driven is not None:  # only this reports kernels that the executor has dropped
                    self._end_well(launched.driven)
                launched.ended = True
                self._on_their_way.popleft()
                self.runtime.retire(launched.call)
            for captured in [*self._captured]:  # calls of graphs, which may have been replayed
                gone = captured.call.graph_gone  # read before the last check for a failure
                self.check_failure(captured.call)
                if gone:
                    self._captured.remove(captured)
                    self.runtime.retire(captured.call)

    def _end_well(self, driven: C.Run) -> None:
        """Break the Buffer if the thread that waited for a call's kernels has raised an exception."""
        with self.telling_others("a call's kernels"):
            driven.result()

    def launch_alone(self, tensors: tuple[torch.Tensor | None, ...], launch: Callable[[], int]) -> None:
        """Launch a kernel that involves no other rank and uses `tensors`; `launch` returns its serial number."""
        # After an interrupt the kernel may still use the tensors, so they are held until a later one has ended.
        self._alone.append(tensors)
        serial = launch()
        if not self.device.asynchronous:
            self._run("wait_launch", serial=serial)
        self._alone.clear()

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Allocate an output that peers can access; an ordinary tensor if it is empty or there is no room."""
        tensor = self.shared(shape, dtype)
        return torch.empty(shape, dtype=dtype, device=self.device.torch_device) if tensor is None else tensor

    def empty_private(self, *memories: Memory) -> list[torch.Tensor]:
        """Allocate outputs that no peer uses."""
        if self.device.fresh_memory_is_slow:
            return [self.empty(shape, dtype) for shape, dtype in memories]
        where = self.device.torch_device
        return [torch.empty(shape, dtype=dtype, device=where) for shape, dtype in memories]

    def region_memory(self) -> torch.Tensor:
        """Return this rank's regions as bytes. Must not be used after the runtime is destroyed."""
        address = self.runtime.peer_base(self.rank) + self._regions_offset
        return self.device.view(address, self.regions * self.region_bytes)

    def visible(self, *tensors: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """Return the tensors, or copies that peers can read; unchanged if no peer can, or if there is no room."""
        if not self._publishes_rows:
            return tensors
        copies = [None if tensor is None else self._copy_if_private(tensor) for tensor in tensors]
        if any(copy is None and tensor is not None for copy, tensor in zip(copies, tensors, strict=True)):
            return tensors
        return tuple(copies)

    def _copy_if_private(self, tensor: torch.Tensor) -> torch.Tensor | None:
        if tensor.nbytes == 0 or self.runtime.arena_contains(tensor.data_ptr(), tensor.nbytes):
            return tensor
        copy = self.shared(tuple(tensor.shape), tensor.dtype)
        if copy is not None:
            self.device.copy(copy, tensor, self.ranks)
        return copy

    def peers_reach(self, *tensors: torch.Tensor | None) -> bool:
        """Return whether peers can access all of these; nothing is where there is no byte."""
        return all(
            tensor is None or tensor.nbytes == 0 or self.runtime.arena_contains(tensor.data_ptr(), tensor.nbytes)
            for tensor in tensors
        )

    def shared_bytes_left(self) -> int:
        """Return the bytes that are left for outputs that peers can access; they need not be in one piece."""
        return self.runtime.arena_bytes - self.runtime.arena_used

    def shared(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor | None:
        """Allocate an output that peers can access; None if it is empty or there is no room."""
        return None if 0 in shape else self.device.allocate(self.runtime, shape, dtype, self.growth.helps)

    def check_failure(self, call: C.Call) -> None:
        """Raise if a call has failed, and notify the other ranks."""
        if call.failure.reason == 0:
            return
        self.check_whole()
        call = self._where_it_began(call)
        self._broken = error_of(
            call, self.rank, self.runtime, self._process_of, self._differences, self._notes.reason_of
        )
        self.runtime.note_told()
        if call.failure.reason == C.ABORTED:
            self.runtime.pass_abort_on()
        else:
            self.runtime.abort(call.failure.reason, call.mismatch[0] if call.mismatch[0] >= 0 else call.failure.peer)
        self._results_told = True
        raise self._broken  # a local reference would keep its frames alive until a garbage collection

    def note_call(self, call: C.Call, operation: int) -> None:
        """Note the call of an operation, so that other ranks' errors can quote its arguments."""
        self._notes.begin(call, operation)

    def _differences(self, call: C.Call) -> str:
        """Return the text of a call's failure because ranks' calls differ, as far as they say how."""
        others = {rank for rank in range(self.ranks) if rank != self.rank and not self.mask >> rank & 1}
        return mismatch_text(self._notes, call, self.rank, others, self._words)

    def _where_it_began(self, call: C.Call) -> C.Call:
        """Return the call in which a failure began, among `call` and those before it.

        That is the first one that gave up by itself, or else the first that failed: a call queued behind a failure is
        only notified of it, and its message must not hide what was being waited for.
        """
        on_their_way = [one.call for one in tuple(self._on_their_way) if self.runtime.finished(one.call)]
        failed = [one for one in on_their_way if one.failure.reason != 0] + [call]
        return next((one for one in failed if one.failure.reason != C.ABORTED), failed[0])

    def break_off(self, why: str) -> None:
        """Break the Buffer and notify the other ranks, unless it is already broken or destroyed.

        In a forked child, whose failures are not this rank's, this does nothing.
        """
        if self.is_inherited:
            return
        if self._runtime is not None and self._broken is None:
            self._broken = DeepEPError(f"rank {self.rank}: {why}")
            try:
                self._notes.leave_reason(why, self.generation)  # it is there when the others are notified
            finally:  # an interrupt must not keep the others waiting
                self._runtime.abort(C.EXCEPTION)

    def _end_with_process(self) -> None:
        error = getattr(sys, "last_value", None)  # what ends the program, if an exception does
        self.break_off("the process exits with calls in flight" + (f", after {brief(error)}" if error else ""))

    def _stop_kernels(self, seconds: float) -> bool:
        """Stop this rank's kernels, and the driver's thread that waits for them. Returns whether both have stopped."""
        return self._run("stop_all", seconds=seconds) and (self._driver is None or self._driver.rest(seconds))

    def masked(self) -> list[int]:
        """Return the ranks masked in this generation, as far as this rank knows; none after `destroy`."""
        runtime = self._runtime
        return [] if runtime is None or not self.masks_ranks or self.is_inherited else runtime.masked

    def lost_ranks(self) -> list[int]:
        """Return the other ranks that are known not to store anything any longer."""
        self.check_process()
        runtime = self.runtime
        return [rank for rank in range(self.ranks) if rank != self.rank and runtime.gone(rank)]

    def recover(self, mask: int, seconds: float) -> None:
        """After `break_off`, continue without the ranks of `mask` and those left out before; a barrier of the rest."""
        runtime = self.runtime
        # An interrupted recovery may have left this rank broken in a generation whose other ranks know of no failure.
        if not runtime.aborted():
            runtime.abort(C.EXCEPTION)
        if not self._stop_kernels(seconds):
            raise DeepEPError(f"rank {self.rank}: recover: kernels of this rank have not ended within {seconds:g} s")
        if not self._results_told:
            self._warn_of_void_results()
        attempt: int | None = self._attempts + 1
        until = time.monotonic() + seconds
        while attempt is not None:
            self._attempts = attempt
            attempt = recover(runtime, self.rank, mask | self.mask, attempt, seconds)
            if attempt is not None and time.monotonic() > until:
                raise DeepEPError(
                    f"rank {self.rank}: recover: other ranks still begin new attempts after {seconds:g} s"
                )
        try:
            self._begin_generation(mask | self.mask)
        except BaseException:  # the others have begun the generation too
            runtime.abort_generation(self._attempts + 1, C.EXCEPTION)
            raise

    def _begin_generation(self, mask: int) -> None:
        """Discard the state of the previous generation, which all remaining ranks have left."""
        # Only now may the memory of failed operations be reused: no rank stores into it any longer (P16).
        self._note_ended(self.runtime)
        self._alone.clear()
        self._open.clear()
        self._on_their_way.clear()
        self._issued = 0
        self.generation, self.mask = self._attempts + 1, mask
        self._notes.begin_generation()
        self._broken, self._results_told = None, False
        if isinstance(self._bootstrap, Connections):
            self._bootstrap.drop(ranks_of(self.mask))

    def _warn_of_void_results(self) -> None:
        """Warn of a failure of calls that have returned, on a rank that has not raised it."""
        calls = [launched.call for launched in (*self._on_their_way, *self._captured)]
        for call in calls:
            if call.failure.reason != 0:
                began = self._where_it_began(call)
                why = error_of(
                    began, self.rank, self.runtime, self._process_of, self._differences, self._notes.reason_of
                )
                _log.warning("rank %d: recover: results that no check has covered are void: %s", self.rank, why)
                break
        self._results_told = True

    @contextmanager
    def timeout_of(self, seconds: float) -> Iterator[None]:
        """Use another timeout for the waits of calls that are begun in the body."""
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
        """Return a context that breaks the Buffer if its body raises."""
        return TellingOthers(self, kind)

    def destroy(self) -> None:
        """Release the runtime, once everything that peers still wait for has been sent.

        Captured graphs cannot be replayed afterwards. In a forked child this does nothing, since the Buffer belongs to
        the parent.

        Raises
        ------
        DeepEPError
            An operation has failed, and no call has raised that yet.
        """
        if self._runtime is None or self.is_inherited:
            return
        runtime, well, settled = self._runtime, False, False
        try:
            with self.telling_others("destroy"):
                if self._broken is None:
                    self.run_dropped()
                well = not self._open and self._broken is None
                # Kernels of operations that were begun and never ended, or that failed, may still use the held tensors.
                if self._open and self._broken is None:
                    self._notes.leave_reason("the Buffer was destroyed with operations in flight", self.generation)
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
            self._driver = None  # its thread ends when it is idle

    def _settle(self, seconds: float) -> bool:
        """Wait for all kernels, first for the thread that is already waiting for some of them."""
        rests = self._driver is None or self._driver.rest(seconds)
        return rests and self.runtime.settle(seconds)

    def __del__(self) -> None:
        runtime = getattr(self, "_runtime", None)
        if runtime is None or self.is_inherited:
            return
        self.dropped.clear()  # running it would wait for other ranks during garbage collection
        try:
            if not all(captured.call.graph_gone for captured in self._captured):  # graphs may still be replayed
                self._abandon(runtime)
            elif self._open or self._on_their_way or self._alone or (self._driver is not None and self._driver.busy):
                # Kernels may still be running.
                self.destroy()
            else:
                # Send what peers still wait for. A world of rank threads may have ended, and its NICs with it.
                if self._broken is None and isinstance(self._bootstrap, Connections):
                    drained = runtime.drain()
                    if drained and self._symmetric is not None:
                        self._symmetric.leave()
                runtime.leave()
                self._let_go()
        except DeepEPError as error:
            _log.error("a Buffer was dropped, so no caller is told of this failure: %s", error)
        except RuntimeError:
            pass  # an executor that has ended throws again what was raised before

    def _abandon(self, runtime: C.Runtime) -> None:
        _abandoned.append((runtime, self._open, self._on_their_way, self._alone, self._bootstrap, self._driver))


_abandoned: list[tuple[Any, ...]] = []
"""Runtimes whose kernels never ended, with the memory that these may still use, and with the connections whose end
tells the others that this process has ended.
"""
