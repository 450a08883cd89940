"""Low-latency dispatch and combine on the host: the steps from arguments to results."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from deep_ep_py.base import arguments
from deep_ep_py.base.events import EventOverlap, Streams
from deep_ep_py.base.native import C
from deep_ep_py.base.one_thread import by_one_thread
from deep_ep_py.errors import DeepEPError
from deep_ep_py.modes.low_latency.handles import Origin, origin_of
from deep_ep_py.modes.low_latency.plans import Plans
from deep_ep_py.modes.low_latency.sizes import Sizes
from deep_ep_py.modes.low_latency.views import Views
from deep_ep_py.session.origin import check_origin

if TYPE_CHECKING:
    from deep_ep_py.device.device import Device
    from deep_ep_py.session.engine import Engine

Hook = Callable[[], None]
_ROW_TYPES = (torch.bfloat16,)
_SMALLEST_ROW = 8
"""Elements of the smallest row."""


class Ending(NamedTuple):
    """How a call ends: the arguments of V1."""

    async_finish: bool
    return_recv_hook: bool

    @staticmethod
    def checked(async_finish: Any, return_recv_hook: Any) -> Ending:
        """Check the arguments."""
        ending = Ending(
            arguments.flag("async_finish", async_finish), arguments.flag("return_recv_hook", return_recv_hook)
        )
        if ending.async_finish and ending.return_recv_hook:
            raise ValueError("async_finish=True: expected False with return_recv_hook=True, the hook ends the call")
        return ending

    def order(self, device: Device) -> None:
        """Order the kernels launched next after the caller's work, on its stream unless that continues beside them."""
        if self.async_finish:
            device.order_after_caller(None, False)
        else:
            device.launch_on_callers_stream()


class _Rest:
    """The receiving half of a call, which its hook launches."""

    def __init__(
        self, engine: Engine, call: C.Call, operation: int, published: bool, handle: tuple[torch.Tensor, ...]
    ) -> None:
        self._engine, self._call, self._operation, self._published = engine, call, operation, published
        self._handle = handle
        self._generation, self._done = engine.generation, False
        self._captured = engine.device.capturing()
        # Later work on this stream may use the results once the hook has been called, on any thread.
        self._on_callers_stream = engine.device.callers_stream()

    def run(self) -> None:
        """Launch the receiving half; on a CPU, wait for it."""
        if self._done:
            raise DeepEPError(f"{self._call.kind}: its hook has already been called")
        engine = self._engine
        if self._generation != engine.generation:
            raise DeepEPError(f"{self._call.kind}: begun before the Buffer recovered, its hook cannot be called")
        engine.check_process()
        engine.check_whole()
        with self._on_callers_stream():
            if engine.device.capturing() != self._captured:
                where = "in the capture" if self._captured else "outside a capture"
                raise DeepEPError(f"{self._call.kind}: it was begun {where}, so its hook must be called there")
            with engine.telling_others(self._call.kind):
                self._done = True
                engine.device.launch_on_callers_stream()
                C.low_latency.finish(engine.runtime, self._call)
                engine.end_operation(self._call, self._operation, Streams(), self._handle)

    def run_if_dropped(self) -> None:
        """Do the same for a dropped hook, if there is still something to receive."""
        engine = self._engine
        if self._done or self._generation != engine.generation or engine.broken is not None:
            return
        if self._captured or self._published:
            # It can no longer run in the capture, or in the order in which other ranks call such hooks.
            engine.break_off(f"the hook of a {self._call.kind} was dropped, but only its caller could call it in time")
            engine.check_whole()
        self.run()


class ReceiveHook:
    """A hook that receives the results of a call. It must be called once.

    A dropped hook runs before the next call or hook of its Buffer. It does not run when it is dropped, which may happen
    in a garbage collection at any time.
    """

    _called = True  # if an interrupt ends the constructor, there is nothing to do

    def __init__(self, engine: Engine, rest: _Rest) -> None:
        self._engine, self._rest, self._called = engine, rest, False

    @by_one_thread
    def hook(self) -> None:
        """Receive the results."""
        self._called = True
        self._engine.run_dropped()
        self._rest.run()

    __call__ = hook

    def __del__(self) -> None:
        if not self._called:
            self._engine.dropped.append(self._rest.run_if_dropped)


def _end(
    engine: Engine,
    call: C.Call,
    operation: int,
    ending: Ending,
    published: bool = False,
    handle: tuple[torch.Tensor, ...] = (),
) -> tuple[EventOverlap, Hook | None]:
    """End a call whose kernels are launched, or its sending half. For `handle`, see `Engine.end_operation`."""
    engine.note_call(call, operation)
    if not ending.return_recv_hook:
        return engine.end_operation(call, operation, Streams(async_finish=ending.async_finish), handle), None
    hook = ReceiveHook(engine, _Rest(engine, call, operation, published, handle))
    event = engine.await_half(call)
    if C.low_latency.forwards(call):  # it waits for other ranks, for which the caller's stream must not wait
        engine.device.order_after_caller(None, False)
        engine.go_on_alone(C.low_latency.forward(engine.runtime, call))
    return EventOverlap(event), hook


class DispatchArguments(NamedTuple):
    """The arguments of a low-latency dispatch; see `Buffer.low_latency_dispatch`."""

    x: Any
    topk_idx: Any
    num_max_dispatch_tokens_per_rank: Any
    num_experts: Any
    cumulative_local_expert_recv_stats: Any
    dispatch_wait_recv_cost_stats: Any
    use_fp8: Any
    round_scale: Any
    use_ue8m0: Any
    ending: Ending
    topk_weights: Any = None


def dispatch(engine: Engine, plans: Plans, given: DispatchArguments) -> tuple[Any, ...]:
    """Check the arguments, allocate the outputs and launch the kernels of a dispatch."""
    device, ranks = engine.device.torch_device, engine.ranks
    x = arguments.rows("x", given.x, _ROW_TYPES, device)
    tokens, hidden = x.shape
    experts = arguments.experts(given.num_experts, ranks)
    topk_idx = arguments.topk_idx(given.topk_idx, experts, device, tokens)
    max_tokens = arguments.max_tokens(given.num_max_dispatch_tokens_per_rank)
    if tokens > max_tokens:
        raise ValueError(
            f"x={arguments.describe(x)}: expected at most num_max_dispatch_tokens_per_rank={max_tokens} tokens"
        )
    use_fp8 = arguments.flag("use_fp8", given.use_fp8)
    if use_fp8 and hidden % C.low_latency.SCALE_GROUP:
        raise ValueError(
            f"x={arguments.describe(x)}: expected rows of a multiple of {C.low_latency.SCALE_GROUP} elements with "
            "use_fp8=True"
        )
    weights = None
    if given.topk_weights is not None:
        if engine.masks_ranks:
            raise ValueError("topk_weights: expected None on a Buffer with enable_shrink=True")
        weights = arguments.tensor("topk_weights", given.topk_weights, torch.float32, topk_idx.shape, device)
    plan = plans.dispatch(
        max_tokens,
        hidden,
        topk_idx.shape[1],
        experts,
        use_fp8,
        arguments.flag("round_scale", given.round_scale),
        arguments.flag("use_ue8m0", given.use_ue8m0),
        topk_idx.element_size(),
        weights is not None,
        _may_forward(engine, given.ending),
    )
    sizes, local = plan.sizes, plan.local_experts
    stats = _optional(
        "cumulative_local_expert_recv_stats", given.cumulative_local_expert_recv_stats, torch.int32, local, device
    )
    waited = _optional("dispatch_wait_recv_cost_stats", given.dispatch_wait_recv_cost_stats, torch.int64, ranks, device)

    places_memory = ((Origin.places_words(sizes, ranks, tokens),), torch.int32)
    places, recv_x, recv_count, src_info, ranges, *row_scales = engine.empty_private(places_memory, *plan.outputs)
    recv_scales = row_scales[0] if row_scales else None
    with engine.opening(
        "low-latency dispatch",
        x,
        topk_idx,
        weights,
        recv_x,
        recv_scales,
        recv_count,
        src_info,
        ranges,
        places,
        stats,
        waited,
    ) as operation:
        origin = Origin(engine, engine.generation, operation, sizes, tokens, places)
        given.ending.order(engine.device)
        call = C.low_latency.dispatch(
            engine.runtime,
            plan.native,
            tokens,
            x.data_ptr(),
            topk_idx.data_ptr(),
            _address(weights),
            recv_x.data_ptr(),
            _address(recv_scales),
            0 if recv_scales is None else recv_scales.shape[2],
            recv_count.data_ptr(),
            src_info.data_ptr(),
            ranges.data_ptr(),
            places.data_ptr(),
            _address(stats),
            _address(waited),
            not given.ending.return_recv_hook,
            _blocks(engine, tokens, sizes),
            _forward_blocks(engine, tokens, sizes),
        )
        engine.log.moved(operation, "tokens sent", tokens, sizes.hidden * _ROW_TYPES[0].itemsize, "low latency")
        event, hook = _end(engine, call, operation, given.ending)
    engine.stats["low_latency_dispatches"] += 1
    packed = recv_x if recv_scales is None else (recv_x, _by_rows(recv_scales, recv_x.shape[1]))
    return packed, recv_count, origin.handle_of(src_info, ranges), event, hook


def meet(engine: Engine, plans: Plans) -> None:
    """Wait for all ranks with a dispatch without tokens. A Buffer that masks ranks masks those that do not arrive."""
    device, smallest = engine.device.torch_device, Sizes(1, _SMALLEST_ROW, 1, engine.ranks)
    nothing = torch.empty((0, smallest.hidden), dtype=torch.bfloat16, device=device)
    ids = torch.empty((0, 1), dtype=torch.int64, device=device)
    sizes = (smallest.max_tokens, smallest.experts)
    given = DispatchArguments(nothing, ids, *sizes, None, None, False, False, False, Ending(False, False))
    dispatch(engine, plans, given)


def _blocks(engine: Engine, tokens: int, sizes: Sizes) -> int:
    """Return the number of blocks for the most that a rank reads and writes: each row once per expert."""
    return engine.device.blocks_for(2 * tokens * sizes.topk * sizes.hidden * torch.bfloat16.itemsize)


def _may_forward(engine: Engine, ending: Ending) -> bool:
    """Return whether rows may go once to each node.

    Raises
    ------
    ValueError
        The Buffer demands it, but this call cannot do it.
    """
    topology = engine.topology
    # No other rank takes over the rows of a forwarder that is left out, so rows then go to each rank.
    allowed = not engine.masks_ranks and engine.mask == 0
    if allowed and topology.once_per_node and ending.return_recv_hook and topology.forward_sms == 0:
        raise ValueError(
            "return_recv_hook=True: expected forward_sms of at least 1 on a Buffer with once_per_node=True; a hook may "
            "run too late to forward rows that other ranks wait for"
        )
    return allowed and (topology.forward_sms > 0 or not ending.return_recv_hook)


def _forward_blocks(engine: Engine, tokens: int, sizes: Sizes) -> int:
    """Return the number of blocks for a launch that only forwards.

    If it waits for other ranks, that is at most `forward_sms`; if it only sums the rank's own results, as many as send.
    """
    blocks = _blocks(engine, tokens, sizes)
    return min(blocks, engine.topology.forward_sms) if sizes.per_node > 1 else blocks


def _optional(name: str, value: Any, dtype: torch.dtype, extent: int, device: torch.device) -> torch.Tensor | None:
    return None if value is None else arguments.tensor(name, value, dtype, (extent,), device)


def _by_rows(scales: torch.Tensor, rows: int) -> torch.Tensor:
    """Return `scales.transpose(1, 2)[:, :rows]` of a contiguous tensor in one step."""
    experts, words, stride = scales.shape
    return scales.as_strided((experts, rows, words), (words * stride, 1, stride))


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


class CombineArguments(NamedTuple):
    """The arguments of a low-latency combine; see `Buffer.low_latency_combine`."""

    x: Any
    topk_idx: Any
    topk_weights: Any
    handle: Any
    use_logfmt: Any
    zero_copy: Any
    ending: Ending
    out: Any
    combine_wait_recv_cost_stats: Any


def _check_summed(engine: Engine, sizes: Sizes, given: CombineArguments, logfmt: bool) -> None:
    """Check the arguments of a combine whose dispatch was given the weights.

    Raises
    ------
    ValueError
        The message names the argument.
    """
    if given.topk_weights is not None:
        raise ValueError(
            f"topk_weights={arguments.describe(given.topk_weights)}: expected None, since the dispatch of this handle "
            "was given the weights"
        )
    if logfmt:
        raise ValueError("use_logfmt=True: expected False, since the dispatch was given the weights and sums are sent")
    if engine.masks_ranks:
        raise ValueError("handle: expected one of a dispatch without topk_weights on a Buffer with enable_shrink=True")
    if sizes.per_node > 1 and given.ending.return_recv_hook and engine.topology.forward_sms == 0:
        raise ValueError(
            "return_recv_hook=True: expected a Buffer with forward_sms of at least 1, since the dispatch was given the "
            "weights and its rows went once to each node; a hook may run too late to sum results that others wait for"
        )


def combine(
    engine: Engine, plans: Plans, views: Views, given: CombineArguments
) -> tuple[torch.Tensor, EventOverlap, Hook | None]:
    """Check the arguments, allocate the output and launch the kernels of a combine."""
    handle, origin = origin_of(given.handle)
    check_origin(engine, origin.owner, origin.generation)
    if origin.owner is not engine and origin.owner.topology.mapped != engine.topology.mapped:
        raise ValueError("handle: expected one of a Buffer that reaches the same ranks by loads and stores")
    if origin.owner.is_open(origin.operation):
        raise ValueError("handle: expected one of a dispatch whose hook has been called")
    device, ranks, sizes, tokens = engine.device.torch_device, engine.ranks, origin.sizes, origin.tokens
    logfmt, zero_copy = arguments.flag("use_logfmt", given.use_logfmt), arguments.flag("zero_copy", given.zero_copy)
    if logfmt and zero_copy:
        raise ValueError("use_logfmt=True: expected False with zero_copy=True, since the cast needs a copy")
    if logfmt and not sizes.has_logfmt:
        raise ValueError(
            f"handle: of rows of {sizes.hidden} elements, expected a multiple of {C.low_latency.LOG_GROUP} elements "
            "with use_logfmt=True"
        )
    shape = origin.result_shape
    x = arguments.aligned("x", arguments.tensor("x", given.x, torch.bfloat16, shape, device))
    view = views.take(origin, shape) if zero_copy else None
    x = x if view is None else view.memory
    topk_idx = arguments.topk_idx(given.topk_idx, sizes.experts, device, tokens)
    if topk_idx.shape[1] != sizes.topk:
        raise ValueError(
            f"topk_idx={arguments.describe(topk_idx)}: expected [{tokens}, {sizes.topk}], as in the dispatch"
        )
    weights = None
    if sizes.weighted:
        _check_summed(engine, sizes, given, logfmt)
    else:
        weights = arguments.tensor("topk_weights", given.topk_weights, torch.float32, (tokens, sizes.topk), device)
    waited = _optional("combine_wait_recv_cost_stats", given.combine_wait_recv_cost_stats, torch.int64, ranks, device)
    out = given.out
    if out is not None:
        out = arguments.aligned("out", arguments.tensor("out", out, torch.bfloat16, (tokens, sizes.hidden), device))
    native = plans.combine(sizes, topk_idx.element_size(), logfmt)

    combined = out
    if combined is None:
        (combined,) = engine.empty_private(((tokens, sizes.hidden), torch.bfloat16))
    # The caller may overwrite x once a call has returned, which on a CPU without a hook is after its end.
    in_one = engine.pulls and not engine.device.asynchronous and not given.ending.return_recv_hook
    # A masked rank does not signal that it has read; with masks, therefore, no results are published.
    publish = (zero_copy or (in_one and not logfmt)) and not engine.masks_ranks
    src_info, ranges = handle[:2]
    with engine.opening(
        "low-latency combine", x, topk_idx, weights, combined, waited, src_info, ranges, origin.places
    ) as operation:
        if view is not None:
            view.given_for, view.used_by = None, (engine.generation, operation)
        given.ending.order(engine.device)
        call = C.low_latency.combine(
            engine.runtime,
            native,
            tokens,
            x.data_ptr(),
            topk_idx.data_ptr(),
            _address(weights),
            combined.data_ptr(),
            publish,
            src_info.data_ptr(),
            ranges.data_ptr(),
            origin.places.data_ptr(),
            _address(waited),
            origin.number,
            not given.ending.return_recv_hook,
            _blocks(engine, tokens, sizes),
            _forward_blocks(engine, tokens, sizes),
        )
        engine.log.moved(operation, "tokens combined", tokens, sizes.hidden * _ROW_TYPES[0].itemsize, "low latency")
        event, hook = _end(engine, call, operation, given.ending, publish, (src_info, ranges, origin.places))
    if view is not None and hook is None:
        view.event = event
    engine.stats["low_latency_combines"] += 1
    return combined, event, hook
