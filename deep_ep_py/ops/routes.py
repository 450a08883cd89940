"""A dispatch's routes as tensors, which an op can return and autograd can keep for the backward.

They hold everything that a handle holds, so no table of handles is needed: routes live exactly as long as their
tensors.
"""

from __future__ import annotations

import torch

from deep_ep_py.base.arguments import tensor
from deep_ep_py.buffer import Buffer
from deep_ep_py.modes.normal.handles import DispatchRecord, Handle, record_of
from deep_ep_py.modes.normal.plans import TwoHopPlan, way_of
from deep_ep_py.ops.registry import serial_of
from deep_ep_py.ops.row_types import zero_rows

_NUMBERS, _PLAN = 0, 1
_NUMBERS_OF_ROUTES = 5
"""Elements of the first tensor. Next come the tensors of a plan, the first with a row per token, then row sources."""


def to_routes(buffer: Buffer, handle: Handle, padded: bool) -> list[torch.Tensor]:
    """Return the routes of a handle.

    Parameters
    ----------
    buffer : Buffer
        The Buffer of the handle; it must be registered.
    handle : DispatchHandle or DispatchRecord
        Of a dispatch that has just ended.
    padded : bool
        Whether the outputs have rows that no rank sent.

    Returns
    -------
    list of torch.Tensor
        int64 [5] on the CPU: the numbers of the Buffer, operation and generation, top-k and `padded`. Then int32
        tensors on the device of the rows.
    """
    record = record_of(handle)
    numbers = torch.tensor([serial_of(buffer), record.operation, record.generation, record.topk, padded], device="cpu")
    return [numbers, *record.tensors()]


def empty_routes(buffer: Buffer, x: torch.Tensor, rows: int | torch.SymInt) -> list[torch.Tensor]:
    """Return tensors like those of `to_routes`, for a dispatch of `x` that receives `rows` rows."""
    topology = buffer._engine.topology
    way = way_of(topology)
    # The number of node rows to forward is known only from the counts.
    passed_on = torch.library.get_ctx().new_dynamic_size() if way is TwoHopPlan else 0
    plan = [
        torch.empty([passed_on if size is None else size for size in shape], dtype=torch.int32, device=x.device)
        for shape in way.shapes(topology, x.shape[0]).values()
    ]
    return [
        torch.empty(_NUMBERS_OF_ROUTES, dtype=torch.int64, device="cpu"),
        *plan,
        torch.empty(way.sources(topology, rows), dtype=torch.int32, device=x.device),  # type: ignore[arg-type]
    ]


def tokens_of(routes: list[torch.Tensor]) -> int:
    """Return how many tokens this rank sent, from shapes alone."""
    return routes[_PLAN].shape[0]


def rows_of(routes: list[torch.Tensor]) -> int:
    """Return how many rows this rank's outputs had, from shapes alone."""
    return routes[-1].shape[0]


def routes_of_rows(buffer: Buffer) -> int:
    """Return how many tensors `to_routes` returns."""
    topology = buffer._engine.topology
    return _PLAN + len(way_of(topology).shapes(topology, 0)) + 1


def to_record(buffer: Buffer, routes: list[torch.Tensor]) -> DispatchRecord:
    """Return the record that the routes were made from.

    Raises
    ------
    TypeError, ValueError
        A dispatch of this Buffer did not return them.
    """
    topology = buffer._engine.topology
    way = way_of(topology)
    count = routes_of_rows(buffer)
    if len(routes) != count:
        raise ValueError(f"routes=a list of {len(routes)}: expected the {count} tensors that a dispatch op returned")
    shapes: list[tuple[int | None, ...]]
    shapes = [*way.shapes(topology, tokens_of(routes)).values(), way.sources(topology, rows_of(routes))]
    numbers = tensor("routes[0]", routes[_NUMBERS], torch.int64, (_NUMBERS_OF_ROUTES,), torch.device("cpu"))
    for index, shape in enumerate(shapes, _PLAN):
        tensor(f"routes[{index}]", routes[index], torch.int32, shape, buffer.device)
    serial, operation, generation, topk, _ = numbers.tolist()
    if serial != serial_of(buffer):
        raise ValueError("routes: expected those of this Buffer, got those of another Buffer")
    plan = way.of(topology, routes[_PLAN:-1])
    return DispatchRecord(buffer._engine, plan, None, routes[-1], topk, operation, generation)


def zero_padding(
    buffer: Buffer, received: torch.Tensor | tuple[torch.Tensor, torch.Tensor], routes: list[torch.Tensor]
) -> None:
    """Zero the rows that no rank sent, so that no gradient depends on uninitialized memory."""
    padded = bool(routes[_NUMBERS][-1])
    if padded:
        topology = buffer._engine.topology
        count = way_of(topology).of(topology, routes[_PLAN:-1]).received()
        zero_rows(received, torch.arange(rows_of(routes), device=count.device) >= count)
