"""torch.distributed.checkpoint carries HiFT's and SFT's state: what continues has the bits of an undisturbed run."""

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

from slivertune import HiFT, HiFTConfig, SFTConfig
from slivertune.sft import SFT
from tests.helpers.models import assert_same_bits, assert_same_tree, tiny_llama, token_batches, trainable, weights
from tests.helpers.ranks import quick, single_rank
from tests.helpers.reference import decay_split, grouped_optimizer, train

BF16 = torch.bfloat16
BATCHES = token_batches(16)
DONE, MORE = 8, 7
"""Updates before and after: HiFT stands in mid-cycle, SFT inside an open estimation phase."""

Build = Callable[[int], tuple[nn.Module, Any]]


def hift(**config: Any) -> Build:
    def build(seed: int) -> tuple[nn.Module, HiFT]:
        model = tiny_llama(BF16, seed=seed)
        return model, HiFT(model, torch.optim.AdamW, config=HiFTConfig.paper(**config), lr=1e-2, weight_decay=0.1)

    return build


def hift_wrapped(seed: int) -> tuple[nn.Module, HiFT]:
    model = tiny_llama(BF16, seed=seed)
    base = grouped_optimizer(model, torch.optim.AdamW, decay_split(model), lr=1e-2)
    return model, HiFT.wrap(base, model, config=HiFTConfig.paper(layers_per_group=2))


def sft(**config: Any) -> Build:
    def build(seed: int) -> tuple[nn.Module, SFT]:
        # SFT continues over the pretrained weights that it began with, or those of the checkpoint.
        model = tiny_llama(BF16)
        settings = SFTConfig(**{"density": 0.1, "reselection_interval": 5, "estimation_steps": 3, **config})
        return model, SFT(model, config=settings, lr=1e-2, total_steps=40)

    return build


CASES: dict[str, Build] = {
    "hift": hift(),
    "hift on the device": hift(state="device"),
    "hift without masters": hift(master="none", steps_per_group=2),
    "hift in the backward": hift(gradients="stepped"),
    "hift with decay groups": hift_wrapped,
    "sft": sft(),
    "sft by momentum": sft(selection="momentum"),
    "sft in the layers": sft(form="layer"),
}
OPTIONS: dict[str, StateDictOptions] = {
    "as it is": StateDictOptions(),
    "full": StateDictOptions(full_state_dict=True),
    "full, on the host": StateDictOptions(full_state_dict=True, cpu_offload=True),
}


@pytest.fixture(autouse=True)
def one_rank(tmp_path: Path) -> Iterator[None]:
    with single_rank(tmp_path):
        yield


def run(build: Build, start: int, steps: int, seed: int = 0) -> tuple[nn.Module, Any]:
    model, optimizer = build(seed)
    train(model, optimizer, BATCHES, steps, start=start)
    return model, optimizer


def states_of(model: nn.Module, optimizer: Any, options: str) -> dict[str, Any]:
    return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer, options=OPTIONS[options]), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", CASES)
def test_a_run_continues_with_the_same_bits(name: str, options: str, tmp_path: Path) -> None:
    undisturbed, _ = run(CASES[name], 0, DONE + MORE)
    model, optimizer = run(CASES[name], 0, DONE)
    if isinstance(optimizer, SFT) and optimizer.config.selection == "accumulated_gradient":
        assert optimizer.is_estimating
    dcp.save(states_of(model, optimizer, options), checkpoint_id=tmp_path / "saved")
    # Saving has changed nothing.
    train(model, optimizer, BATCHES, MORE, start=DONE)
    assert_same_bits(model, undisturbed)

    again, other = CASES[name](9)
    before = trainable(again)
    into = states_of(again, other, options)
    assert other.updates == 0 and trainable(again) == before
    dcp.load(into, checkpoint_id=tmp_path / "saved")
    set_state_dict(
        again,
        other,
        model_state_dict=into["model"],
        optim_state_dict=into["optimizer"],
        options=OPTIONS[options],
    )
    assert other.updates == DONE
    train(again, other, BATCHES, MORE, start=DONE)
    assert_same_bits(again, undisturbed)


@pytest.mark.parametrize("name", quick(CASES, CASES.keys() - {"hift", "hift on the device"}))
def test_the_optimizers_state_alone_goes_back_in_memory_too(name: str) -> None:
    undisturbed, _ = run(CASES[name], 0, DONE + MORE)
    model, optimizer = run(CASES[name], 0, DONE)
    kept = copy.deepcopy(model.state_dict())
    state = get_optimizer_state_dict(model, optimizer)
    train(model, optimizer, BATCHES, 2, start=DONE)  # and back again
    model.load_state_dict(kept)
    set_optimizer_state_dict(model, optimizer, state)
    train(model, optimizer, BATCHES, MORE, start=DONE)
    assert_same_bits(model, undisturbed)


@pytest.mark.parametrize(
    "name", quick(CASES, ["hift without masters", "hift in the backward", "sft", "sft in the layers"])
)
def test_saving_leaves_weights_turn_and_plain_state_as_they_were(name: str) -> None:
    model, optimizer = run(CASES[name], 0, DONE)
    before = weights(model)
    state, free = copy.deepcopy(optimizer.state_dict()), trainable(model)
    # A backward whose gradients were given up, as after a skipped update.
    if name != "hift in the backward":
        model(**BATCHES[0]).loss.backward()
        optimizer.zero_grad()
    get_optimizer_state_dict(model, optimizer)
    assert_same_tree(optimizer.state_dict(), state)
    assert_same_tree(weights(model), before)
    assert trainable(model) == free
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("name", ["hift", "sft"])
def test_a_flattened_state_is_refused_by_torch_and_one_that_has_lost_its_bytes_by_name(name: str) -> None:
    model, optimizer = run(CASES[name], 0, DONE)
    with pytest.raises(NotImplementedError, match="Flattening optimizer state_dict only supports"):
        get_optimizer_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))
    state: Any = get_optimizer_state_dict(model, optimizer)
    del state["param_groups"][0]["slivertune"]
    with pytest.raises(ValueError, match="has lost the values of its first param group"):
        set_optimizer_state_dict(model, optimizer, state)


@pytest.mark.parametrize("name", ["hift", "sft"])
def test_the_bytes_hold_nothing_but_plain_containers_and_tensors(name: str, tmp_path: Path) -> None:
    model, optimizer = run(CASES[name], 0, DONE)
    state: Any = get_optimizer_state_dict(model, optimizer)
    torch.save(state, tmp_path / "state.pt")
    again = torch.load(tmp_path / "state.pt", weights_only=True)
    other_model, other = run(CASES[name], 0, 0)
    other_model.load_state_dict(model.state_dict())
    set_optimizer_state_dict(other_model, other, again)
    assert_same_tree(other.state_dict(), optimizer.state_dict())


def test_a_step_at_rate_zero_whose_gradients_are_zero_counts_as_in_the_bare_optimizer() -> None:
    models = [tiny_llama(), tiny_llama()]
    bare = torch.optim.AdamW(models[0].parameters(), lr=1e-2)
    rotated = HiFT(models[1], torch.optim.AdamW, config=HiFTConfig.paper(layers_per_group=5), lr=1e-2)
    for model, optimizer in zip(models, (bare, rotated), strict=True):
        for index, rate in enumerate((1e-2, 0.0, 1e-2)):
            optimizer.param_groups[0]["lr"] = rate
            (model(**BATCHES[index]).loss * (rate != 0)).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert rotated.updates == 3
    assert_same_bits(*models)
