from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from slivertune import HiFT, HiFTConfig
from slivertune.core.sliver import CheckpointedSliver
from tests.helpers.models import assert_same_bits, tiny_llama, token_batches
from tests.sft.runs import sft_over

BUILDERS: dict[str, Callable[[nn.Module], CheckpointedSliver]] = {
    "HiFT": lambda model: HiFT(model, torch.optim.AdamW, config=HiFTConfig.paper(), lr=1e-2),
    "SFT": sft_over,
}


def first_of(optimizer: torch.optim.Optimizer) -> Any:
    return optimizer.param_groups[0]["params"][0]


def assign(optimizer: Any) -> None:
    optimizer.state = defaultdict(dict)


def assign_entry(optimizer: Any) -> None:
    optimizer.state[first_of(optimizer)] = {}


def zero_moments(optimizer: Any) -> None:
    state = optimizer.state[first_of(optimizer)]
    state["exp_avg"] = torch.zeros(1)


def merge(optimizer: Any) -> None:
    optimizer.state |= {"other": {}}


WRITES: dict[str, Callable[[Any], Any]] = {
    "assigned": assign,
    "entry assigned": assign_entry,
    "moments zeroed": zero_moments,
    "merged": merge,
    "cleared": lambda optimizer: optimizer.state.clear(),
    "entry deleted": lambda optimizer: optimizer.state.__delitem__(first_of(optimizer)),
    "popped": lambda optimizer: optimizer.state.pop(first_of(optimizer), None),
    "last popped": lambda optimizer: optimizer.state.popitem(),
    "updated": lambda optimizer: optimizer.state.update({}),
    "default set": lambda optimizer: optimizer.state.setdefault("other", {}),
}


@pytest.mark.parametrize("in_sidecar", [False, True], ids=["whole state", "placeholder"])
@pytest.mark.parametrize("name", BUILDERS)
def test_a_write_to_the_state_is_an_error_and_training_goes_on(name: str, in_sidecar: bool) -> None:
    models = tiny_llama(), tiny_llama()
    written, untouched = (BUILDERS[name](model) for model in models)
    if in_sidecar:
        written.use_sidecar()
    first, second = token_batches(2)
    for model, optimizer in zip(models, (written, untouched), strict=True):
        model(**first).loss.backward()
        optimizer.step()
    held = list(written.state)
    for write in WRITES.values():
        with pytest.raises(RuntimeError, match=f"{name} does not keep its state in optimizer.state"):
            write(written)
    assert list(written.state) == held
    for model, optimizer in zip(models, (written, untouched), strict=True):
        model(**second).loss.backward()
        optimizer.step()
    assert_same_bits(*models)


@pytest.mark.parametrize("name", BUILDERS)
def test_the_placeholder_is_saved_as_plain_dictionaries(name: str) -> None:
    optimizer = BUILDERS[name](tiny_llama())
    optimizer.use_sidecar()
    saved = optimizer.state_dict()["state"]
    assert saved
    assert {type(each) for each in saved.values()} == {dict}


def another_group(optimizer: Any) -> None:
    optimizer.param_groups.append({**optimizer.param_groups[0], "params": [nn.Parameter(torch.zeros(3))]})


CHANGES: dict[str, Callable[[Any], Any]] = {
    "list cut": lambda optimizer: optimizer.param_groups[0].update(params=optimizer.param_groups[0]["params"][:3]),
    "taken away": lambda optimizer: optimizer.param_groups[0]["params"].pop(),
    "added": lambda optimizer: optimizer.param_groups[0]["params"].append(nn.Parameter(torch.zeros(3))),
    "reordered": lambda optimizer: optimizer.param_groups[0]["params"].reverse(),
    "group added": another_group,
    "group taken away": lambda optimizer: optimizer.param_groups.pop(),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", BUILDERS)
def test_a_step_with_other_parameters_in_the_param_groups_is_an_error(name: str, change: str) -> None:
    model = tiny_llama()
    optimizer = BUILDERS[name](model)
    model(**token_batches(1)[0]).loss.backward()
    CHANGES[change](optimizer)
    with pytest.raises(RuntimeError, match=r"param_groups\[[01]\] were changed after .* was built"):
        optimizer.step()
    assert optimizer.updates == 0


@pytest.mark.parametrize("name", BUILDERS)
def test_hooks_on_states_are_refused(name: str) -> None:
    optimizer: Any = BUILDERS[name](tiny_llama())
    for moment in ("state_dict_pre", "state_dict_post", "load_state_dict_pre", "load_state_dict_post"):
        with pytest.raises(RuntimeError, match=f"{name} runs no hooks on its state_dict"):
            getattr(optimizer, f"register_{moment}_hook")(lambda *_: None)
