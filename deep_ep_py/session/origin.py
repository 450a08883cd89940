"""The operation that a handle belongs to, and whether a Buffer may use it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deep_ep_py.session.recovery import ranks_of

if TYPE_CHECKING:
    from deep_ep_py.session.engine import Engine


def number_of(owner: Engine, generation: int, operation: int) -> int:
    """Return the 64 bits by which ranks compare operations: they identify the Buffer, generation and operation."""
    return (owner.membership.number & 0xFFFFFF) << 40 | (generation & 0xFF) << 32 | operation & 0xFFFFFFFF


def check_origin(engine: Engine, owner: Engine, generation: int) -> None:
    """Check that a handle of `owner` and that generation belongs to this Buffer, or to another one of the same ranks.

    Raises
    ------
    ValueError
        It does not.
    """
    if generation != owner.generation:
        raise ValueError("handle: expected one of a dispatch since the Buffer recovered, got one from before")
    if owner is engine:
        return
    if owner.membership.members != engine.membership.members:
        raise ValueError("handle: expected one of a Buffer with the same ranks, got one of other ranks")
    if owner.device.torch_device != engine.device.torch_device:
        raise ValueError(
            f"handle: expected one of a Buffer on {engine.device.torch_device}, got one from "
            f"{owner.device.torch_device}"
        )
    if owner.mask != engine.mask:
        raise ValueError(
            f"handle: expected one of a Buffer that leaves out the same ranks, {ranks_of(engine.mask)}, got one of a "
            f"Buffer that leaves out {ranks_of(owner.mask)}"
        )
    if owner.broken is not None:
        raise ValueError(f"handle: expected one of a Buffer that has not failed, its Buffer has: {owner.broken}")
