"""`python -m deep_ep_py profile`: what kernels execute on a GPU, counted without one."""

from __future__ import annotations

import dataclasses
import os
import re
import sys
from pathlib import Path

import click
from rich.console import Console

from deep_ep_py.bench.machine import describe_machine
from deep_ep_py.core.arguments import MAX_RANKS
from deep_ep_py.core.files import write_json
from deep_ep_py.core.native import C
from deep_ep_py.errors import DeepEPError
from deep_ep_py.jit import CompileError, NvrtcUnavailableError, require_nvrtc
from deep_ep_py.jit.cache import FOLDER_VARIABLE
from deep_ep_py.jit.compiler import nvrtc_version
from deep_ep_py.profile.device import Images
from deep_ep_py.profile.report import profiles
from deep_ep_py.profile.tables import hottest, overview
from deep_ep_py.profile.workload import Workload, run

_BUILD, _VARIABLE = "exact", "DEEP_EP_BUILD"
_DEFAULT = Workload()
_HBM_NS, _NVLINK_NS = 700.0, 2300.0
_LAUNCHED = {
    "normal": ("layout", "notify", "notify_cached", "dispatch", "combine"),
    "low-latency": ("low_latency_dispatch", "low_latency_combine"),
}
_INSTALL = f"`DEEP_EP_BUILDS=fast,{_BUILD} pip install '.[gpu]'` in the clone"


@click.command(context_settings={"show_default": True, "help_option_names": ["-h", "--help"]})
@click.option("--mode", type=click.Choice(["normal", "low-latency"]), default=_DEFAULT.mode)
@click.option(
    "--kernel",
    "kernels",
    multiple=True,
    type=click.Choice([name for names in _LAUNCHED.values() for name in names]),
    help="This one; repeatable.",
)
@click.option("--arch", "architecture", default=_DEFAULT.architecture, help="As sm_90a.")
@click.option("--fabric", type=click.Choice(["peer", "ibgda"]), default=_DEFAULT.fabric)
@click.option("--ranks", type=click.IntRange(1, MAX_RANKS), default=_DEFAULT.ranks)
@click.option("--tokens", type=click.IntRange(1), default=_DEFAULT.tokens, help="Of each rank.")
@click.option("--hidden", type=click.IntRange(8), default=_DEFAULT.hidden, help="BF16 per row.")
@click.option("--topk", type=click.IntRange(1, 32), default=_DEFAULT.topk, help="Experts each token chooses.")
@click.option("--experts", type=click.IntRange(1, 2048), default=_DEFAULT.experts, help="Experts in all.")
@click.option("--routing", type=click.Choice(["uniform", "deepseek", "skewed"]), default=_DEFAULT.routing)
@click.option("--warps", type=click.IntRange(1, 32), default=_DEFAULT.warps, help="Of a block.")
@click.option("--blocks", type=click.IntRange(1, 64), default=_DEFAULT.blocks, help="Of an operation, as counted.")
@click.option("--gpu-blocks", type=click.IntRange(1, 160), default=24, help="Of an operation, for what latency allows.")
@click.option("--hbm-ns", type=click.FloatRange(1), default=_HBM_NS, help="A load from the GPU's own memory takes so.")
@click.option("--nvlink-ns", type=click.FloatRange(1), default=_NVLINK_NS, help="One from a peer's.")
@click.option("--lines", type=click.IntRange(0), default=10, help="Of the sources to list for each kernel.")
@click.option(
    "--seed",
    type=click.IntRange(0, 2**63 - 1),
    default=_DEFAULT.seed,
    help="Of routing and of the order in which threads run.",
)
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Also write it all here.")
def command(
    kernels: tuple[str, ...],
    gpu_blocks: int,
    hbm_ns: float,
    nvlink_ns: float,
    lines: int,
    json_file: Path | None,
    **options: object,
) -> None:
    """Count what kernels execute: instructions, sectors of memory, bank conflicts, bytes in flight. Needs no GPU.

    NVRTC compiles them to PTX, which is interpreted for a dispatch and a combine of all ranks. What ptxas and the GPU
    make of it is not seen: the figures are those of the PTX, the bandwidths what latency allows and no more.
    """
    workload = Workload(**options)  # type: ignore[arg-type]
    _check(workload, kernels)
    if json_file is not None:
        _check_writable(json_file)
    try:
        require_nvrtc()
    except NvrtcUnavailableError as error:
        raise click.ClickException(f"{error}\n{_INSTALL} has it, and the build that is needed") from None
    if C.WARP_SIZE != 32:
        _restart()
    console = Console(width=None if sys.stdout.isatty() else 80, highlight=False)
    try:
        with console.status("compiling, and interpreting what that has made"):
            rows, counted = run(workload, Images(workload.architecture))
    except OSError as error:
        raise click.ClickException(f"the cache of kernels, which {FOLDER_VARIABLE} names: {error}") from None
    except (CompileError, DeepEPError, ValueError) as error:
        raise click.ClickException(str(error).strip()) from None
    found = profiles(counted, rows, workload.row_bytes)
    shown = [profile for profile in found if not kernels or profile.name in kernels]
    console.print(
        f"{workload.architecture}, {workload.mode} mode over {workload.fabric}: {workload.ranks} ranks of "
        f"{workload.tokens} tokens, hidden {workload.hidden}, top-{workload.topk} of {workload.experts} experts; "
        f"{rows} rows received. Blocks of {workload.warps} warps; {gpu_blocks} of them for what latency allows."
    )
    latencies = {"own": hbm_ns, **({"NVLink": nvlink_ns} if workload.fabric == "peer" else {})}
    console.print(overview(shown, gpu_blocks, latencies))
    for profile in shown if lines else ():
        console.print(hottest(profile, lines))
    if json_file is not None:
        assumed = {"blocks": gpu_blocks, "ns": latencies}
        figures = [profile.as_json(lines) for profile in shown]
        write_json(
            json_file,
            {
                "workload": dataclasses.asdict(workload),
                "machine": describe_machine(),
                "nvrtc": nvrtc_version(),
                "assumed": assumed,
                "rows": rows,
                "kernels": figures,
            },
        )
        console.print(f"Report: {json_file}")


def _check(workload: Workload, kernels: tuple[str, ...]) -> None:
    if workload.hidden % 8:
        raise click.BadParameter("a row must be a multiple of 16 bytes", param_hint="--hidden")
    if workload.topk > workload.experts:
        raise click.BadParameter(f"{workload.topk}: expected at most --experts={workload.experts}", param_hint="--topk")
    if workload.experts % workload.ranks:
        raise click.BadParameter(
            f"{workload.experts}: expected a multiple of --ranks={workload.ranks}", param_hint="--experts"
        )
    if not re.fullmatch(r"sm_\d{2,3}[af]?", workload.architecture):
        raise click.BadParameter(f"{workload.architecture!r}: expected as sm_90a", param_hint="--arch")
    launched = _LAUNCHED[workload.mode]
    if others := [name for name in kernels if name not in launched]:
        raise click.BadParameter(
            f"{', '.join(others)}: expected of {', '.join(launched)} with --mode={workload.mode}", param_hint="--kernel"
        )


def _check_writable(file: Path) -> None:
    """Before minutes are spent on what cannot be written then."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        is_new = not file.exists()
        with file.open("a"):
            pass
        if is_new:
            file.unlink()
    except OSError as error:
        raise click.BadParameter(str(error), param_hint="--json") from None


def _restart() -> None:
    """Run this command again with the build whose warps have 32 threads."""
    if os.environ.get(_VARIABLE) is not None:
        raise click.ClickException(
            f"{_VARIABLE}={os.environ[_VARIABLE]}: expected {_BUILD}, whose warps have as many threads as a GPU's"
        )
    package = Path(__file__).resolve().parents[1]
    if not any(package.glob(f"_C_{_BUILD}.*")):
        raise click.ClickException(
            f"the build {_BUILD!r} is not there, whose warps have as many threads as a GPU's: {_INSTALL} makes it, "
            f"or `DEEP_EP_BUILDS=fast,{_BUILD} make build` for the clone alone"
        )
    os.environ[_VARIABLE] = _BUILD
    os.execv(sys.executable, [sys.executable, "-m", "deep_ep_py", *sys.argv[1:]])
