"""The PTX of every kernel, interpreted, against the oracle: what g++ makes of the sources stays out of it."""

from __future__ import annotations

from typing import Any

import pytest

import deep_ep_py as deep_ep
import interpreted
import low_latency
from builds import LONG
from cases import Case
from deep_ep_py.core.native import C
from deep_ep_py.jit import NvrtcUnavailableError, require_nvrtc
from deep_ep_py.testing import run_ranks
from harness import Trial, round_trip

pytestmark = pytest.mark.skipif(C.WARP_SIZE != 32, reason="warps have 32 threads in PTX")

ARCHITECTURES = ("sm_80", "sm_90a", "sm_100a", "sm_120a") if LONG else ("sm_90a",)
RANKS = (1, 2, 4, 8) if LONG else (2,)


def seeds(architecture: str) -> range:
    if not LONG:
        return range(1, 2)
    return range(1, 21) if architecture in ("sm_80", "sm_90a") else range(1, 3)


@pytest.fixture(params=ARCHITECTURES)
def architecture(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    try:
        require_nvrtc()
    except NvrtcUnavailableError as error:
        pytest.skip(str(error))
    interpreted.install(monkeypatch, request.param)
    return str(request.param)


def normal(ranks: int, architecture: str, **options: Any) -> None:
    tokens = tuple(12 + 5 * rank for rank in range(ranks))
    shape = {name: options.get(name) for name in ("ranks_per_node", "hops")}
    case = Case("ptx", ranks, tokens, hidden=264, topk=4, experts=4 * ranks, **shape)
    for seed in seeds(architecture):
        trial = Trial.of(case, seed)

        def on_each_rank(group: Any, trial: Trial = trial) -> None:
            with deep_ep.Buffer(group, 1 << 20, arena_bytes=1 << 20, timeout=20.0, **options) as buffer:
                round_trip(buffer, group.rank(), trial, 2)

        run_ranks(ranks, on_each_rank, seed=seed)


def low_latency_calls(ranks: int, architecture: str, **options: Any) -> None:
    tokens = tuple(6 + 3 * rank for rank in range(ranks))
    sizes = low_latency.Sizes("ptx", ranks, tokens, max(tokens), 256, 4, 4 * ranks)
    for seed in seeds(architecture):
        work = low_latency.Work.of(sizes, seed)

        def on_each_rank(group: Any, seed: int = seed, work: Any = work) -> None:
            given = {"num_rdma_bytes": 4 << 20, "arena_bytes": 1 << 20, "timeout": 20.0, **options}
            with deep_ep.Buffer(group, low_latency_mode=True, **given) as buffer:
                for cast in low_latency.CASTS.values():
                    low_latency.round_trip(buffer, work, cast, hooks=seed % 2 == 1 and not options.get("once_per_node"))

        run_ranks(ranks, on_each_rank, seed=seed)


@pytest.mark.parametrize("fabric", ["peer", "ibgda"])
@pytest.mark.parametrize("ranks", RANKS)
def test_normal_mode(architecture: str, ranks: int, fabric: str) -> None:
    normal(ranks, architecture, fabric=fabric)


@pytest.mark.parametrize("fabric", ["peer", "ibgda"])
@pytest.mark.parametrize("ranks", RANKS)
def test_low_latency_mode(architecture: str, ranks: int, fabric: str) -> None:
    low_latency_calls(ranks, architecture, fabric=fabric)


@pytest.mark.parametrize("ranks", [4, 8] if LONG else [4])
def test_two_hops(architecture: str, ranks: int) -> None:
    normal(ranks, architecture, fabric="ibgda", ranks_per_node=2)


@pytest.mark.parametrize("ranks", [4, 8] if LONG else [4])
def test_rows_once_to_each_node(architecture: str, ranks: int) -> None:
    low_latency_calls(ranks, architecture, fabric="ibgda", ranks_per_node=2, once_per_node=True)
