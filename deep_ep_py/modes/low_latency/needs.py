"""The needs of low-latency mode."""

from __future__ import annotations

from deep_ep_py.base.arguments import wrong_id
from deep_ep_py.session.needs import Needs

LOW_LATENCY = Needs(call_words=0, stats=("low_latency_dispatches", "low_latency_combines"), explain=wrong_id)
