"""The CPU versions of warp operations: copies and row sums. All versions of the sum give the same bits."""

from __future__ import annotations

import itertools

import pytest
import torch

from deep_ep_py.base.native import C

NAN = 0x7FFF
GUARD = 64
SUM_VERSIONS = C.sum_instructions()


def random_rows(count: int, elements: int, seed: int, special: bool = False) -> torch.Tensor:
    """Return bfloat16 rows; with `special`, of arbitrary bits: infinities, NaNs, subnormals, negative zeros."""
    generator = torch.Generator().manual_seed(seed)
    if special:
        return torch.randint(0, 1 << 16, (count, elements), generator=generator).to(torch.uint16).view(torch.bfloat16)
    # Exponents so far apart that sums are inexact in fp32: otherwise the order would not show.
    scale = torch.exp2(torch.randint(-20, 20, (count, elements), generator=generator).float())
    return (torch.randn(count, elements, generator=generator) * scale).to(torch.bfloat16)


def model(rows: torch.Tensor, biases: list[torch.Tensor]) -> torch.Tensor:
    """Sum in the specified order, step by step; return bits, with the specified NaN."""
    total = torch.zeros(rows.shape[1], dtype=torch.float32)
    for row in [*rows, *biases]:
        total = total + row.float()
    bits = total.to(torch.bfloat16).view(torch.uint16).to(torch.int32)
    return torch.where(total.isnan(), NAN, bits)


def summed(rows: torch.Tensor, biases: list[torch.Tensor], version: str, offset: int = 0) -> torch.Tensor:
    """Return the sum as bits; check that nothing else is written."""
    elements = rows.shape[1]
    buffer = torch.full((elements + 2 * GUARD,), 0xA5A5, dtype=torch.int32).to(torch.uint16)
    start = buffer.data_ptr() + 2 * (GUARD + offset)
    bias0, bias1 = [bias.data_ptr() for bias in biases] + [0] * (2 - len(biases))
    C.sum_row(start, [row.data_ptr() for row in rows], bias0, bias1, elements, version)
    written = buffer.to(torch.int32)
    first = GUARD + offset
    assert (written[:first] == 0xA5A5).all()
    assert (written[first + elements :] == 0xA5A5).all()
    return written[first : first + elements]


@pytest.mark.parametrize("version", ["", *SUM_VERSIONS])
@pytest.mark.parametrize("special", [False, True], ids=["normal", "any bits"])
@pytest.mark.parametrize("elements", [8, 16, 24, 40, 64, 72, 1000, 7168])
def test_sum_has_the_stated_order(elements: int, special: bool, version: str) -> None:
    for count in (0, 1, 2, 5, 8, 32):
        rows = random_rows(count, elements, seed=count, special=special)
        assert torch.equal(summed(rows, [], version), model(rows, []))


@pytest.mark.parametrize("version", SUM_VERSIONS)
@pytest.mark.parametrize("biases", [1, 2])
def test_biases_come_last(biases: int, version: str) -> None:
    rows = random_rows(5, 7168, seed=1)
    added = list(random_rows(biases, 7168, seed=2))
    assert torch.equal(summed(rows, added, version), model(rows, added))


@pytest.mark.parametrize("version", SUM_VERSIONS)
def test_the_order_shows(version: str) -> None:
    """Another order gives other bits, so the comparisons above can fail."""
    rows = random_rows(6, 7168, seed=3)
    got = summed(rows, [], version)
    assert torch.equal(got, model(rows, []))
    assert not torch.equal(got, model(rows.flip(0), []))
    assert not torch.equal(got, model(rows[1:], [rows[0]]))


@pytest.mark.parametrize("version", SUM_VERSIONS)
def test_sum_needs_no_alignment(version: str) -> None:
    rows = random_rows(4, 264, seed=4)
    for offset in (1, 3, 8):
        shifted = torch.empty(4, 264 + 16, dtype=torch.bfloat16)[:, offset : offset + 264]
        shifted.copy_(rows)
        assert torch.equal(summed(shifted, [], version, offset), model(rows, []))


@pytest.mark.parametrize("version", ["", *SUM_VERSIONS])
@pytest.mark.parametrize("elements", [8, 40, 1000])
def test_weighted_sum_rounds_each_product(elements: int, version: str) -> None:
    for count in (1, 2, 8):
        rows = random_rows(count, elements, seed=count)
        weights = torch.rand(count, generator=torch.Generator().manual_seed(count))
        total = torch.zeros(elements)
        for row, weight in zip(rows, weights, strict=True):
            total = total + weight * row.float()
        out = torch.empty(elements, dtype=torch.bfloat16)
        addresses = [row.data_ptr() for row in rows]
        C.sum_row(out.data_ptr(), addresses, 0, 0, elements, version, weights.tolist())
        assert torch.equal(out.view(torch.int16), total.to(torch.bfloat16).view(torch.int16))
    with pytest.raises(ValueError, match="weights"):
        C.sum_row(out.data_ptr(), addresses, 0, 0, elements, version, [1.0])


def test_sum_refuses_what_it_cannot_do() -> None:
    with pytest.raises(ValueError, match="multiple of 8"):
        C.sum_row(0, [], 0, 0, 7)
    with pytest.raises(ValueError, match="no version"):
        C.sum_row(0, [], 0, 0, 8, "abacus")


def test_versions_begin_with_the_widest() -> None:
    assert SUM_VERSIONS[-1] == "baseline"
    assert [name for name in ("avx512", "avx2", "baseline") if name in SUM_VERSIONS] == SUM_VERSIONS


def addresses(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


@pytest.mark.parametrize("streaming", [False, True], ids=["plain", "streaming"])
@pytest.mark.parametrize("offset", [0, 1, 15, 16])
def test_copy_to_many(offset: int, streaming: bool) -> None:
    generator = torch.Generator().manual_seed(7)
    sizes = (0, 1, 15, 16, 63, 64, 80, 1023, 1024, 1040, 2064, 14336, 14337)
    for size, count in itertools.product(sizes, (0, 1, 3, 8)):
        source = torch.randint(0, 256, (size,), generator=generator).to(torch.uint8)
        targets = torch.full((count, size + 2 * GUARD), 0xA5, dtype=torch.uint8)
        begin = GUARD // 2 + offset
        C.copy_row_to_many([row.data_ptr() + begin for row in targets], source.data_ptr(), size, streaming)
        assert all(torch.equal(row[begin : begin + size], source) for row in targets)
        assert (targets[:, :begin] == 0xA5).all()
        assert (targets[:, begin + size :] == 0xA5).all()


@pytest.mark.parametrize("streaming", [False, True], ids=["plain", "streaming"])
def test_copy_rows(streaming: bool) -> None:
    rows, row_bytes = 37, 1040
    source = torch.randint(0, 256, (rows, row_bytes), generator=torch.Generator().manual_seed(5)).to(torch.uint8)
    target = torch.zeros_like(source)
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(6)).tolist()
    to = addresses([target[i].data_ptr() for i in order])
    since = addresses([source[i].data_ptr() for i in range(rows)])
    C.copy_rows(to.data_ptr(), since.data_ptr(), rows, row_bytes, streaming)
    assert torch.equal(target[order], source)


def test_pretouch_keeps_contents() -> None:
    memory = torch.arange(100_000, dtype=torch.int32)
    before = memory.clone()
    C.pretouch(memory.data_ptr() + 4, 4 * memory.numel() - 8)
    C.pretouch(memory.data_ptr(), 0)
    assert torch.equal(memory, before)


def test_streaming_threshold_is_beyond_the_caches() -> None:
    assert C.STREAMING_THRESHOLD >= 1 << 20
