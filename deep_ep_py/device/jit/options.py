"""A command-line option type for GPU architectures."""

from __future__ import annotations

import re
from typing import Any

import click

from deep_ep_py.device.jit.compiler import known_architectures

_ARCHITECTURE = re.compile(r"sm_\d{2,3}[af]?")


class Architecture(click.ParamType):
    """A GPU architecture that NVRTC compiles for, such as `sm_90a`."""

    name = "arch"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Check the name against the architectures that the installed NVRTC knows, if it is installed."""
        known = known_architectures()
        base = str(value).rstrip("af")
        if not _ARCHITECTURE.fullmatch(str(value)) or (known and base not in known):
            expected = f"one of {', '.join(known)}, or with a suffix, like sm_90a" if known else "a name like sm_90a"
            self.fail(f"{value!r}: expected {expected}", param, ctx)
        return value
