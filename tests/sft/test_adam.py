import pytest
import torch

from slivertune.sft.adam import age_dtype, age_limit, seeded_moments
from slivertune.sft.growth import Estimate
from slivertune.sft.moments import AdamMoments, PackedAdamMoments
from tests.helpers.tolerance import assert_sums_close, unit_roundoff


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.5, 0.9), (0.9, 0.99995), (0.0, 0.0)])
def test_the_age_limit_is_where_bias_correction_has_ended(betas: tuple[float, float]) -> None:
    limit, unit = age_limit(betas), unit_roundoff(torch.float32)
    for beta in betas:
        assert torch.tensor(1 - beta**limit, dtype=torch.float64).float() == pytest.approx(1.0, abs=unit)
    assert limit <= torch.iinfo(age_dtype(betas)).max


def test_ages_are_int16_at_the_usual_betas_and_wider_where_they_must_be() -> None:
    assert age_dtype((0.9, 0.999)) == torch.int16
    assert age_dtype((0.9, 0.9999)) == torch.int32


def test_a_weight_that_is_older_than_the_limit_goes_on_as_adamw() -> None:
    betas = (0.5, 0.8)
    count = 3 * age_limit(betas)
    weight = torch.nn.Parameter(torch.zeros(5, dtype=torch.float64))
    reference = torch.optim.AdamW([weight], lr=1e-3, betas=betas, weight_decay=0.0)
    moments, delta = AdamMoments(5, betas, torch.device("cpu")), torch.zeros(5)
    options = {"lr": 1e-3, "betas": betas, "eps": 1e-8, "weight_decay": 0.0}
    for _ in range(count):
        gradient = torch.randn(5)
        weight.grad = gradient.double()
        reference.step()
        moments.update(delta, gradient, torch.arange(5), options)
    assert moments.age.tolist() == [age_limit(betas)] * 5
    # Each update of some 1e-3 in fp32 is rounded ten times, against fp64.
    assert_sums_close(delta, weight.detach(), 10 * count, size=count * 1e-3)


@pytest.mark.parametrize("kind", [AdamMoments, PackedAdamMoments])
def test_an_age_is_at_most_the_limit_after_a_long_phase(kind: type[AdamMoments]) -> None:
    """An age in 16 bits would be negative else."""
    betas = (0.9, 0.999)
    moments = kind(2, betas, torch.device("cpu"))
    grown = Estimate(indices=torch.tensor([1]), mean=torch.ones(1), mean_square=torch.ones(1), num_steps=70_000)
    moments.replace(1, grown, torch.tensor([0, 2]), {"betas": betas})
    assert moments._ages().tolist() == [0, age_limit(betas)]


def test_seeded_moments_are_the_phases_means_after_bias_correction() -> None:
    mean, square = torch.randn(6), torch.rand(6)
    m, v = seeded_moments(mean, square, 5, (0.9, 0.999))
    # Multiplied and divided once each.
    assert_sums_close(m / (1 - 0.9**5), mean, 2, size=mean.abs().double())
    assert_sums_close(v / (1 - 0.999**5), square, 2, size=square.double())
