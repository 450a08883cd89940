"""One rank's part of the benchmark of `ElasticBuffer`: V2's calls beside V1's, and beside V1's with a permutation."""

from __future__ import annotations

from functools import cached_property, partial
from typing import Any

import torch

from deep_ep_py.tools.bench.baselines import Baseline, make_baselines
from deep_ep_py.tools.bench.config import BenchConfig
from deep_ep_py.tools.bench.oracle import Oracle
from deep_ep_py.tools.bench.ours import NIC_OPTIONS, Ours
from deep_ep_py.tools.bench.rank_job import RankContext
from deep_ep_py.tools.bench.size_run import SizeRun
from deep_ep_py.tools.bench.wire import WireMeter

OPS = {
    "dispatch": "V1: get_dispatch_layout and dispatch with top-k ids and weights",
    "dispatch_permuted": "the same, and deep_ep_py.moe's permutation of the rows into expert order",
    "dispatch_v2": "ElasticBuffer.dispatch, with a host wait for the counts",
    "dispatch_no_wait": "the same without a host wait: outputs of the largest possible size",
    "dispatch_expanded": "ElasticBuffer.dispatch into the expanded layout, with a host wait",
    "expanded_no_wait": "the same without a host wait",
    "combine": "V1: combine of the received tensor itself",
    "combine_v2": "ElasticBuffer.combine of the received tensor itself",
    "combine_expanded": "ElasticBuffer.combine of the expanded rows",
}
DISPATCHES: dict[str, dict[str, Any]] = {
    "dispatch_v2": {},
    "dispatch_no_wait": {"do_cpu_sync": False},
    "dispatch_expanded": {"do_expand": True},
    "expanded_no_wait": {"do_expand": True, "do_cpu_sync": False},
}
_ULP = 2.0**-8


class ElasticRun(SizeRun):
    """All iterations of one size on one rank."""

    def __init__(self, context: RankContext, config: BenchConfig, tokens: int) -> None:
        import deep_ep_py as deep_ep

        super().__init__(context, config, tokens)
        self._ours = Ours(config, self._inputs, context.group)
        self._baselines = make_baselines(config, self._inputs, context.group)
        self._buffer = deep_ep.ElasticBuffer(
            context.group,
            num_max_tokens_per_rank=tokens,
            hidden=config.hidden,
            num_topk=config.topk,
            device="cpu",
            ranks_per_node=config.ranks // config.nodes,
            fabric=config.fabric,
            nic=deep_ep.NicOptions(**NIC_OPTIONS),
            hops=config.hops or None,
        )
        self._results: Any = None
        self._permuted: tuple[torch.Tensor, torch.Tensor] | None = None
        self._combined = torch.empty(0)

    @cached_property
    def _meter(self) -> WireMeter:
        return WireMeter(self._buffer._buffer, self._context.group)

    def _rows(self) -> list[int]:
        rows: list[int] = self._inputs.counts[self._config.warmup :].sum(dim=(1, 2)).tolist()
        return rows

    def _variants(self) -> dict[str, tuple[str, ...]]:
        return {name: baseline.variants for name, baseline in self._baselines.items()}

    def _close(self) -> None:
        self._ours.release()
        self._ours.buffer.destroy()
        self._buffer.destroy()

    @cached_property
    def _oracle(self) -> Oracle:
        """The oracle of the last iteration."""
        return Oracle(self._inputs, self._steps - 1)

    def _iteration(self) -> None:
        ours, watch = self._ours, self._watch
        watch.time("dispatch", ours.dispatch)
        self._check("dispatch", lambda: self._oracle.check_dispatch(ours.received, ours.recv_topk_idx))
        for name, baseline in self._baselines.items():
            baseline.prepare(ours)
            for variant in baseline.variants:
                self._baseline(name, baseline, variant)
        watch.time("combine", ours.combine)
        self._check("combine", lambda: self._oracle.check_combine(ours.combined_x))
        ours.release()
        watch.time("dispatch_permuted", self._dispatch_permuted)
        self._check("dispatch_permuted", self._check_permuted)
        self._permuted = None
        ours.release()
        for name, options in DISPATCHES.items():
            self._results = None
            self._time(name, partial(self._dispatch, **options))
            self._check(name, self._check_dispatch)
            if name in ("dispatch_v2", "dispatch_expanded"):
                combine = name.replace("dispatch", "combine")
                self._time(combine, self._combine)
                self._check(combine, self._check_combine)
        self._results, self._combined = None, torch.empty(0)

    def _baseline(self, name: str, baseline: Baseline, variant: str) -> None:
        self._watch.time(f"{name}.dispatch.{variant}", partial(baseline.dispatch, variant))
        self._watch.time(f"{name}.combine.{variant}", partial(baseline.combine, variant))
        self._barrier()

    def _dispatch_permuted(self) -> None:
        from deep_ep_py.moe import permute, sort_by_expert

        ours = self._ours
        ours.dispatch()
        assert ours.recv_topk_idx is not None
        order = sort_by_expert(ours.recv_topk_idx, self._config.experts // self._config.ranks)
        self._permuted = permute(ours.recv_x, order), order.slots

    def _dispatch(self, **options: Any) -> None:
        inputs = self._inputs
        self._results = self._buffer.dispatch(
            inputs.x,
            inputs.topk_idx,
            inputs.topk_weights,
            num_experts=self._config.experts,
            num_sms=self._config.num_sms,
            **options,
        )

    def _combine(self) -> None:
        self._combined, _, _ = self._buffer.combine(self._results.recv_x, self._results.handle)

    def _check_permuted(self) -> str | None:
        assert self._permuted is not None
        rows, slots = self._permuted
        wrong = self._oracle.check_dispatch(self._ours.received)
        of_slot = self._ours.recv_x[slots // self._config.topk]
        return wrong or (None if torch.equal(rows, of_slot) else "dispatch_permuted: rows are not those of their slots")

    def _check_dispatch(self) -> str | None:
        results, handle = self._results, self._results.handle
        if not handle.do_expand:
            received = self._inputs.received
            idx, weights = results.recv_topk_idx[:received], results.recv_topk_weights[:received]
            return self._oracle.check_dispatch(results.recv_x[:received], idx, weights)
        # The first row of each token, in the order of rows that are not expanded; the others must equal it.
        slots = handle.recv_src_metadata[: self._inputs.received, 2:].long()
        first = slots.gather(1, (slots >= 0).int().argmax(1, keepdim=True)).squeeze(1)
        rows = results.recv_x[first]
        wrong = self._oracle.check_dispatch(rows)
        for k in range(slots.shape[1]):
            here = slots[:, k] >= 0
            if not torch.equal(results.recv_x[slots[here, k]], rows[here]):
                return wrong or "dispatch_expanded: the copies of a row differ"
        if int((slots >= 0).sum()) != int(handle.num_unaligned_recv_tokens_per_expert.sum()):
            return wrong or "dispatch_expanded: rows of experts do not add up"
        return wrong

    def _check_combine(self) -> str | None:
        if not self._results.handle.do_expand:
            return self._oracle.check_combine(self._combined)
        # Every choice returns the token itself; a rank's sum is rounded, and then the sum of these.
        exact = self._config.topk * self._inputs.x.double()
        bound = exact.abs() * (2 * _ULP + _ULP**2) * self._config.nodes + 1e-30
        wrong = int((~((self._combined.double() - exact).abs() <= bound)).sum())
        return f"combine_expanded: {wrong} elements are out of bounds" if wrong else None
