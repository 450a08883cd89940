"""FP8 rows through the torch ops and the layers: on their way only, or as the caller has cast them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import oracle
from cases import AMPLE, BY_NAME, Case, build
from deep_ep_py import moe, ops
from deep_ep_py.testing import run_ranks
from elastic import Layout
from harness import make_buffer, under_schedules

HIDDEN, EXPERTS, TOPK, ALIGNMENT = 256, 8, 3, 4
CASE = Case("fp8", 4, (5, 0, 11, 2), hidden=HIDDEN, topk=TOPK, experts=EXPERTS, num_nvl_bytes=AMPLE)
MOST = 11


def leaf(tensor: Tensor) -> Tensor:
    return tensor.clone().requires_grad_()


def there_and_back(x: Tensor) -> Tensor:
    return moe.per_token_cast_back(*moe.per_token_cast_to_fp8(x.contiguous()))


class StraightThrough(torch.autograd.Function):
    """Rows as FP8 leaves them; the gradient does not notice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return there_and_back(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


class Rounding(moe.Experts):
    """Experts that round what they receive."""

    def forward(self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> Tensor:
        return super().forward(StraightThrough.apply(x), topk_idx, topk_weights)


class RoundingGroups(moe.Experts):
    """The same for rows that are grouped."""

    def on_groups(self, x: Tensor, ends: Tensor) -> Tensor:
        return super().on_groups(StraightThrough.apply(x), ends)


def dispatched(layout: str, name: str, x: Tensor, work: oracle.Workload, rank: int, worst: bool, fp8: bool) -> Any:
    given = x, work.topk_idx[rank], work.topk_weights[rank], work.num_experts, name
    if layout == "rows":
        return ops.dispatch(*given, num_worst_tokens=4 * MOST if worst else 0, fp8=fp8)
    return ops.dispatch_expanded(*given, ALIGNMENT, MOST if worst else 0, fp8=fp8)


@pytest.mark.parametrize("worst", [False, True], ids=["counted", "worst"])
@pytest.mark.parametrize("layout", ["rows", "expanded"])
def test_rows_that_travel_as_fp8(layout: str, worst: bool) -> None:
    """They arrive as casts there and back leave them, and have the gradients of rows that are not cast."""
    work = build(CASE)

    def on_each_rank(group: Any) -> None:
        buffer = make_buffer(group, CASE, "weak")
        rank, name, got, gradients = buffer.rank, ops.register(buffer), {}, {}
        for fp8 in (False, True):
            x = leaf(work.x[rank])
            got[fp8] = dispatched(layout, name, x, work, rank, worst, fp8)
            rows = got[fp8].x
            rows.backward(torch.arange(rows.numel(), dtype=torch.bfloat16).remainder(7).view(rows.shape))
            gradients[fp8] = x.grad
        assert oracle.same_bits(got[True].x.detach(), there_and_back(got[False].x.detach()))
        assert not torch.equal(got[True].x, got[False].x) or not got[True].x.numel()
        assert torch.equal(got[True].topk_weights, got[False].topk_weights)
        assert torch.equal(gradients[True], gradients[False])

    under_schedules(CASE.ranks, on_each_rank)


@pytest.mark.parametrize("layout", ["rows", "expanded"])
def test_bytes_on_the_wire(layout: str) -> None:
    """A row of 256 elements has 512 bytes in BF16, and 256 + 8 in FP8; each comes with its choices."""
    case = Case("wire", 2, (64, 64), hidden=HIDDEN, topk=TOPK, experts=EXPERTS, num_nvl_bytes=AMPLE, ranks_per_node=1)
    work = build(case)

    def on_each_rank(group: Any) -> None:
        buffer = make_buffer(group, case, "ibgda")
        name, sent = ops.register(buffer), []
        for fp8 in (False, True):
            before = sum(nic["bytes"] for nic in buffer.network_counters())
            dispatched(layout, name, work.x[buffer.rank], work, buffer.rank, False, fp8)
            group.barrier()
            sent.append(sum(nic["bytes"] for nic in buffer.network_counters()) - before)
        assert sent[1] < 0.6 * sent[0], sent

    run_ranks(case.ranks, on_each_rank)


@pytest.mark.parametrize("worst", [False, True], ids=["counted", "worst"])
@pytest.mark.parametrize("exponents", [False, True], ids=["float32", "ue8m0"])
def test_rows_that_the_caller_has_cast(exponents: bool, worst: bool) -> None:
    """Rows and scales arrive bit by bit, and what no rank sent is 0."""
    case = Case("cast", 4, CASE.tokens, hidden=512, topk=TOPK, experts=EXPERTS, num_nvl_bytes=AMPLE)
    work = build(case)
    casts = [moe.per_token_cast_to_fp8(x, exponents, exponents) for x in work.x]
    received = oracle.dispatch(work)
    layouts = [Layout.of(part, work.experts_per_rank, ALIGNMENT) for part in received]

    def on_each_rank(group: Any) -> None:
        buffer = make_buffer(group, case, "weak")
        rank, name = buffer.rank, ops.register(buffer)
        part, layout = received[rank], layouts[rank]
        rows, scales = casts[rank]
        scales = scales if exponents else leaf(scales)
        given = rows, scales, work.topk_idx[rank], leaf(work.topk_weights[rank]), EXPERTS, name
        wanted = []
        for which in (0, 1):
            sent = [casts[s][which][t] for s, t in zip(part.src_rank, part.src_idx, strict=True)]
            wanted.append(torch.stack(sent) if sent else casts[rank][which][:0])

        got = ops.dispatch_fp8(*given, num_worst_tokens=4 * MOST if worst else 0)
        for found, rows in zip((got.x, got.scales), wanted, strict=True):
            assert oracle.same_bits(found[: len(rows)], rows) and not found[len(rows) :].float().any()
        assert torch.equal(got.topk_idx[: len(part.x)], part.topk_idx)

        expanded = ops.dispatch_expanded_fp8(*given, ALIGNMENT, MOST if worst else 0)
        assert not any(one.requires_grad for one in (*got[:-1], *expanded[:-1]))
        used, at = layout.slots >= 0, layout.slots[layout.slots >= 0].long()
        unused = torch.isin(torch.arange(len(expanded.x)), at, invert=True)
        for found, rows in zip((expanded.x, expanded.scales), wanted, strict=True):
            assert oracle.same_bits(found[at], rows[used.nonzero()[:, 0]]) and not found[unused].float().any()
        assert expanded.ends.tolist() == [b + len(r) for b, r in zip(layout.begins, layout.rows, strict=True)]
        for name_of_layout, routes in (("combine", got.routes), ("combine_expanded", expanded.routes)):
            size = len(got.x if name_of_layout == "combine" else expanded.x)
            out = getattr(ops, name_of_layout)(torch.ones(size, 512, dtype=torch.bfloat16), routes, name)
            assert out.shape == work.x[rank].shape and torch.equal(out[:, :1].expand(out.shape), out)

    under_schedules(case.ranks, on_each_rank)


@pytest.mark.parametrize(
    ("layer", "rounding", "options"),
    [
        (moe.MoELayer, Rounding, {}),
        (moe.MoELayer, Rounding, {"num_worst_tokens": 4 * MOST}),
        (moe.ExpandedMoELayer, RoundingGroups, {"expert_alignment": 4}),
        (moe.ExpandedMoELayer, RoundingGroups, {"expert_alignment": 4, "num_max_tokens": MOST}),
    ],
    ids=["counted", "worst", "expanded", "expanded_worst"],
)
def test_layers(layer: Callable[..., nn.Module], rounding: type[moe.Experts], options: dict[str, int]) -> None:
    """Outputs and gradients are those of a layer whose experts round the rows that they receive."""
    torch.manual_seed(5)
    gate, share = moe.Gate(HIDDEN, EXPERTS, TOPK), EXPERTS // CASE.ranks
    random = torch.Generator().manual_seed(6)
    inputs = [torch.randn(n, HIDDEN, generator=random).bfloat16().float() for n in CASE.tokens]

    def on_each_rank(group: Any) -> None:
        buffer = make_buffer(group, CASE, "weak")
        rank, name, found = buffer.rank, ops.register(buffer), []
        for fp8, experts in ((True, moe.Experts), (False, rounding)):
            one = layer(gate, experts(rank * share, share, HIDDEN, 8, seed=3), EXPERTS, name, fp8=fp8, **options)
            x = leaf(inputs[rank])
            out = one(x)
            wanted = [x, *one.experts.parameters(), *one.gate.parameters()]
            found.append([out.detach(), *torch.autograd.grad(out.square().sum(), wanted)])
        for fp8, rounded in zip(*found, strict=True):
            assert torch.equal(fp8, rounded)

    under_schedules(CASE.ranks, on_each_rank, count=1)


@pytest.mark.once
@pytest.mark.parametrize("worst", [0, 6])
def test_torch_finds_nothing_wrong_with_the_ops(worst: int) -> None:
    """Schema, aliasing, fake shapes, autograd registration; not twice the same result, since operations count.

    Rows of one byte are given as int8: torch's checks compute with the inputs, and it has no arithmetic for FP8.
    """
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    case = Case("alone", ranks=1, tokens=4, hidden=512, topk=2, experts=4)
    work, op = build(case), torch.ops.deep_ep
    ids, weights = work.topk_idx[0], work.topk_weights[0]

    def on_the_rank(group: Any) -> None:
        name = ops.register(buffer := make_buffer(group, case, "peer"))
        cast, scales = moe.per_token_cast_to_fp8(work.x[0])
        exponents = moe.per_token_cast_to_fp8(work.x[0], True, True)[1]
        bits = cast.view(torch.int8)
        for rows, of_rows, fp8 in ((leaf(work.x[0]), None, True), (bits, scales, False), (bits, exponents, False)):
            given = (rows, of_rows, ids, leaf(weights) if fp8 else weights, 4)
            torch.library.opcheck(op.dispatch.default, (*given, worst, fp8, name), test_utils=checks)
            given = (*given, ALIGNMENT, worst, fp8, name)
            torch.library.opcheck(op.dispatch_expanded.default, given, test_utils=checks)
        assert buffer.stats()["dispatches"] > 0

    run_ranks(1, on_the_rank)


@pytest.mark.parametrize("layout", ["rows", "expanded"])
def test_compiled_without_a_break(layout: str) -> None:
    """On one rank: a compiler's locks would stop other ranks that are threads."""
    case = Case("alone", ranks=1, tokens=4, hidden=HIDDEN, topk=2, experts=4)
    work = build(case)

    def on_each_rank(group: Any) -> None:
        name = ops.register(buffer := make_buffer(group, case, "peer"))

        def step(x: Tensor) -> Tensor:
            got = dispatched(layout, name, x, work, 0, False, True)
            back = ops.combine if layout == "rows" else ops.combine_expanded
            return back(got.x * 2, got.routes, name)

        results = []
        for function in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
            x = leaf(work.x[0])
            out = function(x)
            out.sum().backward()
            results.append((out.detach(), x.grad))
        for eager, compiled in zip(*results, strict=True):
            assert torch.equal(eager, compiled)
        assert buffer.stats()["dispatches"] > 0

    run_ranks(1, on_each_rank)


@pytest.mark.once
def test_rows_that_cannot_be_cast() -> None:
    case = BY_NAME["two_ranks"]

    def on_each_rank(group: Any) -> None:
        buffer = make_buffer(group, case, "peer")
        name = ops.register(buffer)
        ids, weights = torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1)
        rows = torch.zeros(2, 256, dtype=torch.bfloat16)
        cast, scales = rows.to(torch.float8_e4m3fn), torch.ones(2, 2)
        for dispatch in (ops.dispatch, ops.dispatch_expanded):
            for x, error, why in (
                (rows[:, :192].contiguous(), ValueError, r"x=bfloat16\[2, 192\].*a multiple of 128 .* with fp8=True"),
                (rows.float(), TypeError, r"x=.*expected bfloat16 \[tokens, hidden\] on cpu"),
                (rows.tolist(), TypeError, "x=.{0,300}: expected a torch.Tensor"),
            ):
                with pytest.raises(error, match=why) as info:
                    dispatch(x, ids, weights, 2, name, fp8=True)
                assert len(str(info.value)) < 400
            with pytest.raises(TypeError, match="fp8='yes': expected a bool"):
                dispatch(rows, ids, weights, 2, name, fp8="yes")
            with pytest.raises(TypeError, match="group=.*: expected the name that deep_ep_py.ops.register returned"):
                dispatch(rows, ids, weights, 2, buffer)
        for combine in (ops.combine, ops.combine_expanded):
            with pytest.raises(TypeError, match="routes=None: expected the list of tensors"):
                combine(rows, None, name)
        for dispatch_fp8 in (ops.dispatch_fp8, ops.dispatch_expanded_fp8):
            for given, error, why in (
                ((rows, scales), TypeError, "x=bfloat16.*: expected rows of one byte per element"),
                ((cast, torch.ones(3, 2)), ValueError, r"scales=float32\[3, 2\].*: expected \[2, scales\] or \[2\]"),
                ((cast, None), TypeError, "scales=None: expected a torch.Tensor"),
            ):
                with pytest.raises(error, match=why):
                    dispatch_fp8(*given, ids, weights, 2, name)
        assert buffer.stats()["operations"] == 0

    run_ranks(2, on_each_rank)
