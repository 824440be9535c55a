from __future__ import annotations

from itertools import product

import pytest

from slivertune.training.methods.registry import TRAIN_METHODS
from slivertune.training.options.arguments import WeightsDtype
from slivertune.training.precision import choose_precision

TABLE = {
    # method, weights_dtype, bf16 -> loading, autocast
    ("hift", "auto", False): ("stored", "no"),
    ("hift", "auto", True): ("bf16", "no"),
    ("hift", "fp32", False): ("fp32", "no"),
    ("hift", "fp32", True): ("fp32", "bf16"),
    ("hift", "bf16", False): ("bf16", "no"),
    ("hift", "bf16", True): ("bf16", "no"),
    ("dense", "auto", False): ("fp32", "no"),
    ("dense", "auto", True): ("fp32", "bf16"),
    ("dense", "fp32", False): ("fp32", "no"),
    ("dense", "fp32", True): ("fp32", "bf16"),
    ("dense", "bf16", False): ("bf16", "no"),
    ("dense", "bf16", True): ("bf16", "no"),
    ("sft", "auto", False): ("stored", "no"),
    ("sft", "auto", True): ("bf16", "no"),
    ("sft", "fp32", False): ("fp32", "no"),
    ("sft", "fp32", True): ("fp32", "bf16"),
    ("sft", "bf16", False): ("bf16", "no"),
    ("sft", "bf16", True): ("bf16", "no"),
    ("lora", "auto", False): ("fp32", "no"),
    ("lora", "auto", True): ("bf16", "bf16"),
    ("lora", "fp32", False): ("fp32", "no"),
    ("lora", "fp32", True): ("fp32", "bf16"),
    ("lora", "bf16", False): ("bf16", "bf16"),
    ("lora", "bf16", True): ("bf16", "bf16"),
}


@pytest.mark.parametrize(("method", "weights_dtype", "bf16"), list(TABLE))
def test_the_table_of_precisions(method: str, weights_dtype: WeightsDtype, bf16: bool) -> None:
    precision = choose_precision(TRAIN_METHODS[method].bf16_use, weights_dtype, bf16=bf16, fp16=False)
    assert (precision.loading, precision.autocast) == TABLE[method, weights_dtype, bf16]


@pytest.mark.parametrize(("method", "weights_dtype"), list(product(("dense", "hift", "sft", "lora"), ("auto", "fp32"))))
def test_fp16_is_autocast_over_fp32_weights(method: str, weights_dtype: WeightsDtype) -> None:
    precision = choose_precision(TRAIN_METHODS[method].bf16_use, weights_dtype, bf16=False, fp16=True)
    assert (precision.loading, precision.autocast) == ("fp32", "fp16")


@pytest.mark.parametrize(("weights_dtype", "bf16"), list(product(("auto", "fp32", "bf16"), (False, True))))
def test_beside_4_bit_weights_sft_computes_as_lora_does(weights_dtype: WeightsDtype, bf16: bool) -> None:
    precision = choose_precision("weights", weights_dtype, bf16=bf16, fp16=False, four_bit=True)
    assert (precision.loading, precision.autocast) == TABLE["lora", weights_dtype, bf16]
