"""The benchmark: `python -m deep_ep_py bench`."""

from deep_ep_py.tools.bench.config import BenchConfig, CapabilityError

__all__ = ["BenchConfig", "CapabilityError"]
