"""Low-latency mode as `deep_ep.Buffer` of DeepEP 1.2 has it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from deep_ep_py.core import arguments
from deep_ep_py.core.events import EventOverlap
from deep_ep_py.core.native import C
from deep_ep_py.modes.low_latency import operations
from deep_ep_py.modes.low_latency.handles import Handle, origin_of
from deep_ep_py.modes.low_latency.operations import CombineArguments, DispatchArguments, Ending, Hook
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
        """Bytes for `Buffer(num_rdma_bytes=)` in low-latency mode: rows of any type, results also as LogFMT or summed.

        Parameters
        ----------
        num_max_dispatch_tokens_per_rank : int
            Tokens of a rank, at most.
        hidden : int
            Elements of a row.
        num_ranks : int
            Ranks of the group.
        num_experts : int
            Experts of all ranks.
        num_topk : int, optional
            Experts of a token. Default: 11, the most that DeepEP takes, or all experts if they are fewer.
        regions : int
            As `Buffer` is given it: operations that may be open at once.

        Returns
        -------
        int
            A multiple of 128.

        Raises
        ------
        ValueError, TypeError
            Naming the argument.
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
    ) -> tuple[torch.Tensor | tuple[torch.Tensor, torch.Tensor], torch.Tensor, Handle, EventOverlap, Hook | None]:
        """Send every token to its experts, without an exchange of counts before it.

        Parameters
        ----------
        x : torch.Tensor
            bfloat16 [tokens, hidden], rows of a multiple of 16 bytes.
        topk_idx : torch.Tensor
            int64 or int32 [tokens, top-k]: expert ids, -1 for none. An expert that a token names twice gets it once.
        num_max_dispatch_tokens_per_rank : int
            No rank has more tokens in this call; the same on all ranks.
        num_experts : int
            Experts of all ranks; rank r holds ids [r * num_experts / ranks, (r + 1) * num_experts / ranks).
        cumulative_local_expert_recv_stats : torch.Tensor, optional
            int32 [local experts]: rows received are added.
        dispatch_wait_recv_cost_stats : torch.Tensor, optional
            int64 [ranks]: nanoseconds that were spent waiting for each source are added. (DeepEP counts cycles.)
        use_fp8 : bool
            Rows are cast to float8_e4m3fn as they are sent, with a scale for every 128 elements, of which `hidden` must
            then be a multiple: `amax / 448` of their largest magnitude, which is taken to be at least 1e-4.
        round_scale : bool
            Scales are powers of two.
        use_ue8m0 : bool
            With `round_scale`: scales are exponents alone, four to an int32, the first in the lowest byte; bytes that
            `hidden` does not fill are zero.
        async_finish : bool
            As in `dispatch`.
        return_recv_hook : bool
            Only send now; receive when the returned hook is called. In between no SM works for the call, except up to
            `forward_sms` blocks until the rows to forward have come, and a short kernel that sums a rank's own results
            if the dispatch was given the weights. The results may be used after the hook alone. Other calls may come in
            between, as many as the Buffer has regions; hooks may be called in any order, on any thread. One that is
            dropped runs before the next call. Must be the same on all ranks where rows may go once to each node and
            `forward_sms` is 0.
        topk_weights : torch.Tensor, optional
            float32 [tokens, top-k], on all ranks or none. They go with the tokens, so that the combine brings back one
            sum for each token from every node (or from every rank, where rows go to each rank) that this rank's memory
            is not mapped to, instead of a row for each choice. Not with `enable_shrink`.

        Returns
        -------
        recv_x : torch.Tensor or tuple of torch.Tensor
            [local experts, ranks * num_max_dispatch_tokens_per_rank, hidden]: an expert's rows stand at the beginning,
            sorted by source, then token; what stands behind them is undefined. bfloat16; or with `use_fp8`
            float8_e4m3fn and the scales, [local experts, ranks * num_max_dispatch_tokens_per_rank, hidden / 128]
            float32, or hidden / 512 int32, the rows next to each other in memory.
        recv_count : torch.Tensor
            int32 [local experts]: rows of each.
        handle : tuple
            For `low_latency_combine`: `(packed_recv_src_info int32 [local experts, ranks * most tokens]: each row's
            token at its source, packed_recv_layout_range int64 [local experts, ranks]: begin << 32 | count of each
            source's rows, num_max_dispatch_tokens_per_rank, hidden, num_experts)`.
        event : EventOverlap
        hook : callable or None

        Raises
        ------
        TypeError, ValueError
            Naming the argument. Also where the Buffer is too small.
        DeepEPTimeout, DeepEPError
            As `dispatch`.
        """
        engine = self._low_latency_engine("low_latency_dispatch")
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
        packed, count, handle, event, hook = operations.dispatch(engine, self._plans(), given)
        return packed, count, handle, event, hook

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
    ) -> tuple[torch.Tensor, EventOverlap, Hook | None]:
        """Send the experts' results back to their tokens, and sum them with the tokens' weights.

        Parameters
        ----------
        x : torch.Tensor
            bfloat16 [local experts, ranks * num_max_dispatch_tokens_per_rank, hidden]: a result in the place of each
            row that was received. May be written over once the call has returned, or its stream has come so far.
        topk_idx : torch.Tensor
            [tokens, top-k] as in the dispatch; where it is -1, that choice is left out of the sum, unless the dispatch
            had the weights: then only its shape and type are checked.
        topk_weights : torch.Tensor or None
            float32 [tokens, top-k]; None if the dispatch was given them.
        handle : tuple
            Of the dispatch; may be used again, also as a tuple that was rebuilt of its elements.
        use_logfmt : bool
            Results travel as LogFMT where that is accurate: for every 128 elements, of which `hidden` must then be a
            multiple, 160 bytes instead of 256, and 4 for their range. An element is a sign and a code of 9 bits: 0 is
            zero, 1 to 511 divide the logarithms evenly between the least magnitude of the 128 that is not zero and the
            largest. The logarithm is that of the float format: linear from one power of two to the next. Where the 128
            lie within 510 steps of bfloat16, almost a factor of 16, all come back bit by bit; where they span 2**n, one
            is off by at most n / 1000 of itself. What is less than 2**-32 of the largest becomes zero. The 128 stay
            bfloat16 if one of them is 1 or more, an infinity, or a NaN. All targets give the same bits; they are not
            DeepEP's, whose logarithm is exact up to rounding. The same on all ranks; not with `zero_copy`.
        zero_copy : bool
            The results are not in `x` but where `get_next_low_latency_combine_buffer` has said for this handle.
            Other ranks read them there: all ranks call the hook of such a combine at the same place among their other
            calls and hooks, and one that is dropped breaks the Buffer. Not with `use_logfmt`.
        async_finish, return_recv_hook : bool
            As in `low_latency_dispatch`.
        out : torch.Tensor, optional
            bfloat16 [tokens, hidden]: where to put the sums.
        combine_wait_recv_cost_stats : torch.Tensor, optional
            int64 [ranks]: nanoseconds that were spent waiting for each rank's results are added. If the dispatch was
            given the weights, time spent on another node counts for the rank there that sends its sums.

        Returns
        -------
        combined_x : torch.Tensor
            bfloat16 [tokens, hidden]: the sum over a token's choices, in their order, of weight times result, or what
            LogFMT has made of it, in fp32, rounded once. If the dispatch was given the weights, each far node's part
            is rounded to BF16, then the parts are added in fp32 in the order of nodes, this node's results one by one,
            and rounded. The error is at most 2**-8 of the magnitudes summed, and one rounding.
        event : EventOverlap
        hook : callable or None

        Raises
        ------
        TypeError, ValueError
            Naming the argument.
        DeepEPTimeout, DeepEPError
            As `dispatch`.
        """
        engine = self._low_latency_engine("low_latency_combine")
        ending = Ending.checked(async_finish, return_recv_hook)
        given = CombineArguments(
            x, topk_idx, topk_weights, handle, use_logfmt, zero_copy, ending, out, combine_wait_recv_cost_stats
        )
        return operations.combine(engine, self._plans(), self._views(), given)

    def get_next_low_latency_combine_buffer(self, handle: Handle) -> torch.Tensor:
        """Return memory for the experts' results, for the next combine of a dispatch with `zero_copy=True`.

        Ranks that are mapped read the results there, so that they are not copied. There are as many such tensors as
        the Buffer has regions; they are made when they are first asked for, and kept. What is there is only the
        caller's until the combine, and again when its results have been received.

        They come from the memory that ranks share, which does not grow for them: `arena_bytes` of the Buffer must
        have room for all of them. One that finds none is ordinary memory: a warning says so, and its results are
        copied after all.

        Parameters
        ----------
        handle : tuple
            Of the dispatch.

        Returns
        -------
        torch.Tensor
            bfloat16 [local experts, ranks * num_max_dispatch_tokens_per_rank, hidden]; the same until the combine.

        Raises
        ------
        TypeError, ValueError
            Naming the argument.
        DeepEPError
            All are in use by combines whose hooks have not been called.
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
        """Do nothing, but with `enable_shrink` wait for all ranks, and mask those that do not come.

        Callers of V1 clean before its low-latency mode, after any normal-mode call. Here an operation of any mode lays
        out its region itself, so nothing left there needs cleaning.

        Parameters
        ----------
        num_max_dispatch_tokens_per_rank : int
            Tokens of a rank, at most.
        hidden : int
            Elements of a row.
        num_experts : int
            Experts of all ranks.

        Raises
        ------
        ValueError, TypeError
            Naming the argument.
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
