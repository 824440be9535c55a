"""Pretrained values that lie in shards: which of them a rank reads and writes, and what the layers add up."""

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from slivertune import SFT, SFTConfig
from slivertune.parallel.sft.communicator import ShardedPretrainedValues
from slivertune.sft.communicator import ALONE
from slivertune.sft.targets import Target
from slivertune.sft.weight import PretrainedValues
from tests.helpers.models import bits

NUM_ELEMENTS = 13 * 17


class Cut(ShardedPretrainedValues):
    """A tensor of 13 x 17 whose elements are cut anywhere."""

    def __init__(self, whole: torch.Tensor, first: int, length: int) -> None:
        target = Target(name="weight", module=nn.Linear(17, 13, bias=False), attribute="weight", shape=(13, 17))
        super().__init__(target, torch.device("cpu"))
        self.part, self.first = whole[first : first + length].clone(), first

    def own(self) -> tuple[torch.Tensor, int]:
        return self.part, self.first


@pytest.fixture
def one_rank(tmp_path: Path) -> Any:
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cuts", [(0, NUM_ELEMENTS), (0, 111, NUM_ELEMENTS), (0, 5, 5, 200, NUM_ELEMENTS)])
def test_each_rank_reads_and_writes_its_own_entries(dtype: torch.dtype, cuts: tuple[int, ...]) -> None:
    whole = torch.randn(NUM_ELEMENTS).to(dtype)
    whole[7] = -0.0
    indices = torch.tensor([0, 4, 5, 7, 110, 111, 199, 200, NUM_ELEMENTS - 1], dtype=torch.int32)
    values = torch.randn(indices.numel()).to(dtype)
    shards = [Cut(whole, first, last - first) for first, last in itertools.pairwise(cuts)]
    # The sum over ranks, one process doing all of them.
    read = sum(shard.read(indices).view(torch.uint8).int() for shard in shards)
    assert torch.equal(torch.as_tensor(read).to(torch.uint8), bits(whole[indices.long()]))
    for shard in shards:
        shard.write(indices, values)
    expected = whole.clone()
    expected[indices.long()] = values
    assert torch.equal(torch.cat([shard.part for shard in shards]), expected)


class Elsewhere(PretrainedValues):
    """The fp32 values of a tensor of which the module has a bf16 copy, as FSDP2's mixed precision gathers it."""

    is_whole = False

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        self._precise = target.parameter.detach().clone()

    def read(self, indices: torch.Tensor) -> torch.Tensor:
        return self._precise.take(indices.long())


def test_deltas_are_added_to_the_precise_values_and_rounded_once() -> None:
    model = nn.Sequential(nn.Linear(24, 40, bias=False))
    precise = model[0].weight.detach().clone()
    sft = SFT(model, config=SFTConfig(density=0.5, form="layer", targets=["0"]), lr=1e-2, total_steps=9)
    delta = torch.zeros(precise.numel())
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.numel() > 1:
            parameter.data.uniform_(-1 / 64, 1 / 64)
            delta[sft.positions()["0.weight"].long()] = parameter.data
    with sft.rebinding_parameters(ALONE, in_layers=True, pretrained=Elsewhere):
        pass
    model[0].weight.data = precise.bfloat16()
    inputs = torch.randn(5, 24).bfloat16()
    weight = (precise + delta.view(precise.shape)).bfloat16()
    rounded_twice = (precise.bfloat16().float() + delta.view(precise.shape)).bfloat16()
    assert int((weight != rounded_twice).sum()) > math.prod(precise.shape) // 50
    torch.testing.assert_close(model(inputs), F.linear(inputs, weight), rtol=0, atol=0)
    assert torch.equal(model[0].weight.detach(), precise.bfloat16())
