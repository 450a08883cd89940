"""The decoding layer: against a dense one and that of normal mode, in micro-batches, compiled; refused arguments."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import deep_ep_py as deep_ep
from decode import check_close, dense, make_layer, own_experts, routed
from deep_ep_py import moe, ops
from deep_ep_py.moe import packed
from deep_ep_py.testing import run_ranks
from harness import under_schedules
from launches import forked
from low_latency import CASTS, Sizes, Work, make_buffer

# Also a rank without tokens, and one with the maximum number.
TOKENS = {1: (6,), 2: (9, 0), 4: (4, 0, 9, 1)}
ROUNDINGS = 0.0079
"""For the rounding of an expert's result and of the sum to bfloat16: 2**-8 each, and a margin."""
SIZES = Sizes("decode", 2, TOKENS[2], 9, 128, 3, 4)


def sizes_of(ranks: int, hidden: int = 128) -> Sizes:
    return Sizes("decode", ranks, TOKENS[ranks], 9, hidden, 3, 4 * ranks, torch.int32 if ranks == 2 else torch.int64)


@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize("ranks", TOKENS)
def test_as_a_dense_layer(ranks: int, cast: str) -> None:
    how = CASTS[cast]
    sizes = sizes_of(ranks, 512 if how.use_ue8m0 else 128)
    work = Work.of(sizes, skipped=0.2, twice=0.1, results=False)
    expected = [dense(work, rank, how) for rank in range(ranks)]

    def on_each_rank(group: Any) -> None:
        with make_buffer(group, sizes, "mixed") as buffer:
            given = routed(work, buffer.rank)
            outs = []
            for zero_copy in (False, True):
                layer = make_layer(buffer, sizes, how, zero_copy)
                for _ in range(3):
                    outs.append(layer(*given))
                    check_close(outs[-1], *expected[buffer.rank], ROUNDINGS)
            assert all(torch.equal(outs[0], out) for out in outs), "every run must give the same bits"

    under_schedules(ranks, on_each_rank, count=2)


def test_tokens_that_choose_no_expert() -> None:
    work = Work.of(SIZES, skipped=1.0, results=False)

    def on_each_rank(group: Any) -> None:
        with make_buffer(group, SIZES, "peer") as buffer, torch.inference_mode():
            for zero_copy in (False, True):
                out = make_layer(buffer, SIZES, zero_copy=zero_copy)(*routed(work, buffer.rank))
                assert out.shape == work.x[buffer.rank].shape and not out.any()

    run_ranks(2, on_each_rank, seed=1)


class GivenRoutes(nn.Module):
    """A gate with given choices."""

    def __init__(self, topk_idx: Tensor, topk_weights: Tensor) -> None:
        super().__init__()
        self.chosen = topk_idx, topk_weights

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.chosen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_as_the_layer_of_normal_mode(dtype: torch.dtype) -> None:
    """On the same Buffer, with the same weights."""
    work = Work.of(SIZES, skipped=0.2, results=False)
    expected = [dense(work, rank) for rank in range(2)]
    # Experts in bfloat16 also round their intermediate values in both modes, but at different points.
    share = 0.016 if dtype == torch.float32 else 0.04

    def on_each_rank(group: Any) -> None:
        with make_buffer(group, SIZES, "peer") as buffer:
            x, ids, weights = routed(work, buffer.rank)
            layer = make_layer(buffer, SIZES).to(dtype)
            experts = layer.experts.experts
            assert experts.down.dtype == dtype
            normal = moe.MoELayer(GivenRoutes(ids, weights), experts, SIZES.experts, layer.group)
            wanted = normal(x.float()).detach()
            out = layer(x.float(), ids, weights)
            assert out.dtype == torch.float32
            check_close(out, wanted.double(), expected[buffer.rank][1], share)

    run_ranks(2, on_each_rank, seed=1)


@pytest.mark.parametrize("zero_copy", [False, True], ids=["copied", "zero_copy"])
@pytest.mark.parametrize("ranks", [1, 4])
def test_two_micro_batches(ranks: int, zero_copy: bool) -> None:
    sizes = sizes_of(ranks)
    first = Work.of(sizes, 1, results=False)
    second = Work.of(Sizes("second", ranks, TOKENS[ranks][::-1], 9, 128, 3, sizes.experts), 2, results=False)
    expected = [(dense(first, rank), dense(second, rank)) for rank in range(ranks)]

    def on_each_rank(group: Any) -> None:
        with make_buffer(group, sizes, "mixed") as buffer:
            layer = make_layer(buffer, sizes, CASTS["bf16"], zero_copy)
            batches = routed(first, buffer.rank), routed(second, buffer.rank)
            seen = []

            def meanwhile(which: int) -> None:
                stats = buffer.stats()
                seen.append((which, stats["low_latency_dispatches"], stats["low_latency_combines"]))

            outs = moe.run_two(layer, *batches, meanwhile)
            assert seen == [(0, 2, 0), (1, 2, 2)]
            for out, alone, wanted in zip(outs, batches, expected[buffer.rank]):
                assert torch.equal(out, layer(*alone))
                check_close(out, *wanted, ROUNDINGS)

    under_schedules(ranks, on_each_rank, count=2)


def test_results_that_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """With `zero_copy` the experts write where the combine reads, and the combine is called accordingly."""
    sizes = sizes_of(1)
    work = Work.of(sizes, results=False)

    def on_each_rank(group: Any) -> None:
        with make_buffer(group, sizes, "peer") as buffer:
            views, combines = [], []
            next_view, combine = buffer.get_next_low_latency_combine_buffer, buffer.low_latency_combine

            def noted_view(handle: Any) -> Tensor:
                views.append(next_view(handle))
                return views[-1]

            def noted_combine(x: Tensor, *rest: Any, **options: Any) -> Any:
                combines.append((x.data_ptr(), options["zero_copy"]))
                return combine(x, *rest, **options)

            monkeypatch.setattr(buffer, "get_next_low_latency_combine_buffer", noted_view)
            monkeypatch.setattr(buffer, "low_latency_combine", noted_combine)
            layer, given = make_layer(buffer, sizes, zero_copy=True), routed(work, 0)
            layer(*given)
            moe.run_two(layer, given, given, lambda which: None)
            assert combines == [(view.data_ptr(), True) for view in views] and len(views) == 3

    run_ranks(1, on_each_rank, seed=1)


def test_steps_in_another_order() -> None:
    work = Work.of(SIZES, results=False)

    def on_each_rank(group: Any) -> None:
        with make_buffer(group, SIZES, "peer") as buffer:
            layer = make_layer(buffer, SIZES)
            batch = layer.begin(*routed(work, buffer.rank))
            for early, turn in ((batch.run_experts, "receive"), (batch.finish, "receive")):
                with pytest.raises(deep_ep.DeepEPError, match=f"expected {turn} as this micro-batch's next step"):
                    early()
            batch.receive()
            with pytest.raises(deep_ep.DeepEPError, match="receive: expected run_experts as"):
                batch.receive()
            batch.run_experts()
            out = batch.finish()
            with pytest.raises(deep_ep.DeepEPError, match="finish: expected nothing more as"):
                batch.finish()
            assert torch.equal(out, layer(*routed(work, buffer.rank)))

    run_ranks(2, on_each_rank, seed=1)


def never(which: int) -> None:
    pytest.fail(f"work of micro-batch {which}, where none was begun")


X, IDS, WEIGHTS = torch.zeros(3, 128), torch.zeros(3, 2, dtype=torch.int64), torch.zeros(3, 2)
WRONG_TOKENS: list[tuple[tuple[Any, ...], type[Exception], str]] = [
    ((None, IDS, WEIGHTS), TypeError, r"x=None: expected a floating \[tokens, 128\] on cpu"),
    ((X.long(), IDS, WEIGHTS), TypeError, r"x=int64\[3, 128\] on cpu: expected a floating"),
    ((X[:, :64], IDS, WEIGHTS), ValueError, r"x=float32\[3, 64\].*: expected \[at most 9 tokens, 128\]"),
    ((X.repeat(4, 1), IDS, WEIGHTS), ValueError, r"x=float32\[12, 128\].*: expected \[at most 9 tokens, 128\]"),
    ((X, IDS.float(), WEIGHTS), TypeError, r"topk_idx=float32\[3, 2\].*: expected int64 or int32 \[3, top-k\]"),
    ((X, IDS[:2], WEIGHTS), ValueError, r"topk_idx=int64\[2, 2\].*: expected \[3, top-k\], a row for each of x"),
    ((X, IDS + 4, WEIGHTS), ValueError, "topk_idx: ids from 4 to 4, expected -1 to 3 with 4 experts"),
    ((X, IDS, WEIGHTS.double()), TypeError, r"topk_weights=float64.*: expected a float32 \[3, 2\] on cpu"),
    ((X, IDS, WEIGHTS[:, :1]), ValueError, r"topk_weights=float32\[3, 1\].*: expected \[3, 2\], as topk_idx"),
]


@pytest.mark.once
def test_tokens_that_are_refused() -> None:
    """They are refused before anything is sent, even of the valid micro-batch."""
    sizes = Sizes("one", 1, (3,), 9, 128, 2, 4)

    def on_each_rank(group: Any) -> None:
        with make_buffer(group, sizes, "peer") as buffer:
            layers = [make_layer(buffer, sizes, zero_copy=zero_copy) for zero_copy in (False, True)]
            for given, error, message in WRONG_TOKENS:
                calls: list[Callable[..., object]] = [*layers, layers[0].begin]
                for call in calls:
                    with pytest.raises(error, match=message):
                        call(*given)
                with pytest.raises(error, match=message):
                    moe.run_two(layers[0], (X, IDS, WEIGHTS), given, never)
            with pytest.raises(ValueError, match="second: top-1: expected top-2, as in first"):
                moe.run_two(layers[0], (X, IDS, WEIGHTS), (X, IDS[:, :1], WEIGHTS[:, :1]), never)
            assert buffer.stats()["low_latency_dispatches"] == 0
        with make_buffer(group, sizes, "peer", regions=1) as buffer:
            with pytest.raises(ValueError, match="layer: its Buffer has regions=1, expected at least 2 for two"):
                moe.run_two(make_layer(buffer, sizes), (X, IDS, WEIGHTS), (X, IDS, WEIGHTS), never)
            assert buffer.stats()["low_latency_dispatches"] == 0

    run_ranks(1, on_each_rank, seed=1)


@pytest.mark.once
def test_any_strides_will_do() -> None:
    sizes = Sizes("one", 1, (3,), 9, 128, 2, 4)
    work = Work.of(sizes, results=False)
    given = [tensor.t().contiguous().t() for tensor in routed(work, 0)]
    assert not any(tensor.is_contiguous() for tensor in given)

    def on_each_rank(group: Any) -> None:
        with make_buffer(group, sizes, "peer") as buffer:
            layers = [make_layer(buffer, sizes, zero_copy=zero_copy) for zero_copy in (False, True)]
            for layer in layers:
                check_close(layer(*given), *dense(work, 0), ROUNDINGS)

    run_ranks(1, on_each_rank, seed=1)


@pytest.mark.once
def test_layers_that_are_refused() -> None:
    sizes = Sizes("one", 1, (3,), 9, 128, 2, 4)

    def on_each_rank(group: Any) -> None:
        with make_buffer(group, sizes, "peer") as buffer:
            name, mine = ops.register(buffer, "refused"), moe.PackedExperts(own_experts(sizes, 0))
            narrow = moe.PackedExperts(moe.Experts(0, 4, 64, 8))
            given: list[tuple[tuple[Any, ...], type[Exception], str]] = [
                ((mine.experts, 4, 9, name), TypeError, "experts=Experts: expected deep_ep_py.moe.PackedExperts"),
                ((mine, 8, 9, name), ValueError, "num_experts=8: expected 4, 4 on each of 1 ranks"),
                ((mine, 4, 0, name), ValueError, "num_max_dispatch_tokens_per_rank=0: expected 1 to"),
                ((mine, 4, 9, "unknown"), ValueError, "group='unknown': expected the name of a live Buffer"),
                ((mine, 4, 9, name, 2), TypeError, "use_fp8=2: expected a bool"),
                ((mine, 4, 9, name, True, False, True), ValueError, "use_ue8m0=True: expected together with"),
                ((mine, 4, 9, name, True, True, True), ValueError, "a multiple of 512, not 128"),
                ((narrow, 4, 9, name, True), ValueError, "a multiple of 128, not 64"),
            ]
            for arguments, error, message in given:
                with pytest.raises(error, match=message):
                    moe.DecodeLayer(*arguments)

    run_ranks(1, on_each_rank, seed=1)


def packed_rows(how: str, hidden: int = 512) -> tuple[Tensor, Tensor | None, Tensor]:
    """Make rows of 3 experts, their scales and counts; rows beyond the counts are NaN."""
    random = torch.Generator().manual_seed(4)
    counts = torch.tensor([5, 0, 2], dtype=torch.int32)
    x = torch.full((3, 5, hidden), torch.nan, dtype=torch.bfloat16)
    for expert, count in enumerate(counts.tolist()):
        x[expert, :count] = torch.randn(count, hidden, generator=random)
    if how == "bf16":
        return x, None, counts
    rows, scales = moe.per_token_cast_to_fp8(x.view(-1, hidden).nan_to_num(), how == "ue8m0", how == "ue8m0")
    return rows.view(x.shape), scales.view(3, 5, -1).transpose(1, 2).contiguous().transpose(1, 2), counts


@pytest.mark.once
@pytest.mark.parametrize("how", ["bf16", "fp8", "ue8m0"])
def test_packed_experts(how: str) -> None:
    experts = moe.Experts(0, 3, 512, 16)
    x, scales, counts = packed_rows(how)
    out = torch.full(x.shape, 7, dtype=torch.bfloat16)
    assert moe.PackedExperts(experts)(x, scales, counts, out) is out
    # All rows in one batch, as on a GPU: rows within the counts must be equal.
    batched = packed.swiglu(x, scales, experts.gate_and_up, experts.down).detach()
    for expert, count in enumerate(counts.tolist()):
        torch.testing.assert_close(out[expert, :count].float(), batched[expert, :count], rtol=2**-8, atol=1e-5)
        assert (out[expert, count:] == 7).all(), "rows beyond the counts must not be computed"
    op = torch.ops.deep_ep.packed_swiglu.default
    weights = experts.gate_and_up.detach(), experts.down.detach()
    # The schema check of torch cannot compare float8 arguments.
    tests = ("test_faketensor",) if scales is not None else ("test_schema", "test_faketensor")
    torch.library.opcheck(op, (x, scales, counts, *weights, out), test_utils=tests)


@pytest.mark.once
def test_packed_rows_that_are_refused() -> None:
    experts = moe.PackedExperts(moe.Experts(0, 3, 512, 16))
    x, _, counts = packed_rows("bf16")
    rows, scales, _ = packed_rows("fp8")
    given: list[tuple[tuple[Any, ...], type[Exception], str]] = [
        ((x.float(), None, counts), TypeError, r"x=float32\[3, 5, 512\].*: expected bfloat16 or float8_e4m3fn"),
        ((x[:2], None, counts), ValueError, r"x=bfloat16\[2, 5, 512\]"),
        (
            (x, scales, counts),
            ValueError,
            r"scales=float32\[3, 5, 4\].*: expected scales with float8_e4m3fn rows and no others",
        ),
        ((rows, None, counts), ValueError, "scales=None: expected scales with float8_e4m3fn rows"),
        ((x, None, counts.long()), TypeError, r"counts=int64\[3\].*: expected int32\[3\]"),
        ((x, None, counts, x[:, :4]), ValueError, r"out=bfloat16\[3, 4, 512\]"),
    ]
    for arguments, error, message in given:
        with pytest.raises(error, match=message):
            experts(*arguments)
    with pytest.raises(TypeError, match="experts=PackedExperts: expected deep_ep_py.moe.Experts"):
        moe.PackedExperts(experts)  # type: ignore[arg-type]


@pytest.mark.once
@pytest.mark.parametrize("cast", ["bf16", "ue8m0"])
def test_compiled_in_one_piece(cast: str) -> None:
    how = CASTS[cast]
    sizes = sizes_of(2, 512)
    work = Work.of(sizes, results=False)

    def on_each_rank(group: Any) -> None:
        with make_buffer(group, sizes, "peer") as buffer:
            layer = make_layer(buffer, sizes, how)
            compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
            x, ids, weights = routed(work, buffer.rank)
            for tokens in (len(x), len(x) // 2):
                given = x[:tokens], ids[:tokens], weights[:tokens]
                assert torch.equal(compiled(*given), layer(*given)), "the same kernels give the same bits"

    run_ranks(2, on_each_rank, seed=1)


@pytest.mark.slow
@pytest.mark.once
@pytest.mark.thorough
def test_between_processes(workers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Micro-batch steps on other threads than the ones that began them, and a layer compiled by inductor."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    backend = "aot_eager" if shutil.which("g++") is None else "inductor"
    done = forked(workers / "decode_layers.py", 2, backend)
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(f"rank {rank} is done" in done.stdout for rank in range(2)), done.stdout
