"""`ElasticBuffer`: dispatch and combine with the interface of DeepEP V2."""

from __future__ import annotations

import inspect
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from deep_ep_py.base import arguments
from deep_ep_py.base.config import QUEUE_PAIRS, Config
from deep_ep_py.base.events import EventHandle, EventOverlap
from deep_ep_py.base.not_copied import NotCopied
from deep_ep_py.base.one_thread import by_one_thread
from deep_ep_py.base.results import Combined, ElasticDispatched
from deep_ep_py.buffer import Buffer
from deep_ep_py.device.rates import destinations
from deep_ep_py.modes.normal.counted import Choices
from deep_ep_py.modes.normal.operations import CombineArguments, PendingCombine
from deep_ep_py.transport.bootstrap.groups import make_bootstrap
from deep_ep_py.transport.bootstrap.together import attempt, raise_together, told_of
from deep_ep_py.v2.barrier import barrier
from deep_ep_py.v2.barrier import prepare as prepare_barrier
from deep_ep_py.v2.dispatching import Routed, dispatch_again, dispatch_anew
from deep_ep_py.v2.handle import EPHandle, check_handle
from deep_ep_py.v2.one_by_one import combine_one_by_one
from deep_ep_py.v2.one_by_one import prepare as prepare_one_by_one
from deep_ep_py.v2.over import OverBuffer
from deep_ep_py.v2.sizes import ALIGNMENT, Settings, too_small, transit_of
from deep_ep_py.v2.streams import streams
from deep_ep_py.v2.traffic import Bandwidths, Domains, num_sms

_QPS_FORWARDED, _QPS_DIRECT = 129, 17
"""Queue pairs that V2 allocates by default, with and without forwarding in nodes."""
_QPS_PER_SM, _MAX_QPS_DIRECT = 16, 9
_SIZED = "which num_bytes, or num_max_tokens_per_rank and hidden, determine"
_REFUSED = {
    "enable_shrink": "since these calls mask no ranks",
    "low_latency_mode": "since ElasticBuffer has no low-latency calls",
    "num_nvl_bytes": _SIZED,
    "num_rdma_bytes": _SIZED,
    "first_arena_bytes": _SIZED,
    "num_qps_per_rank": "which num_allocated_qps determines",
    "timeout": "which num_gpu_timeout_secs determines",
}
"""Arguments of `deep_ep_py.Buffer` that `ElasticBuffer` does not take, and why."""
_OPTIONS = frozenset(inspect.signature(Buffer).parameters) - {"others"}
_NVLINK_GBS = {8: 300.0, 9: 450.0, 10: 900.0}
"""NVLink bandwidth of a GPU per direction, by the major number of its compute capability, as NVIDIA publishes it."""
_NOT_OFFERED = {
    "engram_": "Engram's remote fetches from CPU memory",
    "pp_": "pipeline-parallel send and receive",
    "agrs_": "all-gather and reduce-scatter",
    "create_agrs_": "all-gather and reduce-scatter",
    "destroy_agrs_": "all-gather and reduce-scatter",
    "all_gather": "all-gather and reduce-scatter",
}


def _missing(of: str, name: str, where: Any) -> AttributeError:
    """Return the exception for a missing attribute, with the reason if V2 has it."""
    what = next((what for prefix, what in _NOT_OFFERED.items() if name.removeprefix("get_").startswith(prefix)), None)
    reason = "" if what is None else f": not offered are {what}"
    return AttributeError(f"{of} has no attribute {name!r}{reason}", name=name, obj=where)


class _SaysWhatIsMissing(type):
    """The class of `ElasticBuffer`: some of V2's methods are static."""

    if not TYPE_CHECKING:

        def __getattr__(cls, name: str) -> Any:
            raise _missing(f"type object {cls.__name__!r}", name, cls)


class ElasticBuffer(OverBuffer, NotCopied, metaclass=_SaysWhatIsMissing):
    """Expert-parallel communication among the ranks of a group, with the interface of DeepEP V2.

    Signatures and return values are those of DeepEP's `deep_ep.ElasticBuffer`. A process may have Buffers of both
    interfaces. All ranks make it together and issue its operations in the same order. Results have no gradients, as
    those of `deep_ep_py.Buffer`.

    Rows arrive in an order that depends on nothing but the routing: by source rank, then token. Where V2 reads a clock
    or a counter, this library does not, so `deterministic` changes nothing.

    Parameters
    ----------
    group : torch.distributed.ProcessGroup
        The ranks. Under `deep_ep_py.testing.run_ranks`, the group that it passes to each rank.
    num_bytes : int, optional
        Bytes of memory that peers access: for rows in transit, and for outputs from the start. A multiple of 2 MiB. If
        all outputs alive need more, the memory grows: on a CPU always, on a GPU where the host waits for counts.
        Otherwise rows go in rounds (`stats`). Default: `get_buffer_size_hint` for the sizes below.
    num_cpu_bytes : int
        Must be 0: Engram is not offered.
    num_max_tokens_per_rank : int
        Maximum number of tokens per rank: the default for dispatches that do not specify one.
    hidden, num_topk, use_fp8_dispatch
        Elements of a token, experts per token (0: up to 32), and whether rows are FP8. They determine `num_bytes`, or
        if that is given, how many of these bytes are for rows in transit.
    deterministic : bool
        No effect: results are always the same on every run.
    allow_hybrid_mode : bool
        Whether rows between nodes go once to each node and are forwarded there, if nodes have several ranks.
    allow_multiple_reduction : bool
        Whether a combine of the expanded layout may sum a token's rows, and round to BF16, on each rank and in each
        node before they travel. Otherwise each row returns by itself, and only the token's owner sums and rounds: more
        exact, but more rows travel, and each dispatch into the expanded layout has a second, small one beside it.
    prefer_overlap_with_compute : bool
        Whether `get_theoretical_num_sms` leaves SMs to computation.
    sl_idx : int
        No effect: the service level is NVSHMEM's or libfabric's to choose.
    num_allocated_qps : int
        Queue pairs to each peer with `heap="nvshmem"`; 0: as many as a `Buffer` has by default.
    num_cpu_timeout_secs, num_gpu_timeout_secs : int
        The latter is the time after which any wait ends with a DeepEPTimeout, on the host too. Default: the environment
        variable DEEP_EP_TIMEOUT, or 100.
    explicitly_destroy : bool
        Whether the caller will call `destroy`; otherwise the Buffer is destroyed with its last reference.
    device : torch.device or str, optional
        Where tensors live. Default: the CPU.
    **options
        Other keyword arguments of `deep_ep_py.Buffer`, but for `enable_shrink`, `low_latency_mode` and those that are
        computed from the arguments above: sizes in bytes, `num_qps_per_rank` and `timeout`.

    Attributes
    ----------
    group : torch.distributed.ProcessGroup
        The ranks.
    rank_idx, num_ranks : int
        This rank, and the number of ranks.
    num_scaleout_ranks, num_scaleup_ranks, scaleout_rank_idx, scaleup_rank_idx : int
        The logical domains (see `get_logical_domain_size`), and this rank's place in them.
    num_rdma_ranks, num_nvlink_ranks : int
        The physical domains: nodes, and ranks per node.
    num_allocated_qps, num_bytes, num_max_tokens_per_rank : int
        As given, or what was chosen.
    allow_hybrid_mode, allow_multiple_reduction, prefer_overlap_with_compute, deterministic, explicitly_destroy : bool
        As given.

    Raises
    ------
    TypeError, ValueError
        The message names the argument. If one rank raises, all do.
    """

    def __init__(
        self,
        group: Any,
        num_bytes: int | None = None,
        num_cpu_bytes: int = 0,
        num_max_tokens_per_rank: int = 0,
        hidden: int = 0,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        deterministic: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
        prefer_overlap_with_compute: bool = True,
        sl_idx: int = 3,
        num_allocated_qps: int = 0,
        num_cpu_timeout_secs: int = 300,
        num_gpu_timeout_secs: int | None = None,
        explicitly_destroy: bool = False,
        *,
        device: torch.device | str | None = None,
        **options: Any,
    ) -> None:
        bootstrap = make_bootstrap(group)

        def check() -> tuple[int, int, Settings | None]:
            for name, value in (
                ("deterministic", deterministic),
                ("allow_hybrid_mode", allow_hybrid_mode),
                ("allow_multiple_reduction", allow_multiple_reduction),
                ("prefer_overlap_with_compute", prefer_overlap_with_compute),
            ):
                arguments.flag(name, value)
            arguments.integer("num_max_tokens_per_rank", num_max_tokens_per_rank, 0, arguments.MAX_TOKENS)
            arguments.integer("sl_idx", sl_idx, 0, arguments.MAX_ROWS)
            arguments.integer("num_allocated_qps", num_allocated_qps, 0, arguments.MAX_ROWS)
            arguments.seconds("num_cpu_timeout_secs", num_cpu_timeout_secs)
            arguments.timeout("num_gpu_timeout_secs", num_gpu_timeout_secs)
            if arguments.integer("num_cpu_bytes", num_cpu_bytes, 0, arguments.MAX_BYTES):
                raise ValueError(f"num_cpu_bytes={num_cpu_bytes}: expected 0, since Engram is not offered")
            arguments.no_unknown(options, _OPTIONS)
            for name, reason in _REFUSED.items():
                if options.get(name):
                    raise ValueError(f"{name}={arguments.describe(options[name])}: expected none, {reason}")
            if not allow_hybrid_mode and options.get("hops", 1) != 1:
                raise ValueError(f"hops={options['hops']}: expected 1 or none with allow_hybrid_mode=False")
            settings = None
            if num_bytes is None and not num_max_tokens_per_rank and not hidden:
                raise ValueError("num_bytes=None: expected bytes, or num_max_tokens_per_rank and hidden")
            if hidden or num_bytes is None:
                settings = Settings(bootstrap.size, num_max_tokens_per_rank, hidden, num_topk, use_fp8_dispatch)
                settings.check(least_tokens=1 if num_bytes is None else 0)  # bytes that are given need no bound
            wanted = settings.bytes if num_bytes is None and settings is not None else num_bytes
            size = arguments.integer("num_bytes", wanted, ALIGNMENT, arguments.MAX_BYTES)
            if size % ALIGNMENT:
                raise ValueError(f"num_bytes={size}: expected a multiple of {ALIGNMENT}")
            return size, transit_of(size, settings), settings

        checked, failed = attempt(check)
        mine = {
            "num_max_tokens_per_rank": num_max_tokens_per_rank,
            "num_bytes": None if checked is None else checked[0],
            "allow_hybrid_mode": allow_hybrid_mode,
            "allow_multiple_reduction": allow_multiple_reduction,
        }
        everyones = bootstrap.all_gather((told_of(failed), mine))
        raise_together(bootstrap.rank, failed, [told for told, _ in everyones])
        arguments.same_on_all_ranks(bootstrap.rank, [theirs for _, theirs in everyones])
        assert checked is not None
        self.num_bytes, transit, settings = checked
        self.deterministic, self.allow_hybrid_mode = bool(deterministic), bool(allow_hybrid_mode)
        self.allow_multiple_reduction = bool(allow_multiple_reduction)
        self.prefer_overlap_with_compute = bool(prefer_overlap_with_compute)
        options = {name: value for name, value in options.items() if name not in _REFUSED}
        if not self.allow_hybrid_mode:
            options["hops"] = 1
        self._hidden = hidden
        self._buffer = Buffer(
            group,
            transit,
            num_qps_per_rank=num_allocated_qps or QUEUE_PAIRS,
            explicitly_destroy=explicitly_destroy,
            device=device,
            timeout=num_gpu_timeout_secs,
            first_arena_bytes=self.num_bytes - transit,
            **options,
        )
        self._engine = self._buffer._engine
        self._engine.too_small = partial(too_small, self.num_bytes, settings)
        self.explicitly_destroy = explicitly_destroy
        self.rank_idx, self.num_ranks = self._buffer.rank, self._buffer.group_size
        self.num_max_tokens_per_rank = num_max_tokens_per_rank
        self.num_scaleout_ranks, self.num_scaleup_ranks = self.get_logical_domain_size()
        self.scaleout_rank_idx, self.scaleup_rank_idx = divmod(self.rank_idx, self.num_scaleup_ranks)
        self.num_rdma_ranks, self.num_nvlink_ranks = self.get_physical_domain_size()
        forwarded = _QPS_FORWARDED if self.allow_hybrid_mode else _QPS_DIRECT
        self.num_allocated_qps = num_allocated_qps or forwarded

    def __repr__(self) -> str:
        return f"<deep_ep_py.ElasticBuffer over {self._buffer!r}>"

    if not TYPE_CHECKING:  # to a type checker, this would make every name an attribute

        def __getattr__(self, name: str) -> Any:
            raise _missing("'ElasticBuffer' object", name, self)

    # --- sizes ------------------------------------------------------------------------------------------------

    @staticmethod
    def get_buffer_size_hint(
        group: Any,
        num_max_tokens_per_rank: int,
        hidden: int,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
    ) -> int:
        """Return the bytes that `ElasticBuffer` shares with its peers from the start, for an MoE layer of these sizes.

        They hold rows in transit and one output of the largest size that a dispatch without a host wait may have: every
        token of every rank.

        Parameters
        ----------
        group : torch.distributed.ProcessGroup
            The ranks.
        num_max_tokens_per_rank, hidden, num_topk, use_fp8_dispatch
            As in the constructor.
        allow_hybrid_mode, allow_multiple_reduction : bool
            No effect.

        Returns
        -------
        int
            A multiple of 2 MiB.

        Raises
        ------
        TypeError, ValueError
            The message names the argument.
        """
        del allow_hybrid_mode, allow_multiple_reduction
        if not callable(getattr(group, "size", None)):
            raise TypeError(f"group={arguments.describe(group)}: expected a process group")
        return Settings(group.size(), num_max_tokens_per_rank, hidden, num_topk, use_fp8_dispatch).check().bytes

    def get_physical_domain_size(self) -> tuple[int, int]:
        """Return the number of nodes, and of ranks per node."""
        return self._engine.topology.nodes, self._engine.topology.ranks_per_node

    def get_logical_domain_size(self) -> tuple[int, int]:
        """Return the nodes and ranks per node if rows are forwarded in nodes, otherwise 1 and the number of ranks."""
        return self.get_physical_domain_size() if self._engine.topology.hops == 2 else (1, self.num_ranks)

    def get_theoretical_num_sms(
        self,
        num_experts: int,
        num_topk: int,
        num_scaleout_topk: int = 0,
        rdma_gbs: float = 0,
        nvlink_gbs: float = 0,
        sm_read_gbs: float = 200,
        sm_write_gbs: float = 50,
    ) -> int:
        """Return the number of SMs for a dispatch or a combine.

        If the rates of this GPU have been measured (`python -m deep_ep_py rates`) and the Buffer knows `hidden` and
        `num_max_tokens_per_rank`: the fewest with which such a call is about as fast as with all. Otherwise V2's model:
        with the expected number of distinct ranks D that a token goes to, and nodes N if rows are forwarded, the SMs
        must read and write, for each row that arrives, what the limiting link takes to bring it::

            read  = 1/D (+ N/D)      write = near (+ 1/D if a NIC is used); forwarded: 1/D + N/D / nodes + 1
            link  = the longer of nvlink traffic / nvlink_gbs and rdma traffic / rdma_gbs
            SMs   = 1.25 max(read / sm_read_gbs, write / sm_write_gbs) / link, even, at least 4

        Parameters
        ----------
        num_experts, num_topk : int
            Experts on all ranks, and per token; assumed to be equally popular.
        num_scaleout_topk : int
            Must be 0, as in V2.
        rdma_gbs, nvlink_gbs : float
            GB/s of a rank's NIC and NVLink; 0: the Buffer's `link`, and what NVIDIA publishes for the GPU.
        sm_read_gbs, sm_write_gbs : float
            GB/s that an SM reads and writes.

        Returns
        -------
        int
            On a CPU 1, since one thread runs all blocks.

        Raises
        ------
        TypeError, ValueError
            The message names the argument.
        """
        self._engine.check_process()
        experts = arguments.experts(num_experts, self.num_ranks)
        topk = arguments.integer("num_topk", num_topk, 1, min(arguments.MAX_TOPK, experts))
        arguments.integer("num_scaleout_topk", num_scaleout_topk, 0, 0)
        given = {"rdma_gbs": rdma_gbs, "nvlink_gbs": nvlink_gbs, "sm_read_gbs": sm_read_gbs}
        for name, value in {**given, "sm_write_gbs": sm_write_gbs}.items():
            arguments.number(name, value, 0 if name in ("rdma_gbs", "nvlink_gbs") else 1e-3, 1e6)
        device = self._engine.device
        if not device.asynchronous:
            return device.blocks
        if device.knows_rates and self._hidden and self.num_max_tokens_per_rank:
            moved = self.num_max_tokens_per_rank * 2 * self._hidden * (1 + destinations(topk, self.num_ranks))
            return device.blocks_for(moved)
        properties = torch.cuda.get_device_properties(self._buffer.device)
        domains = Domains(*self.get_logical_domain_size(), self._engine.topology.mapped.count(True))
        if rdma_gbs == 0 and self.num_rdma_ranks > 1:
            rdma_gbs = self._engine.topology.link.bandwidth / 1e9
        bandwidths = Bandwidths(
            rdma_gbs, nvlink_gbs or _NVLINK_GBS.get(properties.major, 0.0), sm_read_gbs, sm_write_gbs
        )
        overlap = self.prefer_overlap_with_compute
        chosen = num_sms(domains, experts, topk, bandwidths, properties.multi_processor_count, overlap)
        return min(chosen, arguments.MAX_BLOCKS)

    def get_theoretical_num_qps(self, num_sms: int) -> int:
        """Return V2's number of queue pairs for a call with this many SMs; this library chooses its own."""
        sms = arguments.integer("num_sms", num_sms, 1, arguments.MAX_ROWS)
        wanted = sms * _QPS_PER_SM + 1 if self.allow_hybrid_mode else min(sms, _MAX_QPS_DIRECT)
        return min(wanted, self.num_allocated_qps)

    # --- operations -------------------------------------------------------------------------------------------

    @by_one_thread
    def dispatch(
        self,
        x: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        cumulative_local_expert_recv_stats: torch.Tensor | None = None,
        num_experts: int | None = None,
        num_max_tokens_per_rank: int | None = None,
        expert_alignment: int | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: EventHandle | EventOverlap | None = None,
        previous_event_before_epilogue: EventHandle | EventOverlap | None = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        handle: EPHandle | None = None,
        do_handle_copy: bool = True,
        do_cpu_sync: bool | None = None,
        do_expand: bool = False,
        do_zero_padding: bool = False,
        use_tma_aligned_col_major_sf: bool = False,
    ) -> ElasticDispatched:
        """Send every token to the ranks that hold its experts.

        Parameters
        ----------
        x : torch.Tensor or tuple of torch.Tensor
            Rows [tokens, hidden], or rows of one byte per element with scales, as in `deep_ep_py.Buffer.dispatch`.
        topk_idx : torch.Tensor
            int64 or int32 [tokens, top-k]: expert ids, -1 for none. None with a handle.
        topk_weights : torch.Tensor, optional
            float32 [tokens, top-k].
        cumulative_local_expert_recv_stats : torch.Tensor, optional
            int32 [local experts]: the rows of each local expert are added. With a handle nothing is added, as in V2.
        num_experts : int
            Experts on all ranks; with a handle, that of its dispatch.
        num_max_tokens_per_rank : int, optional
            Most tokens of a rank, the same on all. Default: the handle's, otherwise the Buffer's.
        expert_alignment : int, optional
            Counts of rows per expert, and in the expanded layout the rows themselves, are rounded up to a multiple of
            this. Those of all local experts together may be at most 2**31 - 1. Default: the handle's, otherwise 1.
        num_sms : int
            Thread blocks; 0: as many as the device's rates call for.
        num_qps : int
            No effect.
        previous_event : EventHandle, optional
            What the kernels wait for, instead of all work that the caller has queued. Only with
            `allocate_on_comm_stream`.
        previous_event_before_epilogue : EventHandle, optional
            What must have happened as well before outputs are written.
        async_with_compute_stream : bool
            Return an event that stands for the end of the call, instead of making the current stream wait.
        allocate_on_comm_stream : bool
            Allocate outputs on the communication stream.
        handle : EPHandle, optional
            Send rows where that dispatch sent them. On the expanded layout's handle, `do_expand=False` returns its rows
            without it.
        do_handle_copy : bool
            Whether the handle keeps a copy of `topk_idx`; otherwise it must not change until the handle is dropped.
        do_cpu_sync : bool, optional
            Whether the host waits for the counts, so that outputs are exactly as large as needed. Otherwise they have
            the largest possible size, nothing of the call waits on the host, and rows beyond those received are
            undefined, with ids -1 and weights 0. Default: True, unless there is a handle.
        do_expand : bool
            Return the expanded layout: a row for each choice of a local expert, contiguous per expert, in the order of
            source rank and token.
        do_zero_padding : bool
            With `do_expand`: zero the rows between those of two experts. Otherwise they are undefined, but their
            weights are 0.
        use_tma_aligned_col_major_sf : bool
            Return scales whose consecutive rows are adjacent, in columns that begin at multiples of 16 bytes.

        Returns
        -------
        recv_x : torch.Tensor or tuple of torch.Tensor
            [rows, hidden], with scales if `x` has them.
        recv_topk_idx : torch.Tensor or None
            [rows, top-k]: ids of local experts, -1 elsewhere. None with `do_expand`.
        recv_topk_weights : torch.Tensor or None
            float32 [rows, top-k], 0 where the id is -1; with `do_expand` [rows], 0 in rows that no choice has. None
            without `topk_weights`.
        handle : EPHandle
            For `combine` and later dispatches; `handle` itself if it was given.
        event : EventOverlap

        Raises
        ------
        TypeError, ValueError
            The message names the argument; nothing has been sent.
        DeepEPTimeout, DeepEPError
            As `deep_ep_py.Buffer.dispatch`.
        """
        self._buffer._check_normal("dispatch")
        arguments.integer("num_qps", num_qps, 0, arguments.MAX_ROWS)
        given = Routed(
            x=x,
            topk_idx=topk_idx,
            topk_weights=topk_weights,
            statistics=cumulative_local_expert_recv_stats,
            num_experts=num_experts,
            max_tokens=num_max_tokens_per_rank,
            alignment=expert_alignment,
            config=_config(num_sms),
            streams=streams(
                previous_event, previous_event_before_epilogue, async_with_compute_stream, allocate_on_comm_stream
            ),
            copies_ids=arguments.flag("do_handle_copy", do_handle_copy),
            host_waits=do_cpu_sync,
            expands=arguments.flag("do_expand", do_expand),
            zero_padding=arguments.flag("do_zero_padding", do_zero_padding),
            columns=arguments.flag("use_tma_aligned_col_major_sf", use_tma_aligned_col_major_sf),
            returns_one_by_one=not self.allow_multiple_reduction,
        )
        if given.zero_padding and not given.expands:
            raise ValueError(
                "do_zero_padding=True: expected do_expand=True as well, since only that layout has padding"
            )
        if handle is not None:
            return dispatch_again(self._engine, check_handle(handle), given)
        return dispatch_anew(self._engine, given, self.num_max_tokens_per_rank)

    @by_one_thread
    def combine(
        self,
        x: torch.Tensor,
        handle: EPHandle,
        topk_weights: torch.Tensor | None = None,
        bias: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: EventHandle | EventOverlap | None = None,
        previous_event_before_epilogue: EventHandle | EventOverlap | None = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> Combined:
        """Return the rows to the tokens' owners and sum them, unweighted.

        The order of summation is V2's, in fp32 and rounded to BF16 once: the biases, then the ranks' rows in the order
        of the last choice that each rank holds. Before, in the expanded layout, a rank sums a token's rows in the order
        of its choices, in fp32, and rounds; with `allow_multiple_reduction=False`, the owner sums the biases, then all
        rows in the order of the choices. If rows are forwarded in nodes and summed on their way, the order is that of
        `deep_ep_py.Buffer.combine`: by rank inside a node, rounded, then by node, then the biases.

        Parameters
        ----------
        x : torch.Tensor
            bfloat16 [rows, hidden], in the layout of the handle's dispatch.
        handle : EPHandle
            The handle of the dispatch.
        topk_weights : torch.Tensor, optional
            float32 [rows, top-k], or [rows] in the expanded layout. Each choice's weight returns to its token; what is
            in places where `recv_topk_idx` is -1 has no effect.
        bias : torch.Tensor or tuple, optional
            One or two bfloat16 [tokens, hidden], added to the sums.
        num_sms : int
            Thread blocks; 0: those of the handle.
        num_qps
            No effect.
        previous_event, previous_event_before_epilogue, async_with_compute_stream, allocate_on_comm_stream
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
        TypeError, ValueError, DeepEPTimeout, DeepEPError
            As `dispatch`.
        """
        self._buffer._check_normal("combine")
        arguments.integer("num_qps", num_qps, 0, arguments.MAX_ROWS)
        handle = check_handle(handle)
        given = CombineArguments(
            x,
            handle.dispatched,
            topk_weights,
            bias,
            _config(num_sms) or handle.config,
            streams(previous_event, previous_event_before_epilogue, async_with_compute_stream, allocate_on_comm_stream),
            placement=handle.expanded,
        )
        if handle.do_expand and not self.allow_multiple_reduction:
            return Combined(*combine_one_by_one(self._engine, given, handle))
        if self._engine.topology.hops == 1:
            given = replace(given, choices=Choices(handle.choices(), handle.num_experts))
        return Combined(*PendingCombine.begin(self._engine, given).finish())

    @by_one_thread
    def warmup(self, hidden: int, topk: int, fp8: bool = False) -> None:
        """Prepare the kernels for rows of `hidden` BF16 elements and `topk` experts per token, on all ranks.

        See `deep_ep_py.Buffer.warmup`. With `fp8`, those for dispatching FP8 rows are prepared too.

        Raises
        ------
        ValueError, TypeError
            The message names the argument.
        """
        self._engine.check_usable()
        arguments.integer("hidden", hidden, 1, arguments.MAX_ROW_BYTES // 2)
        arguments.integer("topk", topk, 1, arguments.MAX_TOPK)
        if not self.allow_multiple_reduction and 2 * hidden % arguments.ROW_ALIGNMENT == 0:
            prepare_one_by_one(self._engine, 2 * hidden, topk)
        rows = [2 * hidden, hidden] if arguments.flag("fp8", fp8) else [2 * hidden]
        for row_bytes in rows:
            if row_bytes % arguments.ROW_ALIGNMENT == 0:  # `Buffer.warmup` raises otherwise
                self._engine.prepare(row_bytes, topk, "expand_slots", "expand_rows", "fold")
                self._engine.prepare(row_bytes, 0, "scale_columns")
        prepare_barrier(self._engine)
        self._buffer.warmup(hidden, topk, fp8)

    @staticmethod
    def capture() -> EventHandle:
        """Record an event on the current stream."""
        return EventHandle()

    @by_one_thread
    def barrier(self, use_comm_stream: bool = True, with_cpu_sync: bool = False, sequential: bool = True) -> None:
        """Wait until all ranks have called this and all that each has queued before on its device has ended.

        It is an operation: in `stats`, and in the text of a timeout, a dispatch. On a GPU the current stream waits,
        unless `with_cpu_sync`; on a CPU the caller.

        Parameters
        ----------
        use_comm_stream, sequential : bool
            No effect: kernels run on the communication stream, one after the other.
        with_cpu_sync : bool
            Whether the host waits too.

        Raises
        ------
        TypeError, DeepEPError, DeepEPTimeout
            As `dispatch`.
        """
        self._buffer._check_normal("barrier")
        for name, value in (("use_comm_stream", use_comm_stream), ("sequential", sequential)):
            arguments.flag(name, value)
        waits = arguments.flag("with_cpu_sync", with_cpu_sync)
        barrier(self._engine)
        if waits:
            self._engine.device.synchronize()
            self._engine.check_usable()


def _config(sms: Any) -> Config | None:
    """Check a number of SMs; 0 stands for none given."""
    return Config(sms) if arguments.integer("num_sms", sms, 0, arguments.MAX_BLOCKS) else None


def buffer_under(buffer: Any) -> Buffer:
    """Return a Buffer that a caller passes, or the one that an `ElasticBuffer` has."""
    if isinstance(buffer, ElasticBuffer):
        return buffer._buffer
    if not isinstance(buffer, Buffer):
        raise TypeError(f"buffer={arguments.describe(buffer)}: expected a Buffer or an ElasticBuffer")
    return buffer
