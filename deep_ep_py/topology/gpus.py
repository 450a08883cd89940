"""Which ranks' GPUs can use each other's memory as fabric `peer` does: by loads, stores and atomics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from deep_ep_py.core.gpus import NO_ACCESS

if TYPE_CHECKING:
    from deep_ep_py.bootstrap.groups import Bootstrap
    from deep_ep_py.device.device import Device


@dataclass(frozen=True)
class Apart:
    """Pairs of ranks that must not use each other's memory by loads and stores; the same on all ranks.

    Attributes
    ----------
    reasons : mapping of (int, int) to str
        The reason for each pair, the lower rank first.
    """

    reasons: Mapping[tuple[int, int], str] = field(default_factory=dict)

    @staticmethod
    def ask(bootstrap: Bootstrap, device: Device) -> Apart:
        """Ask each rank's driver. Collective.

        A process that does not see another's GPU cannot ask about it; then the answer of the other counts. If neither
        sees the GPU of the other, the two count as able to.

        Parameters
        ----------
        bootstrap : Bootstrap
            The ranks.
        device : Device
            The device of this rank.

        Returns
        -------
        Apart
        """
        gpus = [str(gpu) for gpu in bootstrap.all_gather(device.gpu)]
        refusals = {gpu: device.refusal_of_gpu(gpu) for gpu in {*gpus}}
        told = bootstrap.all_gather([[gpu, why] for gpu, why in refusals.items() if why])
        reasons = dict[tuple[int, int], str]()
        for rank, refused in enumerate(told):
            why = dict(refused)
            for peer in (peer for peer, gpu in enumerate(gpus) if gpu in why):
                reasons.setdefault((min(rank, peer), max(rank, peer)), str(why[gpus[peer]]))
        return Apart(reasons)

    @property
    def have_no_access(self) -> bool:
        """Whether some ranks are apart because their memory cannot be mapped."""
        return NO_ACCESS in self.reasons.values()

    def reason(self, one: int, other: int) -> str:
        """Return why two ranks are apart; empty if they are not."""
        return self.reasons.get((min(one, other), max(one, other)), "")

    def inside_a_node(self, ranks_per_node: int) -> tuple[int, int] | None:
        """Return the first two ranks of one node that are apart, or None if there are none."""
        return min((pair for pair in self.reasons if len({rank // ranks_per_node for rank in pair}) == 1), default=None)
