import statistics

import pytest
import torch

from slivertune.sft.adam import age_limit
from slivertune.sft.growth import Estimate
from slivertune.sft.moments import AdamMoments, PackedAdamMoments
from slivertune.sft.packing import TILE, Positions, rounded_at_random, rounding_generator
from tests.helpers.models import tiny_llama, token_batches
from tests.sft.reference import NAMES, SHAPES, Prescribed, prescribed_gradients
from tests.sft.runs import sft_over, train


@pytest.mark.parametrize("packed", [False, True])
def test_positions_below_an_edge_are_counted_anew_only_after_a_reselection(packed: bool) -> None:
    positions = Positions(torch.tensor([0, 3, 9, 10], dtype=torch.int32), 20, packed=packed)
    assert positions.cuts((0, 10, 20)) == [0, 3, 4]
    assert positions.cuts((0, 10, 20)) is positions.cuts((0, 10, 20))
    assert positions.cuts((0, 4)) == [0, 2]
    positions.set(torch.tensor([9, 10], dtype=torch.int32))
    assert positions.cuts((0, 4)) == [0, 0]


@pytest.mark.parametrize("size", [1, 100, TILE, TILE + 1, 5 * TILE + 77])
def test_positions_come_back_as_they_were(size: int) -> None:
    indices = torch.randperm(size)[: max(1, size // 50)].sort().values.int()
    edges = [at for at in (0, TILE - 1, TILE, TILE + TILE // 2, size - 1) if 0 <= at < size]
    indices = torch.cat([indices, torch.tensor(edges, dtype=torch.int32)]).unique()
    packed = Positions(indices, size, packed=True)
    assert packed.get().dtype == torch.int32 and torch.equal(packed.get(), indices)
    assert sum(tensor.nbytes for tensor in packed.tensors) == 2 * indices.numel() + 4 * -(-size // TILE)
    packed.set(indices[::2])
    assert torch.equal(packed.get(), indices[::2])


def test_rounding_goes_to_a_neighbour_and_is_exact_on_average() -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.cat([torch.randn(50), -torch.rand(50) * 1e-6, torch.tensor([0.0, -0.0, 1.0])])
    draws = torch.stack([rounded_at_random(values, generator) for _ in range(4000)])
    assert draws.dtype == torch.bfloat16
    nearest = values.bfloat16()
    unit = (torch.nextafter(nearest.abs(), torch.tensor(torch.inf).bfloat16()) - nearest.abs()).float()
    assert ((draws.float() - values).abs() < unit).all()
    # The mean of 4,000 draws between two neighbours: a standard error of at most 0.008 units.
    assert ((draws.double().mean(0) - values.double()).abs() <= 0.05 * unit).all()


def test_what_bf16_holds_exactly_is_kept_and_nothing_becomes_finite() -> None:
    generator = torch.Generator().manual_seed(0)
    exact = torch.randn(1000).bfloat16().float()
    assert torch.equal(rounded_at_random(exact, generator).float(), exact)
    odd = rounded_at_random(torch.tensor([torch.inf, -torch.inf, torch.nan]), generator)
    assert odd[0] == torch.inf and odd[1] == -torch.inf and odd[2].isnan()


def test_the_rounding_differs_between_tensors_updates_and_seeds_and_repeats() -> None:
    def draw(seed: int, name: str, updates: int) -> list[int]:
        generator = rounding_generator(seed, name, updates, torch.device("cpu"))
        return torch.randint(1000, (8,), generator=generator).tolist()

    draws = [draw(0, "a", 1), draw(1, "a", 1), draw(0, "b", 1), draw(0, "a", 2)]
    assert len({tuple(each) for each in draws}) == 4
    assert draw(0, "a", 1) == draws[0]


def test_packed_ages_are_those_of_the_unpacked_run() -> None:
    """Positions may differ in time, as bf16 deltas rank differently; who is how old follows from when it was grown."""
    model = Prescribed(SHAPES)
    optimizer = sft_over(model, density=0.2, reselection_interval=5, estimation_steps=3, targets=NAMES, packed=True)
    ages = {name: dict.fromkeys(delta.indices.tolist(), 0) for name, delta in optimizer.deltas().items()}
    for gradients in prescribed_gradients(30):
        train(model, optimizer, [gradients])
        for name, state in optimizer.state_dict()["state"].items():
            now = state["cohort_ages"][state["cohort"].long()].tolist()
            positions = state["indices"].tolist()
            ages[name] = {at: ages[name][at] + 1 if at in ages[name] else 3 for at in positions}
            assert now == [ages[name][at] for at in positions]
    assert len(set(now)) >= 3


def test_cohorts_beyond_256_lose_the_oldest_alone() -> None:
    moments = PackedAdamMoments(300, (0.9, 0.999), torch.device("cpu"))
    moments.cohort = torch.arange(256).repeat(2)[:300].to(torch.uint8)
    moments.cohort_ages = torch.arange(5, 256 + 5, dtype=torch.int32)
    ages = moments.cohort_ages[moments.cohort.long()]
    seeds = Estimate(
        indices=torch.tensor([7], dtype=torch.int32), mean=torch.ones(1), mean_square=torch.ones(1), num_steps=3
    )
    moments.replace(1, seeds, torch.tensor([*range(299), 300]), {"betas": (0.9, 0.999)})
    after = moments.cohort_ages[moments.cohort.long()]
    assert moments.cohort_ages.numel() == 256 and after[299] == 3
    young = ages[:299] < ages.max()
    assert torch.equal(after[:299][young], ages[:299][young])
    assert (after[:299][~young] == ages.max() - 1).all()


@pytest.mark.parametrize("beta", [0.5, 0.999])
def test_ages_are_exact_after_any_number_of_reselections(beta: float) -> None:
    """40 weights have at most 40 ages, however many there were. Ten are never dropped, and reach the largest age."""
    betas = (0.9, beta)
    options = {"betas": betas, "lr": 1e-3, "eps": 1e-8, "weight_decay": 0.0}
    packed, plain = (kind(40, betas, torch.device("cpu")) for kind in (PackedAdamMoments, AdamMoments))
    generator = torch.Generator().manual_seed(0)
    for round_ in range(700):
        count = int(torch.randint(1, 4, (), generator=generator))
        others = 10 + torch.randperm(30, generator=generator)[count:]
        order = torch.cat([torch.arange(10), others, torch.arange(40, 40 + count)])
        values = torch.ones(count)
        seeds = Estimate(indices=torch.arange(count).int(), mean=values, mean_square=values, num_steps=1 + round_ % 3)
        for moments in (packed, plain):
            moments.replace(count, seeds, order, options)
            moments.update(torch.zeros(40), torch.ones(40), torch.arange(40).int(), options, generator)
        assert torch.equal(packed._ages(), plain._ages())
        assert packed.cohort_ages.numel() <= 256 and int(packed.cohort_ages.max()) <= age_limit(betas)


@pytest.mark.slow
@pytest.mark.parametrize("selection", ["accumulated_gradient", "momentum"])
def test_the_loss_of_packed_runs_is_within_the_noise_of_unpacked_ones(selection: str) -> None:
    """Noise: the spread of the unpacked runs over the seed of the first positions."""
    results: dict[bool, list[float]] = {False: [], True: []}
    batches = token_batches(3)
    with torch.no_grad():
        start = statistics.mean(tiny_llama(torch.bfloat16)(**batch).loss.item() for batch in batches)
    for packed, losses in results.items():
        for seed in range(4):
            model = tiny_llama(torch.bfloat16)
            optimizer = sft_over(
                model,
                density=0.05,
                selection=selection,
                reselection_interval=10,
                estimation_steps=3,
                packed=packed,
                seed=seed,
                lr=1e-2 if selection[0] == "a" else 3e-2,
            )
            for _ in range(40):
                for batch in batches:
                    (model(**batch).loss / 3).backward()
                optimizer.step()
            with torch.no_grad():
                losses.append(statistics.mean(model(**batch).loss.item() for batch in batches))
    gain = start - statistics.mean(results[False])
    noise = statistics.stdev(results[False])
    assert gain > 3 * noise, "the runs learn too little to tell"
    assert abs(statistics.mean(results[True]) - statistics.mean(results[False])) < 2 * noise
