"""`python -m deep_ep_py profile`: what kernels execute on a GPU, counted without one."""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path

import click
from rich.console import Console

from deep_ep_py.bench.machine import describe_machine
from deep_ep_py.core.arguments import MAX_RANKS
from deep_ep_py.core.files import write_json
from deep_ep_py.core.native import C
from deep_ep_py.errors import DeepEPError
from deep_ep_py.jit import KERNELS, CompileError, NvrtcUnavailableError, require_nvrtc
from deep_ep_py.jit.compiler import nvrtc_version
from deep_ep_py.profile.device import Images
from deep_ep_py.profile.report import profiles
from deep_ep_py.profile.tables import hottest, overview
from deep_ep_py.profile.workload import Workload, run

_BUILD, _VARIABLE = "exact", "DEEP_EP_BUILD"
_DEFAULT = Workload()
_HBM_NS, _NVLINK_NS = 700.0, 2300.0


@click.command(context_settings={"show_default": True, "help_option_names": ["-h", "--help"]})
@click.option("--mode", type=click.Choice(["normal", "low-latency"]), default=_DEFAULT.mode)
@click.option("--kernel", "kernels", multiple=True, type=click.Choice(list(KERNELS)), help="This one; repeatable.")
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
@click.option("--gpu-blocks", type=click.IntRange(1), default=24, help="Of an operation, for what latency allows.")
@click.option("--hbm-ns", type=click.FloatRange(1), default=_HBM_NS, help="A load from the GPU's own memory takes so.")
@click.option("--nvlink-ns", type=click.FloatRange(1), default=_NVLINK_NS, help="One from a peer's.")
@click.option("--lines", type=click.IntRange(0), default=10, help="Of the sources to list for each kernel.")
@click.option("--seed", type=int, default=_DEFAULT.seed, help="Of routing and of the order in which threads run.")
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
    if workload.hidden % 8:
        raise click.BadParameter("a row must be a multiple of 16 bytes", param_hint="--hidden")
    if workload.topk > workload.experts or workload.experts % workload.ranks:
        raise click.BadParameter(
            f"expected a multiple of {workload.ranks} ranks, at least --topk", param_hint="--experts"
        )
    if C.WARP_SIZE != 32:
        _restart()
    try:
        require_nvrtc()
    except NvrtcUnavailableError as error:
        raise click.ClickException(str(error)) from None
    console = Console(width=None if sys.stdout.isatty() else 80, highlight=False)
    try:
        with console.status("compiling, and interpreting what that has made"):
            rows, counted = run(workload, Images(workload.architecture))
    except (CompileError, DeepEPError, ValueError, OSError) as error:
        raise click.ClickException(str(error)) from None
    found = profiles(counted, rows, workload.row_bytes)
    shown = [profile for profile in found if not kernels or profile.name in kernels]
    console.print(
        f"{workload.architecture}, {workload.mode} mode over {workload.fabric}: {workload.ranks} ranks of "
        f"{workload.tokens} tokens, hidden {workload.hidden}, top-{workload.topk} of {workload.experts} experts; "
        f"{rows} rows received. Blocks of {workload.warps} warps; {gpu_blocks} of them for what latency allows."
    )
    if not shown:
        raise click.ClickException(f"{', '.join(kernels)}: not launched; {', '.join(one.name for one in found)} were")
    console.print(overview(shown, gpu_blocks, {"own": hbm_ns, "NVLink": nvlink_ns}))
    for profile in shown if lines else ():
        console.print(hottest(profile, lines))
    if json_file is not None:
        figures = [profile.as_json(lines) for profile in shown]
        write_json(
            json_file,
            {
                "workload": dataclasses.asdict(workload),
                "machine": describe_machine(),
                "nvrtc": nvrtc_version(),
                "rows": rows,
                "kernels": figures,
            },
        )
        console.print(f"Report: {json_file}")


def _restart() -> None:
    """Run this command again with the build whose warps have 32 threads."""
    if os.environ.get(_VARIABLE) is not None:
        raise click.ClickException(
            f"{_VARIABLE}={os.environ[_VARIABLE]}: expected {_BUILD}, whose warps have as many threads as a GPU's"
        )
    package = Path(__file__).resolve().parents[1]
    if not any(package.glob(f"_C_{_BUILD}.*")):
        raise click.ClickException(
            f"the build {_BUILD!r} is not there, whose warps have as many threads as a GPU's: "
            f"`DEEP_EP_BUILDS=fast,{_BUILD} pip install .` or `DEEP_EP_BUILDS={_BUILD} make build` makes it"
        )
    os.environ[_VARIABLE] = _BUILD
    os.execv(sys.executable, [sys.executable, "-m", "deep_ep_py", *sys.argv[1:]])
