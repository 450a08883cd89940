"""`python -m deep_ep_py canary`: what a GPU and its driver let ranks do that share it."""

from __future__ import annotations

from pathlib import Path

import click

from deep_ep_py.core.choices import LAUNCH
from deep_ep_py.core.files import write_json
from deep_ep_py.device.canary import observe


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Also write it here.")
def command(json_file: Path | None) -> None:
    """Find out in 5 seconds what this GPU and its driver do that nothing documents, and how to launch kernels on it.

    The exit code is 1 where ranks cannot share the GPU either way, or heaps do not work. A driver that hangs is given
    up.
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
        raise click.ClickException("nothing was found out: no GPU could be used")
    if found.get("launch") is None:
        raise click.ClickException(
            "no two kernels that wait for each other run side by side: ranks cannot share this GPU"
        )
    if not (found.get("heap_words_clear") and found.get("heap_import")):
        raise click.ClickException("heaps do not work")
    click.echo(f"{LAUNCH}={found['launch']}")
