"""The MoE layer across ranks: against one process with all experts, and compiled as one graph."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from builds import LONG
from cases import AMPLE, Case
from deep_ep_py import moe, ops
from deep_ep_py.examples import moe_layer
from deep_ep_py.examples.train_model import OneProcessMoE
from deep_ep_py.testing import run_ranks
from harness import make_buffer, under_schedules
from launches import forked

HIDDEN, INTERMEDIATE, EXPERTS, TOPK = 16, 8, 8, 3
TOKENS = (5, 0, 11, 2)


def gate() -> moe.Gate:
    torch.manual_seed(5)
    return moe.Gate(HIDDEN, EXPERTS, TOPK)


@functools.cache
def inputs() -> tuple[list[Tensor], list[Tensor]]:
    """Return the rows of each rank, and gradients for its outputs."""
    random = torch.Generator().manual_seed(6)
    return tuple([torch.randn(tokens, HIDDEN, generator=random) for tokens in TOKENS] for _ in range(2))  # type: ignore[return-value]


def results(layer: nn.Module, x: Tensor, grad: Tensor) -> dict[str, Tensor]:
    """Return the output, and the gradients of the rows and of each weight."""
    x = x.clone().requires_grad_()
    out = layer(x)
    out.backward(grad)
    gradients = {name: weight.grad for name, weight in layer.named_parameters()}
    return {"out": out.detach(), "x": x.grad, **gradients}  # type: ignore[dict-item]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("of", [gate, lambda: moe_layer.Gate(HIDDEN, 64, 8)], ids=["Gate", "of the example"])
def test_a_gate_computes_in_float32_under_autocast(of: Callable[[], Any], dtype: torch.dtype) -> None:
    scorer, x = of(), torch.randn(100, HIDDEN, dtype=dtype)
    gradients = []
    chosen = []
    for enabled in (False, True):
        rows = x.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            topk_idx, topk_weights = scorer(rows)
        topk_weights.square().sum().backward()
        chosen.append((topk_idx, topk_weights))
        gradients.append(rows.grad)
    assert chosen[1][1].dtype == torch.float32
    for plain, cast in zip((*chosen[0], gradients[0]), (*chosen[1], gradients[1]), strict=True):
        assert torch.equal(plain, cast)


@pytest.mark.parametrize(
    ("kind", "atol"),
    [
        (moe.MoELayer, 1e-3),
        (functools.partial(moe.MoELayer, num_worst_tokens=20), 1e-3),
        # Each choice's row is rounded, rather than the sum of a token's rows on a rank.
        (moe.ExpandedMoELayer, TOPK * 1e-3),
        (functools.partial(moe.ExpandedMoELayer, expert_alignment=4, num_max_tokens=11), TOPK * 1e-3),
    ],
    ids=["counted", "worst", "expanded", "expanded_worst"],
)
def test_as_one_process_with_all_experts(kind: Callable[..., nn.Module], atol: float) -> None:
    ranks, rows = len(TOKENS), inputs()
    local = EXPERTS // ranks
    shares = [moe.Experts(rank * local, local, HIDDEN, INTERMEDIATE, seed=3) for rank in range(ranks)]
    alone = results(OneProcessMoE(gate(), shares), *(torch.cat(parts) for parts in rows))
    case = Case("layer", ranks, TOKENS, hidden=HIDDEN, topk=TOPK, experts=EXPERTS, num_nvl_bytes=AMPLE)

    def on_each_rank(group: Any) -> dict[str, Tensor]:
        buffer = make_buffer(group, case, "weak")
        experts = moe.Experts(buffer.rank * local, local, HIDDEN, INTERMEDIATE, seed=3)
        layer = kind(gate(), experts, EXPERTS, ops.register(buffer))
        return results(layer, *(parts[buffer.rank] for parts in rows))

    for together in under_schedules(ranks, on_each_rank, count=2):
        for name in ("out", "x"):
            got = torch.cat([of_rank[name] for of_rank in together])
            # Rows are rounded to BF16: sums in another order may be on the other side of a midpoint, one ulp apart.
            torch.testing.assert_close(got, alone[name], rtol=2**-7, atol=atol)
        got = sum(of_rank["gate.weight"] for of_rank in together)
        torch.testing.assert_close(got, alone["gate.weight"], rtol=2**-7, atol=atol)
        for rank, of_rank in enumerate(together):
            for name in ("gate_and_up", "down"):
                wanted = alone[f"shares.{rank}.{name}"]
                torch.testing.assert_close(of_rank[f"experts.{name}"], wanted, rtol=2**-7, atol=atol)


def test_a_layer_that_is_computed_again_for_its_backward() -> None:
    """As in activation checkpointing: dispatch and combine of the forward run once more, on all ranks."""
    ranks, rows = len(TOKENS), inputs()
    case = Case("layer", ranks, TOKENS, hidden=HIDDEN, topk=TOPK, experts=EXPERTS, num_nvl_bytes=AMPLE)

    def on_each_rank(group: Any) -> None:
        buffer = make_buffer(group, case, "peer")
        local = EXPERTS // ranks
        experts = moe.Experts(buffer.rank * local, local, HIDDEN, INTERMEDIATE)
        layer = moe.MoELayer(gate(), experts, EXPERTS, ops.register(buffer))
        x, grad = (parts[buffer.rank] for parts in rows)
        wanted = results(layer, x, grad)
        before = buffer.stats()
        leaf = x.clone().requires_grad_()
        checkpoint(layer, leaf, use_reentrant=False).backward(grad)
        after = buffer.stats()
        assert torch.equal(leaf.grad, wanted["x"])
        grown = {name: after[name] - before[name] for name in ("dispatches", "cached_dispatches", "combines")}
        assert grown == {"dispatches": 2, "cached_dispatches": 1, "combines": 3}

    under_schedules(ranks, on_each_rank, count=1)


@pytest.mark.once
@pytest.mark.parametrize("kind", [moe.MoELayer, moe.ExpandedMoELayer])
def test_experts_that_are_not_a_ranks_share(kind: type[nn.Module]) -> None:
    case = Case("layer", 2, (1, 1), hidden=HIDDEN, topk=TOPK, experts=EXPERTS, num_nvl_bytes=AMPLE)

    def on_each_rank(group: Any) -> None:
        name = ops.register(buffer := make_buffer(group, case, "peer"))
        for count in (3, 5):
            with pytest.raises(ValueError, match=f"experts: {count} experts, expected 4, this rank's share"):
                kind(gate(), moe.Experts(0, count, HIDDEN, INTERMEDIATE), EXPERTS, name)
        with pytest.raises(ValueError, match="group=.*expected the name of a live Buffer"):
            kind(gate(), moe.Experts(0, 4, HIDDEN, INTERMEDIATE), EXPERTS, buffer)

    run_ranks(2, on_each_rank)
    with pytest.raises(ValueError, match="ends: 3 experts, expected 2 as weight has"):
        moe.grouped_linear(torch.zeros(1, 4), torch.zeros(2, 4, 4), torch.tensor([0, 0, 1]))


def test_experts_are_the_same_wherever_they_are_held() -> None:
    everything, half = moe.Experts(0, 8, 16, 4, seed=2), moe.Experts(4, 4, 16, 4, seed=2)
    assert torch.equal(everything.down[4:], half.down) and torch.equal(everything.gate_and_up[4:], half.gate_and_up)
    assert not torch.equal(half.down, moe.Experts(4, 4, 16, 4, seed=1).down), "another seed must give other weights"


def test_the_gate_chooses_the_most_likely() -> None:
    x = torch.randn(20, HIDDEN, generator=torch.Generator().manual_seed(1))
    chosen = gate()
    topk_idx, weights = chosen(x)
    likely = (x @ chosen.weight.t()).softmax(dim=1)
    torch.testing.assert_close(weights.sum(dim=1), torch.ones(20))
    for row in range(20):
        rest = [expert for expert in range(EXPERTS) if expert not in topk_idx[row]]
        assert len(rest) == EXPERTS - TOPK and likely[row, rest].max() <= likely[row, topk_idx[row]].min()
    of_chosen = likely.gather(1, topk_idx)
    torch.testing.assert_close(weights[:, 0] / weights[:, 1], of_chosen[:, 0] / of_chosen[:, 1])


@pytest.mark.slow
@pytest.mark.once
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"] if LONG else ["inductor"])
@pytest.mark.thorough
def test_compiled_in_one_piece(workers: Path, backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # torch's cache identifies a graph by the names of its ops, and could return one for an op that had other outputs.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    if backend == "inductor" and shutil.which("g++") is None:
        pytest.skip("needs g++: inductor compiles C++")
    done = forked(workers / "compiled_layer.py", 2, backend)
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(f"rank {rank} is done" in done.stdout for rank in range(2)), done.stdout
    assert "requires a gradient" not in done.stderr, "compiled ops pass gradients on"
