"""Which ranks' GPUs use each other's memory as fabric `peer` does: by loads, stores and atomics."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deep_ep_py.bootstrap.groups import Bootstrap
    from deep_ep_py.device.device import Device


def ask_gpus(bootstrap: Bootstrap, device: Device) -> dict[int, str]:
    """Return the ranks whose memory is not to be used by loads and stores, and why. Collective.

    A rank whose process does not see another's GPU cannot ask the driver. What either end says counts for both.

    Parameters
    ----------
    bootstrap : Bootstrap
        The ranks.
    device : Device
        Where this one computes.
    """
    gpus = [str(gpu) for gpu in bootstrap.all_gather(device.gpu)]
    found = {gpu: device.refusal_of_gpu(gpu) for gpu in {*gpus}}
    mine = {rank: found[gpu] for rank, gpu in enumerate(gpus) if found[gpu]}
    told = bootstrap.all_gather([[*pair] for pair in mine.items()])
    theirs = {rank: dict(pairs)[bootstrap.rank] for rank, pairs in enumerate(told) if bootstrap.rank in dict(pairs)}
    return theirs | mine
