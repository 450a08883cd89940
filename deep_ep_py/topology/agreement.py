"""How the ranks of a Buffer settle which path each two of them take."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from deep_ep_py.bootstrap.together import attempt, raise_together, told_of
from deep_ep_py.core import arguments
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
    mine, failed = attempt(make)
    told = bootstrap.all_gather(
        [told_of(failed), *([None] * 3 if mine is None else [mine.given, mine.must_agree(), mine.reach.tell()])]
    )
    raise_together(bootstrap.rank, failed, [one[0] for one in told])
    assert mine is not None
    for rank, (_, given, theirs, _) in enumerate(told):
        if theirs["fabric"] != [*mine.fabrics]:
            raise ValueError(
                f"{mine.given} on rank {mine.rank}: expected the same on all ranks, rank {rank} has {given}"
            )
    arguments.same_on_all_ranks(mine.rank, [theirs for *_, theirs, _ in told])
    reaches = [Reach.told(theirs) for *_, theirs in told]
    routes = Routes.agreed(reaches, mine.rank, mine.given, mine.machines)
    for name, count in sorted(Counter(routes.own).items()):
        _log.debug("rank %d: %s to %d of %d ranks", mine.rank, name, count, mine.ranks)
    return replace(mine, routes=routes.own, networks=routes.networks)
