"""Buffers of both interfaces in one process, and V2's sizes and domains."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

import deep_ep_py as deep_ep
from cases import BY_NAME
from deep_ep_py.testing import run_ranks
from deep_ep_py.v2.traffic import Bandwidths, Domains, expected_destinations, num_sms
from elastic import ElasticTrial
from harness import Trial, dispatch_arguments, under_schedules


def test_both_interfaces_in_one_process() -> None:
    trial, v1 = ElasticTrial.of(BY_NAME["uniform"]), Trial.of(BY_NAME["uniform"])

    def on_each_rank(group: Any) -> None:
        with trial.make_buffer(group, "peer") as elastic, deep_ep.Buffer(group, num_nvl_bytes=1 << 20) as buffer:
            rank = buffer.rank
            ours, theirs = trial.dispatch(elastic, rank), buffer.dispatch(**dispatch_arguments(v1.work, rank))
            trial.check(rank, ours, expanded=False, exact=True)
            v1.check_dispatch(rank, theirs)
            v1.check_combine(rank, v1.combine(buffer, rank, theirs.handle))
            trial.check_combine(rank, trial.combine(elastic, rank, ours.handle))
            with pytest.raises(TypeError, match="expected the EPHandle"):
                elastic.combine(theirs.recv_x, theirs.handle)
            with pytest.raises(TypeError, match="expected the handle that dispatch returned"):
                buffer.combine(ours.recv_x, ours.handle)

    under_schedules(4, on_each_rank)


def test_life_and_diagnostics_are_the_buffers(tmp_path: Path) -> None:
    trial = ElasticTrial.of(BY_NAME["uniform"])

    def on_each_rank(group: Any) -> None:
        with trial.make_buffer(group, "peer") as buffer:
            rank, inputs = buffer.rank_idx, trial.inputs
            with buffer.timeout_of(20), buffer.trace(tmp_path / "step.json"):
                handle = buffer.dispatch(
                    inputs.x[rank], inputs.topk_idx[rank], num_experts=trial.work.num_experts
                ).handle
            assert buffer.paths == ("peer",) * group.size() and buffer.lost_ranks() == []
            assert buffer.network_counters() == buffer.network_trace() == []
            handle.topk_idx = None
            assert f"EPHandle(tokens={len(inputs.x[rank])}" in repr(handle)
            group.barrier()  # a rank that has left is a lost one

    run_ranks(trial.case.ranks, on_each_rank)
    assert len(list(tmp_path.glob("step*.json"))) == trial.case.ranks


def test_size_hint() -> None:
    """It is what the Buffer shares: enough for an output of all tokens of all ranks."""

    def on_each_rank(group: Any) -> tuple[int, int]:
        hint = deep_ep.ElasticBuffer.get_buffer_size_hint(group, 16, 64, num_topk=3)
        with deep_ep.ElasticBuffer(group, num_bytes=hint, num_max_tokens_per_rank=16, hidden=64, num_topk=3) as buffer:
            assert buffer.num_bytes == hint and buffer.num_max_tokens_per_rank == 16
            ids = torch.zeros(16, 3, dtype=torch.int64)
            results = buffer.dispatch(torch.ones(16, 64, dtype=torch.bfloat16), ids, num_experts=4, do_cpu_sync=False)
            assert len(results.recv_x) == 32 and buffer.stats()["rounds"] == 0
            return hint, buffer._buffer.num_nvl_bytes

    (hint, transit), _ = run_ranks(2, on_each_rank)
    assert hint % (2 << 20) == 0 and hint >= transit + 2 * 16 * (128 + 3 * 12)

    def of(group: Any, **options: Any) -> int:
        return deep_ep.ElasticBuffer.get_buffer_size_hint(group, **options)

    def grows(group: Any) -> None:
        base = {"num_max_tokens_per_rank": 4096, "hidden": 7168, "num_topk": 8}
        assert (
            of(group, **base)
            < of(group, **base | {"num_topk": 0})
            < of(group, **base | {"num_max_tokens_per_rank": 8192})
        )
        # A combine moves BF16 rows in any case.
        assert of(group, **base) * 0.9 < of(group, **base, use_fp8_dispatch=True) <= of(group, **base)
        with pytest.raises(ValueError, match="hidden=0"):
            of(group, **base | {"hidden": 0})

    run_ranks(2, grows)


@pytest.mark.once
def test_domains() -> None:
    def on_each_rank(group: Any, hybrid: bool, nodes: int | None) -> tuple[Any, ...]:
        options = {} if nodes is None else {"fabric": "ibgda", "ranks_per_node": 4 // nodes}
        with deep_ep.ElasticBuffer(group, num_bytes=8 << 20, allow_hybrid_mode=hybrid, **options) as buffer:
            assert (buffer.num_scaleout_ranks, buffer.num_scaleup_ranks) == buffer.get_logical_domain_size()
            assert (buffer.num_rdma_ranks, buffer.num_nvlink_ranks) == buffer.get_physical_domain_size()
            assert buffer.scaleout_rank_idx * buffer.num_scaleup_ranks + buffer.scaleup_rank_idx == group.rank()
            return buffer.get_logical_domain_size(), buffer.get_physical_domain_size()

    assert run_ranks(4, on_each_rank, True, None) == [((1, 4), (1, 4))] * 4
    assert run_ranks(4, on_each_rank, True, 2) == [((2, 2), (2, 2))] * 4
    assert run_ranks(4, on_each_rank, False, 2) == [((1, 4), (2, 2))] * 4
    of_group = run_ranks(
        4, lambda group: (deep_ep.get_physical_domain_size(group), deep_ep.get_logical_domain_size(group))
    )
    assert of_group == [((1, 4), (1, 4))] * 4


@pytest.mark.once
@pytest.mark.parametrize(("groups", "experts", "topk"), [(8, 256, 8), (2, 16, 4), (4, 4, 1), (1, 8, 8)])
def test_expected_destinations(groups: int, experts: int, topk: int) -> None:
    """Against the mean over random choices, within five times its standard error."""
    random = torch.Generator().manual_seed(1)
    ids = torch.rand(20000, experts, generator=random).topk(topk, dim=1).indices // (experts // groups)
    distinct = torch.nn.functional.one_hot(ids, groups).any(1).sum(1).double()
    error = float(distinct.std()) / math.sqrt(len(distinct))
    assert abs(expected_destinations(groups, experts, topk) - float(distinct.mean())) <= 5 * error + 1e-9


@pytest.mark.once
def test_theoretical_num_sms() -> None:
    """Worked by hand from the published model, at 256 experts and top-8."""
    rates = Bandwidths(rdma=45.0, nvlink=430.0, sm_read=200.0, sm_write=50.0)
    # Inside a node: every row is written once, 7/8 of them cross NVLink, so 430 / (7/8) / 50 = 9.83 SMs write.
    assert num_sms(Domains(1, 8, 8), 256, 8, rates, 132, overlap=True) == 14  # ceil(1.25 * 9.83) = 13, made even
    assert num_sms(Domains(1, 8, 8), 256, 8, rates, 132, overlap=False) == 64
    assert num_sms(Domains(1, 8, 8), 256, 8, rates, 10, overlap=True) == 10
    # Nothing leaves a single rank.
    assert num_sms(Domains(1, 1, 1), 256, 8, rates, 132, overlap=True) == 132
    # Two nodes: the NIC carries to_nodes / to_ranks / 2 per row.
    to_ranks, to_nodes = expected_destinations(16, 256, 8), expected_destinations(2, 256, 8)
    write = 1 / to_ranks + to_nodes / to_ranks / 2 + 1
    seconds = max(to_nodes / to_ranks / 2 / 45.0, 7 / 8 / 430.0)
    wanted = max(4, math.ceil(1.25 * write / 50.0 / seconds))
    assert num_sms(Domains(2, 8, 8), 256, 8, rates, 132, overlap=True) == wanted + wanted % 2


@pytest.mark.once
def test_theoretical_numbers_of_a_buffer() -> None:
    def on_each_rank(group: Any, hybrid: bool) -> tuple[int, ...]:
        with deep_ep.ElasticBuffer(group, num_bytes=8 << 20, allow_hybrid_mode=hybrid) as buffer:
            with pytest.raises(ValueError, match="num_scaleout_topk=1: expected 0 to 0"):
                buffer.get_theoretical_num_sms(16, 4, num_scaleout_topk=1)
            with pytest.raises(ValueError, match="num_experts=15"):
                buffer.get_theoretical_num_sms(15, 4)
            return buffer.get_theoretical_num_sms(16, 4), *(buffer.get_theoretical_num_qps(n) for n in (1, 4, 20))

    assert run_ranks(2, on_each_rank, True)[0] == (1, 17, 65, 129)
    assert run_ranks(2, on_each_rank, False)[0] == (1, 1, 4, 9)
