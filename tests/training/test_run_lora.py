from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.training.tiny_runs import TINY_RECIPE, Runs, saved_weights, write_classes

RANK = 4
# Four projections of attention and three of the feed-forward part in each block, each with r x (in + out) weights.
NUM_ADAPTED = 7 * TINY_RECIPE.num_layers
NUM_TRAINED = (
    TINY_RECIPE.num_layers
    * RANK
    * (4 * 2 * TINY_RECIPE.hidden_size + 3 * (TINY_RECIPE.hidden_size + TINY_RECIPE.intermediate_size))
)
LORA = ("--method", "lora", "--lora_rank", str(RANK))


# PEFT 0.21 asks by the name that transformers 5.23 retires.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_the_model_of_a_run_is_an_adapter_which_alone_has_gradients_and_state(runs: Runs) -> None:
    results = runs.train("out", *LORA, "--max_steps", "24")
    folder = Path(results["model_folder"])
    assert not (folder / "model.safetensors").exists()
    assert sum(tensor.numel() for tensor in saved_weights(folder).values()) == NUM_TRAINED
    AutoTokenizer.from_pretrained(folder)
    base = AutoModelForCausalLM.from_pretrained(runs.base)
    num_weights, ids = base.num_parameters(), torch.arange(20).unsqueeze(0)
    before = base(ids).logits
    assert (PeftModel.from_pretrained(base, folder)(ids).logits - before).abs().max() > 0.1
    assert (results["num_trained"], results["num_parameters"]) == (NUM_TRAINED, num_weights + NUM_TRAINED)
    settings = {"lora_rank": RANK, "lora_alpha": 2 * RANK, "lora_dropout": 0.0, "num_adapted": NUM_ADAPTED}
    assert {name: results["settings"][name] for name in settings} == settings
    out = runs.printed()
    assert f"  lora    rank {RANK}, alpha {2 * RANK}, on {NUM_ADAPTED} modules" in out
    assert f"{NUM_TRAINED:,} of them trained ({NUM_TRAINED / (num_weights + NUM_TRAINED):.2%})" in out
    most = results["highest_bytes"]
    assert most["gradients"] == 4 * NUM_TRAINED
    # AdamW's two moments, and its step counts.
    assert 8 * NUM_TRAINED <= most["state"] < 8 * NUM_TRAINED + 1000
    weights = 4 * num_weights
    assert weights + 4 * NUM_TRAINED <= most["parameters"] < weights + 4 * NUM_TRAINED + 1000


def test_modules_are_chosen_by_name(runs: Runs) -> None:
    more = (*LORA, "--lora_alpha", "3", "--lora_target_modules", "q_proj", "v_proj", "--max_steps", "2")
    results = runs.train("out", *more)
    assert results["settings"]["num_adapted"] == 2 * TINY_RECIPE.num_layers
    assert results["settings"]["lora_alpha"] == 3
    assert {name.split(".")[-3] for name in saved_weights(runs["out"] / "model")} == {"q_proj", "v_proj"}


@pytest.mark.slow
@pytest.mark.parametrize("four_bit", [(), ("--load_in_4bit",)])
def test_a_classifiers_new_head_is_trained_whole_and_saved(
    four_bit: tuple[str, ...], runs: Runs, tmp_path: Path
) -> None:
    more = (*LORA, *four_bit, "--task", "classification", "--max_steps", "30", "--learning_rate", "3e-2")
    results = runs.train("out", *more, data=write_classes(tmp_path))
    assert results["after"]["eval_accuracy"] == 1.0
    (head,) = (tensor for name, tensor in saved_weights(runs["out"] / "model").items() if "score" in name)
    assert head.shape == (2, TINY_RECIPE.hidden_size)
    assert results["num_trained"] == NUM_TRAINED + head.numel()


def test_bf16_freezes_bf16_weights_and_keeps_adapters_in_fp32(runs: Runs) -> None:
    results = runs.train("out", *LORA, "--bf16", "--use_cpu", "--max_steps", "8")
    assert (results["settings"]["weights"], results["settings"]["autocast"]) == ("bf16", "bf16")
    assert {tensor.dtype for tensor in saved_weights(runs["out"] / "model").values()} == {torch.float32}
    weights = sum(tensor.nbytes for tensor in saved_weights(runs.base).values())
    assert results["highest_bytes"]["parameters"] < weights / 2 + 4 * NUM_TRAINED + 1000
    assert results["after"]["eval_loss"] < results["before"]["eval_loss"]


def test_4_bit_weights_take_an_eighth_of_the_blocks_bytes(runs: Runs) -> None:
    full = runs.train("full", *LORA, "--max_steps", "2")
    less = runs.train("less", *LORA, "--load_in_4bit", "--max_steps", "2")
    assert less["num_parameters"] == full["num_parameters"]
    linear = sum(tensor.nbytes for name, tensor in saved_weights(runs.base).items() if "_proj" in name)
    saved = full["highest_bytes"]["parameters"] - less["highest_bytes"]["parameters"]
    assert saved == linear - linear // 8
