"""`python -m deep_ep_py canary`: what a GPU and its driver allow ranks that share the GPU to do."""

from __future__ import annotations

from pathlib import Path

import click

from deep_ep_py.base.choices import LAUNCH
from deep_ep_py.base.files import write_json
from deep_ep_py.base.options import OutputFile
from deep_ep_py.device.canary import observe


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--json", "json_file", type=OutputFile(), help="Also write findings here.")
def command(json_file: Path | None) -> None:
    """Probe in 5 seconds the undocumented behavior of this GPU and its driver, and how to launch kernels on it.

    The exit code is 1 if ranks cannot share the GPU with either kind of launch, or if heaps do not work. If the driver
    hangs, the probe is abandoned.
    """
    found = observe()
    for name, value in found.items():
        if name != "errors":
            click.echo(f"{name}: {value}")
    for error in found["errors"]:
        click.echo(f"error: {error}")
    if json_file is not None:
        write_json(json_file, found)
    if found.keys() == {"errors"}:
        raise click.ClickException("no findings: no GPU could be used")
    if found.get("launch") is None:
        raise click.ClickException(
            "no two kernels that wait for each other run side by side: ranks cannot share this GPU"
        )
    if not (found.get("heap_words_clear") and found.get("heap_import")):
        raise click.ClickException("heaps do not work")
    click.echo(f"{LAUNCH}={found['launch']}")
