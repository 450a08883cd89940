"""The cost of posting to a kernel: time per work request and doorbells per second, on a GPU with software NICs."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch
from rich import box
from rich.console import Console
from rich.table import Table

from deep_ep_py.base.files import write_json
from deep_ep_py.base.native import C
from deep_ep_py.base.options import OutputFile
from deep_ep_py.tools.bench.gpu_timing import EventTimer
from deep_ep_py.tools.bench.machine import describe_machine

BOUNDARY = (
    "One kernel on one rank that only posts puts: for each, an RDMA write of 64 bytes and a fetch-and-add, written "
    "into the send queue, and doorbells. Timed by CUDA events around the kernel: its launch and its end are included, "
    "spread over all its requests; host work is not. No send queue is ever full, so no thread waits for the NIC, and "
    "the NIC's own work is not included. Send queues, doorbell records, doorbells and completions are in pinned host "
    "memory, across the bus; the queue pairs' counters are in GPU memory. The NIC, a host thread, polls and reads "
    "meanwhile. Requests are counted by the NIC, doorbells by the kernel."
)
_PUT_BYTES = 64
_REQUESTS_PER_PUT = 2
_RING = 1 << 15
_TIMEOUT = 60.0


@dataclass(frozen=True)
class Pattern:
    """Which threads post, and on how many queue pairs.

    Parameters
    ----------
    name
        Name of the pattern.
    blocks
        Thread blocks that post.
    warps
        Warps per block that post.
    queue_pairs
        Queue pairs over which they are spread, each warp on one.
    """

    name: str
    blocks: int
    warps: int
    queue_pairs: int


PATTERNS = (
    Pattern("one warp", 1, 1, 1),
    Pattern("a block, one queue pair", 1, C.cuda.BLOCK_WARPS, 1),
    Pattern("8 blocks, 8 queue pairs", 8, C.cuda.BLOCK_WARPS, 8),
)


def measure(
    iterations: int = 20, requests: int = 1 << 14, warmup: int = 3, patterns: tuple[Pattern, ...] = PATTERNS
) -> dict[str, Any]:
    """Time all patterns.

    Parameters
    ----------
    iterations
        Timed kernels per pattern.
    requests
        Work requests per kernel and queue pair, at most 32768.
    warmup
        Untimed kernels before them.
    patterns
        The patterns to time.

    Returns
    -------
    dict
        The report. `patterns`: for each, `ns_per_request`, `doorbells_per_s` and `doorbells` of a kernel with median,
        min and max over the iterations, and `requests` of a kernel. `verified`: everything posted has arrived.

    Raises
    ------
    ValueError
        `requests` is too small for a pattern, or too large for a send queue.
    """
    from deep_ep_py.testing import run_ranks

    for pattern in patterns:
        least = _REQUESTS_PER_PUT * -(-pattern.blocks * pattern.warps // pattern.queue_pairs)
        if not least <= requests <= _RING:
            raise ValueError(f"requests={requests}: expected {least} to {_RING} for each queue pair")
    measured = [
        run_ranks(2, _on_each_rank, pattern, iterations, requests, warmup, device="cuda") for pattern in patterns
    ]
    return {
        "machine": describe_machine(),
        "boundary": BOUNDARY,
        "put_bytes": _PUT_BYTES,
        "iterations": iterations,
        "patterns": [posted for posted, _ in measured],
        "verified": all(arrived for _, arrived in measured),
    }


def _on_each_rank(group: Any, pattern: Pattern, iterations: int, requests: int, warmup: int) -> Any:
    """Return the figures on rank 0, and whether everything has arrived on rank 1."""
    puts = requests * pattern.queue_pairs // (_REQUESTS_PER_PUT * pattern.blocks * pattern.warps)
    result: Any = None
    with Poster(group, pattern, _PUT_BYTES, device="cuda") as poster:
        if group.rank() == 0:
            samples = [_post(poster, puts) for _ in range(warmup + iterations)]
            result = _figures(pattern, samples[warmup:])
        group.barrier()
        if group.rank() == 1:
            result = poster.has_all((warmup + iterations) * puts)
        group.barrier()  # neither rank leaves before everything is read
    return result


class Poster:
    """A rank of a group of two, of which the first one puts rows to the other over software NICs.

    Parameters
    ----------
    group
        The group.
    pattern
        Which threads post.
    put_bytes : int
        Bytes of a row; a multiple of 16.
    **options
        Of the Buffer.
    """

    def __init__(self, group: Any, pattern: Pattern, put_bytes: int, **options: Any) -> None:
        import deep_ep_py as deep_ep

        self.pattern, self.put_bytes = pattern, put_bytes
        self.posters = pattern.blocks * pattern.warps
        nic = deep_ep.NicOptions(blocks=_RING, queues_per_peer=pattern.queue_pairs, in_flight=64)
        self.buffer = deep_ep.Buffer(
            group, fabric="ibgda", ranks_per_node=1, nic=nic, **{"timeout": _TIMEOUT, **options}
        )
        engine = self.buffer._engine
        engine.prepare(0, 0, "post")
        self._sent = torch.arange(put_bytes // 8) + 1  # the first row of rank 0, and at the end every row of rank 1
        self._rows = engine.empty((self.posters, put_bytes // 8), torch.int64)
        self._rows.copy_(self._sent if group.rank() == 0 else torch.zeros_like(self._sent))
        self._words = engine.empty((self.posters,), torch.int64).zero_()
        engine.device.synchronize()
        own = [self.buffer.runtime.heap_offset(tensor.data_ptr()) for tensor in (self._rows, self._words)]
        self._offsets = group.all_gather_object(own)

    def __enter__(self) -> Poster:
        return self

    def __exit__(self, *_: object) -> None:
        self.buffer.destroy()

    def launch(self, puts: int) -> Any:
        """Launch a kernel in which each poster puts its row `puts` times, and return the call."""
        return C.measure.post(
            self.buffer._engine.runtime,
            to=1,
            posters=self.pattern.warps,
            puts=puts,
            bytes=self.put_bytes,
            source=self._offsets[0][0],
            target=self._offsets[1][0],
            words=self._offsets[1][1],
            blocks=self.pattern.blocks,
        )

    def finish(self, call: Any) -> None:
        """Wait for a call, and until the NIC has executed what it has posted."""
        runtime = self.buffer.runtime
        runtime.wait(call)
        self.buffer._engine.check_failure(call)
        runtime.retire(call)
        runtime.drain()

    def has_all(self, puts: int) -> bool:
        """Whether the rows of `puts` puts by each poster have arrived here."""
        arrived = self._words.cpu() == puts * C.SIGNAL_UNIT
        return bool(arrived.all()) and bool((self._rows.cpu() == self._sent).all())


def _post(poster: Poster, puts: int) -> tuple[float, int, int]:
    """Run one kernel. Returns milliseconds, requests and doorbells."""
    before = poster.buffer.network_counters()[1]
    call, milliseconds = EventTimer().time(lambda: poster.launch(puts), poster.buffer.comm_stream)
    poster.finish(call)  # so that the next one finds empty send queues
    after = poster.buffer.network_counters()[1]
    sent = {name: after[name] - before[name] for name in after}
    posted = puts * poster.posters
    if (sent["writes"], sent["atomics"], sent["bytes"]) != (posted, posted, posted * poster.put_bytes):
        raise RuntimeError(f"{poster.pattern.name}: {posted} puts were posted, but the NIC executed {sent}")
    return milliseconds, sent["writes"] + sent["atomics"], sent["doorbells"]


def _figures(pattern: Pattern, samples: list[tuple[float, int, int]]) -> dict[str, Any]:
    def spread(values: list[float]) -> dict[str, float]:
        return {"median": statistics.median(values), "min": min(values), "max": max(values)}

    return {
        "name": pattern.name,
        "posting_warps": pattern.blocks * pattern.warps,
        "queue_pairs": pattern.queue_pairs,
        "requests": samples[0][1],
        "doorbells": spread([float(doorbells) for _, _, doorbells in samples]),
        "ns_per_request": spread([1e6 * ms / requests for ms, requests, _ in samples]),
        "doorbells_per_s": spread([1e3 * doorbells / ms for ms, _, doorbells in samples]),
    }


def as_table(report: dict[str, Any]) -> Table:
    """Return the report as a table for people."""
    table = Table(title="Posting", box=box.SIMPLE_HEAD, title_justify="left")
    table.add_column("posted by")
    for column in ("warps", "queue pairs", "ns per request", "min .. max", "doorbells/s", "requests/doorbell"):
        table.add_column(column, justify="right")
    for posted in report["patterns"]:
        times = posted["ns_per_request"]
        table.add_row(
            posted["name"],
            str(posted["posting_warps"]),
            str(posted["queue_pairs"]),
            f"{times['median']:.3g}",
            f"{times['min']:.3g} .. {times['max']:.3g}",
            f"{posted['doorbells_per_s']['median']:.3g}",
            f"{posted['requests'] / posted['doorbells']['median']:.3g}",
        )
    return table


@click.command(context_settings={"show_default": True, "help_option_names": ["-h", "--help"]})
@click.option("--iterations", type=click.IntRange(1), default=20, help="Timed kernels per pattern.")
@click.option("--requests", type=click.IntRange(32, _RING), default=1 << 14, help="Per queue pair and kernel.")
@click.option("--json", "json_file", type=OutputFile(), help="Write the report here.")
def command(iterations: int, requests: int, json_file: Path | None) -> None:
    """Time how kernels on one GPU post work requests to software NICs. The exit code is 1 if a request got lost."""
    if not torch.cuda.is_available():
        raise click.UsageError("torch sees no GPU here")
    report = measure(iterations, requests)
    console = Console()
    console.print(as_table(report))
    console.print(report["boundary"], style="dim")
    if json_file is not None:
        write_json(json_file, report)
        console.print(f"report: {json_file}")
    if not report["verified"]:
        raise click.ClickException("what has arrived is not what was posted")
