import logging
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from slivertune.planning.shipped import SHIPPED_MODELS

# Numbers of parameters as published with the weights, tied ones once; those of the RoBERTas are of the model with a
# classifier's head for two classes, as the HiFT paper has them (124.65 and 355.36 million), and that of GPT-Neo (2.7
# billion by name) and OPT (13) are what the weights on the hub add up to.
PUBLISHED = {
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "qwen3-8b": 8_190_735_360,
    "mistral-7b": 7_241_732_096,
    "roberta-base": 124_647_170,
    "roberta-large": 355_361_794,
    "gpt2-large": 774_030_080,
    "gpt-neo-2.7b": 2_651_307_520,
    "opt-13b": 12_853_473_280,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_shipped_model_has_exactly_the_published_number_of_parameters(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    figures = SHIPPED_MODELS[name].figures
    config = AutoConfig.for_model(**figures)
    is_encoder = "MaskedLM" in figures["architectures"][0]
    auto: Any = AutoModelForSequenceClassification if is_encoder else AutoModelForCausalLM
    with torch.device("meta"), caplog.at_level(logging.ERROR):
        model = auto.from_config(config)
    assert sum(parameter.numel() for parameter in model.parameters()) == PUBLISHED[name]
    if not is_encoder:
        assert type(model).__name__ == figures["architectures"][0]


def test_every_shipped_model_has_a_published_number() -> None:
    assert SHIPPED_MODELS.keys() == PUBLISHED.keys()
