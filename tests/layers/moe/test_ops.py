"""The torch ops: the values of the Buffer, gradients, names, lifetimes, torch's own checks."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor

import deep_ep_py as deep_ep
import oracle
from cases import BY_NAME, Case, build
from deep_ep_py import ops
from deep_ep_py.ops import library
from deep_ep_py.ops.routes import to_routes
from deep_ep_py.testing import run_ranks
from harness import make_buffer, under_schedules

SMALL = Case("ops", ranks=2, tokens=(5, 3), hidden=16, topk=2, experts=4)


def leaf(tensor: Tensor) -> Tensor:
    return tensor.clone().requires_grad_()


def rows_of_experts(received: ops.Dispatched) -> Tensor:
    """Return a differentiable function of rows and weights; exact, as values are small multiples of powers of two."""
    return received.x * received.topk_weights.sum(dim=1, keepdim=True).bfloat16()


def coarse(work: oracle.Workload, random: torch.Generator) -> oracle.Workload:
    """Return the same routing with rows and weights whose sums and products are exact in BF16."""
    x = [torch.randint(-2, 3, x.shape, generator=random).bfloat16() for x in work.x]
    weights = [torch.randint(1, 3, w.shape, generator=random).float() / 2 for w in work.topk_weights]
    return oracle.Workload(work.num_experts, x, work.topk_idx, weights)


def by_hand(work: oracle.Workload, rank: int, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the outputs for the tokens of a rank and the gradients of rows and weights, without communication."""
    x, weights = leaf(work.x[rank].double()), leaf(work.topk_weights[rank].double())
    owner = torch.where(work.topk_idx[rank] < 0, -1, work.topk_idx[rank] // (work.num_experts // work.num_ranks))
    out = torch.zeros_like(x)
    for other in range(work.num_ranks):
        out = out + x * torch.where(owner == other, weights, 0).sum(dim=1, keepdim=True)
    out.backward(grad.double())
    assert x.grad is not None and weights.grad is not None
    return out.detach(), x.grad, torch.where(owner < 0, 0, weights.grad)


@pytest.mark.parametrize("worst", [False, True], ids=["counted", "worst"])
@pytest.mark.parametrize(
    "name", ["uniform", "unrouted_selections", "all_to_one_rank", "uneven_tokens", "ranks_that_receive_nothing"]
)
def test_values_and_gradients(name: str, worst: bool) -> None:
    case = BY_NAME[name]
    random = torch.Generator().manual_seed(3)
    work = coarse(build(case), random)
    grads = [torch.randint(-2, 3, x.shape, generator=random).bfloat16() for x in work.x]
    expected = [by_hand(work, rank, grads[rank]) for rank in range(case.ranks)]
    received_rows = [len(received.x) for received in oracle.dispatch(work)]

    def on_each_rank(group: Any) -> None:
        buffer = make_buffer(group, case, "weak")
        rank, name = buffer.rank, ops.register(buffer)
        x, weights = leaf(work.x[rank]), leaf(work.topk_weights[rank])
        rows = max(received_rows) + 1 if worst else 0
        received = ops.dispatch(x, work.topk_idx[rank], weights, case.experts, name, rows)
        assert len(received.x) == (rows or received_rows[rank])
        assert not received.x[received_rows[rank] :].any(), "rows that no rank sent must be cleared"
        out = ops.combine(rows_of_experts(received), received.routes, name)
        out.backward(grads[rank])
        for what, got, wanted in zip(("out", "x", "weights"), (out.detach(), x.grad, weights.grad), expected[rank]):
            assert torch.equal(got.double(), wanted), what

    under_schedules(case.ranks, on_each_rank)


def test_again_along_the_same_routes() -> None:
    work = coarse(build(SMALL), torch.Generator().manual_seed(4))

    def on_each_rank(group: Any) -> None:
        buffer = make_buffer(group, SMALL, "peer")
        rank, name = buffer.rank, ops.register(buffer)
        received = ops.dispatch(work.x[rank], work.topk_idx[rank], work.topk_weights[rank], SMALL.experts, name)
        x = leaf(work.x[rank][:, :8].contiguous())
        rows = ops.dispatch_again(x, received.routes, name)
        assert torch.equal(rows, received.x[:, :8])
        # An expanded gradient, while kernels need contiguous rows.
        rows.backward(torch.ones(1, 1, dtype=torch.bfloat16).expand(rows.shape))
        copies = (work.topk_idx[rank] // 2).sort(dim=1).values.diff(dim=1).ne(0).sum(dim=1, keepdim=True) + 1
        assert torch.equal(x.grad, copies.bfloat16().expand(x.shape))

    run_ranks(SMALL.ranks, on_each_rank, seed=1)


def test_weights_that_need_no_gradient() -> None:
    work = build(SMALL)

    def on_each_rank(group: Any) -> None:
        buffer = make_buffer(group, SMALL, "peer")
        rank, name = buffer.rank, ops.register(buffer)
        x = leaf(work.x[rank])
        received = ops.dispatch(x, work.topk_idx[rank], work.topk_weights[rank], SMALL.experts, name)
        ops.combine(received.x, received.routes, name).sum().backward()
        assert x.grad is not None and x.grad.any()

    run_ranks(SMALL.ranks, on_each_rank, seed=1)


@pytest.mark.once
def test_nothing_is_left_of_a_thousand_steps() -> None:
    """With a backward, with a graph dropped without one, and under no_grad; some routes are kept for a while."""
    work = build(SMALL)

    def step(turn: int, name: str, rank: int, kept: list[Any]) -> None:
        x, weights = leaf(work.x[rank]), leaf(work.topk_weights[rank])
        with torch.set_grad_enabled(turn % 3 != 2):
            received = ops.dispatch(x, work.topk_idx[rank], weights, SMALL.experts, name)
            out = ops.combine(rows_of_experts(received), received.routes, name)
        if turn % 3 == 0:
            out.sum().backward()
        kept.append(received.routes)
        del kept[:-8]

    def tensors() -> int:
        return sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())

    def on_each_rank(group: Any) -> list[tuple[int, int]]:
        buffer = make_buffer(group, SMALL, "peer", arena_bytes=1 << 20)
        name = ops.register(buffer)
        kept: list[Any] = []
        seen = []
        for turn in range(1000):
            step(turn, name, buffer.rank, kept)
            if turn in (99, 999):
                group.barrier()
                seen.append((buffer.stats()["arena_used"], tensors()))
                group.barrier()
        assert buffer.stats()["rounds"] == 0, "all outputs must have come from shared memory"
        return seen

    for early, late in run_ranks(SMALL.ranks, on_each_rank):
        assert early == late


def test_names() -> None:
    def on_each_rank(group: Any) -> str:
        buffer, other = (make_buffer(group, SMALL, "peer") for _ in range(2))
        name = ops.register(buffer)
        assert ops.register(buffer) == name, "registering again must be allowed"
        with pytest.raises(ValueError, match=r"name='rank .*no other Buffer"):
            ops.register(other)
        assert ops.register(other, f"{name} second") != name
        assert name.endswith(f"/{buffer.group_size} ranks/2"), "compiler caches must distinguish these"
        other.destroy()
        assert ops.register(buffer, f"{name} second"), "a name must be free again when its Buffer is destroyed"
        with pytest.raises(ValueError, match="name=''"):
            ops.register(buffer, "")
        with pytest.raises(TypeError, match="buffer='a name'"):
            ops.register("a name")  # type: ignore[arg-type]
        del buffer
        with pytest.raises(ValueError, match=r"group='rank .*live Buffer"):
            ops.dispatch(torch.zeros(1, 16), torch.zeros(1, 1), torch.zeros(1, 1), 4, name)
        return name

    names = run_ranks(2, on_each_rank)
    assert len(set(names)) == 2, "ranks of one process must not share a name"


def test_routes_that_are_not_of_this_buffer() -> None:
    work = build(SMALL)

    def on_each_rank(group: Any) -> None:
        buffer, other = (make_buffer(group, SMALL, "peer") for _ in range(2))
        rank, name = buffer.rank, ops.register(buffer)
        second = ops.register(other, f"{name} second")
        received = ops.dispatch(work.x[rank], work.topk_idx[rank], work.topk_weights[rank], SMALL.experts, name)
        with pytest.raises(ValueError, match="routes: expected those of this Buffer"):
            ops.combine(received.x, received.routes, second)
        with pytest.raises(ValueError, match="routes=a list of 3"):
            ops.combine(received.x, received.routes[:3], name)
        wrong = [*received.routes[:1], received.routes[1].long(), *received.routes[2:]]
        with pytest.raises(TypeError, match=r"routes\[1\]=int64"):
            ops.dispatch_again(work.x[rank], wrong, name)
        ops.combine(received.x, received.routes, name)  # nothing was launched: the Buffer is unchanged

    run_ranks(SMALL.ranks, on_each_rank)


@pytest.mark.once
@pytest.mark.parametrize("worst", [0, 9])
def test_torch_finds_nothing_wrong_with_the_ops(worst: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Schema, aliasing, fake shapes, autograd registration, and tracing with unknown sizes."""

    def uncounted_routes(*arguments: Any) -> list[Tensor]:
        """Return the same routes from every call: torch compares calls, and would notice that operations count."""
        numbers, *tensors = to_routes(*arguments)
        numbers[1] = 0
        return [numbers, *tensors]

    monkeypatch.setattr(library, "to_routes", uncounted_routes)
    case = Case("alone", ranks=1, tokens=7, hidden=16, topk=2, experts=4)
    work = build(case)
    op = torch.ops.deep_ep

    def on_the_rank(group: Any) -> None:
        buffer = make_buffer(group, case, "peer")
        name = ops.register(buffer)
        given = (leaf(work.x[0]), work.topk_idx[0], leaf(work.topk_weights[0]), case.experts)
        torch.library.opcheck(op.dispatch.default, (given[0], None, *given[1:], worst, False, name))
        received = ops.dispatch(*given, name, worst)
        routes = received.routes
        rows = leaf(received.x.detach())
        torch.library.opcheck(op.combine.default, (rows, routes, name))
        torch.library.opcheck(op.dispatch_again.default, (leaf(work.x[0]), routes, name))
        weights = received.topk_weights.detach()
        torch.library.opcheck(op.combine_with_weights.default, (received.x.detach(), weights, routes, name))

    run_ranks(1, on_the_rank)


def test_an_op_of_a_broken_buffer_raises() -> None:
    work = build(SMALL)

    def on_each_rank(group: Any) -> None:
        buffer = make_buffer(group, SMALL, "peer")
        rank, name = buffer.rank, ops.register(buffer)
        received = ops.dispatch(leaf(work.x[rank]), work.topk_idx[rank], work.topk_weights[rank], SMALL.experts, name)
        out = ops.combine(received.x, received.routes, name)
        group.barrier()
        buffer.abort()
        with pytest.raises(deep_ep.DeepEPError, match="aborted"):
            out.sum().backward()

    run_ranks(SMALL.ranks, on_each_rank)
