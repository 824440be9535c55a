from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from slivertune.cli import main
from slivertune.deltas.delta_file import DELTA_FILE, load
from tests.helpers.models import differing
from tests.training.tiny_runs import (
    TINY_RECIPE,
    UNMEASURED,
    Runs,
    assert_same_bits,
    saved_weights,
    train,
    write_classes,
)

# Four projections of attention and three of the feed-forward part in each block.
ATTENTION = TINY_RECIPE.hidden_size**2
FEED_FORWARD = TINY_RECIPE.hidden_size * TINY_RECIPE.intermediate_size
NUM_TENSORS = 7 * TINY_RECIPE.num_layers
NUM_TRAINED = TINY_RECIPE.num_layers * (4 * round(0.1 * ATTENTION) + 3 * round(0.1 * FEED_FORWARD))
SFT = ("--method", "sft", "--density", "0.1", "--reselection_interval", "6")
MOMENTUM = ("--selection", "momentum", "--learning_rate", "0.1")


@pytest.mark.parametrize(
    "more", [pytest.param((), marks=pytest.mark.slow), MOMENTUM, ("--bf16",), ("--packed", "--redistribute")]
)
def test_the_final_model_is_the_base_plus_its_deltas_and_nothing_else_has_moved_by_a_bit(
    more: tuple[str, ...], runs: Runs
) -> None:
    output = runs["out"]
    results = runs.train("out", *SFT, "--max_steps", "14", *UNMEASURED, *more)
    assert (results["model_folder"], results["delta_folder"]) == (str(output / "model"), str(output / "delta"))
    assert results["merge_command"] is None
    AutoTokenizer.from_pretrained(output / "model")
    dtype = torch.bfloat16 if "--bf16" in more else torch.float32
    base = {name: tensor.to(dtype) for name, tensor in saved_weights(runs.base).items()}
    trained, file = saved_weights(output / "model"), load(output / "delta", base=base)
    assert trained.keys() == base.keys()
    assert sum(delta.num_weights for delta in file.deltas.values()) == NUM_TRAINED
    assert {name.split(".")[-2] for name in file.deltas} == {
        *("q_proj", "k_proj", "v_proj", "o_proj"),
        *("gate_proj", "up_proj", "down_proj"),
    }
    for name, pretrained in base.items():
        expected = pretrained.clone().flatten()
        if name in file.deltas:
            delta = file.deltas[name]
            assert delta.values.abs().max() > 0
            where = delta.indices.long()
            expected[where] = (expected[where].float() + delta.values).to(dtype)
            assert not torch.equal(expected, pretrained.flatten())
        assert torch.equal(trained[name].flatten(), expected), name


def test_slivertune_merge_makes_the_same_model_of_the_deltas(runs: Runs) -> None:
    output = runs["out"]
    runs.train("out", *SFT, *UNMEASURED)
    file = load(output / "delta")
    assert file.base_model_name == str(runs.base)
    assert (file.config["density"], file.config["selection"]) == (0.1, "accumulated_gradient")
    assert main(["merge", str(output / "delta"), "--output_dir", str(runs["merged"])]) == 0
    assert differing(saved_weights(runs["merged"]), saved_weights(output / "model")) == []


@pytest.mark.slow
def test_over_4_bits_deltas_are_all_that_is_saved_and_the_command_for_a_model_works(runs: Runs) -> None:
    output = runs["out"]
    results = runs.train("out", *SFT, "--load_in_4bit", "--max_steps", "14")
    assert results["model_folder"] is None and not (output / "model").exists()
    assert "".join(results["merge_command"]) in "".join(runs.printed().split())
    assert main(results["merge_command"][1:]) == 0
    merged = AutoModelForCausalLM.from_pretrained(output / "merged").state_dict()
    base, file = AutoModelForCausalLM.from_pretrained(runs.base).state_dict(), load(output / "delta")
    assert len(file.deltas) == NUM_TENSORS
    for name, pretrained in base.items():
        expected = pretrained.clone().flatten()
        if name in file.deltas:
            expected[file.deltas[name].indices.long()] += file.deltas[name].values
        assert torch.equal(merged[name].flatten(), expected), name


@pytest.mark.slow
def test_codes_of_4_bits_never_change(runs: Runs) -> None:
    more = (*SFT, "--load_in_4bit", "--max_steps", "8", "--save_steps", "4")
    runs.train("out", *more)
    first, second = (saved_weights(runs["out"] / f"checkpoint-{step}") for step in (4, 8))
    assert sum(tensor.dtype == torch.uint8 for tensor in first.values()) > NUM_TENSORS
    assert differing(first, second) == []


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), ("--bf16", "--packed", "--redistribute"), ("--load_in_4bit",)])
def test_a_run_that_is_resumed_inside_an_open_estimation_phase_ends_with_the_same_bits(
    more: tuple[str, ...], runs: Runs, caplog: pytest.LogCaptureFixture
) -> None:
    # Phases are updates 1 to 5, then 8 to 12: after 3 and 9 one is open, after 6 none is.
    schedule = ("--reselection_interval", "12", "--lr_scheduler_type", "cosine", "--gradient_accumulation_steps", "2")
    more = (*SFT, *schedule, *more, "--max_steps", "14", "--save_steps", "3", "--sample_tokens", "0")
    runs.train("whole", *more)
    for step, is_open in ((3, True), (6, False), (9, True)):
        checkpoint = runs["whole"] / f"checkpoint-{step}"
        state = torch.load(checkpoint / "optimizer.pt", weights_only=True)["state"]
        assert {"estimates" in values for values in state.values()} == {is_open}
        again = runs[f"from-{step}"]
        runs.train(again.name, *more, "--resume_from_checkpoint", str(checkpoint))
        assert_same_bits(runs["whole"], again)
        assert differing(*(load_file(path / "delta" / DELTA_FILE) for path in (runs["whole"], again))) == []
    assert "unexpected keys" not in caplog.text


@pytest.mark.slow
def test_a_checkpoint_of_weights_alone_is_refused(runs: Runs) -> None:
    runs.train("out", *SFT, "--max_steps", "2", "--save_steps", "1", "--save_only_model")
    error = runs.complaint(*SFT, "--max_steps", "4", "--resume_from_checkpoint", "true")
    assert "checkpoint-2 has no optimizer.pt, so its deltas can't be told from pretrained" in error


@pytest.mark.slow
def test_a_run_says_what_it_trains(runs: Runs) -> None:
    results = runs.train("out", *SFT, "--bf16")
    out, num_all = runs.printed(), sum(tensor.numel() for tensor in saved_weights(runs.base).values())
    assert (results["num_trained"], results["num_parameters"]) == (NUM_TRAINED, num_all)
    share = f"{NUM_TRAINED / num_all:.2%}"
    assert f"  model   {num_all:,} weights in bfloat16 on cpu, {NUM_TRAINED:,} of them trained ({share})" in out
    for line in (
        f"  sft     {NUM_TRAINED:,} weights of {NUM_TENSORS} tensors (10.00% of theirs), deltas in the weights",
        "  chosen  by gradients accumulated over 5 updates, at update 5 and then every 6 updates",
        "  rate    0.01, sft_adamw, linear schedule",
    ):
        assert line in out
    settings = {"optim": "sft_adamw", "density": 0.1, "selection": "accumulated_gradient", "num_tensors": NUM_TENSORS}
    assert {name: results["settings"][name] for name in settings} == settings


@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "state_bytes"),
    [
        # Index, delta, two moments, pretrained value (4 in fp32), age; in a phase 16 more for candidates.
        ((), 38),
        (("--reselection_interval", "0"), 22),
        (("--bf16",), 36),
        (("--load_in_4bit",), 34),
    ],
)
def test_the_ledger_counts_deltas_as_state_from_the_first_update_on(
    more: tuple[str, ...], state_bytes: int, runs: Runs
) -> None:
    steps = ("--reselection_interval", "20", *more, "--max_steps", "7")
    most = runs.train("out", *SFT, *steps)["highest_bytes"]
    assert (most["state"], most["gradients"]) == (state_bytes * NUM_TRAINED, 4 * NUM_TRAINED)
    sizes = {name: tensor.nbytes for name, tensor in saved_weights(runs.base).items()}
    weights = sum(sizes.values()) // (2 if "--bf16" in more else 1)
    if "--load_in_4bit" in more:
        # An eighth of the blocks' bytes, and scales.
        weights -= sum(size for name, size in sizes.items() if "_proj" in name) * 7 // 8
    assert weights <= most["parameters"] < weights + 1000


def test_modules_are_chosen_by_name_and_embeddings_on_request(runs: Runs) -> None:
    more = (*SFT, "--sft_target_modules", "q_proj", "v_proj", "--train_embeddings", "--max_steps", "2", *UNMEASURED)
    runs.train("out", *more)
    assert {name.split(".")[-2] for name in load(runs["out"] / "delta").deltas} == {
        *("q_proj", "v_proj", "embed_tokens"),
    }


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--sft_target_modules", "query"), "--sft_target_modules query: targets has 'query', which matches no module"),
        (("--equivalent_lora_rank", "64"), "LoRA of rank 64 would train"),
        (
            ("--method", "lora", "--lora_target_modules", "query"),
            "lora_target_modules=['query'] does not fit LlamaForCausalLM: ",
        ),
    ],
)
def test_settings_that_do_not_fit_the_model_are_named(more: tuple[str, ...], message: str, runs: Runs) -> None:
    assert message in runs.complaint(*more, method="sft")


@pytest.mark.parametrize("four_bit", [(), ("--load_in_4bit",)])
def test_a_classifiers_new_head_is_refused_with_what_to_do_instead(
    four_bit: tuple[str, ...], runs: Runs, tmp_path: Path
) -> None:
    error = runs.complaint(*SFT, *four_bit, "--task", "classification", data=write_classes(tmp_path))
    assert "score of LlamaForSequenceClassification is new, and --method sft trains a few of each tensor's" in error
    assert "Use --task prompt_classification" in error


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:SFT trains the linear layers of the blocks")
def test_a_classifier_that_has_its_head_is_trained(runs: Runs, tmp_path: Path) -> None:
    data, task = write_classes(tmp_path), ("--task", "classification")
    # As it begins: its head has been saved and has learned nothing.
    runs.train("head", *task, "--max_steps", "1", "--learning_rate", "0", method="dense", data=data)
    more = (*SFT, *task, "--max_steps", "40", "--learning_rate", "3e-2", "--token_ratio", "0.5")
    results = train(runs["head"] / "model", data, runs["out"], *more)
    assert results["before"]["eval_accuracy"] < 1.0 == results["after"]["eval_accuracy"]
    assert torch.equal(*(saved_weights(runs[name] / "model")["score.weight"] for name in ("head", "out")))


def test_classes_can_be_told_by_a_word_without_a_new_head(runs: Runs, tmp_path: Path) -> None:
    prompts = ("--task", "prompt_classification", "--template", "{text} is {mask}", "--label_words", "even:e,odd:o")
    more = (*SFT, *prompts, "--max_steps", "40", "--learning_rate", "3e-2", *UNMEASURED)
    assert runs.train("out", *more, data=write_classes(tmp_path))["after"]["eval_accuracy"] == 1.0
