"""A mixture-of-experts layer for decoding, in low-latency mode. Start reading at `DecodeLayer.forward`.

All sizes are known before a call: no counts are exchanged, and on a GPU the host waits for none. Two alternating
micro-batches overlap communication with computation; see `DecodeLayer.begin` and `run_two`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from deep_ep_py import ops
from deep_ep_py.base import arguments
from deep_ep_py.device.rowwise.fp8 import PACKED
from deep_ep_py.device.rowwise.torch_kernels import GROUP
from deep_ep_py.errors import DeepEPError
from deep_ep_py.moe.packed import PackedExperts
from deep_ep_py.ops.registry import buffer_of


class DecodeLayer(nn.Module):
    """A mixture-of-experts layer for tokens that a router has assigned; each rank has its own tokens and experts.

    All ranks of the group must make the same calls in the same order. There are no gradients: `MoELayer` is for
    training and prefill, and can share the weights. The two give the same result except for rounding: this layer rounds
    each expert's result to bfloat16, `MoELayer` each rank's sum. If experts compute in float32 and rows travel in
    bfloat16, the two differ by less than 1.6 % of the weighted sum of the results' magnitudes.

    Parameters
    ----------
    experts : PackedExperts
        This rank's share: rank r of R holds the r-th of R equal shares.
    num_experts : int
        Number of experts on all ranks together.
    num_max_dispatch_tokens_per_rank : int
        Upper bound for the tokens of any rank in a call; the same on all ranks.
    group : str
        The name of the Buffer, from `deep_ep_py.ops.register`. The Buffer must have been made with
        `low_latency_mode=True` and the size that `get_low_latency_rdma_size_hint` returns. One Buffer serves all layers
        of a model.
    use_fp8, round_scale, use_ue8m0 : bool
        How rows are sent to the experts, as in `Buffer.low_latency_dispatch`. Results return in bfloat16.
    zero_copy : bool
        Whether the experts write their results where other ranks read them. Such calls bypass `deep_ep_py.ops`, so they
        do not work under `torch.compile`.

    Raises
    ------
    TypeError, ValueError
        The message names the argument.
    """

    def __init__(
        self,
        experts: PackedExperts,
        num_experts: int,
        num_max_dispatch_tokens_per_rank: int,
        group: str,
        use_fp8: bool = False,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        zero_copy: bool = False,
    ) -> None:
        super().__init__()
        if not isinstance(experts, PackedExperts):
            raise TypeError(f"experts={type(experts).__name__}: expected deep_ep_py.moe.PackedExperts")
        ranks = buffer_of(group).group_size
        if arguments.experts(num_experts, ranks) != experts.count * ranks:
            raise ValueError(
                f"num_experts={num_experts}: expected {experts.count * ranks}, {experts.count} on each of {ranks} ranks"
            )
        most = arguments.integer(
            "num_max_dispatch_tokens_per_rank", num_max_dispatch_tokens_per_rank, 1, arguments.MAX_TOKENS
        )
        self.use_fp8 = arguments.flag("use_fp8", use_fp8)
        self.round_scale = arguments.flag("round_scale", round_scale)
        self.use_ue8m0 = arguments.flag("use_ue8m0", use_ue8m0)
        if use_ue8m0 and not round_scale:
            raise ValueError("use_ue8m0=True: expected together with round_scale=True, since scales are powers of two")
        multiple = GROUP * PACKED if use_ue8m0 else GROUP
        if use_fp8 and experts.hidden % multiple:
            raise ValueError(
                f"use_fp8=True: expected experts whose hidden size is a multiple of {multiple}, not {experts.hidden}"
            )
        self.experts, self.num_experts, self.max_tokens, self.group = experts, num_experts, most, group
        self.zero_copy = arguments.flag("zero_copy", zero_copy)

    def forward(self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> Tensor:
        """Run the layer on this rank's tokens.

        Parameters
        ----------
        x : torch.Tensor
            [tokens, hidden] of a floating-point dtype, with 0 to `num_max_dispatch_tokens_per_rank` tokens. Rows travel
            in bfloat16 or, with `use_fp8`, in float8_e4m3fn.
        topk_idx : torch.Tensor
            int64 or int32 [tokens, top-k]: expert ids, -1 for none.
        topk_weights : torch.Tensor
            float32 [tokens, top-k].

        Returns
        -------
        torch.Tensor
            [tokens, hidden] of x's dtype, rounded to bfloat16: for each token, the sum over its choices of weight times
            result.

        Raises
        ------
        TypeError, ValueError
            The message names the argument. Raised before anything is launched; also if the Buffer is too small.
        DeepEPTimeout, DeepEPError
            As `Buffer.dispatch`.
        """
        self.check(x, topk_idx, topk_weights)
        if self.zero_copy:
            batch = MicroBatch(self, x, topk_idx, topk_weights, hooks=False)
            batch.receive()
            batch.run_experts()
            return batch.finish()
        # Each token goes to its experts on any rank, and is placed there among the rows of each expert.
        received = ops.low_latency_dispatch(
            x.bfloat16(),
            topk_idx,
            self.max_tokens,
            self.num_experts,
            self.group,
            self.use_fp8,
            self.round_scale,
            self.use_ue8m0,
        )
        rows = self.experts(received.x, received.scales, received.counts)
        # The results return, and combine applies the weights, which the experts have not seen.
        return ops.low_latency_combine(rows, topk_idx, topk_weights, received.routes, self.group).to(x.dtype)

    def begin(self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> MicroBatch:
        """Send this rank's tokens to their experts, without waiting for the tokens of other ranks.

        Two micro-batches may be in flight at once, or as many as the Buffer has `regions`.

        Parameters
        ----------
        x, topk_idx, topk_weights : torch.Tensor
            As in `forward`.

        Returns
        -------
        MicroBatch
            The micro-batch, whose steps the caller must take.

        Raises
        ------
        TypeError, ValueError, DeepEPTimeout, DeepEPError
            As `forward`.
        """
        self.check(x, topk_idx, topk_weights)
        return MicroBatch(self, x, topk_idx, topk_weights, hooks=True)

    def check(self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> None:
        """Check the arguments of `forward`, except for the ids, which the dispatch checks.

        Raises
        ------
        TypeError, ValueError
            The message names the argument.
        """
        device, hidden = self.experts.experts.down.device, self.experts.hidden
        if not isinstance(x, Tensor) or not x.is_floating_point() or x.device != device:
            raise TypeError(_unlike("x", x, f"a floating [tokens, {hidden}] on {device}"))
        if x.dim() != 2 or x.shape[1] != hidden or x.shape[0] > self.max_tokens:
            raise ValueError(_unlike("x", x, f"[at most {self.max_tokens} tokens, {hidden}]"))
        tokens = x.shape[0]
        if (
            not isinstance(topk_idx, Tensor)
            or topk_idx.dtype not in (torch.int64, torch.int32)
            or topk_idx.device != device
        ):
            raise TypeError(_unlike("topk_idx", topk_idx, f"int64 or int32 [{tokens}, top-k] on {device}"))
        if topk_idx.dim() != 2 or topk_idx.shape[0] != tokens:
            raise ValueError(_unlike("topk_idx", topk_idx, f"[{tokens}, top-k], a row for each of x"))
        if not isinstance(topk_weights, Tensor) or topk_weights.dtype != torch.float32 or topk_weights.device != device:
            raise TypeError(_unlike("topk_weights", topk_weights, f"a float32 {list(topk_idx.shape)} on {device}"))
        if topk_weights.shape != topk_idx.shape:
            raise ValueError(_unlike("topk_weights", topk_weights, f"{list(topk_idx.shape)}, as topk_idx"))


def _unlike(name: str, value: object, wanted: str) -> str:
    return f"{name}={arguments.describe(value)}: expected {wanted}"


class MicroBatch:
    """Tokens in flight through a layer, made by `DecodeLayer.begin`: call `receive`, `run_experts`, `finish` in order.

    Each step is taken once, on any thread: of two threads that each drive a micro-batch, either may call `receive` or
    `finish` for the other. Calls and steps of one Buffer are made one at a time, and in the same order on all ranks;
    with `zero_copy`, other ranks wait in that order, as `Buffer.low_latency_combine` describes.

    On a GPU, rows are received on the stream on which they were sent, whichever thread calls. `run_experts` computes on
    the current stream, and so does `finish` if x is not bfloat16; the caller must make that stream the current one.

    Parameters
    ----------
    layer : DecodeLayer
        The layer.
    x, topk_idx, topk_weights : torch.Tensor
        As in `DecodeLayer.forward`, already checked.
    hooks : bool
        Whether receiving is deferred. If False, rows are received at once, and `receive` and `finish` have nothing to
        wait for.
    """

    def __init__(self, layer: DecodeLayer, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, hooks: bool) -> None:
        self._layer, self._buffer, self._hooks, self._dtype = layer, buffer_of(layer.group), hooks, x.dtype
        self._routing = (topk_idx.contiguous(), topk_weights.contiguous())
        packed, self._counts, self._handle, _, self._hook = self._buffer.low_latency_dispatch(
            x.bfloat16().contiguous(),
            self._routing[0],
            layer.max_tokens,
            layer.num_experts,
            use_fp8=layer.use_fp8,
            round_scale=layer.round_scale,
            use_ue8m0=layer.use_ue8m0,
            return_recv_hook=hooks,
        )
        self._rows: tuple[Tensor, Tensor | None] | None = packed if isinstance(packed, tuple) else (packed, None)
        self._combined: Tensor | None = None
        self._next = "receive"

    def receive(self) -> None:
        """Wait for the rows that other ranks have sent to this rank's experts.

        Raises
        ------
        DeepEPTimeout, DeepEPError
            As `Buffer.dispatch`; also if this is not the next step.
        """
        self._take("receive")
        if self._hook is not None:
            self._hook()
        self._next = "run_experts"

    def run_experts(self) -> None:
        """Run this rank's experts and send their results back, without waiting for results from other ranks.

        Raises
        ------
        DeepEPTimeout, DeepEPError
            As `Buffer.combine`; also if this is not the next step.
        """
        self._take("run_experts")
        buffer, zero_copy = self._buffer, self._layer.zero_copy
        out = buffer.get_next_low_latency_combine_buffer(self._handle) if zero_copy else None
        assert self._rows is not None
        results = self._layer.experts(*self._rows, self._counts, out)
        self._rows = None  # no longer needed, and large
        self._combined, _, self._hook = buffer.low_latency_combine(
            results, *self._routing, self._handle, zero_copy=zero_copy, return_recv_hook=self._hooks
        )
        self._next = "finish"

    def finish(self) -> Tensor:
        """Wait for the results of other ranks' experts, and return the sums.

        Returns
        -------
        torch.Tensor
            As `DecodeLayer.forward`.

        Raises
        ------
        DeepEPTimeout, DeepEPError
            As `Buffer.combine`; also if this is not the next step.
        """
        self._take("finish")
        if self._hook is not None:
            self._hook()
        self._next = "nothing more"
        assert self._combined is not None
        return self._combined.to(self._dtype)

    def _take(self, step: str) -> None:
        if self._next != step:
            raise DeepEPError(f"{step}: expected {self._next} as this micro-batch's next step")


def run_two(
    layer: DecodeLayer,
    first: tuple[Tensor, Tensor, Tensor],
    second: tuple[Tensor, Tensor, Tensor],
    meanwhile: Callable[[int], object],
) -> tuple[Tensor, Tensor]:
    """Run a layer on two micro-batches at once, so that the rows of one travel while the other computes.

    The order is: begin both dispatches; call `meanwhile(0)`; receive the rows of the first and run its experts while
    the rows of the second arrive; send its results while the experts of the second run; call `meanwhile(1)`; receive
    the results of both.

    Parameters
    ----------
    layer : DecodeLayer
        A layer whose Buffer has at least 2 regions, which is the default.
    first, second : tuple of torch.Tensor
        Tokens, expert ids and weights of each, as in `DecodeLayer.forward`, with the same top-k. A rank without tokens
        participates with empty tensors.
    meanwhile : callable
        Work that needs no result of the layer, such as shared experts or another micro-batch's attention. Called with 0
        while the dispatches are in flight, with 1 while the results are.

    Returns
    -------
    first, second : torch.Tensor
        Bitwise the same as from `DecodeLayer.forward`.

    Raises
    ------
    TypeError, ValueError
        The message names the argument. Raised before anything of either batch is launched.
    DeepEPTimeout, DeepEPError
        As `Buffer.dispatch`.
    """
    if (regions := buffer_of(layer.group).regions) < 2:
        raise ValueError(f"layer: its Buffer has regions={regions}, expected at least 2 for two micro-batches")
    for batch in (first, second):
        layer.check(*batch)
        topk_idx = batch[1].contiguous()
        arguments.topk_idx(topk_idx, layer.num_experts, topk_idx.device)
    if first[1].shape[1] != second[1].shape[1]:  # if equal, a region that fits the first also fits the second
        raise ValueError(f"second: top-{second[1].shape[1]}: expected top-{first[1].shape[1]}, as in first")
    begun = [layer.begin(*batch) for batch in (first, second)]
    meanwhile(0)
    for one in begun:
        one.receive()
        one.run_experts()
    meanwhile(1)
    return begun[0].finish(), begun[1].finish()
