"""Weights in bf16 that are stepped in fp32 and rounded up or down by chance, for `master="stochastic"`."""

import math
from typing import Any, ClassVar

import pytest
import torch

from slivertune.hift import stochastic_rounding
from slivertune.hift.stochastic_rounding import StochasticRounding
from tests.helpers.models import bits, differing, small_decoder, tiny_llama, token_batches, weights
from tests.helpers.reference import naive_rounding
from tests.hift.cases import Stumbling, hift_over, run

BF16 = torch.bfloat16
DRAWS = 2**16
EVERY_BF16 = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(BF16)
VALUES = [1.0 + 2**-9, 1.0 + 2**-12, 1.999, -0.7, 3e-3, -1e30, 1e-39, 2.0 - 2**-8 + 2**-10]


def rounded(values: torch.Tensor, *, seed: int = 0, update: int = 0, name: str = "a", start: int = 0) -> torch.Tensor:
    target = torch.full(values.shape, math.nan, dtype=BF16)
    StochasticRounding(seed=seed, update=update).of(name).round_into(target, values.clone(), start)
    return target


def many() -> torch.Tensor:
    """Values of all exponents and both signs, each between two numbers of bf16 or at one."""
    found = torch.arange(0, 2**32, 40_503, dtype=torch.int64).to(torch.int32).view(torch.float32)
    return found[~found.isnan()]


@pytest.mark.parametrize("way", ["elements of one update", "updates of a few elements"])
@pytest.mark.parametrize("value", VALUES)
def test_the_mean_of_many_draws_is_the_value(value: float, way: str) -> None:
    exact = torch.tensor(value)
    if way == "elements of one update":
        found = rounded(exact.repeat(DRAWS))
    else:
        found = torch.cat([rounded(exact.repeat(64), update=update, start=1000) for update in range(DRAWS // 64)])
    below, above = found.double().min(), found.double().max()
    assert below < exact.double() < above and len(found.unique()) == 2
    share = float((exact.double() - below) / (above - below))
    deviation = math.sqrt(share * (1 - share) / DRAWS) * float(above - below)
    assert abs(float(found.double().mean() - exact.double())) < 5 * deviation


def test_draws_of_neighbours_and_of_one_element_over_updates_are_independent() -> None:
    ups = torch.stack([rounded(torch.full((512,), 1 + 2**-8), update=update) > 1 for update in range(512)]).double()
    ups -= ups.mean()
    for dim in (0, 1):
        for lag in (1, 2, 3, 64, 128, 256):
            left, right = ups.narrow(dim, 0, 512 - lag), ups.narrow(dim, lag, 512 - lag)
            correlation = float((left * right).mean() / ups.square().mean())
            assert abs(correlation) * math.sqrt(left.numel()) < 5, (dim, lag)


def test_what_bf16_holds_stays_to_the_bit() -> None:
    found, is_nan = rounded(EVERY_BF16.float()), EVERY_BF16.isnan()
    assert torch.equal(found[~is_nan].view(torch.int16), EVERY_BF16[~is_nan].view(torch.int16))
    assert int(is_nan.sum()) == 2 * 127 and bool(found[is_nan].isnan().all())


def test_nothing_finite_becomes_infinite_and_infinity_stays() -> None:
    largest, beyond = torch.finfo(BF16).max, torch.finfo(torch.float32).max
    values = torch.tensor([largest, beyond, -beyond, math.inf, -math.inf, math.nan]).repeat(1000, 1)
    found = rounded(values).float()
    expected = torch.tensor([largest, largest, -largest, math.inf, -math.inf]).repeat(1000, 1)
    assert torch.equal(found[:, :5], expected) and bool(found[:, 5].isnan().all())
    # NaN as a GPU writes it, all of whose bits are set.
    assert bool(rounded(torch.full((99,), 2**31 - 1, dtype=torch.int32).view(torch.float32)).isnan().all())


@pytest.mark.parametrize("tile", [1000, 4096, 2**22])
def test_tiles_order_and_place_change_no_bit(tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    values = many()
    expected = naive_rounding(values, 7, 3, "layer.weight")
    monkeypatch.setattr(stochastic_rounding, "TILE_ELEMENTS", tile)
    options: dict[str, Any] = {"seed": 7, "update": 3, "name": "layer.weight"}
    assert torch.equal(bits(rounded(values, **options)), bits(expected))
    parts = [rounded(part, start=999 * index, **options) for index, part in reversed([*enumerate(values.split(999))])]
    assert torch.equal(bits(torch.cat(parts[::-1])), bits(expected))
    columns = values[: len(values) // 64 * 64].view(-1, 64)
    target = torch.empty(64, len(columns), dtype=BF16).t()
    StochasticRounding(seed=7, update=3).of("layer.weight").round_into(target, columns.clone(), 0)
    assert torch.equal(bits(target.contiguous()).view(-1), bits(expected[: target.numel()]))


def test_indices_beyond_32_bits_go_on_from_the_first() -> None:
    values = torch.full((300,), 1 + 2**-8)
    for start in (2**31 - 100, 2**32 - 100, 2**33 + 5):
        whole = torch.cat([rounded(part, start=start + 50 * i) for i, part in enumerate(values.split(50))])
        assert torch.equal(rounded(values, start=start), whole)
        assert 100 < int((whole > 1).sum()) < 200


@pytest.mark.parametrize("other", [{"seed": 1}, {"update": 1}, {"name": "b"}, {"start": 1}], ids=str)
def test_seed_update_name_and_index_each_choose_other_bits(other: dict[str, Any]) -> None:
    values = torch.full((4096,), 1 + 2**-8)
    same = float((rounded(values) == rounded(values, **other)).double().mean())
    assert abs(same - 0.5) < 5 * 0.5 / math.sqrt(4096)


def trained(master: str, updates: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Weights near 1 before and after updates that each subtract a hundredth of the distance of two numbers."""
    model: Any = small_decoder(BF16)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.5)
    _, hift = hift_over(model, torch.optim.SGD, layers_per_group=5, master=master, lr=1.0)
    before = weights(model)
    for _ in range(updates):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 2**-7 / 100)
        hift.step()
    return before, weights(model)


def test_small_updates_add_up_where_the_nearest_number_loses_them() -> None:
    updates = 300
    before, after = trained("stochastic", updates)
    for name, start in before.items():
        moved = (start.double() - after[name].double()) / 2**-7
        # Each update is one draw with probability 1/100; 1.5 is far from where the numbers' distance changes.
        deviation = math.sqrt(updates * 0.01 * 0.99 / moved.numel())
        assert abs(float(moved.mean()) - updates / 100) < 5 * deviation, name
    before, after = trained("none", 20)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_the_bits_are_those_of_the_number_of_updates_whatever_was_skipped() -> None:
    model: Any = tiny_llama(BF16)
    _, hift = hift_over(model, torch.optim.SGD, master="stochastic", seed=3, lr=0.1)
    embedded = torch.randn(2, 5, model.config.hidden_size, dtype=BF16, requires_grad=True)
    model(inputs_embeds=embedded, labels=torch.zeros(2, 5, dtype=torch.int64)).loss.backward()
    with pytest.warns(UserWarning, match="no gradient reached group 0"):
        hift.step()
    assert (hift.updates, hift.rotation.steps) == (0, 1)
    for update in range(2):
        weight = hift.weights_of(hift.active_group)[0]
        before, gradient = weight.parameter.detach().float(), torch.full_like(weight.parameter, 0.123)
        weight.parameter.grad = gradient.clone()
        hift.step()
        expected = naive_rounding(before - 0.1 * gradient.float(), 3, update, weight.name)
        assert torch.equal(weight.parameter.detach(), expected)


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [("none", "stochastic"), ("stochastic", "none"), ("fp32", "stochastic"), ("stochastic", "fp32"), ("seed", "seed")],
)
@pytest.mark.parametrize("optimizer", ["AdamW", "SGD"])
def test_a_state_of_another_rounding_is_refused(saved: str, loaded: str, optimizer: str) -> None:
    made = []
    for kind, seed in ((saved, 0), (loaded, 7)):
        settings = {"master": "stochastic", "seed": seed} if kind == "seed" else {"master": kind}
        made.append(hift_over(small_decoder(BF16), optimizer, **settings))
    run(*made[0], 1)
    before = weights(made[1][0])
    with pytest.raises(ValueError, match=r"another seed of stochastic rounding \(master, seed\)"):
        made[1][1].load_state_dict(made[0][1].state_dict())
    assert differing(weights(made[1][0]), before) == []


@pytest.mark.parametrize("elementwise", [True, False])
def test_a_failed_step_leaves_no_copies(elementwise: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, hift = hift_over(
        small_decoder(BF16), Stumbling, master="stochastic", state="device", elementwise=elementwise, lr=1e-2
    )
    run(model, hift, 1)
    monkeypatch.setattr(Stumbling, "countdown", 1)
    with pytest.raises(RuntimeError, match="stumbled"):
        run(model, hift, 1, start=1)
    slices = [one for group in hift.turns.states for piece in group.chunks for one in piece.slices]
    assert slices and all(one.leaf.numel() == 0 and one.leaf.grad is None for one in slices)


class Alone(torch.optim.AdamW):
    """Notes how many tensors each instance steps."""

    sizes: ClassVar[list[int]] = []

    def step(self, closure: Any = None) -> Any:
        self.sizes.append(sum(each.grad is not None for group in self.param_groups for each in group["params"]))
        return super().step(closure)


def test_state_on_the_device_is_stepped_by_tensors_so_that_one_has_a_copy_at_a_time() -> None:
    Alone.sizes.clear()
    model, hift = hift_over(
        small_decoder(BF16), Alone, layers_per_group=5, master="stochastic", state="device", elementwise=True, lr=1e-2
    )
    run(model, hift, 1)
    assert Alone.sizes[-len(hift.trained_weights) :] == [1] * len(hift.trained_weights)
    assert all(one.leaf.numel() == 0 for piece in hift.turns.states[0].chunks for one in piece.slices)


def test_rows_without_a_gradient_stay() -> None:
    model: Any = small_decoder(BF16)
    _, hift = hift_over(model, torch.optim.SGD, layers_per_group=5, master="stochastic", lr=0.1)
    before = weights(model)
    run(model, hift, 3)
    used = torch.cat([batch["input_ids"].flatten() for batch in token_batches(3, vocab=model.config.vocab_size)])
    moved = (weights(model)["model.embed_tokens.weight"] != before["model.embed_tokens.weight"]).any(1)
    assert set(moved.nonzero().flatten().tolist()) <= set(used.tolist())
    assert 0 < int(moved.sum()) < len(moved)


def test_fp32_weights_of_a_model_in_bf16_are_stepped_as_they_are() -> None:
    models = []
    for master in ("stochastic", "fp32"):
        model: Any = small_decoder(BF16)
        for module in model.modules():
            if type(module).__name__.endswith("Norm"):
                module.float()
        models.append(hift_over(model, torch.optim.SGD, layers_per_group=5, master=master, lr=0.1)[1])
    for hift in models:
        for weight in hift.trained_weights:
            weight.parameter.grad = torch.full_like(weight.parameter, 0.123)
        hift.step()
    norms = [
        [weight.parameter for weight in hift.trained_weights if weight.parameter.dtype == torch.float32]
        for hift in models
    ]
    assert norms[0] and all(torch.equal(*pair) for pair in zip(*norms, strict=True))
