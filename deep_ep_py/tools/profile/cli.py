"""The command `python -m deep_ep_py profile`: counts what kernels execute on a GPU, without one."""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path

import click
from rich.console import Console

from deep_ep_py.base.arguments import MAX_RANKS
from deep_ep_py.base.files import write_json
from deep_ep_py.base.native import C
from deep_ep_py.base.options import OutputFile
from deep_ep_py.device.jit import CompileError, NvrtcUnavailableError, require_nvrtc
from deep_ep_py.device.jit.cache import FOLDER_VARIABLE, KernelCache
from deep_ep_py.device.jit.compiler import nvrtc_version
from deep_ep_py.device.jit.options import Architecture
from deep_ep_py.device.jit.registry import KERNELS
from deep_ep_py.errors import DeepEPError
from deep_ep_py.tools.bench.machine import describe_machine
from deep_ep_py.tools.profile.device import Images
from deep_ep_py.tools.profile.report import profiles
from deep_ep_py.tools.profile.sass import Sass, disassemble, find_nvdisasm
from deep_ep_py.tools.profile.tables import durations, hottest, longest_path, overview
from deep_ep_py.tools.profile.times import times
from deep_ep_py.tools.profile.workload import Workload, run

_BUILD, _VARIABLE = "exact", "DEEP_EP_BUILD"
_DEFAULT = Workload()
_LAUNCHED = {
    "normal": (
        *("layout", "notify", "dispatch", "combine"),
        *("two_hops_notify", "two_hops_dispatch", "two_hops_combine"),
    ),
    "low-latency": ("low_latency_dispatch", "low_latency_combine"),
    "posting": ("post",),
}
_INSTALL = f"`DEEP_EP_BUILDS=fast,{_BUILD} pip install '.[gpu]'` in the clone"


@click.command(context_settings={"show_default": True, "help_option_names": ["-h", "--help"]})
@click.option("--mode", type=click.Choice(list(_LAUNCHED)), default=_DEFAULT.mode)
@click.option(
    "--kernel",
    "kernels",
    multiple=True,
    type=click.Choice([name for names in _LAUNCHED.values() for name in names]),
    help="Kernel to report; may be repeated. Default: all of the mode.",
)
@click.option("--arch", "architecture", type=Architecture(), default=_DEFAULT.architecture, help="For example sm_90a.")
@click.option("--fabric", type=click.Choice(["peer", "ibgda"]), default=_DEFAULT.fabric)
@click.option("--ranks", type=click.IntRange(1, MAX_RANKS), default=_DEFAULT.ranks)
@click.option(
    "--nodes",
    type=click.IntRange(1),
    default=_DEFAULT.nodes,
    help="Over which ranks are spread, with --fabric ibgda; 1: it joins all ranks.",
)
@click.option("--tokens", type=click.IntRange(1), default=_DEFAULT.tokens, help="Tokens per rank.")
@click.option("--hidden", type=click.IntRange(8), default=_DEFAULT.hidden, help="BF16 elements per row.")
@click.option("--topk", type=click.IntRange(1, 32), default=_DEFAULT.topk, help="Experts per token.")
@click.option("--experts", type=click.IntRange(1, 2048), default=_DEFAULT.experts, help="Total number of experts.")
@click.option("--routing", type=click.Choice(["uniform", "deepseek", "skewed"]), default=_DEFAULT.routing)
@click.option("--warps", type=click.IntRange(1, 32), default=_DEFAULT.warps, help="Warps per block.")
@click.option("--blocks", type=click.IntRange(1, 64), default=_DEFAULT.blocks, help="Blocks per operation, as counted.")
@click.option("--time", "only_times", is_flag=True, help="Only predict times, which takes less memory.")
@click.option("--one-gpu", is_flag=True, help="The ranks share a GPU.")
@click.option("--dtype", type=click.Choice(["bf16", "fp8"]), default=_DEFAULT.dtype, help="Of dispatched rows.")
@click.option("--halves", is_flag=True, help="Launch the halves of low-latency calls one by one, as a hook does.")
@click.option("--zero-copy", is_flag=True, help="Low-latency combine of results in the Buffer's memory.")
@click.option("--cached", is_flag=True, help="Also a dispatch along the routes of the first one (normal mode).")
@click.option("--queue-pairs", type=click.IntRange(1), default=_DEFAULT.queue_pairs, help="To each peer.")
@click.option(
    "--nic-rate",
    type=click.FloatRange(0),
    default=_DEFAULT.nic_rate,
    help="GB/s that a rank's NICs send; 0: any number.",
)
@click.option("--lines", type=click.IntRange(0), default=10, help="Source lines to list for each kernel.")
@click.option("--seed", type=click.IntRange(0, 2**63 - 1), default=_DEFAULT.seed, help="Seed of the routing.")
@click.option(
    "--sass/--no-sass",
    default=None,
    show_default="if nvdisasm is installed",
    help="Also disassemble the machine code that ptxas generates from the PTX.",
)
@click.option("--json", "json_file", type=OutputFile(), help="Also write everything to this file.")
def command(
    kernels: tuple[str, ...],
    only_times: bool,
    lines: int,
    sass: bool | None,
    json_file: Path | None,
    **options: object,
) -> None:
    """Count what kernels execute, and predict how long they take. Needs no GPU.

    NVRTC compiles the kernels to PTX, which is interpreted for a dispatch and a combine of all ranks. Counts are those
    of the PTX, without the effects of ptxas. A time is the longest path through the threads of all ranks, or what
    bandwidth allows; launches and host work are not included.
    """
    workload = Workload(**options)  # type: ignore[arg-type]
    _check(workload, kernels)
    try:
        require_nvrtc()
    except NvrtcUnavailableError as error:
        raise click.ClickException(f"{error}\n{_INSTALL} installs it, and the required build") from None
    nvdisasm = find_nvdisasm() if sass is not False and not only_times else None
    if sass and nvdisasm is None:
        raise click.BadParameter(
            "nvdisasm is not installed; `pip install nvidia-cuda-nvdisasm` installs it", param_hint="--sass"
        )
    if C.WARP_SIZE != 32:
        _restart()
    console = Console(width=None if sys.stdout.isatty() else 80, highlight=False)
    try:
        with console.status("compiling and interpreting kernels"):
            images = Images(workload.architecture)
            rows, counted = run(workload, images, only_times)
    except OSError as error:
        raise click.ClickException(f"kernel cache (set {FOLDER_VARIABLE} for another folder): {error}") from None
    except (CompileError, DeepEPError, ValueError) as error:
        raise click.ClickException(str(error).strip()) from None
    found = profiles(counted, rows, workload.row_bytes)
    shown = [] if only_times else [profile for profile in found if not kernels or profile.name in kernels]
    predicted = [time for time in times(counted, workload.one_gpu) if not kernels or time.name in kernels]
    codes = {}
    if nvdisasm is not None:
        with console.status("disassembling"):
            codes = _disassembled(nvdisasm, images, [profile.name for profile in shown])
    console.print(
        f"{workload.architecture}, {workload.mode} mode over {workload.fabric}: {workload.ranks} ranks of "
        f"{workload.tokens} tokens, hidden {workload.hidden}, top-{workload.topk} of {workload.experts} experts; "
        f"{rows} rows received. {'One GPU' if workload.one_gpu else 'A GPU per rank'}; {workload.blocks} blocks per "
        f"rank, of {workload.warps} warps."
    )
    if shown:
        console.print(overview(shown, codes))
    console.print(durations(predicted))
    for profile in shown if lines else ():
        console.print(hottest(profile, lines))
    for time in predicted if lines else ():
        console.print(longest_path(time, lines))
    if json_file is not None:
        figures = [
            {
                **profile.as_json(lines),
                **({"sass": dataclasses.asdict(codes[profile.name])} if profile.name in codes else {}),
            }
            for profile in shown
        ]
        write_json(
            json_file,
            {
                "workload": dataclasses.asdict(workload),
                "machine": describe_machine(),
                "nvrtc": nvrtc_version(),
                "rows": rows,
                "kernels": figures,
                "times": [time.as_json(lines) for time in predicted],
            },
        )
        console.print(f"Report: {json_file}")


def _disassembled(nvdisasm: Path, images: Images, names: list[str]) -> dict[str, Sass]:
    """Disassemble the machine code of kernels, from the cache or newly compiled."""
    try:
        compiled = {
            name: KernelCache().get_all([KERNELS[name]], images.shapes[name], images.architecture)[0] for name in names
        }
        return {name: disassemble(nvdisasm, kernel.cubin) for name, kernel in compiled.items()}
    except (CompileError, OSError, RuntimeError) as error:
        raise click.ClickException(f"--sass: {str(error).strip()}; --no-sass omits this part") from None


def _check(workload: Workload, kernels: tuple[str, ...]) -> None:
    if workload.hidden % 8:
        raise click.BadParameter("a row must be a multiple of 16 bytes", param_hint="--hidden")
    if workload.topk > workload.experts:
        raise click.BadParameter(f"{workload.topk}: expected at most --experts={workload.experts}", param_hint="--topk")
    if workload.experts % workload.ranks:
        raise click.BadParameter(
            f"{workload.experts}: expected a multiple of --ranks={workload.ranks}", param_hint="--experts"
        )
    if workload.ranks % workload.nodes:
        raise click.BadParameter(
            f"{workload.nodes}: expected a divisor of --ranks={workload.ranks}", param_hint="--nodes"
        )
    if workload.nodes > 1 and workload.fabric == "peer":
        raise click.BadParameter(f"{workload.nodes}: expected --fabric=ibgda, which joins nodes", param_hint="--nodes")
    launched = _LAUNCHED[workload.mode]
    if others := [name for name in kernels if name not in launched]:
        raise click.BadParameter(
            f"{', '.join(others)}: expected one of {', '.join(launched)} with --mode={workload.mode}",
            param_hint="--kernel",
        )


def _restart() -> None:
    """Restart this command with the build whose warps have 32 threads."""
    if os.environ.get(_VARIABLE) is not None:
        raise click.ClickException(
            f"{_VARIABLE}={os.environ[_VARIABLE]}: expected {_BUILD}, whose warps have 32 threads, as on a GPU"
        )
    package = Path(__file__).resolve().parents[2]
    if not any(package.glob(f"_C_{_BUILD}.*")):
        raise click.ClickException(
            f"the build {_BUILD!r} is missing, whose warps have 32 threads, as on a GPU: {_INSTALL} installs it, "
            f"or `DEEP_EP_BUILDS=fast,{_BUILD} make build` builds it in the clone"
        )
    os.environ[_VARIABLE] = _BUILD
    os.execv(sys.executable, [sys.executable, "-m", "deep_ep_py", *sys.argv[1:]])
