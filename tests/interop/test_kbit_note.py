"""What `attach` says of fp32 weights beside 4-bit ones."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainingArguments

import slivertune
from slivertune.interop.kbit_note import cost_of_fp32
from tests.helpers.plan_requests import paper_request
from tests.planning.real import LLAMA, real_model


def peft_model(recipe: Any, *, in_4bit: bool = True) -> Any:
    return real_model(
        paper_request(method="lora", precision="bf16", load_in_4bit=in_4bit, recipe=recipe if in_4bit else None), LLAMA
    )


@pytest.mark.parametrize("prepares", [False, True])
def test_attach_says_what_fp32_weights_cost_that_peft_has_prepared(
    prepares: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = peft_model("peft-kbit" if prepares else None)
    arguments = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[], max_steps=1)
    slivertune.attach(Trainer(model=model, args=arguments), slivertune.TokenTune(ratio=0.5))
    said = capfd.readouterr().out
    num_weights = 2 * LLAMA.hidden_size * (LLAMA.vocab_size + LLAMA.num_hidden_layers) + LLAMA.hidden_size
    if not prepares:
        assert "4-bit" not in said
        return
    assert f"in fp32 and take {4 * num_weights / 1024:.1f} KiB, twice as much as in 16 bits" in said
    assert said.count("\n") == 1 and "leave out PEFT's prepare_model_for_kbit_training" in said


def test_trained_weights_and_models_without_4_bit_weights_cost_nothing() -> None:
    assert cost_of_fp32(peft_model(None, in_4bit=False).float()) is None
    model = peft_model("peft-kbit")
    for parameter in model.parameters():
        if parameter.dtype == torch.float32:
            parameter.requires_grad = True
    assert cost_of_fp32(model) is None
