"""Tokens from real text: bytes, embedded as rows."""

from __future__ import annotations

from pathlib import Path

import torch

from deep_ep_py.tools.bench.routing import generator

_PACKAGE = Path(__file__).resolve().parents[1]
_CONTEXT = 4


def read_text() -> tuple[bytes, str]:
    """Read the repository's README.

    Returns
    -------
    text : bytes
        The README or, if the package was installed without it, the package's own sources.
    origin : str
        A description of what was read.
    """
    readme = _PACKAGE.parent / "README.md"
    if readme.is_file() and readme.stat().st_size > 0:
        return readme.read_bytes(), "README.md"
    sources = sorted(_PACKAGE.rglob("*.py"))
    text = b"".join(path.read_bytes() for path in sources)
    return text, f"the package's own {len(sources)} source files"


def read_repository() -> tuple[bytes, str]:
    """Read the repository's documentation and Python sources, one after the other.

    Returns
    -------
    text : bytes
        Its .md and .py files or, for an installed package, the package's own .py files.
    origin : str
        A description of what was read.
    """
    root = _PACKAGE.parent
    documents = sorted([*root.glob("*.md"), *root.glob("docs/*.md")]) if (root / "pyproject.toml").is_file() else []
    sources = sorted(_PACKAGE.rglob("*.py"))
    text = b"\n".join(path.read_bytes() for path in [*documents, *sources])
    where = "of the repository" if documents else "of the installed package"
    return text, f"{len(documents)} .md and {len(sources)} .py files {where}"


def embed_bytes(text: bytes, rank: int, tokens: int, hidden: int, seed: int = 0) -> torch.Tensor:
    """Embed one rank's share of the text.

    A token is a byte together with the three preceding ones, with decreasing weights: the same byte in different words
    then goes to different experts, as in a model that has seen the context.

    Parameters
    ----------
    text
        The text, repeated if it is too short.
    rank, tokens
        The rank takes the bytes [rank * tokens, (rank + 1) * tokens).
    hidden
        Elements per row.
    seed
        Seed of the embedding.

    Returns
    -------
    torch.Tensor
        BF16 [tokens, hidden]; each row has a root mean square of 1.
    """
    table = torch.randn(_CONTEXT, 256, hidden, generator=generator(seed, 2))
    values = torch.tensor(list(text))
    positions = torch.arange(rank * tokens, (rank + 1) * tokens)
    x = torch.zeros(tokens, hidden)
    for back in range(_CONTEXT):
        x += table[back, values[(positions - back) % values.numel()]] * 0.7**back
    return (x * x.square().mean(dim=1, keepdim=True).rsqrt()).to(torch.bfloat16)
