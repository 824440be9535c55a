"""HiFT over models of several kinds of blocks, and over models without attention, against the base optimizer."""

from typing import Any

import pytest
import torch

from slivertune import HiFT, HiFTConfig
from tests.helpers.architectures import HYBRIDS, hybrid, ids
from tests.helpers.ranks import quick


def made(name: str) -> Any:
    torch.manual_seed(0)
    return hybrid(name).train()


def stepped(model: Any, optimizer: torch.optim.Optimizer, num_steps: int) -> None:
    batch = ids()
    for _ in range(num_steps):
        model(**batch, labels=batch["input_ids"]).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("name", quick(list(HYBRIDS), ["mamba2", "qwen3_next"]))
def test_all_layers_in_one_group_train_as_the_base_optimizer_and_each_alone_in_its_turn(name: str) -> None:
    dense, together, alone = made(name), made(name), made(name)
    stepped(dense, torch.optim.AdamW(dense.parameters(), lr=1e-3), 3)
    stepped(together, HiFT(together, torch.optim.AdamW, lr=1e-3, config=HiFTConfig(layers_per_group=4)), 3)
    expected = dict(dense.named_parameters())
    assert [key for key, value in together.named_parameters() if not torch.equal(value, expected[key])] == []
    hift = HiFT(alone, torch.optim.AdamW, lr=1e-3, config=HiFTConfig.paper())
    for _ in range(hift.cycle_length):
        before = {key: value.detach().clone() for key, value in alone.named_parameters()}
        group = set(hift.groups[hift.active_group].parameter_names)
        stepped(alone, hift, 1)
        assert {key for key, value in alone.named_parameters() if not torch.equal(value, before[key])} == group
