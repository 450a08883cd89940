"""How the ranks of a Buffer settle which path each two of them take."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from deep_ep_py.core import arguments
from deep_ep_py.errors import DeepEPError
from deep_ep_py.topology.routes import Reach, Routes

if TYPE_CHECKING:
    from deep_ep_py.bootstrap.groups import Bootstrap
    from deep_ep_py.topology.topology import Topology

_log = logging.getLogger("deep_ep_py")


def agree(bootstrap: Bootstrap, make: Callable[[], Topology]) -> Topology:
    """Return this rank's topology with the paths that both ends of each can take. Collective.

    Parameters
    ----------
    bootstrap : Bootstrap
        The ranks.
    make : callable
        Makes this rank's by itself, from what its caller has passed. Where that fails on some rank, all raise: the
        others would wait for it in vain.

    Raises
    ------
    Exception
        What `make` raises; on the other ranks a ValueError with its text, or a DeepEPError where it is no TypeError or
        ValueError. A ValueError also where ranks disagree about what must be the same, and where two ranks have no path
        between them: then with a table of all paths.
    """
    mine, failed = None, None
    try:
        mine = make()
    except Exception as error:  # of the driver, say, which a path has asked
        failed = error
    told = bootstrap.all_gather(
        [str(failed), isinstance(failed, TypeError | ValueError), None]
        if mine is None
        else ["", mine.must_agree(), mine.reach.tell()]
    )
    for rank, (why, by_argument, _) in enumerate(told):
        if why and rank != bootstrap.rank:
            raise failed or (ValueError if by_argument else DeepEPError)(f"rank {rank}: {why}")
    if mine is None:
        assert failed is not None
        raise failed
    arguments.same_on_all_ranks(mine.rank, [theirs for _, theirs, _ in told])
    reaches = [Reach.told(theirs) for *_, theirs in told]
    routes = Routes.agreed(reaches, mine.rank, mine.given, mine.machines)
    for name, count in sorted(Counter(routes.own).items()):
        _log.debug("rank %d: %s to %d of %d ranks", mine.rank, name, count, mine.ranks)
    return replace(mine, routes=routes.own, networks=routes.networks)
