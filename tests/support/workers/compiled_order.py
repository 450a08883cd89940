"""Runs under torchrun: ops that depend on nothing of each other, in one compiled graph, on ranks whose numbers of
tokens make a compiler prefer different orders. The results are those of eager mode, forward and backward."""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import deep_ep_py as deep_ep
from deep_ep_py import ops
from deep_ep_py.ops import order

HIDDEN, EXPERTS, MOST = 64, 4, 40
TOKENS = ((4, MOST), (MOST, 4))  # of the two branches, by rank
Branch = Callable[[Tensor, Tensor, Tensor], Tensor]


def rows(group: str) -> Branch:
    def branch(x: Tensor, topk_idx: Tensor, weights: Tensor) -> Tensor:
        received = ops.dispatch(x, topk_idx, weights, EXPERTS, group)
        return ops.combine(received.x * 0.5, received.routes, group)

    return branch


def expanded(group: str) -> Branch:
    def branch(x: Tensor, topk_idx: Tensor, weights: Tensor) -> Tensor:
        received = ops.dispatch_expanded(x, topk_idx, weights, EXPERTS, group, num_max_tokens=MOST)
        return ops.combine_expanded(received.x * 0.5, received.routes, group)

    return branch


def two_layers(branch: Branch) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return a program of two layers for each of two micro-batches, the second of which is sent first."""

    def program(a: tuple[Tensor, ...], b: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        b_once, a_once = branch(*b), branch(*a)
        return branch(a_once, *a[1:]), branch(b_once, *b[1:])

    return program


def checkpointed(branch: Branch) -> Callable[..., tuple[Tensor, Tensor]]:
    def program(a: tuple[Tensor, ...], b: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        for _ in range(2):
            a_out, b_out = checkpoint(two_layers(branch), a, b, use_reentrant=False)
            a, b = (a_out, *a[1:]), (b_out, *b[1:])
        return a[0], b[0]

    return program


def inputs(tokens: int) -> tuple[Tensor, ...]:
    """Return small integers, whose sums are exact. Each token goes to both ranks."""
    x = torch.randint(-4, 5, (tokens, HIDDEN)).bfloat16().requires_grad_()
    at = torch.arange(tokens) % 2
    return x, torch.stack([at, 2 + at], dim=1), torch.ones(tokens, 2)


def check(program: Callable[..., tuple[Tensor, Tensor]]) -> None:
    """Compare two calls before their backward passes, which run in the opposite order."""
    torch._dynamo.reset()
    compiled = torch.compile(program, fullgraph=True)
    calls = [[inputs(tokens) for tokens in TOKENS[dist.get_rank()]] for _ in range(2)]
    results = []
    for run in (program, compiled):
        outputs = [run(*call) for call in calls]
        gradients: list[Tensor] = []
        for call, (a, b) in reversed(list(zip(calls, outputs))):
            gradients += torch.autograd.grad((a * a.detach()).sum() + b.sum(), [call[0][0], call[1][0]])
        results.append([one.detach() for pair in outputs for one in pair] + gradients)
    eager, fast = results
    assert all(one.any() for one in eager)
    for mine, theirs in zip(fast, eager, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("branch")
    parser.add_argument("--checkpointed", action="store_true")
    parser.add_argument("--unordered", action="store_true", help="what happens if Inductor is not told of the order")
    arguments = parser.parse_args()
    if arguments.unordered:
        order._lower_in_order = lambda op: None
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    with deep_ep.Buffer(dist.group.WORLD, num_nvl_bytes=1 << 20) as buffer:
        branches = {"rows": rows(ops.register(buffer)), "expanded": expanded(ops.register(buffer))}
        branch = branches[arguments.branch]
        check(checkpointed(branch) if arguments.checkpointed else two_layers(branch))
    print(f"rank {dist.get_rank()} is done")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
