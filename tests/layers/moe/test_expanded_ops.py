"""The torch ops of the expanded layout: the values of the Buffer, gradients, torch's own checks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import deep_ep_py as deep_ep
import oracle
from cases import BY_NAME, Case, build
from deep_ep_py import ops
from deep_ep_py.ops import expanded
from deep_ep_py.ops.expanded_routes import to_expanded_routes
from deep_ep_py.testing import run_ranks
from elastic import Layout
from harness import make_buffer, under_schedules

SMALL = Case("ops", ranks=2, tokens=(5, 3), hidden=16, topk=3, experts=4)
ALIGNMENT = 4


def leaf(tensor: Tensor) -> Tensor:
    return tensor.clone().requires_grad_()


def coarse(case: Case) -> oracle.Workload:
    """Return a routing with rows and weights whose sums and products are exact in BF16."""
    random, work = torch.Generator().manual_seed(3), build(case)
    x = [torch.randint(-2, 3, x.shape, generator=random).bfloat16() for x in work.x]
    weights = [torch.randint(1, 3, w.shape, generator=random).float() / 2 for w in work.topk_weights]
    return oracle.Workload(work.num_experts, x, work.topk_idx, weights)


def expert_of(rank: int, work: oracle.Workload, ends: Tensor, rows: int) -> Tensor:
    """Return a factor for each row that depends on its expert: 1 plus its id on all ranks."""
    factor, begin = torch.zeros(rows), 0
    for expert, end in enumerate(ends.tolist()):
        factor[begin:end] = 1 + rank * work.experts_per_rank + expert
        begin = -(-end // ALIGNMENT) * ALIGNMENT
    return factor


def by_hand(work: oracle.Workload, rank: int, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the outputs for the tokens of a rank and the gradients of rows and weights, without communication."""
    x, weights, ids = leaf(work.x[rank].double()), leaf(work.topk_weights[rank].double()), work.topk_idx[rank]
    factor = torch.where(ids >= 0, 1.0 + ids, 0.0).double()
    out = x * (weights * factor).sum(1, keepdim=True)
    out.backward(grad.double())
    assert x.grad is not None
    assert weights.grad is not None
    return out.detach(), x.grad, weights.grad


@pytest.mark.parametrize("worst", [False, True], ids=["counted", "no_host_wait"])
@pytest.mark.parametrize("name", ["uniform", "unrouted_selections", "all_to_one_rank", "uneven_tokens", "2x2_uniform"])
def test_values_and_gradients(name: str, worst: bool) -> None:
    case = BY_NAME[name]
    work = coarse(case)
    random = torch.Generator().manual_seed(5)
    grads = [torch.randint(-2, 3, x.shape, generator=random).bfloat16() for x in work.x]
    expected = [by_hand(work, rank, grads[rank]) for rank in range(case.ranks)]
    received = oracle.dispatch(work)
    layouts = [Layout.of(part, work.experts_per_rank, ALIGNMENT) for part in received]
    most = max(len(x) for x in work.x) if worst else 0

    def on_each_rank(group: Any) -> None:
        buffer = make_buffer(group, case, "ibgda" if case.two_hops else "weak")
        rank, name = buffer.rank, ops.register(buffer)
        x, weights = leaf(work.x[rank]), leaf(work.topk_weights[rank])
        got = ops.dispatch_expanded(x, work.topk_idx[rank], weights, case.experts, name, ALIGNMENT, most)
        layout = layouts[rank]
        assert worst or len(got.x) == layout.size
        used = layout.slots[layout.slots >= 0].long()
        unused = torch.isin(torch.arange(len(got.x)), used, invert=True)
        assert not got.x[unused].any() and not got.topk_weights[unused].any()
        assert got.ends.tolist() == [b + len(r) for b, r in zip(layout.begins, layout.rows, strict=True)]
        factor = expert_of(rank, work, got.ends, len(got.x))
        rows = got.x * (got.topk_weights * factor).unsqueeze(1).bfloat16()
        out = ops.combine_expanded(rows, got.routes, name)
        out.backward(grads[rank])
        for what, found, wanted in zip(("out", "x", "weights"), (out.detach(), x.grad, weights.grad), expected[rank]):
            assert torch.equal(found.double(), wanted), what

    under_schedules(case.ranks, on_each_rank)


def test_compiled_without_a_break() -> None:
    """On one rank: a compiler's locks would stop other ranks that are threads."""
    work = coarse(SMALL)

    def on_each_rank(group: Any) -> None:
        buffer = make_buffer(group, SMALL, "peer")
        rank = buffer.rank
        name = ops.register(buffer, f"rank {rank}")

        def step(x: Tensor, weights: Tensor) -> Tensor:
            got = ops.dispatch_expanded(x, work.topk_idx[rank], weights, SMALL.experts, name, ALIGNMENT)
            return ops.combine_expanded(got.x * got.topk_weights.unsqueeze(1).bfloat16(), got.routes, name)

        results = []
        for function in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
            x, weights = leaf(work.x[rank]), leaf(work.topk_weights[rank])
            out = function(x, weights)
            out.sum().backward()
            results.append((out.detach(), x.grad, weights.grad))
        for eager, compiled in zip(*results, strict=True):
            assert torch.equal(eager, compiled)

    run_ranks(1, on_each_rank)


@pytest.mark.once
@pytest.mark.parametrize("most", [0, 6])
def test_torch_finds_nothing_wrong_with_the_ops(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Schema, aliasing, fake shapes, autograd registration, and tracing with unknown sizes."""

    def uncounted_routes(*arguments: Any) -> list[Tensor]:
        """Return the same routes from every call: torch compares calls, and would notice that operations count."""
        numbers, *tensors = to_expanded_routes(*arguments)
        numbers[1] = 0
        return [numbers, *tensors]

    monkeypatch.setattr(expanded, "to_expanded_routes", uncounted_routes)
    case = Case("alone", ranks=1, tokens=4, hidden=16, topk=2, experts=4)
    work = build(case)
    op = torch.ops.deep_ep

    def on_the_rank(group: Any) -> None:
        buffer = make_buffer(group, case, "peer")
        name = ops.register(buffer)
        given = (leaf(work.x[0]), work.topk_idx[0], leaf(work.topk_weights[0]), case.experts)
        sizes = (ALIGNMENT, most, False, name)
        torch.library.opcheck(op.dispatch_expanded.default, (given[0], None, *given[1:], *sizes))
        got = ops.dispatch_expanded(*given, name, ALIGNMENT, most)
        rows, weights = got.x.detach(), got.topk_weights.detach()
        torch.library.opcheck(op.combine_expanded.default, (leaf(rows), got.routes, name))
        torch.library.opcheck(op.combine_expanded_with_weights.default, (rows, weights, got.routes, name))
        torch.library.opcheck(op.dispatch_expanded_again.default, (work.x[0], got.routes, len(rows), name))

    run_ranks(1, on_the_rank)


@pytest.mark.once
def test_routes_that_are_not_this_ops() -> None:
    case = Case("alone", ranks=1, tokens=4, hidden=16, topk=2, experts=4)
    work = build(case)

    def on_each_rank(group: Any) -> None:
        buffer = make_buffer(group, case, "peer")
        name = ops.register(buffer)
        plain = ops.dispatch(work.x[0], work.topk_idx[0], work.topk_weights[0], 4, name)
        got = ops.dispatch_expanded(work.x[0], work.topk_idx[0], work.topk_weights[0], 4, name)
        for routes in (plain.routes, got.routes[:-1], [], [*got.routes[:-1], got.routes[-1][:-1]]):
            with pytest.raises((ValueError, TypeError), match="routes"):
                ops.combine_expanded(got.x, routes, name)
        with pytest.raises(ValueError, match="expert_alignment=0"):
            ops.dispatch_expanded(work.x[0], work.topk_idx[0], work.topk_weights[0], 4, name, 0)
        with pytest.raises(ValueError, match="list of 7: expected the 12 tensors that dispatch_expanded returned"):
            ops.combine_expanded(got.x, plain.routes, name)
        with pytest.raises(ValueError, match="4 tokens, expected at most num_max_tokens=3"):
            ops.dispatch_expanded(work.x[0], work.topk_idx[0], work.topk_weights[0], 4, name, 1, 3)
        for other in (work.x[0].half(), work.x[0].float()):
            for dispatch in (ops.dispatch, ops.dispatch_expanded):
                with pytest.raises(TypeError, match=r"x=.*expected bfloat16 \[tokens, hidden\] on cpu"):
                    dispatch(other, work.topk_idx[0], work.topk_weights[0], 4, name)
        buffer.destroy()
        with pytest.raises(ValueError, match="buffer: it has been destroyed"):
            ops.register(buffer)

    run_ranks(1, on_each_rank)


@pytest.mark.once
def test_a_number_of_tokens_that_cannot_be() -> None:
    case = Case("alone", ranks=1, tokens=4, hidden=16, topk=2, experts=4)
    work = build(case)

    def on_each_rank(group: Any) -> None:
        buffer = make_buffer(group, case, "peer")
        name = ops.register(buffer)
        with pytest.raises(ValueError, match="num_max_tokens=-1"):
            ops.dispatch_expanded(work.x[0], work.topk_idx[0], work.topk_weights[0], 4, name, 1, -1)
        assert isinstance(buffer, deep_ep.Buffer)

    run_ranks(1, on_each_rank)
