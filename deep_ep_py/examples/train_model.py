"""A byte-level language model with a MoE layer in each block, and the layer as one process computes it."""

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
    """What is trained, and how."""

    ranks: int
    steps: int
    batch: int
    """Sequences of each rank and step."""
    length: int
    """Bytes of a sequence."""
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
        """Experts of each rank and layer."""
        return self.experts // self.ranks

    def make_experts(self, layer: int, rank: int) -> Experts:
        """Make a rank's share of a layer's experts."""
        first = rank * self.local_experts
        seed = self.seed * self.layers + layer
        return Experts(first, self.local_experts, self.hidden, self.intermediate, seed)


MakeLayer = Callable[[int, Gate], nn.Module]
"""The number of a block and its gate to its MoE layer."""


class Block(nn.Module):
    """Attention to what came before, then experts; each after a norm and around a shortcut."""

    def __init__(self, config: TrainConfig, layer: int, make_layer: MakeLayer) -> None:
        super().__init__()
        self.heads = config.heads
        self.norms = nn.ModuleList(nn.RMSNorm(config.hidden) for _ in range(2))
        self.query_key_value = nn.Linear(config.hidden, 3 * config.hidden, bias=False)
        self.out = nn.Linear(config.hidden, config.hidden, bias=False)
        self.moe = make_layer(layer, Gate(config.hidden, config.experts, config.topk))

    def forward(self, x: Tensor) -> Tensor:
        """[batch, length, hidden] to the same."""
        batch, length, hidden = x.shape
        heads = self.query_key_value(self.norms[0](x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        query, key, value = heads.unbind(0)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, hidden))
        return x + self.moe(self.norms[1](x))


class ByteModel(nn.Module):
    """Predicts the next byte from those before.

    Parameters
    ----------
    config : TrainConfig
        The shape; its seed makes the weights, the same ones however the experts are held.
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
    """A layer with all experts, without communication; it rounds what and where the distributed one does.

    Parameters
    ----------
    gate : Gate
        The layer's.
    shares : list of Experts
        Those of each rank.
    """

    def __init__(self, gate: Gate, shares: list[Experts]) -> None:
        super().__init__()
        self.gate, self.shares = gate, nn.ModuleList(shares)
        self._local_experts = shares[0].down.shape[0]

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden] to the same."""
        tokens = x.reshape(-1, x.shape[-1])
        topk_idx, topk_weights = self.gate(tokens)
        # What travels is bfloat16, forwards and backwards; what is summed, over ranks, is float32.
        rows, total = tokens.bfloat16().float(), torch.zeros_like(tokens, dtype=torch.float32)
        for rank, share in enumerate(self.shares):
            local_idx = topk_idx - rank * self._local_experts
            total = total + share(rows.bfloat16(), local_idx, topk_weights).bfloat16().float()
        return total.bfloat16().to(x.dtype).view(x.shape)


class Batches:
    """Pieces of a text, drawn for each step, the same for every caller.

    Parameters
    ----------
    text : bytes
        Longer than a sequence.
    config : TrainConfig
        How much of it makes a batch.
    """

    def __init__(self, text: bytes, config: TrainConfig) -> None:
        if len(text) <= config.length + 1:
            raise ValueError(f"text of {len(text)} bytes: expected more than {config.length + 1}")
        self._text, self._config = torch.frombuffer(bytearray(text), dtype=torch.uint8), config

    def of_step(self, step: int, rank: int | None = None) -> Tensor:
        """Return int64 [sequences, length + 1]: a rank's part, or with None all ranks'."""
        config = self._config
        random = torch.Generator().manual_seed((config.seed << 32) + step)
        starts = torch.randint(len(self._text) - config.length - 1, (config.ranks * config.batch,), generator=random)
        if rank is not None:
            starts = starts[rank * config.batch : (rank + 1) * config.batch]
        return self._text[starts.unsqueeze(1) + torch.arange(config.length + 1)].long()
