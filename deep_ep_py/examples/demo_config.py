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
