"""A dispatch's routes as tensors: what crosses the boundary of an op, and what autograd keeps for the backward.

They hold all that a handle holds, so there is no table of handles: routes live exactly as long as their tensors.
"""

from __future__ import annotations

import torch

from deep_ep_py.buffer import Buffer
from deep_ep_py.core.arguments import tensor
from deep_ep_py.modes.normal.handles import DispatchHandle
from deep_ep_py.modes.normal.plans import TwoHopPlan, way_of
from deep_ep_py.ops.registry import serial_of

_NUMBERS, _PLAN = 0, 1
_NUMBERS_OF_ROUTES = 5
"""Numbers on the host, the tensors of a plan, the first of which has a row for each token, the source of each row."""


def to_routes(buffer: Buffer, handle: DispatchHandle, padded: bool) -> list[torch.Tensor]:
    """Return a handle's routes.

    Parameters
    ----------
    buffer : Buffer
        Whose handle it is; registered.
    handle : DispatchHandle
        Of a dispatch that has just ended.
    padded : bool
        Its outputs have rows that no rank sent.

    Returns
    -------
    list of torch.Tensor
        int64 [5] on the CPU: the numbers of Buffer, operation and generation, top-k, `padded`; then int32 on the rows'
        device.
    """
    numbers = torch.tensor([serial_of(buffer), handle.operation, handle.generation, handle.topk, padded], device="cpu")
    return [numbers, *handle.tensors()]


def empty_routes(buffer: Buffer, x: torch.Tensor, rows: int | torch.SymInt) -> list[torch.Tensor]:
    """Return tensors like those of `to_routes`, for a dispatch of `x` that receives `rows` rows."""
    topology = buffer._engine.topology
    way = way_of(topology)
    # As many node rows are passed on as counts tell.
    passed_on = torch.library.get_ctx().new_dynamic_size() if way is TwoHopPlan else 0
    plan = [
        torch.empty([passed_on if size is None else size for size in shape], dtype=torch.int32, device=x.device)
        for shape in way.shapes(topology, x.shape[0]).values()
    ]
    return [
        torch.empty(_NUMBERS_OF_ROUTES, dtype=torch.int64, device="cpu"),
        *plan,
        torch.empty(way.sources(rows), dtype=torch.int32, device=x.device),  # type: ignore[arg-type]
    ]


def tokens_of(routes: list[torch.Tensor]) -> int:
    """Return how many tokens this rank sent; known without looking at values."""
    return routes[_PLAN].shape[0]


def rows_of(routes: list[torch.Tensor]) -> int:
    """Return how many rows this rank's outputs had; known without looking at values."""
    return routes[-1].shape[0]


def to_handle(buffer: Buffer, routes: list[torch.Tensor]) -> DispatchHandle:
    """Return the handle whose routes these are.

    Raises
    ------
    TypeError, ValueError
        If they are not what a dispatch of this Buffer has returned.
    """
    topology = buffer._engine.topology
    way = way_of(topology)
    shapes: list[tuple[int | None, ...]] = list(way.shapes(topology, 0).values())
    count = _PLAN + len(shapes) + 1
    if len(routes) != count:
        raise ValueError(f"routes=a list of {len(routes)}: expected the {count} tensors that a dispatch op returned")
    shapes = [*way.shapes(topology, tokens_of(routes)).values(), way.sources(rows_of(routes))]
    numbers = tensor("routes[0]", routes[_NUMBERS], torch.int64, (_NUMBERS_OF_ROUTES,), torch.device("cpu"))
    for index, shape in enumerate(shapes, _PLAN):
        tensor(f"routes[{index}]", routes[index], torch.int32, shape, buffer.device)
    serial, operation, generation, topk, _ = numbers.tolist()
    if serial != serial_of(buffer):
        raise ValueError("routes: expected those of this Buffer, they are another Buffer's")
    plan = way.of(topology, routes[_PLAN:-1])
    return DispatchHandle(buffer._engine, plan, None, routes[-1], topk, operation, generation)


def zero_padding(buffer: Buffer, recv_x: torch.Tensor, routes: list[torch.Tensor]) -> None:
    """Clear the rows that no rank sent, so that no gradient depends on what was in memory."""
    padded = bool(routes[_NUMBERS][-1])
    if padded:
        topology = buffer._engine.topology
        received = way_of(topology).of(topology, routes[_PLAN:-1]).received()
        beyond = torch.arange(recv_x.shape[0], device=recv_x.device) >= received
        recv_x.masked_fill_(beyond.unsqueeze(1), 0)
