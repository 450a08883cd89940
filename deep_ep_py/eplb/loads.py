"""Loads: those of logical experts, from the counts of physical ones; and those that a placement predicts for ranks."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from deep_ep_py.base import arguments
from deep_ep_py.eplb.placement import Placement, checked_layer, checked_placement


class RankLoads(NamedTuple):
    """The rows that ranks will receive.

    Attributes
    ----------
    rows : torch.Tensor
        float64 [layers, ranks]: rows of each rank, in the unit of the loads.
    max_over_mean : torch.Tensor
        float64 [layers]: rows of the rank with most over the mean of all ranks that hold experts; at least 1, and 1 if
        no rank has rows.
    """

    rows: Tensor
    max_over_mean: Tensor


def rank_loads(loads: Tensor, placement: Placement) -> RankLoads:
    """Predict the rows that each rank will receive, if the replicas of an expert share its rows equally.

    Rows are counted per choice of an expert, as low-latency mode sends them: a token that chooses two experts of a rank
    counts twice.

    Parameters
    ----------
    loads : torch.Tensor
        As in `plan`: [layers, logical experts], or [logical experts] for one layer.
    placement : Placement
        Of as many layers and logical experts.

    Returns
    -------
    RankLoads
        On the CPU.

    Raises
    ------
    TypeError, ValueError
        An argument is invalid; the message names it.
    """
    placement = checked_placement(placement).to("cpu")
    checked = checked_loads(loads).double()
    if checked.shape != placement.expert_count.shape:
        raise ValueError(
            f"loads={arguments.describe(loads)}: expected {placement.num_layers} layers of "
            f"{placement.num_logical_experts} logical experts, as in the placement"
        )
    held = placement.physical_to_logical_map
    of_physical = (checked / placement.expert_count).gather(1, held.clamp(min=0)).masked_fill(held < 0, 0)
    of_ranks = (placement.num_layers, placement.num_ranks, -1)
    rows = of_physical.view(of_ranks).sum(dim=2)
    most, mean = rows.amax(dim=1), rows.sum(dim=1) / (held >= 0).view(of_ranks).any(dim=2).sum(dim=1)
    # The mean is rounded, so the mean of equal rows may exceed them.
    return RankLoads(rows, torch.where(mean > 0, most / mean, 1.0).clamp(min=1.0))


def physical_to_logical(counts: Tensor, placement: Placement, layer: int | None = None) -> Tensor:
    """Sum the counts of physical experts over the replicas of each logical expert, which gives the loads for `plan`.

    Parameters
    ----------
    counts : torch.Tensor
        [layers, physical experts], or [physical experts] for one layer, of an integer or floating-point dtype and on
        the device of the placement: such as the tokens that each physical expert has received. The
        `cumulative_local_expert_recv_stats` of all ranks, concatenated in the order of ranks, are the counts of a
        layer.
    placement : Placement
        The placement that was in use when tokens were counted.
    layer : int, optional
        The layer whose counts these are, if they are those of one layer and the placement has several.

    Returns
    -------
    torch.Tensor
        [layers, logical experts], or [logical experts] for counts of one layer. int64 for integers, otherwise of the
        dtype of counts.

    Raises
    ------
    TypeError, ValueError
        An argument is invalid; the message names it.
    """
    checked_placement(placement)
    places, layers, physical = placement.logical_to_physical_map, placement.num_layers, placement.num_physical_experts
    wanted = f"numbers [{layers}, {physical}], or [{physical}] for one layer, on {placement.device}"
    if not _has_numbers(counts) or counts.device != placement.device:
        raise TypeError(f"counts={arguments.describe(counts)}: expected {wanted}")
    if counts.shape == (physical,):
        places = places[checked_layer(placement, layer)]
    elif counts.shape != (layers, physical):
        raise ValueError(f"counts={arguments.describe(counts)}: expected {wanted}")
    elif layer is not None:
        raise ValueError(f"layer={arguments.describe(layer)}: expected None with counts of all layers")
    # Sums over the last dimension have a fixed order on every device, which scattered additions have not.
    found = counts.gather(-1, places.clamp(min=0).flatten(-2)).view(places.shape)
    return found.masked_fill(places < 0, 0).sum(dim=-1)


def checked_loads(loads: Tensor) -> Tensor:
    """Check the loads of logical experts, and return them as float32 [layers, logical experts] on the CPU."""
    described = arguments.describe(loads)
    if not _has_numbers(loads):
        raise TypeError(f"loads={described}: expected a tensor of an integer or floating-point dtype")
    if loads.dim() not in (1, 2) or not loads.numel():
        raise ValueError(f"loads={described}: expected [layers, logical experts] or [logical experts], not empty")
    if loads.shape[-1] > arguments.MAX_EXPERTS:
        raise ValueError(f"loads={described}: expected at most {arguments.MAX_EXPERTS} logical experts")
    checked = loads.detach().to("cpu", torch.float32).reshape(-1, loads.shape[-1])
    low, total = float(checked.min()), float(checked.sum(dim=1, dtype=torch.float64).max())
    # With a NaN, no comparison holds.
    if not (low >= 0 and total <= torch.finfo(torch.float32).max):
        raise ValueError(
            f"loads={described}: the lowest is {low:g} and the highest sum of a layer {total:g}, expected finite "
            "numbers, not negative, with sums in the range of float32"
        )
    return checked


def _has_numbers(value: object) -> bool:
    """Return whether a value is a tensor of integers or floating-point numbers."""
    return isinstance(value, Tensor) and value.dtype is not torch.bool and not value.is_complex()
