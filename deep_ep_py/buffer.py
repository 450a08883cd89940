"""The Buffer: dispatch and combine among the ranks of a group."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn
from weakref import finalize

import torch

from deep_ep_py.base import arguments
from deep_ep_py.base.config import QUEUE_PAIRS, Config
from deep_ep_py.base.events import EventHandle, EventOverlap
from deep_ep_py.base.native import C
from deep_ep_py.base.not_copied import NotCopied
from deep_ep_py.base.one_thread import after_other_threads, by_one_thread
from deep_ep_py.base.results import Combined, Dispatched, DispatchLayout
from deep_ep_py.base.texts import size_text
from deep_ep_py.device.device import Device
from deep_ep_py.device.make import make_device
from deep_ep_py.errors import DeepEPError, brief
from deep_ep_py.modes.low_latency.needs import LOW_LATENCY
from deep_ep_py.modes.normal import layout
from deep_ep_py.modes.normal.handles import Handle
from deep_ep_py.modes.normal.needs import NORMAL
from deep_ep_py.modes.normal.operations import CombineArguments, DispatchArguments, PendingCombine, PendingDispatch
from deep_ep_py.session.engine import Engine
from deep_ep_py.session.recovery import mask_of
from deep_ep_py.session.timeline.recording import Recording, start_if_asked
from deep_ep_py.transport.bootstrap.connections import Connections
from deep_ep_py.transport.bootstrap.groups import make_bootstrap
from deep_ep_py.transport.bootstrap.start import connect
from deep_ep_py.transport.bootstrap.together import attempt
from deep_ep_py.transport.nvshmem.choice import choose_memory
from deep_ep_py.transport.topology.agreement import agree
from deep_ep_py.transport.topology.gpus import Apart
from deep_ep_py.transport.topology.link import Link
from deep_ep_py.transport.topology.nic import NicOptions
from deep_ep_py.transport.topology.topology import Topology
from deep_ep_py.v1.runtime import Runtime
from deep_ep_py.v1.surface import V1Surface


class Buffer(V1Surface, NotCopied):
    """Expert-parallel communication among the ranks of one machine, which may emulate several nodes, or of several.

    Signatures and return values are those of DeepEP's `deep_ep.Buffer`. All ranks of the group make the Buffer together
    and issue its operations in the same order. Any thread may make calls, one at a time; meanwhile, other threads may
    wait for events of earlier calls and read `stats`. Results have no gradients: a call warns once of an argument that
    requires one, unless gradients are off, as in an autograd function. The ops of `deep_ep_py.ops` have gradients.

    Parameters
    ----------
    group : torch.distributed.ProcessGroup
        The ranks. Under `deep_ep_py.testing.run_ranks`, the group that it passes to each rank.
    num_nvl_bytes : int
        Bytes for rows and counts in transit, a multiple of 128: at least 4 rows per rank and region, preferably 64. In
        `run_ranks`, which writes a pattern over all of it, more than what is free is refused.
    num_rdma_bytes : int
        The same for low-latency calls; see `get_low_latency_rdma_size_hint`. Both modes share the same memory, the
        larger of the two sizes. Without `low_latency_mode` this one has no effect.
    low_latency_mode : bool
        Whether low-latency calls may be made in addition to those of normal mode.
    num_qps_per_rank : int
        Queue pairs to each peer with `heap="nvshmem"`; otherwise it has no effect. Each takes about 0.6 MB, to ranks
        that are never posted to as well.
    allow_nvlink_for_low_latency_mode, allow_mnnvl, use_fabric
        Accepted for compatibility with DeepEP. They concern hardware that this version does not support and have no
        effect.
    explicitly_destroy : bool
        Whether the caller will call `destroy()`; otherwise the Buffer is destroyed with its last reference.
    enable_shrink : bool
        Whether low-latency calls continue without a rank whose process has ended, or that does not arrive within 9/8 of
        `timeout` (4 times `timeout` if it is itself waiting for another rank). All ranks mask it. Its rows are missing,
        or zeros if it had already announced them, and its results are left out of sums. Such a Buffer supports only
        low-latency calls. Processes on GPUs must all use each other's memory.
    comm : mpi4py.MPI.Comm, optional
        Used if `group` is None. The arguments up to here are in DeepEP 1.2.1's order. Versions without `use_fabric`
        have a different positional order: a call that passes all of theirs by position, up to `comm`, is recognized; in
        a shorter call, its `explicitly_destroy` is taken for `use_fabric`, which has no effect.
    device : torch.device or str, optional
        Where tensors live. Default: the CPU. `docs/status.md` says what has run on a GPU.
    fabric : str or list of str, optional
        How ranks reach each other. Each pair uses the first fabric of the list by which both reach the other. "peer":
        loads and stores, within a node. "ibgda": work requests that the kernels write for NICs. These are software NICs
        and reach only one machine; on a GPU, a host thread serves them, which allows testing the send path on one GPU.
        "proxy": a thread of each process sends over libfabric, with the provider that DEEP_EP_PROXY_PROVIDER names, or
        the best one available. With either of these, all heaps of a GPU's ranks are in pinned host memory (`stats`
        reports `through_host`), which is not fast. For tests of a checkout, on a CPU only: "weak", an agent that
        delays, splits and reorders messages; "mixed", some pairs by loads and stores, some weak. Default: the
        environment variable DEEP_EP_FABRIC, a comma-separated list; if it is not set, those available of "peer",
        "ibgda" and "proxy", in this order (on a GPU, of "peer" and "proxy"). A single name selects what joins nodes:
        "peer" is implied before it, except for "mixed", and for "weak" on one node. With a list without "peer", each
        rank is a node of its own.
        `python -m deep_ep_py doctor` shows the paths that ranks would take.
    ranks_per_node : int, optional
        Ranks [n * ranks_per_node, (n + 1) * ranks_per_node) are node n. Default: the environment variable
        DEEP_EP_RANKS_PER_NODE. If it is not set, all ranks of a machine are on one node; on a single machine with
        "ibgda" or "proxy" as the only name, each rank is a node of its own. With "peer" or "mixed" as the only name,
        all ranks are on one node, whatever this argument says. On a GPU it requires an explicit `fabric`.
    nic : NicOptions, optional
        Properties of the software NICs.
    arena_bytes : int, optional
        Shared memory for outputs, and for copies of `combine` inputs that are elsewhere. A given size is allocated at
        once. When it is full, rows go through `num_nvl_bytes` in rounds: same result, slower. Default on a CPU: half of
        the memory that the process may use (the machine's, or the limit of its cgroup if that is lower), shared among
        the machine's ranks, or the minimum of this over all ranks; more than that memory is refused. Pages cost nothing
        until they are touched. Default on a GPU: with "ibgda" or "proxy", 64 MiB of host memory; otherwise 64 MiB at
        first, growing on demand to at most an eighth of the GPU's memory, shared likewise. After a call has found no
        room, more is available from the next dispatch on whose counts the host waits for. Calls that wait for none,
        with a handle or `num_worst_tokens`, use only what is already available: if all calls are like that, pass a
        size.
    first_arena_bytes : int
        Without `arena_bytes`: memory for outputs that is available from the start, if the default starts with less.
    timeout : float, optional
        Seconds after which a wait inside a kernel times out; see `timeout_of`. Default: the environment variable
        DEEP_EP_TIMEOUT, for programs that cannot pass it, or 100.
    regions : int
        Number of operations that may be open at once.
    hops : {1, 2}, optional
        How normal-mode rows travel between nodes. 1: directly to each destination rank. 2: once to each node, to the
        rank there with the sender's local index, which forwards them (`docs/two_hops.md`). Default: 2 if nodes have
        several ranks.
    link : Link, optional
        Bandwidth and round-trip time between nodes. They determine the size of chunks in two hops and, in low-latency
        mode, whether rows go once to each node. Default: those of the software NICs.
    once_per_node : bool, optional
        Whether rows of low-latency calls go once to each node, to the rank there with the sender's local index, where
        the other ranks of that node read them. True: always. False: never; they go to each rank. Default: if the NIC
        time saved exceeds the cost of forwarding, judging by `link` and the sizes of the call (`docs/latency.md`).
        Never with `enable_shrink`, nor while ranks are left out.
    forward_sms : int
        Number of thread blocks, at most one per SM, that forward rows for calls with a hook; 0: such calls send rows to
        each rank. They occupy their SMs, and delay later kernels of the communication stream, until the rows have
        arrived.
    heap : {"own", "nvshmem"}, optional
        Where heaps are allocated. "own": in memory that this library allocates. "nvshmem", on GPUs: in NVSHMEM's
        symmetric heap; kernels then drive this machine's ConnectX NICs through NVSHMEM's queue pairs ("ibgda" in
        `fabric`); see `docs/cluster.md`. Such a heap does not grow, so `arena_bytes` is the limit, by default 64 MiB,
        and the Buffer cannot `recover`. Default: "nvshmem" if ranks are on several machines, no fabric is named, and
        all machines have nvshmem4py, a ConnectX, NVSHMEM_IB_ENABLE_IBGDA=1, and GPUs that access each other's memory.
    **others
        Refused by name, on all ranks.

    Raises
    ------
    TypeError, ValueError
        The message names the argument. If one rank raises, all do, and name that rank; but a rank without a group has
        no way to tell the others. Also raised if ranks disagree about an argument that must be the same, or if two
        ranks have no path between them; the message then has a table of all paths.
    DeepEPError
        A rank's memory, threads or sockets do not suffice. All ranks raise it.
    """

    def __init__(
        self,
        group: Any,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = QUEUE_PAIRS,
        allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False,
        use_fabric: bool = False,
        explicitly_destroy: bool = False,
        enable_shrink: bool = False,
        comm: Any = None,
        *,
        device: torch.device | str | None = None,
        fabric: str | Sequence[str] | None = None,
        ranks_per_node: int | None = None,
        nic: NicOptions | None = None,
        arena_bytes: int | None = None,
        first_arena_bytes: int = 0,
        timeout: float | None = None,
        regions: int = 2,
        hops: int | None = None,
        link: Link | None = None,
        once_per_node: bool | None = None,
        forward_sms: int = 0,
        heap: str | None = None,
        **others: NoReturn,
    ) -> None:
        if comm is None and (enable_shrink is None or hasattr(enable_shrink, "Get_rank")):
            # The call passed all arguments up to the communicator by position, in the order without `use_fabric`.
            use_fabric, explicitly_destroy, enable_shrink, comm = False, use_fabric, explicitly_destroy, enable_shrink
        bootstrap = make_bootstrap(group, comm)
        arguments.integer("group.size()", bootstrap.size, 1, arguments.MAX_RANKS)
        self.group = group if group is not None else comm
        self.rank, self.group_size = bootstrap.rank, bootstrap.size
        self.num_nvl_bytes, self.num_rdma_bytes = num_nvl_bytes, num_rdma_bytes

        def find_device() -> Device:
            arguments.no_unknown(others)
            for name, size in (("num_nvl_bytes", num_nvl_bytes), ("num_rdma_bytes", num_rdma_bytes)):
                if arguments.integer(name, size, 0, arguments.MAX_BYTES) % 128:
                    raise ValueError(f"{name}={size}: expected a multiple of 128")
            arguments.integer("num_qps_per_rank", num_qps_per_rank, 0, arguments.MAX_ROWS)
            for name, value in (
                ("allow_nvlink_for_low_latency_mode", allow_nvlink_for_low_latency_mode),
                ("allow_mnnvl", allow_mnnvl),
                ("use_fabric", use_fabric),
            ):
                arguments.flag(name, value)
            self.low_latency_mode = arguments.flag("low_latency_mode", low_latency_mode)
            self.enable_shrink = arguments.flag("enable_shrink", enable_shrink)
            if self.enable_shrink and not self.low_latency_mode:
                raise ValueError(
                    "enable_shrink=True: expected low_latency_mode=True as well, since normal-mode calls mask no ranks"
                )
            if arena_bytes is not None:
                arguments.integer("arena_bytes", arena_bytes, 0, arguments.MAX_BYTES)
            arguments.integer("first_arena_bytes", first_arena_bytes, 0, arguments.MAX_BYTES)
            self.explicitly_destroy = arguments.flag("explicitly_destroy", explicitly_destroy)
            self.timeout = arguments.timeout("timeout", timeout)
            self.regions = arguments.integer("regions", regions, 1, C.MAX_REGIONS)
            # Ranks of one process share a GPU; which processes do is asked below.
            sharers = bootstrap.size if bootstrap.in_process else 1
            together = getattr(group, "one_launch", None)
            make_launcher = None if together is None else partial(together.launcher, self.rank, self.timeout)
            made = make_device(arguments.device(device), sharers, sharers < bootstrap.size, make_launcher)
            if arena_bytes is not None:
                made.check_arena_bytes(arena_bytes)
            return made

        where, failed = attempt(find_device)
        connected, symmetric = connect(bootstrap, failed), None
        try:
            assert where is not None
            self.device = where.torch_device
            apart = Apart.ask(connected, where)
            where.share(apart.sharers[self.rank])
            symmetric = choose_memory(connected, where, apart, heap, fabric, num_qps_per_rank, self.enable_shrink)
            make_topology = partial(
                Topology.of,
                bootstrap.rank,
                bootstrap.size,
                where,
                fabric,
                ranks_per_node,
                nic,
                link=link,
                hops=hops,
                low_latency=self.low_latency_mode,
                once_per_node=once_per_node,
                forward_sms=forward_sms,
                machines=connected.machines if isinstance(connected, Connections) else None,
                in_process=bootstrap.in_process,
                address=connected.address if isinstance(connected, Connections) else "",
                symmetric=symmetric,
                apart=apart,
            )
            topology = agree(connected, make_topology)
            if self.enable_shrink and once_per_node:
                raise ValueError(
                    "once_per_node=True: expected False with enable_shrink=True, since a rank that forwards the "
                    "rows of others cannot be masked"
                )
            # Operations of both modes use the same regions.
            transient = max(num_nvl_bytes, num_rdma_bytes) if self.low_latency_mode else num_nvl_bytes
            self._engine = Engine(
                connected,
                where,
                transient,
                arena_bytes,
                first_arena_bytes,
                topology,
                self.timeout,
                self.regions,
                NORMAL.beside(LOW_LATENCY),
                self.enable_shrink,
                symmetric,
            )
            if getattr(group, "one_launch", None) is not None:
                self._engine.senders_expand = False  # launches must not depend on what a rank receives
            self._recordings = start_if_asked(self._engine)
            for recording in self._recordings:
                finalize(self, recording.end_quietly, 0.0)  # a collection may do it, where nothing may wait
        except BaseException as error:
            if symmetric is not None:
                symmetric.leave()
            if isinstance(connected, Connections):
                connected.leave(error)
            raise

    def __repr__(self) -> str:
        """Return what this Buffer is, how it reaches the others, and where its bytes are."""
        name = f"deep_ep_py.Buffer, rank {self.rank} of {self.group_size}"
        engine = getattr(self, "_engine", None)
        if engine is None or engine.destroyed:
            return f"<{name}, {'destroyed' if engine is not None else 'not constructed'}>"
        modes = "normal and low-latency mode" if self.low_latency_mode else "normal mode"
        reached = Counter(path for rank, path in enumerate(self.paths) if rank != self.rank)
        ways = ", ".join(f"{path} to {count}" for path, count in reached.items()) or "alone"
        arena = f"arena {size_text(engine.runtime.arena_bytes)}, {size_text(engine.runtime.arena_used)} of it used"
        memory = f"{engine.regions} regions of {size_text(engine.region_bytes)}, {arena}"
        state = ", broken" if engine.broken is not None else ""
        return f"<{name} on {self.device}, {modes}, {ways}; {memory}; {engine.stats['operations']} operations{state}>"

    @property
    def paths(self) -> tuple[str, ...]:
        """How this rank reaches each rank: "peer" (loads and stores; also for itself), or the name of a fabric.

        "none" marks a rank that no operation of this one involves.
        """
        return self._engine.topology.routes

    @property
    def runtime(self) -> Any:
        """V1's attribute of this name, a `deep_ep_py.v1.runtime.Runtime`; None once the Buffer is destroyed."""
        return None if self._engine.destroyed else Runtime(self, self._engine.runtime)

    # --- operations -------------------------------------------------------------------------------------------

    @by_one_thread
    def get_dispatch_layout(
        self,
        topk_idx: torch.Tensor,
        num_experts: int,
        previous_event: EventOverlap | EventHandle | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> DispatchLayout:
        """Count how many tokens go to each rank and expert. Local: no communication.

        Parameters
        ----------
        topk_idx : torch.Tensor
            int64 or int32 [tokens, top-k]: expert ids, -1 for none.
        num_experts : int
            Number of experts on all ranks; rank r holds ids [r * num_experts / ranks, (r + 1) * num_experts / ranks).
        previous_event, async_finish, allocate_on_comm_stream
            As in DeepEP: see `dispatch`.

        Returns
        -------
        num_tokens_per_rank : torch.Tensor
            int32 [ranks].
        num_tokens_per_rdma_rank : torch.Tensor or None
            int32 [nodes]; None if there is only one node.
        num_tokens_per_expert : torch.Tensor
            int32 [num_experts].
        is_token_in_rank : torch.Tensor
            bool [tokens, ranks].
        event : EventOverlap
        """
        self._engine.check_usable()
        streams = arguments.streams(previous_event, async_finish, allocate_on_comm_stream)
        num_experts = arguments.experts(num_experts, self.group_size)
        topk_idx = arguments.topk_idx(topk_idx, num_experts, self.device)
        per_rank, per_node, per_expert, in_rank, event = layout.count_tokens(
            self._engine, topk_idx, num_experts, streams
        )
        return DispatchLayout(per_rank, per_node, per_expert, in_rank, EventOverlap(event))

    @by_one_thread
    def dispatch(
        self,
        x: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        handle: Handle | None = None,
        num_tokens_per_rank: torch.Tensor | None = None,
        num_tokens_per_rdma_rank: torch.Tensor | None = None,
        is_token_in_rank: torch.Tensor | None = None,
        num_tokens_per_expert: torch.Tensor | None = None,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Config | None = None,
        previous_event: EventOverlap | EventHandle | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> Dispatched:
        """Send every token to the ranks that hold its experts.

        Parameters
        ----------
        x : torch.Tensor or tuple of torch.Tensor
            [tokens, hidden], rows a multiple of 16 bytes long. Elements have two bytes (bfloat16, float16, int16) or
            one (float8_e4m3fn, float8_e5m2, int8, uint8). One-byte rows may come with scales: float32 or int32 (four
            UE8M0 exponents each) [tokens, scales] or [tokens] with any strides. Rows and scales are sent unchanged;
            their types must be the same on all ranks.
        handle : DispatchHandle or tuple of torch.Tensor, optional
            The handle of an earlier dispatch: send along the same routes again (cached dispatch). No top-k is passed
            then, and a layout, alignment or `num_worst_tokens` is ignored. A plain tuple of the handle's elements is
            accepted too, as autograd returns them, but not copies of them. The handle may belong to another Buffer of
            the same ranks, which may have been destroyed since, but must not have failed or recovered; with
            `async_finish`, the event of that dispatch must have been waited for.
        num_tokens_per_rank, is_token_in_rank, num_tokens_per_expert : torch.Tensor
            From `get_dispatch_layout`. Rows per rank are counted from `is_token_in_rank`, not taken from
            `num_tokens_per_rank`.
        topk_idx : torch.Tensor, optional
            int64 or int32 [tokens, top-k], sent with the tokens; requires `topk_weights`. The layout must be of these
            ids: if an expert's count differs, or a choice's rank gets no row of its token, the call fails on all ranks.
            The very tensors of this Buffer's latest `get_dispatch_layout` are not checked again, unless torch has
            written to one of them since or a graph is being captured.
        topk_weights : torch.Tensor, optional
            float32 [tokens, top-k]; requires `topk_idx`.
        expert_alignment : int
            The returned counts per expert are rounded up to a multiple of this.
        config : Config, optional
            `num_sms` blocks. Default: on a GPU as few as its rates allow (`python -m deep_ep_py rates`).
        num_worst_tokens : int
            If not 0, the number of rows of the outputs, the same on all ranks. The host then waits for nothing, as CUDA
            graphs require. It must suffice for every rank: if one would receive more, the call fails on all ranks. Rows
            that no rank sends have index -1 and weight 0; their contents in `recv_x` are undefined.
        num_tokens_per_rdma_rank
            Ignored.
        previous_event : EventOverlap, optional
            An event to wait for as well. On a GPU, kernels run on a stream of their own, after all work submitted to
            the current stream so far.
        async_finish : bool
            On a GPU: whether the current stream continues without waiting; the caller must then make it wait for the
            returned event before it uses the results. Otherwise the current stream waits for the kernels. Either way,
            the host waits only for the counts. On a CPU, the caller takes the place of the current stream: it continues
            while a separate thread moves the rows.
        allocate_on_comm_stream : bool
            With both of these: wait only for the event, and allocate the outputs on the communication stream.

        Returns
        -------
        recv_x : torch.Tensor or tuple of torch.Tensor
            [rows, hidden] of the type of `x`, sorted by source rank, then token. If scales were sent, a pair with them,
            contiguous [rows, scales] or [rows].
        recv_topk_idx : torch.Tensor or None
            [rows, top-k] of the type of `topk_idx`: local expert ids, -1 for experts of other ranks.
        recv_topk_weights : torch.Tensor or None
            float32 [rows, top-k], 0 where the id is -1.
        num_recv_tokens_per_expert_list : list of int or None
            Number of rows for each local expert; empty with `num_worst_tokens`.
        handle : DispatchHandle or None
            For `combine` and cached dispatches; a cached dispatch returns None.
        event : EventOverlap
            The end of the kernels. Without `async_finish`, on a GPU, it stands for all that has been queued on the
            current stream by the time another stream waits for it.

        Raises
        ------
        DeepEPTimeout
            A peer did not do its part in time. On a GPU this is detected when the kernels have given up, and raised by
            the Buffer's next call or by `destroy`. On a CPU with `async_finish`, the wait for the event raises it if
            that comes first.
        DeepEPError
            Another rank failed, this Buffer has failed before, or the layout is of other ids than `topk_idx`.
        """
        pending = self._begin_dispatch(
            x,
            previous_event=previous_event,
            async_finish=async_finish,
            allocate_on_comm_stream=allocate_on_comm_stream,
            handle=handle,
            num_tokens_per_rank=num_tokens_per_rank,
            is_token_in_rank=is_token_in_rank,
            num_tokens_per_expert=num_tokens_per_expert,
            topk_idx=topk_idx,
            topk_weights=topk_weights,
            expert_alignment=expert_alignment,
            num_worst_tokens=num_worst_tokens,
            config=config,
        )
        recv_x, recv_topk_idx, recv_topk_weights, counts, record, event = pending.finish()
        handle = None if record is None else record.handle()
        return Dispatched(recv_x, recv_topk_idx, recv_topk_weights, counts, handle, event)

    def _begin_dispatch(
        self,
        x: Any,
        handle: Any = None,
        previous_event: Any = None,
        async_finish: Any = False,
        allocate_on_comm_stream: Any = False,
        num_tokens_per_rdma_rank: Any = None,  # ignored
        config: Any = None,
        **options: Any,
    ) -> PendingDispatch:
        """Start a dispatch: this rank's counts are on their way when this returns.

        `finish()` does the rest. It must be the next call on this Buffer, unless `finish_later` is true.
        """
        self._check_normal("dispatch")
        streams = arguments.streams(previous_event, async_finish, allocate_on_comm_stream)
        given = DispatchArguments(x, handle, config=self._config(config), streams=streams, **options)
        if handle is not None and (given.topk_idx is not None or given.topk_weights is not None):
            raise ValueError(
                "topk_idx, topk_weights: expected None with a handle, since a cached dispatch sends only rows"
            )
        if (given.topk_idx is None) != (given.topk_weights is None):
            raise ValueError("topk_idx and topk_weights: expected both or neither")
        return PendingDispatch.begin(self._engine, given)

    @by_one_thread
    def combine(
        self,
        x: torch.Tensor,
        handle: Handle,
        topk_weights: torch.Tensor | None = None,
        bias: torch.Tensor | tuple[torch.Tensor | None, ...] | None = None,
        config: Config | None = None,
        previous_event: EventOverlap | EventHandle | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> Combined:
        """Return the rows to the tokens' owners and sum them: the reverse of the dispatch that `handle` is from.

        The sum is unweighted: apply the gate's weights to the rows first. Rows are summed in fp32 in rank order, then
        the biases are added, and the result is rounded once, so it does not depend on timing. In two hops, the sum of a
        remote node's rows is rounded to the rows' type before it is sent.

        Parameters
        ----------
        x : torch.Tensor
            bfloat16 [rows, hidden], in the order of `recv_x`. If it is `recv_x` itself, or a part of it, the owners
            read it in place; otherwise they read a copy in shared memory.
        handle : DispatchHandle or tuple of torch.Tensor
            The handle of the dispatch, in any form that a cached dispatch accepts.
        topk_weights : torch.Tensor, optional
            float32 [rows, top-k], summed in the same way, also where `recv_topk_idx` is -1.
        bias : torch.Tensor or tuple, optional
            One or two bfloat16 [tokens, hidden], added to the sums.
        config : Config, optional
            `num_sms` blocks. Default: on a GPU as few as its rates allow (`python -m deep_ep_py rates`).
        previous_event, async_finish, allocate_on_comm_stream
            As in `dispatch`.

        Returns
        -------
        combined_x : torch.Tensor
            bfloat16 [tokens, hidden].
        combined_topk_weights : torch.Tensor or None
            float32 [tokens, top-k].
        event : EventOverlap

        Raises
        ------
        DeepEPTimeout, DeepEPError
            As `dispatch`.
        """
        self._check_normal("combine")
        streams = arguments.streams(previous_event, async_finish, allocate_on_comm_stream)
        given = CombineArguments(x, handle, topk_weights, bias, self._config(config), streams)
        return Combined(*PendingCombine.begin(self._engine, given).finish())

    @contextmanager
    def trace(self, path: str | os.PathLike[str]) -> Iterator[None]:
        """Record a timeline of what happens inside of the `with`, for https://ui.perfetto.dev or chrome://tracing.

        It has this rank's operations. On a CPU it also has its kernels, what each of their threads waited for and which
        rank ended the wait, and what its software NICs wrote and signaled, with arrows from signals to waits. On a GPU
        the same operations appear as NVTX ranges in profilers. If DEEP_EP_STAGES=on was set when the Buffer was made,
        it has the stages of kernels, by block and warp. `python -m deep_ep_py trace merge` joins the files of all
        ranks. The environment variable DEEP_EP_TRACE records every Buffer of a process, from its construction to its
        destruction. Not collective. A process can record one Buffer per rank at a time.

        Parameters
        ----------
        path : str or path-like
            The file, in Chrome's trace event format. With several ranks each writes a file of its own: `name.json`
            becomes `name.rank0.json` and so on.

        Raises
        ------
        OSError
            The file cannot be written; raised at the start.
        DeepEPError
            A recording of a Buffer with this rank is in progress in this process, for example because DEEP_EP_TRACE is
            set.
        """
        self._engine.check_usable()
        recording = Recording(Path(path), self._engine)
        self._recordings = [recording]
        try:
            yield
        finally:
            recording.end()

    def warmup(self, hidden: int, topk: int, fp8: bool = False) -> None:
        """Prepare the kernels for rows of `hidden` BF16 elements and `topk` experts per token, on all ranks.

        With `fp8`, those for dispatching FP8 rows, or other rows of one byte per element, are prepared too. On a GPU,
        kernels are compiled, or taken from the cache, and loaded; without this call, that happens at the first call of
        each kind. Collective, and a barrier. If several ranks share a GPU, call it before the first operation, since
        loading may wait for another rank's kernels. On a CPU there is nothing to prepare.

        Raises
        ------
        ValueError, TypeError
            The message names the argument.
        """
        self._engine.check_usable()
        arguments.integer("hidden", hidden, 1, arguments.MAX_ROW_BYTES // 2)
        arguments.integer("topk", topk, 1, arguments.MAX_TOPK)
        row_bytes, multiple = 2 * hidden, arguments.ROW_ALIGNMENT // (1 if arguments.flag("fp8", fp8) else 2)
        if hidden % multiple:
            raise ValueError(f"hidden={hidden}: expected a multiple of {multiple}")
        if self.low_latency_mode:
            self._engine.prepare(row_bytes, topk, "low_latency_dispatch", "low_latency_combine")
        layout.warmup(self._engine, row_bytes, topk)
        if fp8:
            layout.warmup(self._engine, hidden, topk)

    @property
    def comm_stream(self) -> Any:
        """The torch.cuda.Stream of kernels that run beside the caller's work; None on a CPU.

        Low-latency calls use it with `async_finish`, or if ranks are threads; otherwise they use the current stream.
        """
        return self._engine.device.comm_stream

    def get_comm_stream(self) -> Any:
        """Return `comm_stream`.

        Raises
        ------
        RuntimeError
            On a CPU, which has no streams.
        """
        if self.comm_stream is None:
            raise RuntimeError(f"get_comm_stream: there are no streams on {self.device}")
        return self.comm_stream

    # --- life -------------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, int]:
        """Return counts of the operations of this Buffer, and the state of its output memory.

        Returns
        -------
        dict
            `operations`, and among them `dispatches`, `cached_dispatches` and `combines` of normal mode, and
            `low_latency_dispatches` and `low_latency_combines`. `direct`: those of normal mode whose rows went straight
            to or from where this rank keeps them, where its peers share its memory. `rounds`: those that could not, for
            lack of room there, and went through the Buffer. `expanded_by_senders`: dispatches into the expanded layout
            whose rows went straight into it. `copied`: combines whose rows were first copied into shared
            memory. `arena_bytes`: size of the memory for outputs; `arena_growths`: how often it has grown;
            `arena_used`: the bytes of it that outputs occupy; `arena_resident`: those that take memory, in use or kept
            for later outputs; `arena_returned`: those that have been given back to the system so far, on a CPU after
            512 operations without an output there. `through_host`: 1 if tensors are on a GPU and rows between nodes go
            through pinned host memory, otherwise 0.
        """
        self._engine.check_usable()
        runtime = self._engine.runtime
        arena = {
            "arena_bytes": runtime.arena_bytes,
            "arena_growths": len(runtime.added_pieces()),
            "arena_used": runtime.arena_used,
            "arena_resident": runtime.arena_resident,
            "arena_returned": runtime.arena_returned,
        }
        engine = self._engine
        through_host = engine.device.asynchronous and bool(engine.topology.networks) and not engine.is_symmetric
        return {**self._engine.stats, **arena, "through_host": int(through_host)}

    def network_counters(self) -> list[dict[str, int]]:
        """Return counts of what this rank's software NICs have sent.

        Returns
        -------
        list of dict
            One entry for each peer: `writes` and `atomics`, the number of requests of each kind; `bytes` of rows and
            messages; `doorbells`. Empty if there are no software NICs.
        """
        self._engine.check_usable()
        names = ("writes", "atomics", "bytes", "doorbells")
        return [{name: getattr(peer, name) for name in names} for peer in self._engine.runtime.network_counters]

    def network_trace(self) -> list[dict[str, int]]:
        """Return every request of this rank's software NICs, if they were created with `NicOptions(traced=True)`.

        Returns
        -------
        list of dict
            `time_ns`, `source`, `destination`, `queue`, `opcode`, `bytes`; see
            `deep_ep_py.transport.topology.nic.save_trace`.
        """
        self._engine.check_usable()
        names = ("time_ns", "source", "destination", "queue", "opcode", "bytes")
        return [{name: getattr(message, name) for name in names} for message in self._engine.runtime.network_trace]

    def check(self) -> None:
        """Raise the failure of an earlier operation, including graph replays, that no call has raised yet.

        On a GPU, calls return before their kernels have ended, so a result is valid only once a check made after the
        kernels' end has passed: this one, or the one with which every dispatch, combine and layout begins. A program
        that only replays graphs calls this itself, after each wait for the device: ``torch.cuda.synchronize();
        buffer.check()``. It costs a few loads from host memory and never waits.

        Raises
        ------
        DeepEPTimeout, DeepEPError
            As `dispatch`.
        """
        self._engine.check_usable()

    def abort(self) -> None:
        """Notify every rank that this one has failed; their calls on this Buffer then raise at once."""
        self._engine.check_process()
        self._engine.break_off("the Buffer was aborted")

    def recover(self, mask: Iterable[int] = (), timeout: float | None = None) -> None:
        """Make the Buffer usable again after a failure, with all ranks or only some of them.

        Collective among the remaining ranks, and a barrier: each calls it with the same `mask`, whether it has raised
        or not; a rank that has not raised notifies the others. No process group is needed. Later calls behave as if the
        ranks left out had no tokens and no token had chosen their experts: rows for them are dropped, and `combine`
        sums over the others. Those ranks keep their place in all shapes and cannot come back. Handles from before the
        recovery can no longer be used, and results that no check (see `check`) has covered are void: if this rank has
        raised nothing, a warning says what failed.

        Parameters
        ----------
        mask : iterable of int
            Ranks to leave out, in addition to those left out before. Their processes must have ended, or their Buffers
            must have been destroyed. With two hops, each rank forwards rows of others, which another rank of its node
            must take over; therefore at most half of the ranks of a node may be left out, or all of them; with
            `Link.rails`, all or none.
        timeout : float, optional
            Seconds to wait for the other ranks. Default: the Buffer's `timeout`.

        Raises
        ------
        DeepEPError
            The masks differ, a rank that no mask names has failed, a rank did not arrive in time, or a rank to be left
            out is still alive. The Buffer stays broken; `recover` may be called again. It need not be called the same
            number of times on all ranks: one that still waits in an earlier call joins the later one.
        TypeError, ValueError
            The message names the argument.
        """
        if self._engine.is_symmetric:
            raise DeepEPError(
                f"rank {self.rank}: a Buffer with heap='nvshmem' does not recover, since NVSHMEM's queue pairs cannot "
                "be recreated: make another Buffer, in new processes if a queue pair has failed"
            )
        seconds = self.timeout if timeout is None else arguments.seconds("timeout", timeout)
        left_out = mask_of(mask, self.rank, self.group_size)
        if not self._engine.masks_ranks:  # otherwise there are no normal-mode calls
            self._engine.topology.check_mask(left_out | self._engine.mask)
        self._engine.check_process()
        self._engine.break_off("recover was called")  # which ends a call that another thread is in
        with after_other_threads(self._engine.occupancy, "recover"):
            self._engine.recover(left_out, seconds)

    def lost_ranks(self) -> list[int]:
        """Return the ranks whose processes have ended or whose Buffers are destroyed, as far as this rank knows."""
        return self._engine.lost_ranks()

    @contextmanager
    def timeout_of(self, seconds: float) -> Iterator[None]:
        """Use another timeout than the Buffer's for the waits of calls that are begun in the body.

        Raises
        ------
        TypeError, ValueError
            The message names the argument.
        """
        with self._engine.timeout_of(arguments.seconds("seconds", seconds)):
            yield

    def _check_normal(self, name: str) -> None:
        if self.enable_shrink:
            raise ValueError(
                f"{name}: expected a Buffer with enable_shrink=False, since normal-mode calls mask no ranks"
            )
        self._engine.check_usable()

    def destroy(self) -> None:
        """Release everything that the Buffer holds, including the process group. Not collective; outputs stay valid.

        A call that another thread is in ends first, at the Buffer's `timeout` at the latest. In a forked child this
        does nothing, since the Buffer belongs to the parent.

        Raises
        ------
        DeepEPError
            An operation has failed, and no call has raised that yet; or this thread is inside a call of this Buffer,
            as in a signal handler.
        """
        if self._engine.is_inherited:
            return
        with after_other_threads(self._engine.occupancy, "destroy"):
            try:
                self._engine.destroy()
                if self._engine.destroyed:
                    self.group = None  # a group that outlives `destroy_process_group` may crash the process at exit
            finally:
                for recording in self._recordings:  # now that its last kernels have ended
                    recording.end_quietly()

    def __enter__(self) -> Buffer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Destroy the Buffer; after an exception, notify the other ranks first."""
        if kind is not None:
            self._engine.break_off(brief(value) if value is not None else kind.__name__)
        self.destroy()
