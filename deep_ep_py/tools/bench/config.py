"""The configuration of a benchmark run, and what cannot be measured yet."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from deep_ep_py.tools.bench.routing import require_groups

MODES = ("normal", "low-latency", "elastic")
DEVICES = ("cpu", "cuda")
FABRICS = ("ibgda", "proxy")
HEAPS = ("own", "nvshmem")
DTYPES = ("bf16", "fp8")
ROUTINGS = ("uniform", "deepseek", "skewed")
BASELINES_OF = {
    "normal": ("memcpy", "gloo_bare", "gloo"),
    "low-latency": ("memcpy", "gloo_bare", "normal", "barrier"),
    "elastic": ("memcpy", "gloo_bare", "gloo"),
}
CORRUPTIBLE = ("dispatch", "combine")

MAX_RANKS, MAX_TOPK, MAX_EXPERTS, MAX_SMS = 64, 32, 2048, 256
ROW_ALIGNMENT = 16
ELEMENT_BYTES = {"bf16": 2, "fp8": 1}
FP8_BLOCK = 128
MAX_KEEP = 64
MAX_SIZE = 1 << 20
"""Largest number of tokens per rank, elements per row, and iterations: beyond what any machine finishes."""


class CapabilityError(RuntimeError):
    """The library does not support what was asked for, such as a mode, a device or a dtype."""


@dataclass(frozen=True)
class BenchConfig:
    """One run of the benchmark.

    Parameters
    ----------
    mode, device, dtype, routing
        One of `MODES`, `DEVICES`, `DTYPES` and `ROUTINGS`.
    ranks, nodes
        Number of ranks, and number of nodes over which they are spread.
    hops
        How rows of normal mode cross nodes, as in `Buffer`; 0 for its default.
    fabric, provider
        What joins nodes, as in `Buffer`, and the libfabric provider of the proxy; None and empty for the defaults.
    heap
        Where heaps on GPUs are, as in `Buffer`; None for its default.
    tokens
        The sizes to measure, in tokens per rank.
    hidden, topk, experts
        Elements per row, experts per token, total number of experts.
    seed
        Seed of the rows, the routings and the weights of every iteration.
    baselines
        Names from `BASELINES_OF` the mode, measured in the same run.
    iterations, warmup
        Timed iterations, and untimed iterations before them.
    chain
        How many dispatch -> combine pairs run back to back in one sample of `pair`.
    num_sms
        Thread blocks of each rank's kernels; 0 for the Buffer's default.
    keep
        How many earlier dispatch outputs stay alive, like those of a network's layers in training.
    corrupt
        For tests: change one element of this operation's result in the last timed iteration. The run must then report
        that it is not verified.
    """

    mode: str = "normal"
    device: str = "cpu"
    ranks: int = 8
    nodes: int = 1
    hops: int = 0
    fabric: str | None = None
    provider: str = ""
    heap: str | None = None
    tokens: tuple[int, ...] = (128, 1024, 4096)
    hidden: int = 7168
    topk: int = 8
    experts: int = 256
    dtype: str = "bf16"
    routing: str = "uniform"
    seed: int = 0
    baselines: tuple[str, ...] = ()
    iterations: int = 15
    warmup: int = 3
    chain: int = 4
    num_sms: int = 0
    keep: int = 0
    corrupt: str | None = None

    @property
    def two_hops(self) -> bool:
        """Whether rows of normal mode are forwarded inside nodes."""
        return self.hops == 2 if self.hops else 1 < self.nodes < self.ranks

    @property
    def row_bytes(self) -> int:
        """Bytes of one token's row."""
        return self.hidden * ELEMENT_BYTES[self.dtype]

    @property
    def scales(self) -> int:
        """Scales of one token's row, 4 bytes each."""
        return self.hidden // FP8_BLOCK if self.dtype == "fp8" else 0

    @property
    def payload_bytes(self) -> int:
        """Bytes of one token's row and its scales."""
        return self.row_bytes + 4 * self.scales

    @property
    def combines(self) -> bool:
        """Whether combine is measured: it takes only BF16 rows, whatever dispatch has carried."""
        return self.dtype == "bf16" or self.mode == "low-latency"

    def as_dict(self) -> dict[str, Any]:
        """Return the fields for a report."""
        return asdict(self)

    def validate(self) -> None:
        """Check the values.

        Raises
        ------
        ValueError
            A value is invalid.
        CapabilityError
            A value is valid but not supported yet.
        """
        for name, choices in (("mode", MODES), ("device", DEVICES), ("dtype", DTYPES), ("routing", ROUTINGS)):
            _require(getattr(self, name) in choices, name, getattr(self, name), "one of " + ", ".join(choices))
        known = BASELINES_OF[self.mode]
        for baseline in self.baselines:
            _require(baseline in known, "baseline", baseline, f"one of {', '.join(known)} with --mode {self.mode}")
        _require(self.corrupt in (None, *CORRUPTIBLE), "corrupt", self.corrupt, "one of " + ", ".join(CORRUPTIBLE))
        _require(1 <= self.ranks <= MAX_RANKS, "ranks", self.ranks, f"between 1 and {MAX_RANKS}")
        sizes_ok = bool(self.tokens) and all(1 <= tokens <= MAX_SIZE for tokens in self.tokens)
        sizes = ",".join(map(str, self.tokens))
        _require(sizes_ok, "tokens", sizes, f"one or more sizes between 1 and {MAX_SIZE}")
        _require(
            1 <= self.hidden <= MAX_SIZE and self.row_bytes % ROW_ALIGNMENT == 0,
            "hidden",
            self.hidden,
            f"at most {MAX_SIZE}, and such that a row is a multiple of {ROW_ALIGNMENT} bytes "
            f"(a multiple of {ROW_ALIGNMENT // ELEMENT_BYTES[self.dtype]})",
        )
        whole = self.dtype != "fp8" or self.hidden % FP8_BLOCK == 0
        _require(whole, "hidden", self.hidden, f"a multiple of {FP8_BLOCK} with --dtype fp8: a scale for each block")
        experts_ok = 1 <= self.experts <= MAX_EXPERTS and self.experts % self.ranks == 0
        _require(experts_ok, "experts", self.experts, f"a multiple of ranks ({self.ranks}), at most {MAX_EXPERTS}")
        topk_limit = min(MAX_TOPK, self.experts)
        _require(1 <= self.topk <= topk_limit, "topk", self.topk, f"between 1 and {topk_limit}")
        if self.routing == "deepseek":
            require_groups(self.experts, self.topk)
        for name in ("iterations", "chain", "nodes"):
            _require(1 <= getattr(self, name) <= MAX_SIZE, name, getattr(self, name), f"between 1 and {MAX_SIZE}")
        _require(self.ranks % self.nodes == 0, "nodes", self.nodes, f"a divisor of the {self.ranks} ranks")
        _require(self.hops in (0, 1, 2), "hops", self.hops, "1 or 2; 0: the Buffer's default")
        _require(self.hops < 2 or self.nodes > 1, "hops", self.hops, "several nodes with two hops")
        _require(self.fabric is None or self.nodes > 1, "fabric", self.fabric, "several nodes with it")
        _require(self.heap in (None, *HEAPS), "heap", self.heap, "one of " + ", ".join(HEAPS))
        _require(self.heap != "nvshmem" or self.device == "cuda", "heap", self.heap, "--device cuda with it")
        known_paths = self.heap != "nvshmem" or self.fabric in (None, "ibgda")
        _require(known_paths, "fabric", self.fabric, "ibgda with --heap nvshmem, or none named")
        _require(not self.provider or self.fabric == "proxy", "provider", self.provider, "--fabric proxy with it")
        _require(0 <= self.warmup <= MAX_SIZE, "warmup", self.warmup, f"between 0 and {MAX_SIZE}")
        _require(0 <= self.keep <= MAX_KEEP, "keep", self.keep, f"between 0 and {MAX_KEEP}")
        _require(0 <= self.num_sms <= MAX_SMS, "num-sms", self.num_sms, f"between 0 and {MAX_SMS}")
        self._require_capabilities()

    def _require_capabilities(self) -> None:
        if self.device == "cuda" and self.baselines:
            raise CapabilityError("--baseline: those are for CPUs; with --device cuda the GPU's own copy is measured")
        if self.mode != "normal" and self.keep:
            raise CapabilityError(f"--keep {self.keep}: in normal mode only; use --keep 0")
        if self.mode == "elastic" and (self.device != "cpu" or self.dtype != "bf16"):
            raise CapabilityError("--mode elastic: with --device cpu and --dtype bf16 only so far")
        if self.mode == "low-latency" and self.num_sms:
            raise CapabilityError(
                f"--num-sms {self.num_sms}: in normal mode only; low-latency calls choose by their size"
            )
        if self.keep and self.device != "cpu":
            raise CapabilityError(f"--keep {self.keep}: on CPUs only so far; use --keep 0")
        if self.corrupt == "combine" and not self.combines:
            raise CapabilityError(f"--corrupt combine: no combine is measured with --dtype {self.dtype}")


def _require(holds: bool, name: str, value: object, expected: str) -> None:
    if not holds:
        raise ValueError(f"--{name} is {value}; expected {expected}")
