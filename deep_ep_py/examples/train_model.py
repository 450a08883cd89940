"""A byte-level language model with a MoE layer in each block, and a reference for the layer in one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from deep_ep_py.moe import Experts, Gate

BYTES = 256


@dataclass(frozen=True)
class TrainConfig:
    """The configuration of the model and its training."""

    ranks: int
    steps: int
    batch: int
    """Sequences per rank and step."""
    length: int
    """Bytes per sequence."""
    hidden: int
    layers: int
    heads: int
    experts: int
    topk: int
    intermediate: int
    rate: float
    seed: int

    @property
    def local_experts(self) -> int:
        """Experts per rank and layer."""
        return self.experts // self.ranks

    def make_experts(self, layer: int, rank: int) -> Experts:
        """Make a rank's share of a layer's experts."""
        first = rank * self.local_experts
        seed = self.seed * self.layers + layer
        return Experts(first, self.local_experts, self.hidden, self.intermediate, seed)


MakeLayer = Callable[[int, Gate], nn.Module]
"""Makes the MoE layer of a block from the block's index and gate."""


class Block(nn.Module):
    """A block of causal attention and experts, each with a preceding norm and a residual connection."""

    def __init__(self, config: TrainConfig, layer: int, make_layer: MakeLayer) -> None:
        super().__init__()
        self.heads = config.heads
        self.norms = nn.ModuleList(nn.RMSNorm(config.hidden) for _ in range(2))
        self.query_key_value = nn.Linear(config.hidden, 3 * config.hidden, bias=False)
        self.out = nn.Linear(config.hidden, config.hidden, bias=False)
        self.moe = make_layer(layer, Gate(config.hidden, config.experts, config.topk))

    def forward(self, x: Tensor) -> Tensor:
        """Apply the block to [batch, length, hidden]."""
        batch, length, hidden = x.shape
        heads = self.query_key_value(self.norms[0](x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        query, key, value = heads.unbind(0)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, hidden))
        return x + self.moe(self.norms[1](x))


class ByteModel(nn.Module):
    """A language model that predicts the next byte.

    Parameters
    ----------
    config : TrainConfig
        The sizes, and the seed of the weights, which do not depend on how the experts are distributed.
    make_layer : callable
        Makes the MoE layer of each block.
    """

    def __init__(self, config: TrainConfig, make_layer: MakeLayer) -> None:
        super().__init__()
        torch.manual_seed(config.seed)
        self.bytes = nn.Embedding(BYTES, config.hidden)
        self.places = nn.Embedding(config.length, config.hidden)
        self.blocks = nn.Sequential(*(Block(config, layer, make_layer) for layer in range(config.layers)))
        self.norm = nn.RMSNorm(config.hidden)
        self.head = nn.Linear(config.hidden, BYTES, bias=False)

    def forward(self, text: Tensor) -> Tensor:
        """Return the mean cross-entropy, in nats per byte, of int64 [batch, length + 1]."""
        given, wanted = text[:, :-1], text[:, 1:]
        x = self.bytes(given) + self.places(torch.arange(given.shape[1]))
        return functional.cross_entropy(self.head(self.norm(self.blocks(x))).flatten(0, 1), wanted.flatten())


class OneProcessMoE(nn.Module):
    """A layer with all experts and without communication, which rounds in the same places as the distributed one.

    Parameters
    ----------
    gate : Gate
        The gate of the layer.
    shares : list of Experts
        The experts of each rank.
    """

    def __init__(self, gate: Gate, shares: list[Experts]) -> None:
        super().__init__()
        self.gate, self.shares = gate, nn.ModuleList(shares)
        self._local_experts = shares[0].down.shape[0]

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer to [..., hidden]."""
        tokens = x.reshape(-1, x.shape[-1])
        topk_idx, topk_weights = self.gate(tokens)
        # Rows travel as bfloat16, forward and backward; sums over ranks are computed in float32.
        rows, total = tokens.bfloat16().float(), torch.zeros_like(tokens, dtype=torch.float32)
        for rank, share in enumerate(self.shares):
            local_idx = topk_idx - rank * self._local_experts
            total = total + share(rows.bfloat16(), local_idx, topk_weights).bfloat16().float()
        return total.bfloat16().to(x.dtype).view(x.shape)


class Batches:
    """Batches of sequences from a text, drawn for each step; every caller draws the same ones.

    Parameters
    ----------
    text : bytes
        The text, longer than a sequence.
    config : TrainConfig
        The sizes of a batch, and the seed.
    """

    def __init__(self, text: bytes, config: TrainConfig) -> None:
        if len(text) <= config.length + 1:
            raise ValueError(f"text of {len(text)} bytes: expected more than {config.length + 1}")
        self._text, self._config = torch.frombuffer(bytearray(text), dtype=torch.uint8), config

    def of_step(self, step: int, rank: int | None = None) -> Tensor:
        """Return int64 [sequences, length + 1] for a rank or, with None, for all ranks."""
        config = self._config
        random = torch.Generator().manual_seed((config.seed << 32) + step)
        starts = torch.randint(len(self._text) - config.length - 1, (config.ranks * config.batch,), generator=random)
        if rank is not None:
            starts = starts[rank * config.batch : (rank + 1) * config.batch]
        return self._text[starts.unsqueeze(1) + torch.arange(config.length + 1)].long()
