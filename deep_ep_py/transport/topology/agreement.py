"""How the ranks of a Buffer agree on the path between every two of them."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from deep_ep_py.base import arguments
from deep_ep_py.transport.bootstrap.together import attempt, raise_together, told_of
from deep_ep_py.transport.topology.routes import Reach, Routes

if TYPE_CHECKING:
    from deep_ep_py.transport.bootstrap.groups import Bootstrap
    from deep_ep_py.transport.topology.topology import Topology

_log = logging.getLogger("deep_ep_py")


def agree(bootstrap: Bootstrap, make: Callable[[], Topology]) -> Topology:
    """Return this rank's topology, with the paths that work from both ends. Collective.

    Parameters
    ----------
    bootstrap : Bootstrap
        The ranks.
    make : callable
        Makes this rank's topology on its own, from the caller's arguments. If that fails on any rank, all ranks raise,
        because the others would wait for it until they time out.

    Raises
    ------
    Exception
        What `make` raises; on the other ranks a ValueError with its text, or a DeepEPError if it is neither a TypeError
        nor a ValueError. Also a ValueError if ranks disagree about values that must be the same, or, with a table of
        all paths, if there is no path between two ranks.
    """
    mine, failed = attempt(make)
    told = bootstrap.all_gather(
        [told_of(failed), *([None] * 3 if mine is None else [mine.given, mine.must_agree(), mine.reach.tell()])]
    )
    raise_together(bootstrap.rank, failed, [one[0] for one in told])
    assert mine is not None
    if len({tuple(theirs["fabric"]) for *_, theirs, _ in told}) > 1:
        found = arguments.difference({rank: given for rank, (_, given, *_) in enumerate(told)}, str)
        raise ValueError(f"{mine.given} on rank {mine.rank}: expected the same on all ranks, it is {found}")
    arguments.same_on_all_ranks(mine.rank, [theirs for *_, theirs, _ in told])
    reaches = [Reach.told(theirs) for *_, theirs in told]
    routes = Routes.agreed(reaches, mine.rank, mine.given, mine.machines)
    for name, count in sorted(Counter(routes.own).items()):
        _log.debug("rank %d: %s to %d of %d ranks", mine.rank, name, count, mine.ranks)
    return replace(mine, routes=routes.own, networks=routes.networks)
