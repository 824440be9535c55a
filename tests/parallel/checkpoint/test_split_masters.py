"""A checkpoint of a run whose masters were split (`master="split"`, which was removed): its masters are whole.

`split_masters` is the state of `make(0)` after three updates, as `save_state` wrote it when there were such masters.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from slivertune import HiFT, HiFTConfig
from slivertune.parallel.checkpoint.sidecar import load_state, save_state
from tests.helpers.models import assert_same_tree

SAVED = Path(__file__).with_name("split_masters")
GROUPS = [["0"], ["1"]]


def make(seed: int, **config: Any) -> tuple[nn.Module, HiFT]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).to(torch.bfloat16)
    return model, HiFT(model, torch.optim.AdamW, config=HiFTConfig.paper(layers=GROUPS, **config), lr=1e-2)


def kept(group: int) -> dict[str, dict[str, torch.Tensor]]:
    """The state of a group's weights, read from the files without slivertune."""
    scalars = torch.load(SAVED / "header.pt", weights_only=True)["scalars"]
    state: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in load_file(SAVED / f"group-{group:05}.rank-00000.safetensors").items():
        weight, _, key = name.partition("/")
        state.setdefault(weight, dict(scalars[weight]))[key] = tensor
    return state


@pytest.mark.parametrize("state", ["host", "device", "disk"])
def test_it_loads_as_fp32_masters_and_goes_on(state: Any, tmp_path: Path) -> None:
    model, hift = make(9, state=state, **({"state_dir": tmp_path} if state == "disk" else {}))
    load_state(hift, SAVED)
    assert (hift.updates, hift.active_group) == (3, 1)
    masters = {name: values["master"] for group in (0, 1) for name, values in kept(group).items()}
    assert masters.keys() == dict(model.named_parameters()).keys()
    loaded = hift.state_dict()["state"]
    for name, parameter in model.named_parameters():
        assert torch.equal(loaded[name]["master"], masters[name])
        assert torch.equal(parameter, masters[name].to(torch.bfloat16))
        assert not torch.equal(parameter.float(), masters[name]), "the lower half of the master is not lost"

    model(torch.ones(4, 8, dtype=torch.bfloat16)).square().sum().backward()
    expected = {
        name: step_by_hand(parameter, kept(1)[name])
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    assert expected.keys() == {"1.weight", "1.bias"}
    hift.step()
    for name, master in expected.items():
        assert torch.equal(hift.state_dict()["state"][name]["master"], master)
        assert torch.equal(model.get_parameter(name), master.to(torch.bfloat16))


def step_by_hand(parameter: nn.Parameter, state: dict[str, torch.Tensor]) -> torch.Tensor:
    """What torch's AdamW makes of a kept master and its moments."""
    assert parameter.grad is not None
    master = nn.Parameter(state["master"].clone())
    master.grad = parameter.grad.float()
    optimizer = torch.optim.AdamW([master], lr=1e-2)
    optimizer.state[master] = {key: value.clone() for key, value in state.items() if key != "master"}
    optimizer.step()
    return master.detach()


def test_it_is_saved_again_as_it_was(tmp_path: Path) -> None:
    _, hift = make(9)
    load_state(hift, SAVED)
    save_state(hift, tmp_path / "again")
    _, other = make(3)
    load_state(other, tmp_path / "again")
    assert_same_tree(other.state_dict(), hift.state_dict())
