"""Sizes of low-latency calls: their limits, and the memory that they need."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from deep_ep_py.base import arguments
from deep_ep_py.base.native import C
from deep_ep_py.session.setup_ranks import REGION_ALIGNMENT

if TYPE_CHECKING:
    from deep_ep_py.session.engine import Engine

V1_MOST_TOPK = 11
"""Maximum of DeepEP's low-latency kernels, and the default of size hints."""
_BF16_BYTES = 2


@dataclass(frozen=True)
class Sizes:
    """Sizes that are the same on all ranks.

    Attributes
    ----------
    max_tokens : int
        Maximum number of tokens of a rank.
    hidden : int
        Elements per row.
    topk : int
        Experts per token.
    experts : int
        Number of experts on all ranks.
    per_node : int
        Ranks per node if rows go once to each node; 1 if they go to each rank.
    weighted : bool
        Whether the dispatch was given the weights, so that results are summed before they are sent back.
    """

    max_tokens: int
    hidden: int
    topk: int
    experts: int
    per_node: int = 1
    weighted: bool = False

    @staticmethod
    def checked(max_tokens: Any, hidden: Any, topk: int, experts: Any, ranks: int, weighted: bool = False) -> Sizes:
        """Check the sizes that a caller passes.

        Raises
        ------
        TypeError, ValueError
            The message names the argument.
        """
        arguments.max_tokens(max_tokens)
        arguments.integer("hidden", hidden, 1, arguments.MAX_ROW_BYTES // _BF16_BYTES)
        if hidden * _BF16_BYTES % arguments.ROW_ALIGNMENT:
            raise ValueError(
                f"hidden={hidden}: expected a multiple of {arguments.ROW_ALIGNMENT // _BF16_BYTES}, for rows of a "
                f"multiple of {arguments.ROW_ALIGNMENT} bytes"
            )
        arguments.experts(experts, ranks)
        if max_tokens * topk > C.low_latency.MAX_RESULTS:
            raise ValueError(
                f"num_max_dispatch_tokens_per_rank={max_tokens}: expected at most "
                f"{C.low_latency.MAX_RESULTS // topk} with top-{topk}"
            )
        if experts * max_tokens > arguments.MAX_ROWS:
            raise ValueError(
                f"num_max_dispatch_tokens_per_rank={max_tokens}: expected at most {arguments.MAX_ROWS // experts} "
                f"with {experts} experts"
            )
        return Sizes(max_tokens, hidden, topk, experts, weighted=weighted)

    @cache  # noqa: B019 - there are few
    def native(
        self, scales: C.low_latency.Scales = C.low_latency.Scales.NONE, id_bytes: int = 8, logfmt: bool = False
    ) -> C.low_latency.Sizes:
        """Return the sizes in the form that kernel launches take."""
        return C.low_latency.Sizes(
            max_tokens=self.max_tokens,
            hidden=self.hidden,
            topk=self.topk,
            experts=self.experts,
            id_bytes=id_bytes,
            scales=scales,
            logfmt=logfmt,
            per_node=self.per_node,
            weighted=self.weighted,
        )

    @property
    def row_bytes(self) -> int:
        """Bytes of a row that is not cast."""
        return self.hidden * _BF16_BYTES

    @property
    def has_logfmt(self) -> bool:
        """Whether results of this hidden size may travel as LogFMT."""
        return self.hidden % C.low_latency.LOG_GROUP == 0

    def buffer_bytes(self, ranks: int, regions: int, has_remote: bool, logfmt: bool) -> int:
        """Return the bytes that a Buffer needs for such calls: one region for each operation that may be open."""
        region = C.low_latency.region_bytes(self.native(logfmt=logfmt), ranks=ranks, has_remote=has_remote)
        return -(-region // REGION_ALIGNMENT) * REGION_ALIGNMENT * regions

    def check_room(self, engine: Engine, logfmt: bool = False) -> None:
        """Raise if such calls do not fit into the Buffer."""
        needed = self.buffer_bytes(engine.ranks, engine.regions, bool(engine.topology.networks), logfmt)
        if needed > engine.region_bytes * engine.regions:
            raise ValueError(
                f"num_rdma_bytes: the Buffer has {engine.region_bytes * engine.regions}, expected at least {needed} "
                f"for {self.max_tokens} tokens of {self.hidden} elements, top-{self.topk} of {self.experts} experts, "
                f"among {engine.ranks} ranks{', with use_logfmt=True' if logfmt else ''}; "
                "see get_low_latency_rdma_size_hint"
            )
        if not C.low_latency.fits_shared_memory(engine.runtime, self.native()):
            raise ValueError(
                f"num_experts={self.experts}: expected fewer, with {engine.ranks} ranks so many do not fit into a "
                "thread block's shared memory"
            )
        native = self.native(logfmt=logfmt)
        message, most = (
            find(engine.runtime, native) for find in (C.low_latency.put_bytes, C.low_latency.max_put_bytes)
        )
        if message > most:
            raise ValueError(
                f"nic: a send queue holds {most} bytes at once, expected at least {message}, "
                "the rows of one rank for another; increase blocks or max_bytes"
            )
