"""Settings in which SFT must be an optimizer that exists: torch's AdamW, or SM3-II over a dense matrix."""

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import nn

from slivertune import SFT, SFTConfig
from tests.helpers.models import (
    assert_all_moved,
    assert_same_bits,
    bits,
    default_dtype,
    tiny_bert,
    tiny_gpt2,
    tiny_gpt_oss,
    tiny_llama,
    tiny_mixtral,
    token_batches,
    twin,
    weights,
)
from tests.helpers.tolerance import assert_step_close, sum_limit, with_exact
from tests.sft.reference import NAMES, SHAPES, FixedAdamW, Prescribed, prescribed_gradients, rows_and_columns
from tests.sft.runs import sft_over, train

# Nor the head of the classifiers here.
pytestmark = pytest.mark.filterwarnings("ignore:SFT trains the linear layers of the blocks")

ADAMW = {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-4}
STEPS = 15


CAP = 2e-3
"""Of a tensor's largest weight; one update of 15 that is missing or doubled moves weights of some 0.1 by up to 1e-2."""


def chosen(model: nn.Module, names: Iterable[str]) -> dict[str, torch.Tensor | None]:
    return {name: model.get_parameter(name).detach() for name in names}


@pytest.mark.parametrize("form", ["optimizer", "layer"])
def test_density_1_without_reselection_is_torch_adamw(form: str) -> None:
    model = tiny_llama()
    before, start = weights(model), twin(model)
    classes = [nn.Linear, nn.Embedding] if form == "optimizer" else [nn.Linear]
    optimizer = sft_over(
        model, density=1.0, reselection_interval=0, targets=classes, form=form, total_steps=STEPS, **ADAMW
    )
    names = list(optimizer.deltas())
    assert optimizer.num_weights == sum(before[name].numel() for name in names)

    def reference(dtype: torch.dtype) -> dict[str, torch.Tensor | None]:
        other = twin(start).to(dtype).requires_grad_(False)
        for name in names:
            other.get_parameter(name).requires_grad_(True)
        adamw = torch.optim.AdamW([other.get_parameter(n) for n in names], weight_decay=0.0, **ADAMW)
        train(other, adamw, token_batches(STEPS))
        return chosen(other, names)

    train(model, optimizer, token_batches(STEPS))
    optimizer.detach()
    # AdamW adds each update to a weight, SFT to a delta: the updates themselves are rounded otherwise, too.
    assert_step_close(chosen(model, names), reference(torch.float32), reference(torch.float64), cap=CAP)
    assert_all_moved(model, {name: before[name] for name in names})


def test_weight_decay_is_adamws_on_the_deltas() -> None:
    model = Prescribed(SHAPES)
    optimizer = sft_over(
        model, density=1.0, reselection_interval=0, targets=NAMES, total_steps=STEPS, weight_decay=5.0, **ADAMW
    )
    expected, exact = (adamw_on_deltas(model, dtype) for dtype in (torch.float32, torch.float64))
    train(model, optimizer, prescribed_gradients(STEPS))
    found = {name: delta.values.view(delta.shape) for name, delta in optimizer.deltas().items()}
    assert_step_close(found, expected, exact, cap=CAP)


def adamw_on_deltas(model: nn.Module, dtype: torch.dtype) -> dict[str, torch.Tensor | None]:
    deltas = {name: nn.Parameter(torch.zeros(model.get_parameter(name).shape, dtype=dtype)) for name in NAMES}
    reference = torch.optim.AdamW(deltas.values(), weight_decay=5.0, **ADAMW)
    for gradients in prescribed_gradients(STEPS):
        for name, delta in deltas.items():
            delta.grad = gradients[name].to(dtype)
        reference.step()
    return {name: delta.detach() for name, delta in deltas.items()}


@pytest.mark.parametrize("build", [tiny_llama, tiny_gpt2, tiny_bert, tiny_mixtral, tiny_gpt_oss])
def test_fixed_indices_are_adamw_with_a_masked_gradient(build: Any) -> None:
    model = build()
    before, start = weights(model), twin(model)
    optimizer = sft_over(model, reselection_interval=0, total_steps=STEPS, **ADAMW)
    deltas = optimizer.deltas()
    masks = FixedAdamW(start, deltas, **ADAMW).masks
    batches = token_batches(STEPS)
    if build is tiny_bert:
        for batch in batches:
            batch["labels"] = batch["labels"][:, 0] % 3

    def reference() -> dict[str, torch.Tensor | None]:
        other = twin(start)
        FixedAdamW(other, deltas, **ADAMW).train(batches)
        return chosen(other, masks)

    for batch in batches:
        train(model, optimizer, [batch])
        for name, value in before.items():
            idle = ~masks[name] if name in masks else torch.ones_like(value, dtype=torch.bool)
            assert torch.equal(bits(model.get_parameter(name).detach()[idle]), bits(value[idle]))
    assert masks
    assert_step_close(chosen(model, masks), *with_exact(reference), cap=CAP)
    for name, mask in masks.items():
        assert not torch.equal(model.get_parameter(name).detach()[mask], before[name][mask])


def detach_rows(model: nn.Module, selected: torch.Tensor) -> None:
    """Let the chosen tokens alone have gradients, as training on a part of the tokens does."""

    def keep(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        return torch.where(selected[:, None], output, output.detach())

    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and ".layers." in name:
            module.register_forward_hook(keep)


@pytest.mark.parametrize("form", ["optimizer", "layer"])
def test_with_some_rows_detached_it_is_masked_adamw_over_the_same_rows(form: str) -> None:
    model = tiny_llama()
    start, untouched = twin(model), twin(model)
    selected = torch.tensor([True, False, False, True] * 3)
    config = SFTConfig(density=0.1, reselection_interval=0, form=form)
    optimizer = SFT(model, config=config, total_steps=STEPS, **ADAMW)
    deltas = optimizer.deltas()
    whole = SFT(untouched, config=config, total_steps=STEPS, **ADAMW)
    detach_rows(model, selected)

    def reference() -> dict[str, torch.Tensor | None]:
        other = twin(start)
        detach_rows(other, selected)
        FixedAdamW(other, deltas, **ADAMW).train(token_batches(12))
        return chosen(other, deltas)

    for batch in token_batches(12):
        train(model, optimizer, [batch])
        train(untouched, whole, [batch])
    for each in (optimizer, whole):
        each.detach()
    assert_step_close(chosen(model, deltas), *with_exact(reference), cap=CAP)
    assert any(not torch.allclose(model.get_parameter(name), untouched.get_parameter(name)) for name in deltas)


class DenseSM3:
    """SM3-II over whole matrices, written from the paper: covers are rows and columns."""

    def __init__(self, weight: torch.Tensor, lr: float, momentum: float) -> None:
        self.weight, self.lr, self.momentum = weight.double().view(rows_and_columns(weight.shape)), lr, momentum
        self.rows = torch.zeros(self.weight.shape[0], dtype=torch.float64)
        self.columns = torch.zeros(self.weight.shape[1], dtype=torch.float64)
        self.average = torch.zeros_like(self.weight)

    def step(self, gradient: torch.Tensor) -> None:
        gradient = gradient.double().view(self.weight.shape)
        nu = torch.minimum(self.rows[:, None], self.columns[None, :]) + gradient**2
        self.rows, self.columns = nu.amax(1), nu.amax(0)
        self.average = self.momentum * self.average + (1 - self.momentum) * (gradient / nu.sqrt())
        self.weight -= self.lr * self.average


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_ma_at_density_1_is_dense_sm3(momentum: float) -> None:
    model = Prescribed(SHAPES)
    dense = {name: DenseSM3(model.get_parameter(name).detach().clone(), 1e-2, momentum) for name in NAMES}
    # Nothing is frozen that could be grown, so reselection changes nothing.
    optimizer = sft_over(
        model,
        density=1.0,
        selection="momentum",
        reselection_interval=5,
        targets=NAMES,
        total_steps=STEPS,
        momentum=momentum,
    )
    for gradients in prescribed_gradients(STEPS):
        train(model, optimizer, [gradients])
        for name, reference in dense.items():
            reference.step(gradients[name])
    for name, reference in dense.items():
        weight = model.get_parameter(name).detach().double().view(reference.weight.shape)
        # A sum of thirty fp32 updates and the weight, against fp64; an update is a quotient and an average itself.
        size = float(reference.weight.abs().max()) + STEPS * 1e-2
        assert float((weight - reference.weight).abs().max()) <= sum_limit(2 * STEPS, torch.float32, size)


def test_ages_are_those_of_adams_that_began_on_their_own() -> None:
    """Each active weight at the end equals a scalar Adam, seeded as the phase says, that ran since it was grown."""
    gamma, interval, total = 3, 7, 26
    model = Prescribed(SHAPES)
    optimizer = sft_over(
        model,
        reselection_interval=interval,
        estimation_steps=gamma,
        replacement_rate=0.6,
        targets=NAMES,
        total_steps=total,
    )
    batches = prescribed_gradients(total)
    born = {name: dict.fromkeys(delta.indices.tolist(), 0) for name, delta in optimizer.deltas().items()}
    for update, gradients in enumerate(batches, 1):
        model(gradients).backward()
        before = optimizer.state_dict()["state"]
        ages = {name: dict(zip(s["indices"].tolist(), s["age"].tolist(), strict=True)) for name, s in before.items()}
        optimizer.step()
        after = optimizer.state_dict()["state"]
        for name, state in after.items():
            for index, age in zip(state["indices"].tolist(), state["age"].tolist(), strict=True):
                if update == gamma or ages[name].get(index, -1) + 1 != age:
                    born[name][index] = update
    births = set()
    for name, state in optimizer.state_dict()["state"].items():
        for at, index in enumerate(state["indices"].tolist()):
            birth = born[name][index]
            births.add(birth)
            values = [float(batch[name].flatten()[index]) for batch in batches]
            m = v = delta = 0.0
            age = 0
            if birth:
                phase = values[birth - gamma : birth]
                m = sum(phase) / gamma * (1 - 0.9**gamma)
                v = sum(value**2 for value in phase) / gamma * (1 - 0.999**gamma)
                age = gamma
            for value in values[birth:]:
                age += 1
                m, v = 0.9 * m + 0.1 * value, 0.999 * v + 0.001 * value**2
                delta -= 1e-2 * (m / (1 - 0.9**age)) / ((v / (1 - 0.999**age)) ** 0.5 + 1e-8)
            assert int(state["age"][at]) == age
            assert float(state["delta"][at]) == pytest.approx(
                delta, abs=sum_limit(total, torch.float32, size=total * 1e-2)
            )
    assert len(births) >= 3 and births <= {gamma, 7, 14, 21}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"form": "layer"},
        {"form": "layer", "phi_gradient": "sampled"},
        {"packed": True},
        {"selection": "momentum", "momentum": 0.9},
    ],
    ids=str,
)
def test_what_torch_makes_tensors_of_by_default_changes_no_bit(options: dict[str, Any]) -> None:
    models = tiny_llama(), tiny_llama()
    batches = token_batches(8)  # two reselections
    for model, dtype, device in zip(models, (torch.float32, torch.bfloat16), ("cpu", "meta"), strict=True):
        with default_dtype(dtype):
            with torch.device(device):
                optimizer = sft_over(model, **options)
            train(model, optimizer, batches)
    assert_same_bits(*models)
