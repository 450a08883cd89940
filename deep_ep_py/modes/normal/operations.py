"""Normal-mode dispatch and combine on the host: the steps from arguments to results."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from deep_ep_py.base import arguments
from deep_ep_py.base.config import blocks_of
from deep_ep_py.base.events import Streams
from deep_ep_py.base.native import C
from deep_ep_py.device.rates import destinations
from deep_ep_py.errors import DeepEPError
from deep_ep_py.modes.normal.choice_sums import ChoiceSums
from deep_ep_py.modes.normal.counted import Choices, ReceivedCounts
from deep_ep_py.modes.normal.expanded import Expand, Expanded, Placement
from deep_ep_py.modes.normal.handles import DispatchRecord, record_of
from deep_ep_py.modes.normal.layout import check_room
from deep_ep_py.modes.normal.plans import Plan, way_of
from deep_ep_py.modes.normal.rows import Received, Rows
from deep_ep_py.session.origin import check_origin

if TYPE_CHECKING:
    from deep_ep_py.base.config import Config
    from deep_ep_py.base.events import EventOverlap
    from deep_ep_py.session.engine import Engine


@dataclass
class _Pending:
    """An operation that has been counted, so that peers rely on its completion."""

    engine: Engine
    call: C.Call
    operation: int
    blocks: int
    streams: Streams
    finished: bool = field(default=False, init=False)
    generation: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.generation = self.engine.generation
        self.engine.note_call(self.call, self.operation)

    def finish(self) -> tuple[Any, ...]:
        """Do the rest of the operation and wait for it."""
        if self.finished:
            raise DeepEPError(f"operation {self.operation}: it has already been finished")
        if self.generation != self.engine.generation:
            raise DeepEPError(f"operation {self.operation}: begun before the Buffer recovered, it cannot be finished")
        self.engine.check_whole()
        with self.engine.telling_others(self.call.kind):
            self.finished = True  # not earlier: after an interrupt before the guard, __del__ notifies the peers
            return self._finish()

    def _finish(self) -> tuple[Any, ...]:
        raise NotImplementedError

    def __del__(self) -> None:
        # The peers wait for rows that will never arrive, so notify them now.
        if not self.finished and self.generation == self.engine.generation:
            self.engine.break_off(f"operation {self.operation} was begun and dropped")


@dataclass(frozen=True)
class DispatchArguments:
    """The arguments of a dispatch; see `Buffer.dispatch`.

    With `finish_later`, each rank may begin or finish other operations before it finishes this one, as long as all
    ranks begin operations in one order and finish them in one order (P1). Without it, `finish` must follow at once: one
    kernel then sends this rank's counts and waits for those of the others, or with a handle, the only kernel takes the
    operation's number.
    """

    x: Any
    handle: Any = None
    num_tokens_per_rank: Any = None
    is_token_in_rank: Any = None
    num_tokens_per_expert: Any = None
    topk_idx: Any = None
    topk_weights: Any = None
    expert_alignment: int = 1
    num_worst_tokens: int = 0
    config: Config | None = None
    streams: Streams = field(default_factory=Streams)
    finish_later: bool = False
    counts: ReceivedCounts | None = None
    """Where to store on the device how many rows arrive."""
    num_experts: int = 0
    """With a handle and `topk_idx`: the number of experts."""
    placement: Placement | None = None
    """The layout of the outputs; None: one row per token, scales row by row."""
    notes_holders: bool = False
    """Record which rank holds each choice, so that a combine takes its weight from there alone. In two hops; in one
    hop, `CombineArguments.choices` say so."""
    before: tuple[torch.Tensor | None, ...] = ()
    """Tensors of kernels launched before, which may still use them."""
    called: str = "dispatch"
    """What the caller has called, for messages and logs."""


@dataclass
class PendingDispatch(_Pending):
    """A dispatch whose counts are in flight. `given` has been checked."""

    given: DispatchArguments
    sizes: C.normal.Sizes
    rows: Rows
    plan: Plan
    record: DispatchRecord | None

    @staticmethod
    def begin(engine: Engine, given: DispatchArguments) -> PendingDispatch:
        """Check the arguments and launch the first kernel, if the counts are not known."""
        arguments.integer("expert_alignment", given.expert_alignment, 1, arguments.MAX_ALIGNMENT)
        arguments.integer("num_worst_tokens", given.num_worst_tokens, 0, arguments.MAX_ROWS)
        blocks = blocks_of(given.config)
        if given.handle is not None and given.finish_later:
            raise ValueError(
                "finish_later=True: expected False with a handle, since the only kernel follows in `finish`"
            )
        if given.handle is not None:
            return PendingDispatch._begin_cached(engine, given, blocks)
        if given.num_worst_tokens == 0 and engine.device.capturing():
            raise ValueError(
                "num_worst_tokens=0: expected the maximum number of rows that a rank may receive, or a handle, during "
                "graph capture: sizes cannot depend on what arrives"
            )

        ranks, device, streams = engine.ranks, engine.device.torch_device, given.streams
        rows = Rows.of("x", given.x, device)
        tokens = rows.x.shape[0]
        arguments.tensor("num_tokens_per_rank", given.num_tokens_per_rank, torch.int32, (ranks,), device)
        in_rank = arguments.tensor("is_token_in_rank", given.is_token_in_rank, torch.bool, (tokens, ranks), device)
        per_expert = arguments.tensor(
            "num_tokens_per_expert", given.num_tokens_per_expert, torch.int32, (None,), device
        )
        experts = arguments.experts(per_expert.shape[0], ranks, "len(num_tokens_per_expert)")
        sizes = _sizes(engine, rows, given, experts)
        check_room(engine, sizes)
        stored = tokens * (destinations(sizes.topk, ranks) if sizes.topk else ranks)
        blocks = blocks or engine.device.blocks_for((tokens + stored) * rows.row_bytes)
        way = way_of(engine.topology)
        notify, counts, dispatch, _ = way.kernels
        engine.prepare(sizes.row_bytes, sizes.topk, notify, *((counts,) if given.finish_later else ()), dispatch)
        if given.placement is not None:
            given.placement.prepare(engine, sizes)

        with engine.device.allocating(streams.allocate_on_comm):
            plan: Plan = way.empty(engine.topology, tokens, device)
        received = given.counts or ReceivedCounts()
        exact = not given.num_worst_tokens
        offers_layout = isinstance(given.placement, Expand) and exact and given.placement.by_senders(engine)
        tensors = (*rows.tensors(), in_rank, per_expert, given.topk_idx, given.topk_weights, *plan.tensors())
        tensors = (*tensors, *received.tensors(), *given.before)
        # The kernel compares the ids with the layout, unless this Buffer has counted one from the other. A graph may be
        # replayed with other ids.
        counted = given.topk_idx is not None and engine.counted.are(given.topk_idx, per_expert, in_rank)
        known = given.topk_idx is None or (counted and not engine.device.capturing())
        with engine.opening(given.called, *tensors) as operation:
            engine.device.order_after_caller(streams.event, streams.allocate_on_comm)
            engine.growth.announce(engine.runtime, host_waits=not given.num_worst_tokens)
            call = plan.calls.notify(
                engine.runtime,
                sizes,
                is_token_in_rank=in_rank.data_ptr(),
                tokens_per_expert=per_expert.data_ptr(),
                checked_ids=None if known else given.topk_idx.data_ptr(),
                plan=plan.native,
                counts=received.native(starts=offers_layout),
                max_rows=given.num_worst_tokens,
                finish_later=given.finish_later,
                blocks=blocks,
            )
            pending = PendingDispatch(engine, call, operation, blocks, streams, given, sizes, rows, plan, None)
        return pending

    @staticmethod
    def _begin_cached(engine: Engine, given: DispatchArguments, blocks: int | None) -> PendingDispatch:
        record, streams = checked_record(engine, given.handle), given.streams
        # Arguments that a cached dispatch ignores get their defaults.
        given = DispatchArguments(
            given.x,
            record,
            topk_idx=given.topk_idx,
            topk_weights=given.topk_weights,
            streams=streams,
            num_experts=given.num_experts,
            placement=given.placement,
        )
        rows = Rows.of("x", given.x, engine.device.torch_device, record.tokens)
        sizes = _sizes(engine, rows, given, given.num_experts)
        check_room(engine, sizes)
        blocks = blocks or engine.device.blocks_for((record.tokens + record.rows) * rows.row_bytes)
        _, _, dispatch, _ = record.plan.kernels
        engine.prepare(sizes.row_bytes, sizes.topk, dispatch)
        if given.placement is not None:
            given.placement.prepare(engine, sizes)
        tensors = (*rows.tensors(), *record.tensors(), given.topk_idx, given.topk_weights)
        with engine.opening("cached dispatch", *tensors) as operation:
            engine.device.order_after_caller(streams.event, on_comm_stream=True)  # the rest follows in `finish`
            call = C.normal.open_cached_dispatch(engine.runtime, sizes, handle=record.number)
            pending = PendingDispatch(engine, call, operation, blocks, streams, given, sizes, rows, record.plan, record)
        return pending

    def _finish(self) -> tuple[Any, ...]:
        """Wait for the counts, allocate the outputs and move the rows."""
        engine, call, given, cached = self.engine, self.call, self.given, self.record is not None
        count = self._count()
        recv_topk_idx = recv_topk_weights = recv_source = None
        with engine.device.allocating(self.streams.allocate_on_comm):
            if given.topk_weights is not None:
                recv_topk_weights = engine.empty((count, given.topk_weights.shape[1]), torch.float32)
            if not cached:
                held_topk = self.sizes.topk if given.notes_holders else 0
                self.plan = self.plan.with_table(call, given.num_worst_tokens, held_topk)
                recv_source = engine.empty(self.plan.sources(engine.topology, count), torch.int32)
            counts = self._counts_per_expert()
            scales = self.rows.received_scales(count, engine.empty)
            reached = (scales, recv_topk_weights, recv_source)
            into = own = None
            if isinstance(given.placement, Expand):
                into = given.placement.take_directly(engine, self.rows, count, counts, reached)
                if given.topk_idx is not None and not given.num_worst_tokens:
                    own = given.placement.own_choices(engine, given.topk_idx, self.sizes.experts)
            if into is not None:
                x, recv_topk_idx = into
            else:
                x = engine.empty((count, self.rows.hidden), self.rows.x.dtype)
                if given.topk_idx is not None:
                    recv_topk_idx = engine.empty((count, given.topk_idx.shape[1]), given.topk_idx.dtype)
            received = Rows(x, scales)
            arrived = Received(received, recv_topk_idx, recv_topk_weights)
            outputs = arrived
            if given.placement is not None:
                outputs = given.placement.allocate(engine, arrived, counts)
                engine.hold(self.operation, *outputs.tensors(), *given.placement.tensors())

        tensors = C.normal.DispatchTensors()
        tensors.x, tensors.recv_x = self.rows.x.data_ptr(), received.x.data_ptr()
        if self.rows.scales is not None and received.scales is not None:
            tensors.scales, tensors.recv_scales = self.rows.scales.data_ptr(), received.scales.data_ptr()
            tensors.scales_stride = self.rows.strides
        if given.topk_idx is not None and recv_topk_idx is not None:
            tensors.topk_idx, tensors.recv_topk_idx = given.topk_idx.data_ptr(), recv_topk_idx.data_ptr()
        if given.topk_weights is not None and recv_topk_weights is not None:
            tensors.topk_weights, tensors.recv_topk_weights = (
                given.topk_weights.data_ptr(),
                recv_topk_weights.data_ptr(),
            )
        if recv_source is not None:
            tensors.recv_src_idx, tensors.source_words = recv_source.data_ptr(), _words(recv_source)
        engine.hold(self.operation, *received.tensors(), recv_topk_idx, recv_topk_weights, recv_source)
        if not cached:
            engine.hold(self.operation, *self.plan.tensors())
        # Earlier uses of the outputs' memory must have ended before a peer is told where it is (P9).
        engine.device.order_after_caller(self.streams.before_outputs, self.streams.allocate_on_comm)
        if own is not None:
            engine.hold(self.operation, *own.tensors())
            own.launch(engine, call, self.sizes, self.blocks)
            tensors.ordinals = own.ordinals.data_ptr()
        if into is not None:
            tensors.expanded_rows = x.shape[0]
        direct = self.plan.calls.dispatch(
            engine.runtime,
            call,
            self.sizes,
            tensors,
            plan=self.plan.native,
            rows=count,
            cached=cached,
            blocks=self.blocks,
        )
        if given.placement is not None:
            given.placement.launch(engine, call, self.sizes, arrived, outputs, self.blocks)
        kept: tuple[torch.Tensor | None, ...] = ()
        if self.record is not None:
            placed = () if given.placement is None else given.placement.tensors()
            kept = (*self.record.tensors(), given.topk_idx, *placed)
        path = "direct" if direct else "rounds"
        engine.log.moved(self.operation, "rows received", count, self.rows.row_bytes, path)
        event = engine.end_operation(call, self.operation, self.streams, kept)
        engine.stats[path] += 1
        engine.stats["expanded_by_senders"] += into is not None
        engine.stats["cached_dispatches" if cached else "dispatches"] += 1
        if recv_source is None:
            return outputs.rows.given(), outputs.topk_idx, outputs.topk_weights, None, None, event
        topk = 0 if given.topk_idx is None else given.topk_idx.shape[1]
        record = DispatchRecord(
            engine, self.plan, given.is_token_in_rank, recv_source, topk, self.operation, self.generation
        )
        return outputs.rows.given(), outputs.topk_idx, outputs.topk_weights, counts, record, event

    def _counts_per_expert(self) -> list[int]:
        """Return the rows of each local expert, rounded up; none if the host does not know them."""
        if self.given.num_worst_tokens or self.record is not None:
            return []
        align = self.given.expert_alignment
        counts = [(rows + align - 1) // align * align for rows in C.normal.rows_per_expert(self.call)]
        if self.given.counts is not None and sum(counts) > arguments.MAX_ROWS:  # kernels have stored their running sums
            raise ValueError(
                f"expert_alignment={align}: expected less, since the rows of all local experts, rounded up, are "
                f"{sum(counts)}, more than the {arguments.MAX_ROWS} that running sums count to"
            )
        return counts

    def _count(self) -> int:
        """Return the number of rows of the outputs, once it is known."""
        if self.given.finish_later:
            self.engine.device.order_after_caller(None, on_comm_stream=True)  # calls made since may have left it
            C.normal.counts(self.call)
        if self.record is not None:
            return self.record.rows
        if self.given.num_worst_tokens:
            return self.given.num_worst_tokens
        self.engine.wait_counts(self.call)
        return C.normal.total_rows(self.call)


@dataclass(frozen=True)
class CombineArguments:
    """The arguments of a combine; see `Buffer.combine`."""

    x: Any
    handle: Any
    topk_weights: Any = None
    bias: Any = None
    config: Config | None = None
    streams: Streams = field(default_factory=Streams)
    choices: Choices | None = None
    """In one hop: sum in the order of these; None: in rank order."""
    placement: Expanded | None = None
    """The layout of `x` and `topk_weights`; None: one row per token."""
    sums: ChoiceSums | None = None
    """The handle's tokens are choices, which are summed afterwards; None: they are not."""


@dataclass
class PendingCombine(_Pending):
    """A combine. Its only kernel takes its number, so `finish` must follow at once."""

    sizes: C.normal.Sizes
    x: torch.Tensor
    topk_weights: torch.Tensor | None
    biases: tuple[torch.Tensor, ...]
    record: DispatchRecord
    choices: Choices | None
    placement: Expanded | None
    sums: ChoiceSums | None

    @staticmethod
    def begin(engine: Engine, given: CombineArguments) -> PendingCombine:
        """Check the arguments and count the operation."""
        record, streams = checked_record(engine, given.handle), given.streams
        blocks = blocks_of(given.config)
        device = engine.device.torch_device
        placement = given.placement
        rows = record.rows if placement is None else placement.expanded_rows
        x = arguments.rows("x", given.x, (torch.bfloat16,), device, rows)
        topk, topk_weights = 0, given.topk_weights
        if topk_weights is not None:
            shape = (rows,) if placement is not None else (rows, record.topk or None)
            topk_weights = arguments.tensor("topk_weights", topk_weights, torch.float32, shape, device)
            topk = topk_weights.shape[1] if placement is None else placement.topk
            if not 1 <= topk <= arguments.MAX_TOPK:
                raise ValueError(f"topk_weights: {topk} columns, expected 1 to {arguments.MAX_TOPK}")
        tokens = record.tokens if given.sums is None else given.sums.tokens
        biases = arguments.biases(given.bias, (tokens, x.shape[1]), device)
        sizes = C.normal.Sizes(record.tokens, Rows(x).row_bytes, topk, 0)
        check_room(engine, sizes)
        blocks = blocks or engine.device.blocks_for((record.tokens + record.rows) * sizes.row_bytes)
        *_, combine = record.plan.kernels
        engine.prepare(sizes.row_bytes, sizes.topk, combine)
        if placement is not None:
            engine.prepare(sizes.row_bytes, placement.topk, "fold")
        if given.sums is not None:
            given.sums.prepare(engine, sizes.row_bytes)
        read = (*record.tensors(), *(placement.tensors() if placement is not None else ()))
        choices = () if given.choices is None else (given.choices.topk_idx,)
        sums = () if given.sums is None else (given.sums.slots,)
        with engine.opening("combine", x, *read, topk_weights, *biases, *choices, *sums) as operation:
            engine.device.order_after_caller(streams.event, on_comm_stream=True)  # the rest follows in `finish`
            call = C.normal.open_combine(engine.runtime, sizes, handle=record.number)
            pending = PendingCombine(
                engine,
                call,
                operation,
                blocks,
                streams,
                sizes,
                x,
                topk_weights,
                biases,
                record,
                given.choices,
                placement,
                given.sums,
            )
        return pending

    def _finish(self) -> tuple[torch.Tensor, torch.Tensor | None, EventOverlap]:
        """Move and sum the rows."""
        engine, record = self.engine, self.record
        # Owners read the rows in place. One copy to shared memory costs less than the handshakes of sending chunks.
        x: torch.Tensor | None = self.x
        weights, combined_weights = self.topk_weights, None
        with engine.device.allocating(self.streams.allocate_on_comm):
            if self.placement is not None:
                x, weights = self.placement.folded(engine, record.rows, self.x, self.topk_weights)
            elif engine.pulls:
                x, weights = engine.visible(self.x, self.topk_weights)
            (combined_x,) = engine.empty_private(((record.tokens, self.x.shape[1]), self.x.dtype))
            if weights is not None:
                combined_weights = weights.new_empty((record.tokens, weights.shape[1]))
            summed = combined_x
            if self.sums is not None:
                (summed,) = engine.empty_private(((self.sums.tokens, self.x.shape[1]), self.x.dtype))
        assert x is not None
        tensors = C.normal.CombineTensors()
        tensors.x = x.data_ptr()
        tensors.combined_x = combined_x.data_ptr()
        tensors.src_idx, tensors.source_words = record.recv_source.data_ptr(), _words(record.recv_source)
        if weights is not None and combined_weights is not None:
            tensors.topk_weights, tensors.combined_weights = weights.data_ptr(), combined_weights.data_ptr()
        if self.sums is None:
            tensors.bias = [*(bias.data_ptr() for bias in self.biases), 0, 0][:2]
        if self.choices is not None:
            self.choices.fill(tensors)
        engine.hold(self.operation, x, weights, combined_x, summed, combined_weights)
        engine.device.order_after_caller(self.streams.before_outputs, self.streams.allocate_on_comm)
        kept: tuple[torch.Tensor | None, ...] = record.tensors()
        if self.choices is not None:
            kept = (*kept, self.choices.topk_idx)
        if self.placement is not None:
            self.placement.fold(engine, self.call, (self.x, self.topk_weights), (x, weights), self.blocks)
            kept = (*kept, *self.placement.tensors())
        direct = record.plan.calls.combine(
            engine.runtime,
            self.call,
            self.sizes,
            tensors,
            plan=record.plan.native,
            rows=record.rows,
            publish=engine.pulls,
            blocks=self.blocks,
        )
        if self.sums is not None:
            self.sums.launch(engine, self.call, combined_x, summed, self.biases, self.blocks)
            kept = (*kept, self.sums.slots)
        path = "direct" if direct else "rounds"
        engine.log.moved(self.operation, "rows returned", record.rows, self.sizes.row_bytes, path)
        event = engine.end_operation(self.call, self.operation, self.streams, kept)
        engine.stats[path] += 1
        engine.stats["combines"] += 1
        engine.stats["copied"] += self.placement is None and x is not self.x
        return summed, combined_weights, event


def _sizes(engine: Engine, rows: Rows, given: DispatchArguments, experts: int) -> C.normal.Sizes:
    """Check what rows carry besides themselves, and return their sizes."""
    tokens, device = rows.x.shape[0], rows.x.device
    topk, id_bytes, weighted = 0, torch.int64.itemsize, given.topk_weights is not None
    if given.topk_idx is not None:
        topk_idx = arguments.topk_idx(given.topk_idx, experts, device, tokens)
        topk, id_bytes = topk_idx.shape[1], topk_idx.element_size()
        if weighted:
            arguments.tensor("topk_weights", given.topk_weights, torch.float32, (tokens, topk), device)
    return C.normal.Sizes(
        tokens,
        rows.row_bytes,
        topk,
        experts,
        id_bytes=id_bytes,
        scales=rows.scales_per_row,
        types=rows.types,
        weights=weighted,
        # Ranks that put rows into others' layouts must have numbered their choices.
        expands=(1 + engine.senders_expand) * isinstance(given.placement, Expand),
    )


def _words(source: torch.Tensor) -> int:
    """Return how many numbers a row source has."""
    return 1 if source.dim() == 1 else source.shape[1]


def checked_record(engine: Engine, given: Any) -> DispatchRecord:
    """Check that a handle belongs to this Buffer, or to another one of the same ranks, and return its record."""
    record = record_of(given)
    check_origin(engine, record.owner, record.generation)
    ours, theirs = engine.topology, record.plan.topology
    if ours.hops != theirs.hops or (ours.hops == 2 and ours.ranks_per_node != theirs.ranks_per_node):
        raise ValueError(
            f"handle: expected one of a Buffer with hops={ours.hops} and ranks_per_node={ours.ranks_per_node}, got one "
            f"of a Buffer with hops={theirs.hops} and ranks_per_node={theirs.ranks_per_node}"
        )
    return record
