"""The command `shim`: makes `import deep_ep` find this library."""

from __future__ import annotations

import click

from deep_ep_py.compat import shim


@click.command(name="shim", context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--install", is_flag=True, help="Put `deep_ep` and `deep_ep_cpp` on the path.")
@click.option("--remove", is_flag=True, help="Remove what --install put there.")
def command(install: bool, remove: bool) -> None:
    """Make `import deep_ep` find deep_ep_py, in the environment of this Python.

    Without an option, report what it finds now. An existing `deep_ep` is left alone.
    """
    if install and remove:
        raise click.UsageError("expected --install, --remove or neither")
    folder = shim.site_folder()
    try:
        if install:
            done = shim.install(folder)
            click.echo(f"installed in {folder}" if done else f"already installed in {folder}")
        elif remove:
            done = shim.remove(folder)
            click.echo(f"removed from {folder}" if done else f"nothing to remove in {folder}")
        else:
            click.echo(shim.status(folder))
    except shim.ShimError as error:
        raise click.ClickException(str(error)) from None
