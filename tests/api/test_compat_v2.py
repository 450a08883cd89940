"""The helpers that DeepEP 2 adds to `deep_ep.utils`. Nothing here depends on the build."""

from __future__ import annotations

import importlib
import math
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import deep_ep_py
from deep_ep_py.compat.utils import envs, gate, refs, testing
from deep_ep_py.compat.utils.math import align, ceil_div, count_bytes, hash_tensor, hash_tensors, safe_div
from forks import run_python
from launches import free_port
from names import deep_ep_names

pytestmark = pytest.mark.once


@pytest.mark.parametrize(
    ("module", "names"),
    [
        (
            "gate",
            "get_unbalanced_scores get_precise_unbalanced_scores get_random_unbalanced_scores generate_rank_count",
        ),
        ("gate", "generate_topk_idx get_scores_by_factor map_unbalanced_ratio_to_factor"),
        ("refs", "dispatch combine generate_pre_combine_data ordered_accumulate"),
        ("math", "align ceil_div safe_div count_bytes hash_tensors"),
        ("envs", "init_dist init_seed get_global_seed get_local_seed dist_print"),
        ("envs", "get_physical_domain_size get_logical_domain_size"),
    ],
)
def test_what_is_imported(module: str, names: str) -> None:
    with deep_ep_names():
        utils = importlib.import_module("deep_ep.utils")
        there = importlib.import_module(f"deep_ep.utils.{module}")
        assert getattr(utils, module) is there
        assert all(callable(getattr(there, name)) for name in names.split())
    assert envs.get_logical_domain_size is deep_ep_py.get_logical_domain_size


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("buffers", "Buffer ElasticBuffer EPHandle"),
        ("buffers.elastic", "ElasticBuffer EPHandle EventHandle EventOverlap"),
        ("buffers.legacy", "Buffer Config EventHandle EventOverlap"),
        ("_C", "Config EventHandle topk_idx_t"),
    ],
)
def test_where_v2_keeps_its_names(module: str, names: str) -> None:
    with deep_ep_names():
        package, there = importlib.import_module("deep_ep"), importlib.import_module(f"deep_ep.{module}")
        assert all(getattr(there, name) is getattr(package, name) for name in names.split())


# --- math -----------------------------------------------------------------------------------------------------------


def test_arithmetic() -> None:
    assert [ceil_div(x, 4) for x in (0, 1, 4, 5)] == [0, 1, 1, 2]
    assert [align(x, 4) for x in (0, 1, 4, 5)] == [0, 4, 4, 8]
    assert safe_div(3, 2) == 1.5 and safe_div(0, 5) == 0 and safe_div(0, 0) == 0
    with pytest.raises(ZeroDivisionError):
        safe_div(1, 0)


def test_tensors_in_tuples() -> None:
    one, two = torch.tensor([5, 3], dtype=torch.int32), torch.zeros(3, 7, dtype=torch.bfloat16)
    three = torch.tensor([12, 0], dtype=torch.int32)
    assert count_bytes() == count_bytes(None) == 0
    assert count_bytes(one, None, (two, [three, (None,)])) == 2 * 4 + 3 * 7 * 2 + 2 * 4
    assert hash_tensors(one, None, ([three], 7)) == 8 ^ 12 and hash_tensors(three) == hash_tensor(three) == 12


# --- gate -----------------------------------------------------------------------------------------------------------


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed torch, and let bfloat16 be the default as `init_dist` does: random numbers of 8 bits would repeat."""
    torch.manual_seed(seed)
    torch.set_default_dtype(torch.bfloat16)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def received_by_rank(scores: Tensor, topk: int, ranks: int) -> Tensor:
    """Return how many tokens of scores [tokens, experts] each rank receives."""
    owners = scores.topk(topk).indices // (scores.shape[1] // ranks)
    return torch.tensor([int((owners == rank).any(1).sum()) for rank in range(ranks)])


@pytest.mark.parametrize("ratio", [1.0, 2.0, 3.5])
@pytest.mark.parametrize(("ranks", "per_rank", "topk"), [(4, 8, 6), (8, 4, 2), (8, 8, 9), (16, 1, 1), (2, 8, 8)])
def test_precise_scores(ranks: int, per_rank: int, topk: int, ratio: float) -> None:
    with seeded(3):
        scores = gate.get_unbalanced_scores(4000, ranks * per_rank, ranks, topk, ratio, True)
    assert scores.shape == (4000, ranks * per_rank) and scores.dtype == torch.float32
    assert scores.min() >= 0 and scores.max() <= 1
    received = received_by_rank(scores, topk, ranks)
    assert received[1:].max() - received[1:].min() <= 1
    assert received[0] / received[1:].double().mean() == pytest.approx(ratio, rel=0.02)
    experts = torch.bincount(scores.topk(topk).indices.flatten(), minlength=ranks * per_rank)[per_rank:].double()
    assert experts.max() < 1.6 * experts.min()


def test_no_pattern_in_precise_scores() -> None:
    """Ranks are dealt out in turns, which must not show."""
    with seeded(3):
        owners = gate.get_unbalanced_scores(4000, 9, 9, 1, 1.0, True).argmax(1)
    assert all((owners[shift:] == owners[:-shift]).double().mean() < 0.15 for shift in range(1, 20))


def test_precise_scores_of_few_tokens() -> None:
    """A single token cannot have the ratio, but many calls together must."""
    with seeded(4):
        calls = [received_by_rank(gate.get_unbalanced_scores(1, 32, 4, 2, 2.0, True), 2, 4) for _ in range(3000)]
    received = torch.stack(calls).sum(0).double()
    assert received[0] / received[1:].mean() == pytest.approx(2, rel=0.1)
    assert received[1:].max() < 1.1 * received[1:].min()


def test_ranks_of_a_token() -> None:
    with seeded(5):
        counts = gate.generate_rank_count(2000, 32, 4, 6, 1.0)
        uniform = torch.rand(2000, 32, dtype=torch.float32)
    assert counts.dtype == torch.int32 and counts.shape == (2000, 4) and bool((counts.sum(1) == 6).all())
    visited = (counts > 0).sum(1)
    spread = counts.max(1).values - counts.masked_fill(counts == 0, 99).min(1).values
    assert int(spread.max()) == 1
    # As many ranks as for a router without preferences.
    expected = received_by_rank(uniform, 6, 4).sum() / 2000
    assert visited.double().mean() == pytest.approx(float(expected), rel=0.03) and len(visited.unique()) >= 3
    alone = gate.generate_rank_count(10, 8, 1, 3, 2.0)
    assert alone.tolist() == [[3]] * 10


def test_experts_of_ranks() -> None:
    counts = torch.tensor([[2, 0, 1], [0, 3, 0], [1, 1, 1]]).repeat(500, 1)
    with seeded(6):
        topk_idx = gate.generate_topk_idx(counts, 1500, 12, 3, 3)
    found = torch.nn.functional.one_hot(topk_idx // 4, 3).sum(1)
    assert torch.equal(found, counts)
    assert bool((topk_idx.sort(1).values.diff(dim=1) > 0).all()), "an expert twice"
    chosen = torch.bincount(topk_idx.flatten(), minlength=12).view(3, 4).double()
    assert bool((chosen.amax(1) < 1.25 * chosen.amin(1)).all())
    with pytest.raises(ValueError, match="rows that sum to 4"):
        gate.generate_topk_idx(counts, 1500, 12, 3, 4)
    with pytest.raises(ValueError, match=r"shape \[1500, 3\]: expected \[1500, 2\]"):
        gate.generate_topk_idx(counts, 1500, 12, 2, 3)


def test_ratios_that_cannot_be() -> None:
    with pytest.raises(ValueError, match=r"ratio=0\.5: expected at least 1"):
        gate.get_unbalanced_scores(4, 8, 4, 2, 0.5, True)
    with pytest.raises(ValueError, match=r"ratio=4\.0: .* 3 experts of a token are on 1 ranks"):
        gate.get_unbalanced_scores(4, 8, 4, 3, 4.0, True)


@pytest.mark.parametrize(("ranks", "ratio"), [(4, 1.0), (4, 2.0), (8, 4.0)])
def test_random_scores(ranks: int, ratio: float) -> None:
    with seeded(7):
        scores = gate.get_unbalanced_scores(4000, ranks * 8, ranks, 4, ratio, False)
        again = gate.get_unbalanced_scores(4000, ranks * 8, ranks, 4, ratio, False)
    assert scores.shape == (4000, ranks * 8) and scores.dtype == torch.float32 and not torch.equal(scores, again)
    received = received_by_rank(scores, 4, ranks).double()
    assert received[0] / received[1:].mean() == pytest.approx(ratio, rel=0.1)
    assert scores[:, 8:].max() <= 1 and len(scores.unique()) > scores.numel() / 2


# --- refs -----------------------------------------------------------------------------------------------------------

HUGE = 2.0**24
"""Adding 1 to it in float32 changes nothing."""


def combined(ids: list[int], rows: list[float], *bias: float, local: bool = True, scaleup: bool = False) -> float:
    """Return what `refs.combine` makes of one token, among 2 x 2 ranks with 2 experts each."""
    y = torch.tensor(rows).view(1, -1, 1).bfloat16()
    parts = tuple(torch.tensor([[value]]).bfloat16() for value in bias)
    given = None if not parts else parts[0] if len(parts) == 1 else parts
    result = refs.combine(y, torch.tensor([ids]), 2, 2, 8, given, local, scaleup)
    assert result.dtype == torch.bfloat16 and result.shape == (1, 1)
    return float(result)


def test_order_of_sums() -> None:
    assert combined([0, 2, 4, 6], [1, HUGE, -HUGE, 2], local=False) == 2, "in order of choices"
    assert combined([0, 2, 4], [1, HUGE, -HUGE], local=False) == 0
    # Ranks 0, 1, 2, 0: what is summed on rank 0 comes last.
    assert combined([0, 2, 4, 1], [1, HUGE, -HUGE, 0]) == 1
    assert combined([0, 2, 4, 1], [1, HUGE, -HUGE, 0], local=False) == 0
    # In bfloat16 257 is 256: a rank's sum is rounded, and so is a domain's, of ranks 0 and 1.
    assert combined([0, 4, 1], [256, -256, 1], local=False) == 1
    assert combined([0, 4, 1], [256, -256, 1]) == 0
    assert combined([0, 2, 4], [256, 1, -256]) == 1
    assert combined([0, 2, 4], [256, 1, -256], scaleup=True) == 0
    # Biases come first, and their sum is not rounded.
    assert combined([0, 2], [HUGE, -HUGE], 1) == 0
    assert combined([0], [-256], 256, 1) == 1
    assert combined([0, 2], [3, 4], 5) == 12
    with pytest.raises(ValueError, match="reduce_in_scaleup=True: expected reduce_in_local"):
        combined([0], [1], local=False, scaleup=True)


def wide(*shape: int) -> Tensor:
    """Return bfloat16 values of such different magnitudes that the order of a sum matters."""
    return torch.ldexp(torch.randn(shape), torch.randint(-12, 13, shape)).bfloat16()


@pytest.mark.parametrize("recipe", [(False, False), (True, False), (True, True)])
def test_combine(recipe: tuple[bool, bool]) -> None:
    torch.manual_seed(8)
    tokens, topk, hidden, experts = 25, 6, 16, 24
    y, bias = wide(tokens, topk, hidden), wide(tokens, hidden)
    ids = torch.rand(tokens, experts).topk(topk).indices
    ids[torch.rand(tokens, topk) < 0.2] = -1
    y[ids == -1] = 0
    before = y.clone()
    result = refs.combine(y, ids, 2, 3, experts, bias, *recipe)
    assert torch.equal(y, before)
    for token in range(tokens):
        terms = list(zip(ids[token].tolist(), y[token]))
        for applies, width in zip(recipe, (4, 12)):
            if applies:
                sums: dict[int, tuple[int, Tensor]] = {}
                for expert, row in terms:
                    if expert >= 0:
                        # Taken out and put back, so that the sums are in order of their last terms.
                        _, so_far = sums.pop(expert // width, (0, torch.zeros(hidden)))
                        sums[expert // width] = expert, so_far + row.float()
                terms = [(expert, total.bfloat16()) for expert, total in sums.values()]
        expected = bias[token].float()
        for _, row in terms:
            expected = expected + row.float()
        assert torch.equal(result[token], expected.bfloat16()), token


def test_ordered_accumulate() -> None:
    data = torch.tensor([[[1.0], [HUGE], [-HUGE]], [[HUGE], [-HUGE], [1.0]]]).bfloat16()
    total = refs.ordered_accumulate(data)
    assert total.tolist() == [[0], [1]] and total.dtype == torch.bfloat16
    start = torch.tensor([[0.0], [256.0]])
    small = torch.ones(2, 3, 1).bfloat16()
    assert refs.ordered_accumulate(small, start).tolist() == [[3], [260]], "259 is rounded once"
    assert refs.ordered_accumulate(small, start.bfloat16()).tolist() == [[3], [256]], "257 is rounded at each step"
    assert start.tolist() == [[0], [256]]


def test_data_before_combine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 4)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    state = torch.get_rng_state()
    envs.init_seed(40)
    assert (envs.get_global_seed(), envs.get_local_seed(), torch.initial_seed()) == (40, 41, 41)
    torch.set_rng_state(state)
    tokens = torch.tensor([0, 3, 70, 4 * 64 - 1], dtype=torch.int32)
    y = refs.generate_pre_combine_data(tokens, 64, 3, 20)
    assert y.shape == (4, 3, 20) and y.dtype == torch.bfloat16
    for i, token in enumerate(tokens.tolist()):
        for k in range(3):
            phase = ((token * 3 + k) * 131071 % (4 * 64 * 3) + 1) / (4 * 64 * 3)
            for h in range(20):
                expected = math.sin(phase * (h + 1) + math.sin(40))
                assert float(y[i, k, h]) == pytest.approx(expected, rel=2**-8, abs=2**-16)
    monkeypatch.setattr(envs, "_global_seed", 41)
    assert not torch.equal(refs.generate_pre_combine_data(tokens, 64, 3, 20), y)


NAMES = """
from deep_ep_py.compat import names
names.take_names()
for name in names._MODULES:
    exec(f"import {name} as module")
    assert module is __import__("sys").modules[name]
from deep_ep import _C, buffers, utils
"""


def test_each_name_is_an_attribute_of_its_package() -> None:
    """`import a.b as c` looks there, and V2's own modules import `deep_ep._C` so."""
    done = run_python(["-c", NAMES], os.environ)
    assert done.returncode == 0, done.stderr


# --- processes ------------------------------------------------------------------------------------------------------

PROCESS = """
import random, sys, torch, torch.distributed as dist
from deep_ep_py.compat import take_names
take_names()
from deep_ep.utils.envs import *
from deep_ep.utils.math import per_token_cast_to_fp8
from deep_ep.utils.refs import dispatch

local_rank = int(sys.argv[1])
try:
    dist_print("too early")
except RuntimeError as error:
    assert "init_dist" in str(error)
rank, ranks, group = init_dist(local_rank, 2)
assert get_global_seed() == 0 and get_local_seed() == torch.initial_seed() == rank
init_seed(9)
assert get_global_seed() == 9 and get_local_seed() == torch.initial_seed() == 9 + rank
assert random.random() == random.Random(9 + rank).random()
assert get_physical_domain_size(group) == get_logical_domain_size(group) == (1, 2)

experts, most, topk = 8, 15, 3
torch.manual_seed(1)  # each process makes what both of them send
counts = [7, 12]
ids = [torch.rand(n, experts, dtype=torch.float32).topk(topk).indices for n in counts]
for mine in ids:
    mine[torch.rand(mine.shape, dtype=torch.float32) < 0.4] = -1
ids[1][:, :] = torch.where(ids[1] >= 4, ids[1], -1)  # nothing from process 1 to process 0
weights = [torch.rand(n, topk, dtype=torch.float32) for n in counts]
rows = [torch.randn(n, 256) for n in counts]
casts = [per_token_cast_to_fp8(mine) for mine in rows]
own = ids[rank]

arrive = [(s, t) for s in range(2) for t in range(counts[s]) if ((ids[s][t] >= 0) & (ids[s][t] // 4 == rank)).any()]
def of(tensors):
    found = [tensors[s][t] for s, t in arrive]
    return torch.stack(found) if found else tensors[0][:0]
local = of(ids) - 4 * rank
for x in (rows[rank], casts[rank], (casts[rank][0], casts[rank][1].t().contiguous().t())):
    for given in (weights[rank], None):
        recv_x, recv_ids, recv_weights, source, per_rank = dispatch(x, own, given, most, experts)
        if isinstance(x, tuple):
            assert recv_x[0].dtype == torch.float8_e4m3fn
            assert torch.equal(recv_x[0].view(torch.uint8), of([cast[0].view(torch.uint8) for cast in casts]))
            assert torch.equal(recv_x[1], of([cast[1] for cast in casts]))
        else:
            assert torch.equal(recv_x, of(rows))
        assert torch.equal(recv_ids, torch.where((local >= 0) & (local < 4), local, -1))
        assert recv_weights is None if given is None else torch.equal(recv_weights, of(weights))
        assert source.tolist() == [s * most + t for s, t in arrive] and source.dtype == torch.int32
        assert per_rank.tolist() == [sum(s == r for s, _ in arrive) for r in range(2)]
        assert per_rank.dtype == torch.int32 and len(arrive) > 2

for name, arguments in (
    ("num_experts=7", (rows[rank], own, None, most, 7)),
    ("num_max_tokens_per_rank=6", (rows[rank], own, None, 6, experts)),
    ("topk_idx", (rows[rank], own[1:], None, most, experts)),
    ("topk_weights", (rows[rank], own, weights[rank][:, 1:], most, experts)),
):
    try:
        dispatch(*arguments)
    except ValueError as error:
        assert name in str(error), error
    else:
        raise AssertionError(name)
if rank == 0:
    dist_print("once", once_in_node=True)
    dist_print()
else:
    dist_print("never", once_in_node=True)
    dist_print("each")
dist.destroy_process_group()
"""


def test_two_processes() -> None:
    """Tests `refs.dispatch` and `envs`, which use torch's default process group."""
    environment = {name: value for name, value in os.environ.items() if name not in ("WORLD_SIZE", "RANK")}
    environment |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "PYTHONPATH": os.pathsep.join(sys.path),
        "CUDA_VISIBLE_DEVICES": "",
    }
    with ThreadPoolExecutor() as pool:
        done = list(pool.map(lambda rank: run_python(["-c", PROCESS, str(rank)], environment), range(2)))
    assert [one.stdout for one in done] == ["once\n\n", "each\n"] and [one.returncode for one in done] == [0, 0], done


# --- testing --------------------------------------------------------------------------------------------------------


class Profiler:
    """A replacement for torch's profiler that saw the launches of two kernels."""

    def __init__(self, **_: Any) -> None:
        pass

    def __enter__(self) -> Profiler:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def export_chrome_trace(self, path: str) -> None:
        Path(path).write_text("trace")

    def events(self) -> list[SimpleNamespace]:
        def launch(name: str, start: float, microseconds: float) -> SimpleNamespace:
            span = SimpleNamespace(start=start, elapsed_us=lambda: microseconds)
            return SimpleNamespace(name=name, time_range=span, device_type=SimpleNamespace(name="CUDA"))

        return [launch(*one) for one in (("dispatch", 1, 10), ("copy", 2, 4), ("dispatch", 3, 20), ("copy", 4, 6))]


def test_bench_kineto_with_arguments_of_v2(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: None)
    monkeypatch.setattr(torch.profiler, "profile", Profiler)
    calls: list[str] = []

    def bench(**options: Any) -> Any:
        return testing.bench_kineto(
            lambda: calls.append("run"),
            kernel_names=("dispatch", "copy"),
            num_tests=2,
            suppress_kineto_output=False,
            trace_path=str(tmp_path / "trace.json"),
            flush_l2=False,
            barrier_comm_profiling=True,
            barrier=lambda: calls.append("barrier"),
            **options,
        )

    assert bench() == pytest.approx([15e-6, 5e-6]) and (tmp_path / "trace.json").read_text() == "trace"
    assert calls == ["barrier", "run"] * 4
    assert bench(num_kernels_per_period=2) == [pytest.approx([10e-6, 20e-6]), pytest.approx([4e-6, 6e-6])]
    calls.clear()
    monkeypatch.setenv("EP_DISABLE_BARRIER_PROFILING", "1")
    bench()
    assert calls == ["run"] * 4


def test_bench_kineto_under_another_profiler(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    monkeypatch.setenv("EP_USE_NVIDIA_TOOLS", "1")
    assert testing.bench_kineto(lambda: calls.append(1), "dispatch") == 1
    assert testing.bench_kineto(lambda: calls.append(1), ("dispatch", "copy")) == (1, 1)
    assert not calls
    monkeypatch.setenv("EP_USE_NVIDIA_TOOLS", "0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="expected a GPU"):
        testing.bench_kineto(lambda: calls.append(1), "dispatch")
