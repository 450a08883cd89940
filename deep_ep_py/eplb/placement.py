"""Which physical experts hold which logical experts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from deep_ep_py.base import arguments


@dataclass(frozen=True, eq=False)
class Placement:
    """The logical expert of every physical expert, for each layer. `plan` makes it; the same on all ranks.

    Parameters
    ----------
    physical_to_logical_map : torch.Tensor
        int64 [layers, physical experts]: the logical expert that each physical expert holds, -1 for none.
    logical_to_physical_map : torch.Tensor
        int64 [layers, logical experts, most replicas]: the physical experts that hold each logical expert. Entries
        from its number of replicas on are -1. The last extent is the highest number of replicas in any layer.
    expert_count : torch.Tensor
        int64 [layers, logical experts]: the number of replicas of each logical expert, at least 1.
    num_ranks : int
        Number of ranks. Rank r holds the physical experts from r * P / R on, up to (r + 1) * P / R, for P physical
        experts and R ranks.

    Raises
    ------
    TypeError, ValueError
        A parameter has the wrong type, shape or device; the message names it. Contents are not read.
    """

    physical_to_logical_map: Tensor
    logical_to_physical_map: Tensor
    expert_count: Tensor
    num_ranks: int

    def __post_init__(self) -> None:
        arguments.integer("num_ranks", self.num_ranks, 1, arguments.MAX_RANKS)
        if not isinstance(self.expert_count, Tensor):
            raise TypeError(f"expert_count={arguments.describe(self.expert_count)}: expected a torch.Tensor")
        device = self.expert_count.device
        arguments.shaped("expert_count", self.expert_count, torch.int64, (None, None), device)
        layers, experts = self.expert_count.shape
        shapes = {"logical_to_physical_map": (layers, experts, None), "physical_to_logical_map": (layers, None)}
        for name, shape in shapes.items():
            arguments.shaped(name, getattr(self, name), torch.int64, shape, device)
        if self.num_physical_experts % self.num_ranks:
            raise ValueError(
                f"physical_to_logical_map={arguments.describe(self.physical_to_logical_map)}: expected a multiple of "
                f"the {self.num_ranks} ranks as number of physical experts"
            )

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return self.expert_count.shape[0]

    @property
    def num_logical_experts(self) -> int:
        """Number of experts of the model in a layer: the ids of a router are below it."""
        return self.expert_count.shape[1]

    @property
    def num_physical_experts(self) -> int:
        """Number of physical experts in a layer: the `num_experts` of dispatch."""
        return self.physical_to_logical_map.shape[1]

    @property
    def device(self) -> torch.device:
        """Device of the maps."""
        return self.expert_count.device

    def to(self, device: torch.device | str) -> Placement:
        """Return this placement with its maps on a device.

        Parameters
        ----------
        device : torch.device or str
            Where the ids are that `logical_to_physical` will map.

        Returns
        -------
        Placement
            Maps that are on the device already are shared, not copied.
        """
        return replace(
            self,
            physical_to_logical_map=self.physical_to_logical_map.to(device),
            logical_to_physical_map=self.logical_to_physical_map.to(device),
            expert_count=self.expert_count.to(device),
        )

    def without(self, ranks: Iterable[int]) -> Placement:
        """Return this placement without the replicas that some ranks hold, so that no router chooses them.

        All other physical experts keep their ids.

        Parameters
        ----------
        ranks : iterable of int
            The ranks, such as `Buffer.masked_ranks` after a recovery.

        Returns
        -------
        Placement
            On the same device.

        Raises
        ------
        TypeError, ValueError
            The argument is invalid; or an expert has no replica on any other rank, and the message names it.
        """
        left_out = checked_ranks("ranks", ranks, self.num_ranks)
        held = self.physical_to_logical_map.cpu().view(self.num_layers, self.num_ranks, -1).clone()
        held[:, left_out] = -1
        places = self.logical_to_physical_map.cpu()
        gone = (places < 0) | torch.isin(
            places // held.shape[2], torch.tensor(left_out, dtype=torch.int64, device="cpu")
        )
        count = (~gone).sum(dim=2)
        for layer, missing in enumerate(count == 0):
            if missing.any():
                raise ValueError(
                    f"ranks={left_out}: experts {missing.nonzero().flatten().tolist()} of layer {layer} have no "
                    "replica on other ranks"
                )
        # The replicas that are left come first, in their order.
        order = gone.to(torch.uint8).argsort(dim=2, stable=True)[..., : int(count.max())]
        places = places.masked_fill(gone, -1).gather(2, order)
        return Placement(held.flatten(1), places, count, self.num_ranks).to(self.device)


def checked_placement(placement: Placement) -> Placement:
    """Check that an argument is a `Placement`."""
    if not isinstance(placement, Placement):
        raise TypeError(f"placement={arguments.describe(placement)}: expected a deep_ep_py.eplb.Placement")
    return placement


def checked_layer(placement: Placement, layer: int | None) -> int:
    """Check the index of a layer, which may be left out if there is only one."""
    if layer is None:
        if placement.num_layers != 1:
            raise ValueError(f"layer=None: expected 0 to {placement.num_layers - 1}, since the placement has several")
        return 0
    return arguments.integer("layer", layer, 0, placement.num_layers - 1)


def checked_ranks(name: str, ranks: Iterable[int], num_ranks: int) -> list[int]:
    """Check the ranks that a caller leaves out, and return them in order, each once."""
    try:
        return sorted({arguments.integer(f"a rank of {name}", rank, 0, num_ranks - 1) for rank in ranks})
    except TypeError:
        raise TypeError(f"{name}={arguments.describe(ranks)}: expected the ranks to leave out, such as [3]") from None
