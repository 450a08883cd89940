"""Runs workloads on the library, with ranks as threads of this process, and checks the results."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import deep_ep_py as deep_ep
import oracle
from builds import PROTOCOL_SCHEDULES, schedules
from cases import Case, build
from deep_ep_py.modes.normal.handles import record_of
from deep_ep_py.testing import DEFAULT_FREEZE, run_ranks
from oracle import Received, Workload

# Send queues wrap around and fill up; requests are split and overtake each other.
HARSH_NIC = deep_ep.NicOptions(
    blocks=16, queues_per_peer=2, nics=2, max_bytes=512, mtu=64, in_flight=4, max_delay=6, relaxed=True
)
MANY_RANKS = 16
"""From this number of ranks on, one queue pair per peer must do, because each is a fiber."""
RETRIES_EXCEEDED = 0x15
"""The syndrome of a completion whose request was never acknowledged."""


def failing(rank: int, peer: int, after: int, syndrome: int) -> deep_ep.NicOptions:
    """Return options for NICs of which one fails: that of `rank`, for requests to `peer` after the first `after`."""
    return replace(HARSH_NIC, fault_rank=rank, fault_peer=peer, fault_after=after, fault_syndrome=syndrome)


def make_buffer(group: Any, case: Case, fabric: str | None, **options: Any) -> deep_ep.Buffer:
    """Make a case's Buffer on the calling rank."""
    if fabric in ("ibgda", "proxy") and "nic" not in options:
        # A message of one row takes a few requests.
        max_bytes = max(HARSH_NIC.max_bytes, 2 * case.hidden // 4 // 16 * 16)
        queues = HARSH_NIC.queues_per_peer if case.ranks < MANY_RANKS else 1
        options["nic"] = replace(HARSH_NIC, queues_per_peer=queues, max_bytes=max_bytes)
    given = {"ranks_per_node": case.ranks_per_node, "hops": case.hops}
    nodes = {name: value for name, value in given.items() if value is not None}
    options = {"num_nvl_bytes": case.num_nvl_bytes, "arena_bytes": case.arena_bytes, **nodes, **options}
    return deep_ep.Buffer(group, fabric=fabric, **options)


@functools.cache
def _min_bytes(case: Case, fabric: str, regions: int) -> int:
    """Return the minimum size that the error of a too small Buffer names."""

    def on_each_rank(group: Any) -> int:
        buffer = make_buffer(group, case, fabric, regions=regions)
        with pytest.raises(ValueError, match="num_nvl_bytes=0: expected at least") as info:
            buffer.dispatch(**dispatch_arguments(build(case), buffer.rank))
        return int(str(info.value).split("expected at least ")[1].split()[0])

    return max(run_ranks(case.ranks, on_each_rank))


def cramped(case: Case, fabric: str, times: float = 1.0, regions: int = 2) -> Case:
    """Return the case on a Buffer of `times` the minimum size, which has chunks of one row. A small case then has
    many chunks, and more of them than slots."""
    least = _min_bytes(replace(case, name="cramped", tokens=0, num_nvl_bytes=0), fabric, regions)
    return replace(case, num_nvl_bytes=-(-int(least * times) // (128 * regions)) * 128 * regions)


def dispatch_arguments(work: Workload, rank: int, **options: Any) -> dict[str, Any]:
    """Return the keyword arguments of a rank's dispatch, with the oracle's layout: for tests of anything but the
    layout."""
    layout = oracle.layout(work.topk_idx[rank], work.num_experts, work.num_ranks)
    return {
        "x": work.x[rank],
        "topk_idx": work.topk_idx[rank],
        "topk_weights": work.topk_weights[rank],
        "num_tokens_per_rank": layout.num_tokens_per_rank,
        "is_token_in_rank": layout.is_token_in_rank,
        "num_tokens_per_expert": layout.num_tokens_per_expert,
        **options,
    }


def on_cpu(values: Sequence[Any]) -> list[Any]:
    """Return the values, with tensors copied to the oracle's device where they are elsewhere."""
    return [value.cpu() if isinstance(value, Tensor) else value for value in values]


def as_received(results: Sequence[Any]) -> Received:
    """Name the results of a dispatch that was not cached."""
    x, topk_idx, topk_weights, counts, handle, _ = on_cpu(results)
    # With two hops, no rank knows what other ranks send to each other.
    record = record_of(handle)
    plan, one_hop = record.plan, record.plan.topology.hops == 1
    prefix, send_head = (plan.rank_prefix, plan.token_row) if one_hop else (None, None)
    prefix, channel, src_idx, send_head = on_cpu([prefix, plan.rows_to_rank, record.recv_src_idx, send_head])
    return Received(
        x=x,
        topk_idx=topk_idx,
        topk_weights=topk_weights,
        num_tokens_per_expert=counts,
        src_rank=None,
        src_idx=src_idx,
        rank_prefix_matrix=prefix,
        channel_prefix_matrix=channel.clone(),  # an element may hold the handle, and so the Buffer
        recv_channel_prefix_matrix=None,
        send_head=send_head,
    )


@dataclass(frozen=True)
class Expert:
    """The rows that the experts pass to combine on every rank, and the expected results."""

    x: list[Tensor]
    topk_weights: list[Tensor]
    biases: list[tuple[Tensor, ...]]
    expected: dict[int, list[oracle.Combined]]  # by number of biases


@dataclass(frozen=True)
class Trial:
    """A workload with all its expected results. Made once, run under many schedules."""

    case: Case
    work: Workload
    received: list[Received]
    expert: Expert
    handles: list[oracle.Internode] | None = None  # the routes of rows in two hops

    @staticmethod
    def of(case: Case, seed: int = 1) -> Trial:
        return Trial.of_workload(case, build(case, seed), seed)

    @staticmethod
    def of_workload(case: Case, work: Workload, seed: int = 1) -> Trial:
        received = oracle.dispatch(work, case.expert_alignment)
        # Rows unrelated to what was dispatched, so that a row in the wrong place is detected.
        random = torch.Generator().manual_seed(seed + 1000)
        x = [torch.randn(part.x.shape, generator=random).to(torch.bfloat16) for part in received]
        weights = [torch.rand(part.topk_weights.shape, generator=random) for part in received]
        biases = [
            tuple(torch.randn(own.shape, generator=random).to(torch.bfloat16) for _ in range(2)) for own in work.x
        ]
        tokens, per_node = [len(own) for own in work.x], case.ranks_per_node if case.two_hops else None
        expected = {
            count: oracle.combine(received, tokens, x, weights, [both[:count] for both in biases], per_node)
            for count in range(3)
        }
        handles = None
        if per_node is not None:
            handles = oracle.internode(work, received, per_node)
        return Trial(case, work, received, Expert(x, weights, biases, expected), handles)

    def on(self, device: str) -> Trial:
        """Return the same trial with the ranks' inputs on another device; the expected results stay."""

        def moved(tensors: Sequence[Tensor]) -> list[Tensor]:
            return [tensor.to(device) for tensor in tensors]

        work, expert = self.work, self.expert
        work = replace(work, x=moved(work.x), topk_idx=moved(work.topk_idx), topk_weights=moved(work.topk_weights))
        biases = [tuple(moved(both)) for both in expert.biases]
        expert = replace(expert, x=moved(expert.x), topk_weights=moved(expert.topk_weights), biases=biases)
        return replace(self, work=work, expert=expert)

    def combine(
        self, buffer: deep_ep.Buffer, rank: int, handle: Any, biases: int = 0, weights: bool = True, **options: Any
    ):
        """Combine the expert outputs on the calling rank."""
        bias: Any = self.expert.biases[rank][:biases]
        bias = (None, *bias, bias)[biases] if biases < 2 else bias
        topk_weights = self.expert.topk_weights[rank] if weights else None
        return buffer.combine(self.expert.x[rank], handle, topk_weights=topk_weights, bias=bias, **options)

    def check_dispatch(self, rank: int, results: Sequence[Any]) -> None:
        oracle.check_received(as_received(results), self.received[rank])
        if self.handles is not None:
            oracle.check_handle(record_of(results[4]).elements(), self.handles[rank])

    def check_cached(self, rank: int, results: Sequence[Any]) -> None:
        assert all(part is None for part in results[1:5]), "a cached dispatch returns nothing but rows and an event"
        wrong = oracle.difference("recv_x", results[0].cpu(), self.received[rank].x)
        assert wrong is None, wrong

    def check_combine(self, rank: int, results: Sequence[Any], biases: int = 0, weights: bool = True) -> None:
        combined_x, combined_weights, _ = on_cpu(results)
        assert (combined_weights is not None) == weights
        oracle.check_combined(combined_x, combined_weights, self.expert.expected[biases][rank])

    @property
    def max_rows(self) -> int:
        """The largest number of rows that a rank receives."""
        return max(len(part.x) for part in self.received)

    def check_worst(self, rank: int, results: Sequence[Any], rows: int) -> None:
        """Check a dispatch with `num_worst_tokens=rows`."""
        got = as_received(results)
        assert got.num_tokens_per_expert == []
        assert len(got.x) == len(got.topk_idx) == len(got.topk_weights) == len(got.src_idx) == rows
        used = len(self.received[rank].x)
        assert (got.topk_idx[used:] == -1).all() and not got.topk_weights[used:].any()
        got = replace(
            got,
            x=got.x[:used],
            topk_idx=got.topk_idx[:used],
            topk_weights=got.topk_weights[:used],
            src_idx=got.src_idx[:used],
            num_tokens_per_expert=None,
        )
        oracle.check_received(got, self.received[rank])
        if self.handles is not None:
            oracle.check_handle(record_of(results[4]).elements(), self.handles[rank], padded=True)

    def padded(self, rank: int, rows: int) -> dict[str, Tensor]:
        """Return the input of the combine after such a dispatch; no rank may read the rows that no rank sent."""
        expert = self.expert
        unused = rows - len(expert.x[rank])
        x = torch.cat([expert.x[rank], expert.x[rank].new_full((unused, expert.x[rank].shape[1]), torch.nan)])
        weights = expert.topk_weights[rank]
        return {"x": x, "topk_weights": torch.cat([weights, weights.new_full((unused, weights.shape[1]), torch.nan)])}


def round_trip(buffer: deep_ep.Buffer, rank: int, trial: Trial, blocks: int, biases: int | None = None) -> None:
    """Check a layout, dispatch and combine, and a cached dispatch and combine, on the calling rank."""
    work, config = trial.work, deep_ep.Config(num_sms=blocks)
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(work.topk_idx[rank], work.num_experts)
    results = buffer.dispatch(
        work.x[rank],
        topk_idx=work.topk_idx[rank],
        topk_weights=work.topk_weights[rank],
        num_tokens_per_rank=per_rank,
        is_token_in_rank=in_rank,
        num_tokens_per_expert=per_expert,
        expert_alignment=trial.case.expert_alignment,
        config=config,
    )
    trial.check_dispatch(rank, results)
    handle = results[4]
    biases = blocks % 3 if biases is None else biases
    trial.check_combine(rank, trial.combine(buffer, rank, handle, biases, config=config), biases)
    if not trial.case.cached:
        return
    trial.check_cached(rank, buffer.dispatch(work.x[rank], handle=handle, config=config))
    trial.check_combine(rank, trial.combine(buffer, rank, handle, weights=False, config=config), weights=False)


def queued_round_trip(buffer: deep_ep.Buffer, rank: int, trial: Trial, biases: int) -> None:
    """Queue a dispatch, a combine and a cached dispatch; wait for their events in reverse order, and check."""
    first = buffer.dispatch(**dispatch_arguments(trial.work, rank), async_finish=True)
    combined = trial.combine(buffer, rank, first[4], biases, async_finish=True)
    second = buffer.dispatch(trial.work.x[rank], handle=first[4], async_finish=True)
    second[5].current_stream_wait()
    trial.check_cached(rank, second)
    combined[2].current_stream_wait()
    trial.check_combine(rank, combined, biases)
    first[5].current_stream_wait()
    trial.check_dispatch(rank, first)


def under_schedules(
    ranks: int,
    fn: Callable[..., Any],
    *args: Any,
    count: int = PROTOCOL_SCHEDULES,
    freeze: int = DEFAULT_FREEZE,
) -> list[Any]:
    """Run `fn(group, *args)` on each rank under `count` schedules and return each run's results.

    A smaller `freeze` puts warps to sleep more often: for rules that matter only to a rank far behind the others.
    """
    return [run_ranks(ranks, fn, *args, seed=seed, freeze=freeze) for seed in schedules(count)]


def barrier(group: Any) -> None:
    """Wait for all ranks through the group alone, without a Buffer."""
    group.barrier()


def left_out(trial: Trial, masked: Sequence[int]) -> Trial:
    """Return the results where ranks are left out: as if they had no tokens, and no token chose their experts."""
    work = trial.work
    lost = torch.tensor(list(masked))

    def chosen(topk_idx: Tensor) -> Tensor:
        return torch.where(torch.isin(topk_idx // work.experts_per_rank, lost) & (topk_idx >= 0), -1, topk_idx)

    def present(tensors: Sequence[Tensor]) -> list[Tensor]:
        return [tensor[:0] if rank in masked else tensor for rank, tensor in enumerate(tensors)]

    weights = present(work.topk_weights)
    rest = replace(work, x=present(work.x), topk_idx=[chosen(i) for i in present(work.topk_idx)], topk_weights=weights)
    # Handles record which ranks forwarded rows. Here these differ from the oracle's, and no check of rows needs them.
    return replace(Trial.of_workload(trial.case, rest), handles=None)


def round_trip_without(buffer: deep_ep.Buffer, rank: int, trial: Trial, rest: Trial) -> Any:
    """Dispatch all tokens of a rank and combine, then both again from the handle, all checked. Returns the handle."""
    alignment = trial.case.expert_alignment
    results = buffer.dispatch(**dispatch_arguments(trial.work, rank, expert_alignment=alignment))
    rest.check_dispatch(rank, results)
    handle = results[4]
    rest.check_combine(rank, rest.combine(buffer, rank, handle, 1), 1)
    rest.check_cached(rank, buffer.dispatch(trial.work.x[rank], handle=handle))
    rest.check_combine(rank, rest.combine(buffer, rank, handle, weights=False), weights=False)
    return handle
