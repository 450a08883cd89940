"""Ranks as threads of one process, scheduled from a seed: `run_ranks`."""

from deep_ep_py.errors import PeerFailed
from deep_ep_py.testing.threads import DEFAULT_FREEZE, RankResults, ThreadGroup, run_ranks, sleep

__all__ = ["DEFAULT_FREEZE", "PeerFailed", "RankResults", "ThreadGroup", "run_ranks", "sleep"]
