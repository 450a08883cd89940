"""Low-latency mode with the interface of DeepEP 1.2's `deep_ep.Buffer`."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from deep_ep_py.base import arguments
from deep_ep_py.base.native import C
from deep_ep_py.base.one_thread import by_one_thread
from deep_ep_py.base.results import LowLatencyCombined, LowLatencyDispatched
from deep_ep_py.modes.low_latency import operations
from deep_ep_py.modes.low_latency.handles import Handle, origin_of
from deep_ep_py.modes.low_latency.operations import CombineArguments, DispatchArguments, Ending
from deep_ep_py.modes.low_latency.plans import Plans
from deep_ep_py.modes.low_latency.sizes import V1_MOST_TOPK, Sizes
from deep_ep_py.modes.low_latency.views import Views
from deep_ep_py.session.origin import check_origin

if TYPE_CHECKING:
    from deep_ep_py.session.engine import Engine

_V1_REGIONS = 2


class LowLatencySurface:
    """The low-latency calls of a Buffer."""

    low_latency_mode: bool
    group_size: int
    _engine: Any
    _low_latency_plans: Plans | None = None
    _zero_copy_views: Views | None = None

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int,
        hidden: int,
        num_ranks: int,
        num_experts: int,
        num_topk: int | None = None,
        regions: int = _V1_REGIONS,
    ) -> int:
        """Return the bytes that `Buffer(num_rdma_bytes=)` needs in low-latency mode.

        Parameters
        ----------
        num_max_dispatch_tokens_per_rank : int
            Maximum number of tokens of a rank.
        hidden : int
            Elements per row.
        num_ranks : int
            Number of ranks in the group.
        num_experts : int
            Number of experts on all ranks.
        num_topk : int, optional
            Experts per token. Default: 11, the maximum of DeepEP, or the number of experts if that is smaller.
        regions : int
            The `regions` of the Buffer: the number of operations that may be open at once.

        Returns
        -------
        int
            A multiple of 128. It covers rows of any type, and results also as LogFMT or summed.

        Raises
        ------
        ValueError, TypeError
            The message names the argument.
        """
        arguments.integer("num_ranks", num_ranks, 1, arguments.MAX_RANKS)
        arguments.integer("regions", regions, 1, C.MAX_REGIONS)
        arguments.experts(num_experts, num_ranks)
        topk = min(V1_MOST_TOPK, num_experts)
        if num_topk is not None:
            topk = arguments.integer("num_topk", num_topk, 1, arguments.MAX_TOPK)
        sizes = Sizes.checked(num_max_dispatch_tokens_per_rank, hidden, topk, num_experts, num_ranks)
        remote = num_ranks > 1
        summed = replace(sizes, weighted=True)
        return max(
            sizes.buffer_bytes(num_ranks, regions, remote, logfmt=sizes.has_logfmt),
            summed.buffer_bytes(num_ranks, regions, remote, logfmt=False),
        )

    @by_one_thread
    def low_latency_dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        cumulative_local_expert_recv_stats: torch.Tensor | None = None,
        dispatch_wait_recv_cost_stats: torch.Tensor | None = None,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        topk_weights: torch.Tensor | None = None,
    ) -> LowLatencyDispatched:
        """Send every token to its experts, without a preceding exchange of counts.

        Parameters
        ----------
        x : torch.Tensor
            bfloat16 [tokens, hidden], rows a multiple of 16 bytes long.
        topk_idx : torch.Tensor
            int64 or int32 [tokens, top-k]: expert ids, -1 for none. An expert that a token names twice receives it
            once.
        num_max_dispatch_tokens_per_rank : int
            Upper bound for the tokens of any rank in this call; the same on all ranks.
        num_experts : int
            Number of experts on all ranks; rank r holds ids [r * num_experts / ranks, (r + 1) * num_experts / ranks).
        cumulative_local_expert_recv_stats : torch.Tensor, optional
            int32 [local experts], to which the number of received rows is added.
        dispatch_wait_recv_cost_stats : torch.Tensor, optional
            int64 [ranks], to which the nanoseconds spent waiting for each source are added. (DeepEP counts cycles.)
        use_fp8 : bool
            Whether rows are cast to float8_e4m3fn as they are sent. Each 128 elements have a scale, so `hidden` must be
            a multiple of 128. The scale is `amax / 448`, where `amax`, their largest magnitude, is taken to be at least
            1e-4.
        round_scale : bool
            Whether scales are rounded to powers of two.
        use_ue8m0 : bool
            With `round_scale`, whether scales are stored as exponents only, four to an int32, the first in the lowest
            byte; bytes beyond `hidden` are zero.
        async_finish : bool
            As in `dispatch`.
        return_recv_hook : bool
            Whether this call only sends; the returned hook then receives. In between, no SM works on the call, except
            up to `forward_sms` blocks until the rows to forward have arrived and, if the dispatch was given the
            weights, a short kernel that sums a rank's own results. The results may be used only after the hook. Other
            calls may be made in between, as many as the Buffer has regions. Hooks may be called in any order, on any
            thread; one that is dropped runs before the next call. Must be the same on all ranks if rows may go once to
            each node and `forward_sms` is 0.
        topk_weights : torch.Tensor, optional
            float32 [tokens, top-k], on all ranks or none. The weights travel with the tokens, so that the combine
            returns one sum per token, instead of a row per choice, from every node (or every rank, if rows go to each
            rank) that this rank does not share memory with. Not with `enable_shrink`.

        Returns
        -------
        recv_x : torch.Tensor or tuple of torch.Tensor
            [local experts, ranks * num_max_dispatch_tokens_per_rank, hidden]. The rows of an expert come first, sorted
            by source, then token; what follows them is undefined. bfloat16, or with `use_fp8` a pair of float8_e4m3fn
            and scales. Scales are [local experts, ranks * num_max_dispatch_tokens_per_rank, hidden / 128] float32, or
            hidden / 512 int32, laid out so that those of neighboring rows are contiguous.
        recv_count : torch.Tensor
            int32 [local experts]: number of rows of each.
        handle : tuple
            For `low_latency_combine`: `(packed_recv_src_info, packed_recv_layout_range,
            num_max_dispatch_tokens_per_rank, hidden, num_experts)`. `packed_recv_src_info`, int32 [local experts, ranks
            * num_max_dispatch_tokens_per_rank], is the index of each row's token at its source;
            `packed_recv_layout_range`, int64 [local experts, ranks], is begin << 32 | count of the rows of each source.
        event : EventOverlap
        hook : callable or None

        Raises
        ------
        TypeError, ValueError
            The message names the argument. Also raised if the Buffer is too small.
        DeepEPTimeout, DeepEPError
            As `dispatch`.
        """
        engine = self._low_latency_engine("low_latency_dispatch")
        if use_fp8 is None or isinstance(use_fp8, torch.Tensor):
            raise TypeError(
                f"use_fp8={arguments.describe(use_fp8)}: expected a bool. sgl-deep-ep takes x_global_scale at this "
                "position; pass use_fp8 and what follows by name, and no NVFP4 scale"
            )
        given = DispatchArguments(
            x,
            topk_idx,
            num_max_dispatch_tokens_per_rank,
            num_experts,
            cumulative_local_expert_recv_stats,
            dispatch_wait_recv_cost_stats,
            use_fp8,
            round_scale,
            use_ue8m0,
            Ending.checked(async_finish, return_recv_hook),
            topk_weights,
        )
        return LowLatencyDispatched(*operations.dispatch(engine, self._plans(), given))

    @by_one_thread
    def low_latency_combine(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor | None,
        handle: Handle,
        use_logfmt: bool = False,
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out: torch.Tensor | None = None,
        combine_wait_recv_cost_stats: torch.Tensor | None = None,
    ) -> LowLatencyCombined:
        """Send the experts' results back to the tokens' owners, and sum them with the tokens' weights.

        Parameters
        ----------
        x : torch.Tensor
            bfloat16 [local experts, ranks * num_max_dispatch_tokens_per_rank, hidden]: a result in the place of each
            received row. It may be overwritten once the call has returned, or on a GPU by later work of its stream.
        topk_idx : torch.Tensor
            [tokens, top-k] as in the dispatch. A choice that is -1 here is left out of the sum, unless the dispatch was
            given the weights: then only the shape and type of this tensor are checked.
        topk_weights : torch.Tensor or None
            float32 [tokens, top-k]; None if the dispatch was given the weights.
        handle : tuple
            The handle of the dispatch. It may be used again, also as a tuple rebuilt from its elements.
        use_logfmt : bool
            Whether results travel as LogFMT where that is accurate: each 128 elements, of which `hidden` must be a
            multiple, take 160 bytes instead of 256, plus 4 for their range. An element is a sign and a code of 9 bits:
            0 is zero; 1 to 511 divide the logarithms evenly between the smallest nonzero and the largest magnitude of
            the 128. The logarithm is that of the float format: linear from one power of two to the next. If the 128 lie
            within 510 steps of bfloat16, almost a factor of 16, all are returned bit by bit; if they span 2**n, each
            has a relative error of at most n / 1000. Magnitudes below 2**-32 of the largest become zero. The 128 stay
            bfloat16 if one of them is 1 or more, an infinity, or a NaN. All targets produce the same bits; they differ
            from those of DeepEP, whose logarithm is exact up to rounding. Must be the same on all ranks; not with
            `zero_copy`.
        zero_copy : bool
            Whether the results are not in `x` but in the tensor that `get_next_low_latency_combine_buffer` returned for
            this handle. Other ranks read them there; therefore all ranks must call the hook of such a combine at the
            same place among their other calls and hooks, and dropping it breaks the Buffer. Not with `use_logfmt`.
        async_finish, return_recv_hook : bool
            As in `low_latency_dispatch`.
        out : torch.Tensor, optional
            bfloat16 [tokens, hidden]: receives the sums.
        combine_wait_recv_cost_stats : torch.Tensor, optional
            int64 [ranks], to which the nanoseconds spent waiting for each rank's results are added. If the dispatch was
            given the weights, time spent waiting for another node counts for the rank there that sends its sums.

        Returns
        -------
        combined_x : torch.Tensor
            bfloat16 [tokens, hidden]: the sum over a token's choices, in their order, of weight times result (as LogFMT
            has encoded it, if used), in fp32, rounded once. If the dispatch was given the weights, the part of each
            remote node is rounded to BF16; then these parts, in the order of nodes, and the individual results of this
            node are added in fp32, and the sum is rounded. The error is then at most 2**-8 of the sum of magnitudes,
            plus one rounding.
        event : EventOverlap
        hook : callable or None

        Raises
        ------
        TypeError, ValueError
            The message names the argument.
        DeepEPTimeout, DeepEPError
            As `dispatch`.
        """
        engine = self._low_latency_engine("low_latency_combine")
        ending = Ending.checked(async_finish, return_recv_hook)
        given = CombineArguments(
            x, topk_idx, topk_weights, handle, use_logfmt, zero_copy, ending, out, combine_wait_recv_cost_stats
        )
        return LowLatencyCombined(*operations.combine(engine, self._plans(), self._views(), given))

    def get_next_low_latency_combine_buffer(self, handle: Handle) -> torch.Tensor:
        """Return memory for the experts' results, for the next combine of this dispatch with `zero_copy=True`.

        Ranks that share memory with this one read the results there, which saves a copy. There are as many such tensors
        as the Buffer has regions; they are made on first use and kept. The caller owns the contents until the combine,
        and again once its results have been received.

        The tensors come from the shared memory of the ranks, which does not grow for them: `arena_bytes` of the Buffer
        must have room for all of them. A tensor that finds no room is ordinary memory: a warning is logged, and its
        results are copied after all.

        Parameters
        ----------
        handle : tuple
            Of the dispatch.

        Returns
        -------
        torch.Tensor
            bfloat16 [local experts, ranks * num_max_dispatch_tokens_per_rank, hidden]; the same tensor until the
            combine.

        Raises
        ------
        TypeError, ValueError
            The message names the argument.
        DeepEPError
            All tensors are in use by combines whose hooks have not been called.
        """
        engine = self._low_latency_engine("get_next_low_latency_combine_buffer")
        engine.run_dropped()
        _, origin = origin_of(handle)
        check_origin(engine, origin.owner, origin.generation)
        return self._views().next_for(origin, origin.result_shape)

    def _plans(self) -> Plans:
        if self._low_latency_plans is None:
            self._low_latency_plans = Plans(self._engine)
        return self._low_latency_plans

    def _views(self) -> Views:
        if self._zero_copy_views is None:
            self._zero_copy_views = Views(self._engine)
        return self._zero_copy_views

    def clean_low_latency_buffer(self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int) -> None:
        """Do nothing; with `enable_shrink`, wait for all ranks and mask those that do not arrive.

        V1 requires cleaning between a normal-mode call and its low-latency mode. Here an operation of either mode lays
        out its region itself, so nothing needs cleaning.

        Parameters
        ----------
        num_max_dispatch_tokens_per_rank : int
            Maximum number of tokens of a rank.
        hidden : int
            Elements per row.
        num_experts : int
            Number of experts on all ranks.

        Raises
        ------
        ValueError, TypeError
            The message names the argument.
        """
        self._engine.check_usable()
        Sizes.checked(num_max_dispatch_tokens_per_rank, hidden, 1, num_experts, self.group_size)
        if self._engine.masks_ranks:
            operations.meet(self._engine, self._plans())

    def _low_latency_engine(self, name: str) -> Engine:
        if not self.low_latency_mode:
            raise ValueError(f"{name}: expected a Buffer that was made with low_latency_mode=True")
        engine: Engine = self._engine
        engine.check_usable()
        return engine
