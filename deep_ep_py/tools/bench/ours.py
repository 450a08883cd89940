"""The library's calls, as a user makes them."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from deep_ep_py.tools.bench.config import BenchConfig
from deep_ep_py.tools.bench.inputs import Inputs

if TYPE_CHECKING:
    from deep_ep_py import Buffer

# The scope of each timed call, for the report.
OPS = {
    "layout_notify": "get_dispatch_layout and the first part of a dispatch: count exchange and the host's wait for the "
    "totals. The rest of that dispatch is not timed",
    "dispatch": "get_dispatch_layout and dispatch with top-k ids and weights, as a layer calls them: layout, notify, "
    "output allocation and the rows",
    "combine": "combine of the received tensor itself, which is in memory that all ranks of its node have mapped",
    "combine_private": "combine of an expert output that is in ordinary memory of its rank",
    "pair": "one period of back-to-back dispatch (with layout and notify) -> combine of the received tensor",
}
_ARENA_SLACK = 64 << 20
# Settings of the software NICs between nodes: whole messages at a time, in order on each queue pair.
NIC_OPTIONS: dict[str, Any] = {"blocks": 1024, "mtu": 1 << 20, "in_flight": 16}


class Ours:
    """Dispatch and combine through a `Buffer`.

    Parameters
    ----------
    config
        The run.
    inputs
        This rank's inputs.
    group
        All ranks.
    """

    def __init__(self, config: BenchConfig, inputs: Inputs, group: dist.ProcessGroup) -> None:
        import deep_ep_py as deep_ep

        self._config, self._inputs = config, inputs
        self.buffer: Buffer = deep_ep.Buffer(
            group,
            num_nvl_bytes=deep_ep.Buffer.get_dispatch_config(config.ranks).get_nvl_buffer_size_hint(
                config.row_bytes, config.ranks
            ),
            device="cpu",
            ranks_per_node=config.ranks // config.nodes,
            fabric=config.fabric,
            hops=config.hops or None,
            nic=deep_ep.NicOptions(**NIC_OPTIONS),
            arena_bytes=self._arena_bytes(),
        )
        self.buffer.runtime.pretouch()  # as after the first steps of a run; baselines' memory is warm too
        self._launch = deep_ep.Config(num_sms=config.num_sms) if config.num_sms else None
        self.received: torch.Tensor | tuple[torch.Tensor, torch.Tensor] = torch.empty(0)
        self._kept: deque[Any] = deque(maxlen=config.keep)
        self.recv_topk_idx: torch.Tensor | None = None
        self.recv_topk_weights: torch.Tensor | None = None
        self.tokens_per_expert: list[int] = []
        self.combined_x: torch.Tensor = torch.empty(0)
        self._handle: Any = None
        self._pending: Any = None

    def _arena_bytes(self) -> int:
        config, inputs = self._config, self._inputs
        # The received rows and a copy of the experts' output; kept outputs leave gaps that other sizes do not fill.
        outputs = (
            (2 + config.keep + config.keep // 2) * inputs.max_received * (config.payload_bytes + 12 * config.topk + 4)
        )
        return outputs + 2 * inputs.tokens * config.row_bytes + _ARENA_SLACK

    @property
    def recv_x(self) -> torch.Tensor:
        """The received rows."""
        return self.received[0] if isinstance(self.received, tuple) else self.received

    def layout_notify(self) -> None:
        """Run the layout and the count exchange; `finish_dispatch` does the rest."""
        self._pending = self.buffer._begin_dispatch(self._inputs.payload, **self._layout())
        self.buffer.runtime.wait_counts(self._pending.call)

    def finish_dispatch(self) -> None:
        """Finish the dispatch that `layout_notify` started, and discard its results."""
        self._pending.finish()
        self._pending = None

    def dispatch(self) -> None:
        """Run the layout and a dispatch; the results stay in this object."""
        self.received, self.recv_topk_idx, self.recv_topk_weights, self.tokens_per_expert, self._handle, _ = (
            self.buffer.dispatch(self._inputs.payload, **self._layout())
        )

    def combine(self) -> None:
        """Sum the received rows at their owners."""
        self.combined_x, _, _ = self.buffer.combine(self.recv_x, self._handle, config=self._launch)

    def combine_private(self) -> None:
        """Sum the expert outputs at their owners."""
        self.combined_x, _, _ = self.buffer.combine(self._inputs.expert_out, self._handle, config=self._launch)

    def pairs(self) -> None:
        """Run as many dispatch -> combine pairs as the run chains, back to back."""
        for _ in range(self._config.chain):
            self.release()
            self.dispatch()
            self.combine()

    def release(self) -> None:
        """Release the received tensors, so that the next dispatch can reuse their memory.

        Those of the latest `keep` dispatches are released only after as many further ones.
        """
        self._kept.append((self.received, self.recv_topk_idx, self.recv_topk_weights))
        self.received, self.recv_topk_idx, self.recv_topk_weights = torch.empty(0), None, None
        self._handle = None

    def _layout(self) -> dict[str, Any]:
        """Return the arguments of dispatch besides x."""
        topk_idx, topk_weights = self._inputs.topk_idx, self._inputs.topk_weights
        per_rank, _, per_expert, in_rank, _ = self.buffer.get_dispatch_layout(topk_idx, self._config.experts)
        return {
            "topk_idx": topk_idx,
            "topk_weights": topk_weights,
            "num_tokens_per_rank": per_rank,
            "is_token_in_rank": in_rank,
            "num_tokens_per_expert": per_expert,
            "config": self._launch,
        }
