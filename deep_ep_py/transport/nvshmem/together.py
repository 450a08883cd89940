"""Steps that the ranks of a Buffer take together, so that none waits in NVSHMEM for one that has failed."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from deep_ep_py.transport.bootstrap.groups import Bootstrap
from deep_ep_py.transport.bootstrap.together import attempt
from deep_ep_py.transport.nvshmem.library import NvshmemError

_log = logging.getLogger("deep_ep_py")


def on_all(bootstrap: Bootstrap, do: Callable[[], Any]) -> list[Any]:
    """Return the result of each rank's `do`, which must be JSON; if one raises, all ranks raise. Collective."""
    value, failed = attempt(do)
    if failed is not None:
        # Logged at once: others may wait in NVSHMEM for what has failed here, and then no exception reaches them.
        _log.error("rank %d: %s", bootstrap.rank, _named(failed))
    told = bootstrap.all_gather(["" if failed is None else _named(failed), value])
    for rank, (why, _) in enumerate(told):
        if why:
            raise failed or NvshmemError(f"rank {rank}: {why}")
    return [value for _, value in told]


def _named(error: Exception) -> str:
    return str(error) if isinstance(error, NvshmemError) else f"{type(error).__name__}: {error}"
