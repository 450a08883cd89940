"""The command line: `python -m deep_ep_py COMMAND`."""

from __future__ import annotations

import importlib
import sys

import click

from deep_ep_py.device.hardware_queues import restart_with_queues

# A command's module is imported only when the command is invoked: each needs packages that the others do not.
_COMMANDS = {
    "bench": "deep_ep_py.tools.bench.cli",
    "bench-posting": "deep_ep_py.tools.bench.posting",
    "bench-proxy": "deep_ep_py.tools.bench.proxy",
    "canary": "deep_ep_py.tools.cli.canary",
    "compile": "deep_ep_py.tools.cli.compile",
    "doctor": "deep_ep_py.tools.cli.doctor",
    "profile": "deep_ep_py.tools.profile.cli",
    "rates": "deep_ep_py.tools.bench.rates",
    "shim": "deep_ep_py.tools.cli.shim",
    "trace": "deep_ep_py.tools.trace.cli",
}


_SHARE_A_GPU = ("bench-posting", "canary", "rates")


def _ranks_share_a_gpu(arguments: list[str]) -> bool:
    """Return whether a command runs its ranks as threads that share one GPU."""
    name = arguments[0] if arguments else ""
    return name in _SHARE_A_GPU or (name == "bench" and any(argument.endswith("cuda") for argument in arguments))


class _LazyGroup(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        command: click.Command = importlib.import_module(_COMMANDS[cmd_name]).command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands with their whole first sentences, which click would cut to fit a line."""
        rows = []
        for name in self.list_commands(ctx):
            command = self.get_command(ctx, name)
            rows.append((name, "" if command is None else command.get_short_help_str(limit=200)))
        with formatter.section("Commands"):
            formatter.write_dl(rows)


def _print_version(context: click.Context, option: click.Parameter, value: bool) -> None:
    del option
    if not value:
        return
    import torch

    from deep_ep_py._version import __version__
    from deep_ep_py.base.native import BUILD
    from deep_ep_py.base.sources import sources_hash

    click.echo(f"deep_ep_py {__version__}, build {BUILD}, torch {torch.__version__}, kernels {sources_hash()[:12]}")
    context.exit()


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_version,
    help="Show the version, the build, torch's version and a hash of the kernels' sources.",
)
def main() -> None:
    """Dispatch and combine for mixture-of-experts models."""


def run(prog_name: str = "deep-ep") -> None:
    """Run the command line; the console script `deep-ep` calls this."""
    if _ranks_share_a_gpu(sys.argv[1:]):
        restart_with_queues()
    main(prog_name=prog_name)


if __name__ == "__main__":
    run("python -m deep_ep_py")
