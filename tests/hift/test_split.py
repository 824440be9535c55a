import pytest
import torch

from slivertune.hift.masters import join_master, split_master


def from_bits(bits: list[int]) -> torch.Tensor:
    signed = [bit - 2**32 if bit >= 2**31 else bit for bit in bits]
    return torch.tensor(signed, dtype=torch.int32).view(torch.float32)


def assert_lossless(master: torch.Tensor) -> None:
    weight = master.to(torch.bfloat16)
    low, ties = split_master(master)
    assert (low.dtype, low.shape, ties.dtype) == (torch.int16, master.shape, torch.int32)
    joined = join_master(weight, low, ties)
    assert torch.equal(joined.view(torch.int32), master.view(torch.int32))


def test_both_ties_come_back() -> None:
    # Either side of 1.0: the first is rounded down to it, the second up.
    masters = from_bits([0x3F808000, 0x3F7F8000])
    assert masters.to(torch.bfloat16).tolist() == [1.0, 1.0]
    assert_lossless(masters)
    assert split_master(masters)[1].tolist() == [1]


def test_every_lower_half_comes_back_for_even_and_odd_upper_halves() -> None:
    for upper in (0x3F80, 0x3F7F, 0xBF80, 0xBF7F, 0x0000, 0x8000, 0x0001, 0x7F7F, 0xFF7F):
        lower = torch.arange(2**16, dtype=torch.int64) + upper * 2**16
        assert_lossless(torch.where(lower >= 2**31, lower - 2**32, lower).to(torch.int32).view(torch.float32))


def test_random_bits_come_back() -> None:
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31 - 1, (500_000,), generator=generator).to(torch.int32)
    masters = bits.view(torch.float32)
    assert_lossless(masters[torch.isfinite(masters)])


def test_infinities_come_back_and_nan_stays_nan() -> None:
    assert_lossless(torch.tensor([float("inf"), -float("inf")]))
    nan = torch.tensor([float("nan")])
    assert join_master(nan.to(torch.bfloat16), *split_master(nan)).isnan().all()


@pytest.mark.parametrize("shape", [(0,), (3, 5), (2, 3, 4)])
def test_shapes_are_kept(shape: tuple[int, ...]) -> None:
    assert_lossless(torch.randn(shape, generator=torch.Generator().manual_seed(1)))


def test_ties_are_listed_by_flat_position() -> None:
    masters = torch.zeros(3, 4)
    masters[1, 2] = from_bits([0x3F7F8000])[0]
    masters[2, 3] = from_bits([0x40018000])[0]
    assert split_master(masters)[1].tolist() == [6, 11]
    assert_lossless(masters)
