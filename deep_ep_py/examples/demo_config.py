"""The configuration of the demo."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DemoConfig:
    """The demo's sizes."""

    ranks: int
    tokens: int
    hidden: int
    intermediate: int
    experts: int
    topk: int
    steps: int
    warmup: int
    seed: int

    @property
    def row_bytes(self) -> int:
        """The bytes of a row of BF16 elements."""
        return 2 * self.hidden

    @property
    def sizes(self) -> str:
        """The sizes of the layer in words."""
        return (
            f"{self.tokens} tokens on each, hidden size {self.hidden}, "
            f"{self.experts} experts, of which each token chooses {self.topk}"
        )
