import re

import pytest
import torch
from torch import nn

from slivertune.deltas.adapter_sums import AdapterSums

CONFIG = {"r": 4, "lora_alpha": 8, "use_rslora": False}
PREFIX = "base_model.model.0"


def factors(rows: int, columns: int, **more: torch.Tensor) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    named = {"lora_A.weight": torch.randn(4, columns), "lora_B.weight": torch.randn(rows, 4), **more}
    return {f"{PREFIX}.{name}": each for name, each in named.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_only_the_sum_that_is_rounded_once_is_accepted(dtype: torch.dtype) -> None:
    weights = factors(24, 40)
    base = torch.randn(24, 40).to(dtype)
    sums = AdapterSums(nn.Sequential(nn.Linear(40, 24)), CONFIG, weights, [])
    exact = base.float() + 2 * (weights[f"{PREFIX}.lora_B.weight"] @ weights[f"{PREFIX}.lora_A.weight"])
    assert sums.is_sum("0.weight", base, exact.to(dtype))
    # A sum in fp32 has errors of several units in its last place; beside a midpoint, either neighbour may be right.
    steps = 64 if dtype == torch.float32 else 2
    for entry in range(0, 960, 7):
        other = exact.to(dtype)
        other.view(torch.int32 if dtype == torch.float32 else torch.int16).view(-1)[entry] += steps
        assert not sums.is_sum("0.weight", base, other) or exact.abs().view(-1)[entry] < 0.1
    twice = (base + (exact - base.float()).to(dtype)).to(dtype)
    assert dtype == torch.float32 or not sums.is_sum("0.weight", base, twice)
    assert not sums.is_sum("0.weight", base, torch.full_like(base, torch.nan))
    assert not sums.is_sum("0.weight", base, exact[:-1].to(dtype))
    assert not sums.is_sum("0.weight", base[:-1], exact[:-1].to(dtype))
    assert not sums.is_sum("0.weight", None, exact.to(dtype))


def test_a_matrix_of_several_chunks_is_verified_to_its_last_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slivertune.deltas.adapter_sums._CHUNK_ENTRIES", 100)
    weights = factors(25, 40, lora_magnitude_vector=torch.rand(25) + 1)
    base = torch.randn(25, 40)
    sums = AdapterSums(nn.Sequential(nn.Linear(40, 25)), CONFIG, weights, [])
    total = base + 2 * (weights[f"{PREFIX}.lora_B.weight"] @ weights[f"{PREFIX}.lora_A.weight"])
    exact = total * (weights[f"{PREFIX}.lora_magnitude_vector"] / total.norm(dim=1)).unsqueeze(1)
    assert sums.is_sum("0.weight", base, exact)
    exact[24, 39] *= 1.00001
    assert not sums.is_sum("0.weight", base, exact)


def test_a_tensor_without_an_adapter_must_keep_its_bits() -> None:
    sums = AdapterSums(nn.Sequential(nn.Linear(40, 24)), CONFIG, factors(24, 40), [])
    bias = torch.zeros(24)
    assert sums.is_sum("0.bias", bias, bias.clone())
    assert not sums.is_sum("0.bias", bias, -bias)


@pytest.mark.parametrize(
    ("module", "weights", "message"),
    [
        (nn.Linear(40, 24), {f"{PREFIX}.lora_C.weight": torch.ones(1)}, "0.lora_C.weight of the adapter belongs to no"),
        (nn.Linear(40, 24, bias=False), factors(24, 40, **{"lora_B.bias": torch.ones(24)}), "0 of the adapter belongs"),
        (nn.Linear(40, 24), {f"{PREFIX}.lora_A.weight": torch.ones(4, 40)}, "0 of the adapter has only one factor"),
        (nn.Conv1d(40, 24, 1, groups=2), factors(24, 40), "0 is a convolution of groups, whose sum is not known"),
    ],
)
def test_a_tensor_whose_sum_is_not_known_is_refused(
    module: nn.Module, weights: dict[str, torch.Tensor], message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        AdapterSums(nn.Sequential(module), CONFIG, weights, [])
