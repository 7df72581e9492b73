"""The split master restores every fp32 pattern, and its upper half is a faithful bf16 copy."""

import pytest
import torch
from torch import Tensor

from lightning_megatrain.memory import split
from lightning_megatrain.memory.split import join_master, split_master, split_master_


def _patterns() -> Tensor:
    """fp32 values of every upper half with the lower halves that sit at the edges of the rounding, and random ones."""
    upper = torch.arange(1 << 16, dtype=torch.int64) << 16
    generator = torch.Generator().manual_seed(0)
    edges = [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF]
    lower = [torch.full_like(upper, edge) for edge in edges]
    lower += [torch.randint(1 << 16, upper.shape, generator=generator) for _ in range(4)]
    bits = torch.cat([upper + part for part in lower])
    return torch.where(bits >= 1 << 31, bits - (1 << 32), bits).to(torch.int32).view(torch.float32)


@pytest.fixture(scope="module")
def values() -> Tensor:
    return _patterns()


def test_every_number_is_restored_bit_for_bit(values: Tensor) -> None:
    numbers = values[~values.isnan()]
    joined = join_master(*split_master(numbers))
    assert torch.equal(joined.view(torch.int32), numbers.view(torch.int32))


def test_nan_stays_nan_in_the_wire_copy_and_after_joining(values: Tensor) -> None:
    nans = values[values.isnan()]
    high, low = split_master(nans)
    assert high.isnan().all()
    assert join_master(high, low).isnan().all()


def test_only_nans_become_nans(values: Tensor) -> None:
    high, _ = split_master(values)
    assert torch.equal(high.isnan(), values.isnan())


def test_high_is_the_nearest_bf16_with_ties_away_from_zero() -> None:
    # 1 + 2**-8 lies halfway between 1 and the next bf16, 1 + 2**-7; rounding to even would give 1.
    tie = torch.tensor([1 + 2**-8, -(1 + 2**-8)])
    high, low = split_master(tie)
    assert high.tolist() == [1 + 2**-7, -(1 + 2**-7)]
    assert low.tolist() == [-0x8000, -0x8000]


def test_high_is_within_half_a_unit(values: Tensor) -> None:
    finite = values[values.abs() < 1e38].double()
    high, _ = split_master(finite.float())
    unit = torch.exp2(torch.floor(torch.log2(finite.abs().clamp(min=2.0**-126))) - 7)
    assert ((high.double() - finite).abs() <= unit / 2).all()


def test_infinities_and_subnormals() -> None:
    x = torch.tensor([float("inf"), -float("inf"), 1e-45, -1e-45, 1e-40, 0.0, -0.0, 3.4028235e38])
    high, low = split_master(x)
    assert torch.equal(join_master(high, low).view(torch.int32), x.view(torch.int32))
    assert high[:2].tolist() == [float("inf"), -float("inf")]


@pytest.mark.parametrize("numel", [0, 1, 7, 64, 65])
def test_chunks_in_place_and_at_odd_offsets(numel: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split, "CHUNK", 16)
    x = torch.randn(numel + 1)[1:]
    high = torch.empty(numel + 3, dtype=torch.bfloat16)[3:]
    low = torch.empty(numel + 1, dtype=torch.int16)[1:]
    split_master_(x, high, low)
    out = torch.empty(numel + 1)[1:]
    assert join_master(high, low, out=out) is out
    assert torch.equal(out, x)


@pytest.mark.parametrize(
    ("master", "high", "low", "name"),
    [
        (torch.zeros(4, dtype=torch.float64), torch.zeros(4).bfloat16(), torch.zeros(4, dtype=torch.int16), "master"),
        (torch.zeros(4), torch.zeros(4).half(), torch.zeros(4, dtype=torch.int16), "high"),
        (torch.zeros(4), torch.zeros(4).bfloat16(), torch.zeros(3, dtype=torch.int16), "low"),
        (torch.zeros(2, 2), torch.zeros(4).bfloat16(), torch.zeros(4, dtype=torch.int16), "master"),
        (torch.zeros(8)[::2], torch.zeros(4).bfloat16(), torch.zeros(4, dtype=torch.int16), "master"),
    ],
)
def test_wrong_tensors_are_named(master: Tensor, high: Tensor, low: Tensor, name: str) -> None:
    with pytest.raises(ValueError, match=f"`{name}`"):
        split_master_(master, high, low)
