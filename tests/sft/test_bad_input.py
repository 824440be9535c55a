"""What the optimizer refuses, and that it changes nothing by refusing."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from slivertune import SFT, SFTConfig
from tests.helpers.models import assert_same_tree, bits, small_decoder, token_batches, weights
from tests.sft.runs import sft_over, train

STATE = "model.layers.0.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"lr": -1.0}, "lr=-1.0 must be a finite number of at least 0"),
        ({"lr": float("inf")}, "lr=inf must be a finite number"),
        ({"lr": "auto"}, "lr='auto' must be a number"),
        ({"weight_decay": "0.1"}, "weight_decay='0.1' must be a number"),
        ({"weight_decay": float("inf")}, "weight_decay=inf must be a finite number of at least 0"),
        ({"momentum": None}, "momentum=None must be a number"),
        ({"total_steps": 0}, "total_steps=0 must be a positive integer"),
        ({"weight_decay": -0.1}, "weight_decay=-0.1 must be a finite number of at least 0"),
        ({"eps": -1e-8}, "eps=-1e-08 must be a finite number of at least 0"),
        ({"betas": (0.9,)}, r"betas=\(0.9,\) must be two numbers"),
        ({"betas": 0.9}, "betas=0.9 must be two numbers"),
        ({"betas": (0.9, 1.0)}, r"betas=\(0.9, 1.0\) must be in \[0, 1\)"),
        ({"momentum": 0.9}, "momentum=0.9 is for SM3, .*Use betas="),
        ({"selection": "momentum", "betas": (0.9, 0.99)}, r"betas=\(0.9, 0.99\) are for AdamW.*Use momentum="),
        ({"selection": "momentum", "momentum": 1.0}, r"momentum=1.0 must be in \[0, 1\)"),
    ],
)
def test_a_bad_argument_is_named_with_its_rule(options: dict[str, Any], text: str) -> None:
    model = small_decoder()
    with pytest.raises(ValueError, match=text):
        sft_over(model, **options)
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_other_things_than_a_model_and_a_config_are_named() -> None:
    model: Any = small_decoder()
    with pytest.raises(ValueError, match="SFT got a generator in place of a model"):
        SFT(model.parameters(), lr=1e-3, total_steps=10)
    wrong: Any = {"density": 0.1}
    with pytest.raises(ValueError, match=r"config=\{'density': 0.1\} must be an SFTConfig"):
        SFT(model, config=wrong, lr=1e-3, total_steps=10)


def test_norms_with_running_statistics_are_named() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.BatchNorm1d(4, track_running_stats=False))
    with pytest.warns(UserWarning, match="1 will change running statistics in training, which deltas do not hold"):
        SFT(model, config=SFTConfig(density=0.5, targets=["0"]), lr=1e-3, total_steps=10)


@pytest.mark.parametrize("redistribute", [False, True])
def test_a_state_of_another_number_of_weights_is_refused(redistribute: bool) -> None:
    saved = sft_over(small_decoder(), density=0.2, redistribute=redistribute).state_dict()
    optimizer = sft_over(small_decoder(), density=0.1, redistribute=redistribute)
    with pytest.raises(ValueError, match=r"saved state trains [\d,]+ weights of .*, and this optimizer [\d,]+\. Build"):
        optimizer.load_state_dict(saved)


def test_a_model_takes_one_sft_at_a_time() -> None:
    model = small_decoder()
    first = sft_over(model)
    with pytest.raises(ValueError, match=r"has SFT attached already\. Call detach\(\)"):
        sft_over(model)
    first.detach()
    sft_over(model)


def test_targets_are_fixed_once_built() -> None:
    with pytest.raises(RuntimeError, match="SFT's targets are fixed for the whole run"):
        sft_over(small_decoder()).add_param_group({"params": [nn.Parameter(torch.zeros(3))]})


def lacks(key: str) -> Callable[[dict[str, Any]], None]:
    return lambda state: state["state"][STATE].pop(key)


def changed(key: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[dict[str, Any]], None]:
    def apply(state: dict[str, Any]) -> None:
        state["state"][STATE][key] = change(state["state"][STATE][key])

    return apply


def swapped(indices: torch.Tensor) -> torch.Tensor:
    indices[[0, 1]] = indices[[1, 0]]
    return indices


def doubled(indices: torch.Tensor) -> torch.Tensor:
    indices[1] = indices[0]
    return indices


def beyond(indices: torch.Tensor) -> torch.Tensor:
    indices[-1] = 48 * 32
    return indices


DAMAGE: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "not a state of SFT": (lambda state: state.pop("sft"), "no state of SFT: it has no 'sft'"),
    "an unknown version": (lambda state: state["sft"].update(version=99), "version 99, this library reads 1"),
    "an older version": (
        lambda state: state["sft"].update(version=0),
        r"version 0, this library reads 1\. Continue with the version that wrote it",
    ),
    "another selection": (lambda state: state["sft"].update(selection="momentum"), "selected by 'momentum'"),
    "a broken count": (lambda state: state["sft"].update(updates=-3), "damaged: updates=-3"),
    "negative squares": (
        changed("exp_avg_sq", lambda value: -1 - value),
        "damaged: 'exp_avg_sq' of .* negative values",
    ),
    "a negative beta": (
        lambda state: state["param_groups"][0].update(betas=(-5.0, 0.99)),
        r"damaged: betas=\(-5\.0, 0\.99\) must be in",
    ),
    "a negative epsilon": (lambda state: state["param_groups"][0].update(eps=-5.0), "damaged: eps=-5.0 must be"),
    "a rate without a value": (lambda state: state["param_groups"][0].update(lr=None), "damaged: lr=None must be"),
    "a decay without a value": (lambda state: state["param_groups"][0].update(weight_decay=None), "weight_decay=None"),
    "a lost tensor": (lambda state: state["state"].pop(STATE), "it lacks .*up_proj"),
    "a foreign tensor": (lambda state: state["state"].update(other={}), "does not train .'other'"),
    "lost moments": (lacks("exp_avg"), "lacks 'exp_avg'"),
    "lost values": (lacks("base"), "lacks 'base'"),
    "short moments": (changed("exp_avg", lambda value: value[1:]), "'exp_avg' of shape"),
    "another dtype": (changed("delta", lambda value: value.half()), "torch.float16, expected"),
    "unsorted indices": (changed("indices", swapped), "indices must be strictly increasing"),
    "doubled indices": (changed("indices", doubled), "indices must be strictly increasing"),
    "indices out of range": (changed("indices", beyond), "the tensor has positions 0 to 1535"),
    "negative indices": (changed("indices", lambda value: value - 9999), "indices reach from -"),
    "another model": (changed("base", lambda value: value + 1), "belong to other pretrained values"),
    "a hostile estimate": (
        lambda state: state["state"][STATE]["estimates"][6].update(indices=torch.tensor([5, 5], dtype=torch.int32)),
        "estimate has 'sum' of shape",
    ),
}


@pytest.fixture(scope="module")
def trained() -> tuple[Any, Any]:
    """A model and its SFT inside an estimation phase, for tests that change neither."""
    model = small_decoder()
    optimizer = sft_over(model)
    train(model, optimizer, token_batches(5))
    assert optimizer.is_estimating
    return model, optimizer


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_state_that_does_not_fit_is_refused_and_nothing_changes(damage: str, trained: tuple[Any, Any]) -> None:
    model, optimizer = trained
    state = copy.deepcopy(optimizer.state_dict())
    change, text = DAMAGE[damage]
    change(state)
    before, its_weights = copy.deepcopy(optimizer.state_dict()), weights(model)
    with pytest.raises(ValueError, match=text):
        optimizer.load_state_dict(state)
    assert_same_tree(optimizer.state_dict(), before)
    assert all(torch.equal(bits(model.get_parameter(name)), bits(value)) for name, value in its_weights.items())


def test_a_state_of_another_pretrained_model_is_refused() -> None:
    optimizer = sft_over(small_decoder())
    with pytest.raises(ValueError, match="belong to other pretrained values than the model has"):
        sft_over(small_decoder(seed=5)).load_state_dict(optimizer.state_dict())
