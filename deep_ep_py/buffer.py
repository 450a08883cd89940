"""The Buffer: dispatch and combine among the ranks of a group."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import TracebackType
from typing import Any

import torch

from deep_ep_py.bootstrap.connections import Connections
from deep_ep_py.bootstrap.groups import make_bootstrap
from deep_ep_py.bootstrap.start import connect
from deep_ep_py.bootstrap.together import attempt
from deep_ep_py.core import arguments
from deep_ep_py.core.config import Config
from deep_ep_py.core.events import EventHandle, EventOverlap
from deep_ep_py.core.native import C
from deep_ep_py.device.device import Device
from deep_ep_py.device.make import make_device
from deep_ep_py.errors import DeepEPError
from deep_ep_py.modes.low_latency.needs import LOW_LATENCY
from deep_ep_py.modes.normal import layout
from deep_ep_py.modes.normal.handles import Handle
from deep_ep_py.modes.normal.needs import NORMAL
from deep_ep_py.modes.normal.operations import CombineArguments, DispatchArguments, PendingCombine, PendingDispatch
from deep_ep_py.nvshmem.choice import choose_memory
from deep_ep_py.session.engine import Engine
from deep_ep_py.session.recovery import mask_of
from deep_ep_py.topology.agreement import agree
from deep_ep_py.topology.gpus import Apart
from deep_ep_py.topology.link import Link
from deep_ep_py.topology.nic import NicOptions
from deep_ep_py.topology.topology import Topology
from deep_ep_py.v1.runtime import Runtime
from deep_ep_py.v1.surface import V1Surface


class Buffer(V1Surface):
    """Expert-parallel communication among ranks, of one machine, which may play several nodes, or of several machines.

    The signature and the returns are DeepEP's `deep_ep.Buffer`. All ranks of the group make the Buffer together and
    issue its operations in the same order. Any thread may call, one at a time; meanwhile others may wait for events of
    earlier calls and ask for `stats`.

    Parameters
    ----------
    group : torch.distributed.ProcessGroup
        The ranks. Under `deep_ep_py.testing.run_ranks`, the group it passes.
    num_nvl_bytes : int
        Bytes for rows and counts in transit: at least 4 rows per rank and region, better 64; a multiple of 128.
    num_rdma_bytes : int
        The same for low-latency calls: see `get_low_latency_rdma_size_hint`. Both modes use the same memory, the larger
        of the two numbers; without `low_latency_mode` this one has no effect.
    low_latency_mode : bool
        Low-latency calls may be made, beside those of normal mode.
    num_qps_per_rank : int
        Queue pairs to each peer with `heap="nvshmem"`; without, it has no effect.
    allow_nvlink_for_low_latency_mode, allow_mnnvl, use_fabric
        As in DeepEP, for other machines than this version knows. They have no effect.
    explicitly_destroy : bool
        `destroy()` will be called; otherwise the Buffer goes with its last reference.
    enable_shrink : bool
        Low-latency calls go on without a rank whose process has ended, or that does not come within 9/8 of `timeout` (4
        of them if it waits for another one itself): it is masked, on all ranks. Its rows are missing, or zeros where it
        had told of them; its results are left out of sums. Such a Buffer makes low-latency calls alone.
    comm : mpi4py.MPI.Comm, optional
        Used where `group` is None. The arguments so far stand in DeepEP 1.2.1's order. Versions without `use_fabric`
        call the same places otherwise: a call that names all of theirs, up to `comm`, by position is told apart; in a
        shorter one their `explicitly_destroy` is taken for `use_fabric`, which has no effect either.
    device : torch.device or str, optional
        Where tensors live. Default: the CPU. The way to a GPU is there but has not yet run on one.
    fabric : str or list of str, optional
        By what ranks reach each other: each two of them by the first of a list by which each reaches the other. "peer":
        loads and stores, within a node. "ibgda": work requests that the kernels write for NICs, which are software ones
        and reach one machine: on a GPU a thread of the host, a way to test the send path on one GPU. "proxy": a thread
        of each process sends over libfabric, by the provider that DEEP_EP_PROXY_PROVIDER names or the best there is.
        With both of them all heaps of a GPU's ranks lie in pinned host memory (`stats` says `through_host`), which is
        not fast. On a CPU alone, for tests: "weak", an agent that delays, cuts and reorders; "mixed", some pairs by
        loads and stores, some weak. Default: the environment variable DEEP_EP_FABRIC, names with commas between them;
        else what there is of "peer", "ibgda" and "proxy" in this order, on a GPU of "peer" and "proxy". A name by
        itself says what joins nodes: it has "peer" before it, but for "mixed", and "weak" on one node. A list without
        "peer" leaves each rank a node of its own. `python -m deep_ep_py doctor` shows the paths that ranks would take.
    ranks_per_node : int, optional
        Ranks [n * ranks_per_node, (n + 1) * ranks_per_node) are node n. Default: the environment variable
        DEEP_EP_RANKS_PER_NODE, else all ranks of a machine are on one node, and on one machine, where "ibgda" or
        "proxy" is named by itself, each is a node of its own. With "peer" or "mixed" named by itself all are on one
        node, whatever this says. On a GPU only with a fabric named.
    nic : NicOptions, optional
        What the software NICs are like.
    arena_bytes : int, optional
        Shared memory that outputs come from, and copies of what `combine` is given elsewhere, all of it taken at once.
        Where it is full, rows go through `num_nvl_bytes` in rounds: same result, slower. Default: on a CPU half the
        machine's memory, shared among its ranks, or the least that this is on any machine, whose pages cost nothing
        until they are touched; with "ibgda" or "proxy" on a GPU 64 MiB of host memory; else on a GPU 64 MiB at first
        and, as it is needed, at most an eighth of its memory, shared likewise. When a call has found no room there,
        there is more from the next dispatch on whose counts the host waits for. Calls that wait for none, with a handle
        or `num_worst_tokens`, use only what is there: if all calls are such, name a size.
    timeout : float
        Seconds after which a wait inside a kernel gives up; see `timeout_of`.
    regions : int
        Operations that may be open at once.
    hops : {1, 2}, optional
        How rows of normal mode go between nodes: 1, straight to each of their ranks; 2, once to each node, to the rank
        there with the sender's place in its own node, which passes them on (`docs/two_hops.md`). Default: 2 where nodes
        have several ranks.
    link : Link, optional
        How fast the way between nodes is, and how long an answer takes. In two hops the size of chunks follows from it,
        and in low-latency mode whether rows go once to each node. Default: that of software NICs.
    once_per_node : bool, optional
        Rows of low-latency calls go once to each node, to the rank there with the sender's place in its own node, and
        the others of that node read them there. True: always; False: never, they go to each rank. Default: where the
        NIC's time that it saves is more than what forwarding costs, by `link` and the sizes of the call
        (`docs/latency.md`). Never with `enable_shrink`, nor while ranks are left out.
    forward_sms : int
        Blocks, at most one on an SM, that forward rows for calls with a hook; 0: such calls send rows to each rank.
        They hold their SMs, and later kernels of the communication stream, until the rows have come.
    heap : {"own", "nvshmem"}, optional
        Where heaps lie: "own", in memory that this library allocates; "nvshmem", on GPUs, in NVSHMEM's symmetric heap,
        and then kernels drive this machine's ConnectX by queue pairs of NVSHMEM's ("ibgda" in `fabric`); see
        `docs/cluster.md`. Such a heap does not grow, so `arena_bytes` is all there is, by default 64 MiB, and its
        Buffer does not `recover`. Default: "nvshmem" where ranks are on several machines, no fabric is named, and all
        of them have nvshmem4py, a ConnectX and NVSHMEM_IB_ENABLE_IBGDA=1.

    Raises
    ------
    TypeError, ValueError
        Naming the argument, on all ranks if on any. Also where ranks disagree about what must be the same, and where
        two of them have no path between them: then with a table of all paths.
    """

    def __init__(
        self,
        group: Any,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
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
        timeout: float = 100.0,
        regions: int = 2,
        hops: int | None = None,
        link: Link | None = None,
        once_per_node: bool | None = None,
        forward_sms: int = 0,
        heap: str | None = None,
    ) -> None:
        if comm is None and (enable_shrink is None or hasattr(enable_shrink, "Get_rank")):
            # In the order without `use_fabric`, up to the communicator.
            use_fabric, explicitly_destroy, enable_shrink, comm = False, use_fabric, explicitly_destroy, enable_shrink
        bootstrap = make_bootstrap(group, comm)
        arguments.integer("group.size()", bootstrap.size, 1, arguments.MAX_RANKS)
        self.group = group if group is not None else comm
        self.rank, self.group_size = bootstrap.rank, bootstrap.size
        self.num_nvl_bytes, self.num_rdma_bytes = num_nvl_bytes, num_rdma_bytes

        def find_device() -> Device:
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
                    "enable_shrink=True: expected low_latency_mode=True with it, other calls mask no ranks"
                )
            if arena_bytes is not None:
                arguments.integer("arena_bytes", arena_bytes, 0, arguments.MAX_BYTES)
            self.explicitly_destroy = arguments.flag("explicitly_destroy", explicitly_destroy)
            self.timeout = arguments.seconds("timeout", timeout)
            self.regions = arguments.integer("regions", regions, 1, C.MAX_REGIONS)
            # Between processes each has a GPU of its own; in one process all ranks share one.
            sharers = bootstrap.size if bootstrap.in_process else 1
            together = getattr(group, "one_launch", None)
            make_launcher = None if together is None else partial(together.launcher, self.rank, self.timeout)
            return make_device(arguments.device(device), sharers, sharers < bootstrap.size, make_launcher)

        where, failed = attempt(find_device)
        connected, symmetric = connect(bootstrap, failed), None
        try:
            assert where is not None
            self.device = where.torch_device
            apart = Apart.ask(connected, where)
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
                    "once_per_node=True: expected False with enable_shrink=True, a rank that passes on the "
                    "rows of others cannot be masked"
                )
            # Operations of both modes use the same regions.
            transient = max(num_nvl_bytes, num_rdma_bytes) if self.low_latency_mode else num_nvl_bytes
            self._engine = Engine(
                connected,
                where,
                transient,
                arena_bytes,
                topology,
                self.timeout,
                self.regions,
                NORMAL.beside(LOW_LATENCY),
                self.enable_shrink,
                symmetric,
            )
        except BaseException:
            if symmetric is not None:
                symmetric.leave()
            if isinstance(connected, Connections):
                connected.close()
            raise

    @property
    def paths(self) -> tuple[str, ...]:
        """By rank, how it is reached: "peer" by loads and stores, as this rank is by itself; else by the fabric of that
        name; "none" where no operation has to do with it.
        """
        return self._engine.topology.routes

    @property
    def runtime(self) -> Any:
        """What V1 has under this name, a `deep_ep_py.v1.runtime.Runtime`; None once the Buffer is destroyed."""
        return None if self._engine.destroyed else Runtime(self, self._engine.runtime)

    # --- operations -------------------------------------------------------------------------------------------

    def get_dispatch_layout(
        self,
        topk_idx: torch.Tensor,
        num_experts: int,
        previous_event: EventOverlap | EventHandle | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor, EventOverlap]:
        """Count which ranks and experts the tokens go to. Local: no communication.

        Parameters
        ----------
        topk_idx : torch.Tensor
            int64 or int32 [tokens, top-k]: expert ids, -1 for none.
        num_experts : int
            Experts of all ranks; rank r holds ids [r * num_experts / ranks, (r + 1) * num_experts / ranks).
        previous_event, async_finish, allocate_on_comm_stream
            As in DeepEP: see `dispatch`.

        Returns
        -------
        num_tokens_per_rank : torch.Tensor
            int32 [ranks].
        num_tokens_per_rdma_rank : torch.Tensor or None
            int32 [nodes]; None where there is one node.
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
        return per_rank, per_node, per_expert, in_rank, EventOverlap(event)

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
    ) -> tuple[Any, ...]:
        """Send every token to the ranks that hold its experts.

        Parameters
        ----------
        x : torch.Tensor or tuple of torch.Tensor
            [tokens, hidden], rows of a multiple of 16 bytes, of elements of two bytes (bfloat16, float16, int16) or of
            one (float8_e4m3fn, float8_e5m2, int8, uint8). The latter perhaps with scales: float32 or int32 (four UE8M0
            exponents each) [tokens, scales] or [tokens] with any strides. Rows and scales travel as they are, and their
            types are the same on all ranks.
        handle : DispatchHandle or tuple of torch.Tensor, optional
            Of an earlier dispatch: send along the same routes again (cached dispatch). Then no top-k is given, and a
            layout, alignment or `num_worst_tokens` is not looked at. A plain tuple of its elements is accepted too, as
            autograd gives them back, but not copies of them. It may be of another Buffer of the same ranks, which may
            have been destroyed, but not have failed or recovered since; with `async_finish` that dispatch's event has
            been waited for.
        num_tokens_per_rank, is_token_in_rank, num_tokens_per_expert : torch.Tensor
            From `get_dispatch_layout`. Rows per rank are counted from `is_token_in_rank`, not taken from the first.
        topk_idx : torch.Tensor, optional
            int64 or int32 [tokens, top-k]: travels with the tokens.
        topk_weights : torch.Tensor, optional
            float32 [tokens, top-k]; together with `topk_idx`.
        expert_alignment : int
            The returned counts per expert are rounded up to multiples of it.
        config : Config, optional
            `num_sms` blocks. Default: on a GPU as few as its rates allow (`python -m deep_ep_py rates`).
        num_worst_tokens : int
            Not 0: the rows of the outputs, the same on all ranks; then the host waits for nothing, as a CUDA graph
            needs it. It must suffice for every rank: if one would receive more, the call fails on all. Rows that no
            rank sends have index -1 and weight 0; what their `recv_x` holds is undefined.
        num_tokens_per_rdma_rank
            Not looked at.
        previous_event : EventOverlap, optional
            Wait for it too. On a GPU kernels run on a stream of their own, after all that the current stream has been
            given so far.
        async_finish : bool
            On a GPU: let the current stream go on; its next use of the results must wait for the returned event. Else
            the current stream waits. The host waits for the counts alone. On a CPU the same with the caller in the
            current stream's place: the rows move while it goes on, in a thread of their own.
        allocate_on_comm_stream : bool
            With both of these: wait for the event alone, and make the outputs on that other stream.

        Returns
        -------
        recv_x : torch.Tensor or tuple of torch.Tensor
            [rows, hidden] of the type of `x`, sorted by source rank, then token; where scales were sent, with them,
            contiguous [rows, scales] or [rows].
        recv_topk_idx : torch.Tensor or None
            [rows, top-k], of the type of `topk_idx`: local expert ids, -1 for experts of other ranks.
        recv_topk_weights : torch.Tensor or None
            float32 [rows, top-k]: 0 where the id is -1.
        num_recv_tokens_per_expert_list : list of int or None
            Rows for each local expert; empty with `num_worst_tokens`.
        handle : DispatchHandle or None
            For `combine` and for cached dispatches; None from a cached one.
        event : EventOverlap

        Raises
        ------
        DeepEPTimeout
            If a peer did not do its part in time. On a GPU it is found when the kernels have given up, and raised by
            the Buffer's next call, or by `destroy`; on a CPU with `async_finish` by the wait for the event, if that
            comes first.
        DeepEPError
            If another rank failed, or this Buffer has before.
        """
        return self._begin_dispatch(
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
        ).finish()

    def _begin_dispatch(
        self,
        x: Any,
        handle: Any = None,
        previous_event: Any = None,
        async_finish: Any = False,
        allocate_on_comm_stream: Any = False,
        num_tokens_per_rdma_rank: Any = None,  # not looked at
        config: Any = None,
        **options: Any,
    ) -> PendingDispatch:
        """Start a dispatch: this rank's counts are on their way. `finish()` does the rest.

        It comes next on this Buffer, unless `finish_later` is true.
        """
        self._check_normal("dispatch")
        streams = arguments.streams(previous_event, async_finish, allocate_on_comm_stream)
        given = DispatchArguments(x, handle, config=self._config(config), streams=streams, **options)
        return PendingDispatch.begin(self._engine, given)

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
    ) -> tuple[torch.Tensor, torch.Tensor | None, EventOverlap]:
        """Bring the rows back to the tokens' owners and sum them: the reverse of the dispatch that `handle` is from.

        A plain sum: apply the gate's weights to the rows before. Summed in fp32 in the order of the ranks, then the
        biases, and rounded once; so the result does not depend on timing.

        Parameters
        ----------
        x : torch.Tensor
            bfloat16 [rows, hidden], in the order of `recv_x`. Where it is `recv_x` itself, or lies in it, the owners
            read it in place; else from a copy in shared memory.
        handle : DispatchHandle or tuple of torch.Tensor
            Of the dispatch, as in a cached one.
        topk_weights : torch.Tensor, optional
            float32 [rows, top-k], summed likewise.
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
        return PendingCombine.begin(self._engine, given).finish()

    def warmup(self, hidden: int, topk: int, fp8: bool = False) -> None:
        """Have the kernels for rows of `hidden` BF16 elements and `topk` experts per token ready, on all ranks; with
        `fp8` also those for dispatching FP8 rows, or others of one byte per element.

        On a GPU they are compiled, or taken from the cache, and loaded; else that happens at the first call of each
        kind. Collective, and a barrier. Where several ranks share a GPU, it comes before the first operation: loading
        may wait for another rank's kernels. On a CPU there is nothing to do.

        Raises
        ------
        ValueError, TypeError
            Naming the argument.
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
        """torch.cuda.Stream: where kernels run; None on a CPU."""
        return self._engine.device.comm_stream

    def get_comm_stream(self) -> Any:
        """Return the stream that kernels run on.

        Raises
        ------
        RuntimeError
            On a CPU, where there are none.
        """
        if self.comm_stream is None:
            raise RuntimeError(f"get_comm_stream: there are no streams on {self.device}")
        return self.comm_stream

    # --- life -------------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, int]:
        """Count what this Buffer has done.

        Returns
        -------
        dict
            `operations`, of them `dispatches`, `cached_dispatches`, `combines`; `direct`: those whose rows went
            straight to or from where this rank keeps them, where its peers share its memory; `rounds`: those that could
            not, for want of room there, and went through the Buffer; `copied`: combines whose rows were copied
            into shared memory first; `arena_bytes`: memory for outputs that is there, `arena_growths`: how often there
            came more of it, `arena_used`; `through_host`: 1 where tensors are a GPU's and rows between nodes go
            through pinned memory of the host, else 0.
        """
        self._engine.check_usable()
        runtime = self._engine.runtime
        arena = {
            "arena_bytes": runtime.arena_bytes,
            "arena_growths": len(runtime.added_pieces()),
            "arena_used": runtime.arena_used,
        }
        engine = self._engine
        through_host = engine.device.asynchronous and bool(engine.topology.networks) and not engine.is_symmetric
        return {**self._engine.stats, **arena, "through_host": int(through_host)}

    def network_counters(self) -> list[dict[str, int]]:
        """Count what this rank's software NICs have sent.

        Returns
        -------
        list of dict
            By peer: `writes` and `atomics`, the requests of each kind; `bytes` of rows and messages; `doorbells`. Empty
            where there are no such NICs.
        """
        self._engine.check_usable()
        names = ("writes", "atomics", "bytes", "doorbells")
        return [{name: getattr(peer, name) for name in names} for peer in self._engine.runtime.network_counters]

    def network_trace(self) -> list[dict[str, int]]:
        """Return every request of this rank's software NICs, if they were made with `NicOptions(traced=True)`.

        Returns
        -------
        list of dict
            `time_ns`, `source`, `destination`, `queue`, `opcode`, `bytes`; see `deep_ep_py.topology.nic.save_trace`.
        """
        self._engine.check_usable()
        names = ("time_ns", "source", "destination", "queue", "opcode", "bytes")
        return [{name: getattr(message, name) for name in names} for message in self._engine.runtime.network_trace]

    def check(self) -> None:
        """Raise what an operation of this Buffer has failed of that no call has raised yet, replays of graphs included.

        On a GPU calls return before their kernels have ended, so a result is valid only once a check has passed that
        was made after the kernels' end: this one, or the one with which every dispatch, combine and layout begins. A
        program that only replays graphs makes it itself, after each wait for the device: ``torch.cuda.synchronize();
        buffer.check()``. It costs a few loads from host memory and waits for nothing.

        Raises
        ------
        DeepEPTimeout, DeepEPError
            As `dispatch`.
        """
        self._engine.check_usable()

    def abort(self) -> None:
        """Tell every rank that this one has failed: their calls on this Buffer raise at once."""
        self._engine.check_process()
        self._engine.break_off("the Buffer was aborted")

    def recover(self, mask: Iterable[int] = (), timeout: float | None = None) -> None:
        """Make the Buffer usable again after a failure, with all ranks or without some.

        Collective among the ranks left, and a barrier: each calls it with the same `mask`, whether it has raised or
        not; one that has not lets the others know. It needs no process group. Calls then behave as if the ranks left
        out had no tokens and their experts were chosen by none: rows for them are dropped, and `combine` sums over the
        others. They stay in all shapes, and cannot come back. Handles from before can no longer be used, and what
        calls have returned that no check (see `check`) has covered is void: where this rank has raised nothing, a
        warning says what has failed.

        Parameters
        ----------
        mask : iterable of int
            Ranks to leave out, besides those left out before. Their processes have ended, or their Buffers are
            destroyed. With two hops each passes on the rows of others, which another rank of its node takes over: of
            each node at most half of the ranks, or all; with `Link.rails` all or none.
        timeout : float, optional
            Seconds to wait for the other ranks. Default: the Buffer's.

        Raises
        ------
        DeepEPError
            If masks differ, a rank is gone that no mask names, or one does not come in time; a rank to be left out that
            is still there. The Buffer stays broken, on all ranks, and may be tried again.
        TypeError, ValueError
            Naming the argument.
        """
        if self._engine.is_symmetric:
            raise DeepEPError(
                f"rank {self.rank}: a Buffer with heap='nvshmem' does not recover, NVSHMEM's queue pairs cannot be "
                "made anew: make another Buffer, in new processes where a queue pair has failed"
            )
        seconds = self.timeout if timeout is None else arguments.seconds("timeout", timeout)
        left_out = mask_of(mask, self.rank, self.group_size)
        if not self._engine.masks_ranks:  # then there are no calls of normal mode
            self._engine.topology.check_mask(left_out | self._engine.mask)
        self._engine.recover(left_out, seconds)

    def lost_ranks(self) -> list[int]:
        """Return the ranks whose processes have ended, or whose Buffers are destroyed, as far as is known here."""
        return self._engine.lost_ranks()

    @contextmanager
    def timeout_of(self, seconds: float) -> Iterator[None]:
        """Give the waits of the calls begun in the body another bound than the Buffer's.

        Raises
        ------
        TypeError, ValueError
            Naming the argument.
        """
        with self._engine.timeout_of(arguments.seconds("seconds", seconds)):
            yield

    def _check_normal(self, name: str) -> None:
        if self.enable_shrink:
            raise ValueError(f"{name}: expected a Buffer with enable_shrink=False, such calls mask no ranks")
        self._engine.check_usable()

    def destroy(self) -> None:
        """Give back what the Buffer holds, the process group too. Not collective; outputs live on. Nothing in a forked
        child: it is its parent's.
        """
        self._engine.destroy()
        if self._engine.destroyed:
            self.group = None  # one that outlives `destroy_process_group` may end the process badly

    def __enter__(self) -> Buffer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Destroy the Buffer; after an exception, tell the other ranks first."""
        if kind is not None:
            self._engine.break_off("the Buffer was aborted")
        self.destroy()
