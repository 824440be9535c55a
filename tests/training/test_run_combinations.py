import json
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM

from slivertune.core.manifest import find_damage, read_entries, write_manifest
from slivertune.interop.checkpoints import TOKENS_NAME
from slivertune.tokentune.config import TokenTune
from slivertune.training.options.table import RENAMED
from slivertune.training.run import execute
from tests.helpers.models import differing, weights
from tests.helpers.tolerance import assert_step_close, exact_sums
from tests.training.tiny_runs import (
    COMBINATIONS,
    TINY_CYCLE,
    UNMEASURED,
    Runs,
    assert_same_bits,
    saved_weights,
    write_classes,
)

NAMES = {"random": "drawn one by one", "chunks": "chunks of 16", "block": "one block"}


@pytest.mark.slow
@pytest.mark.parametrize("name", COMBINATIONS)
def test_every_combination_lowers_the_loss_and_says_what_it_is(name: str, runs: Runs) -> None:
    results = runs.train("out", *COMBINATIONS[name], "--max_steps", "24")
    assert results["after"]["eval_loss"] < results["before"]["eval_loss"] - 0.1
    assert results["num_skipped"] == 0
    out, settings = runs.printed(), results["settings"]
    if "tokens" in name:
        line = f"  tokens  40 % of each sequence carry gradient ({NAMES[settings['token_pattern']]})"
        assert settings["token_ratio"] == 0.4 and line in out
    else:
        assert settings["token_ratio"] is settings["token_pattern"] is None and "  tokens " not in out
    is_4bit = "--load_in_4bit" in COMBINATIONS[name]
    assert settings["load_in_4bit"] is ("/nf4 on cpu" in out) is is_4bit


@pytest.mark.slow
@pytest.mark.parametrize("name", COMBINATIONS)
def test_a_resumed_run_ends_with_the_same_bits_as_one_that_was_not_stopped(name: str, runs: Runs) -> None:
    more = (*COMBINATIONS[name], "--max_steps", str(TINY_CYCLE + 3), "--save_steps", "3", "--sample_tokens", "0")
    whole = runs.train("whole", *more)
    checkpoint = runs["whole"] / "checkpoint-3"
    again = runs.train("again", *more, "--resume_from_checkpoint", str(checkpoint))
    assert all(again[name] == whole[name] for name in ("before", "after"))
    assert_same_bits(runs["whole"], runs["again"])


@pytest.mark.slow
def test_the_selection_is_part_of_a_whole_checkpoint_and_decides_what_comes_next(runs: Runs) -> None:
    more = ("--method", "dense", "--token_ratio", "0.4", "--max_steps", "4", "--save_steps", "2")
    runs.train("whole", *more, "--gradient_accumulation_steps", "2")
    checkpoint = runs["whole"] / "checkpoint-2"
    state = checkpoint / TOKENS_NAME
    assert json.loads(state.read_text())["num_draws"] == 4, "two updates of two batches"
    values = read_entries(checkpoint)
    assert values["files"].pop(TOKENS_NAME)["bytes"] == state.stat().st_size
    # As if the selection had not been saved: the same run goes on with other tokens.
    state.write_text(json.dumps({**json.loads(state.read_text()), "num_draws": 0}))
    assert find_damage(checkpoint) is not None
    write_manifest(checkpoint, {"facts": values["facts"]})
    resume = ("--resume_from_checkpoint", str(checkpoint), "--gradient_accumulation_steps", "2")
    runs.train("again", *more, *resume)
    assert differing(*(saved_weights(runs[name] / "model") for name in ("whole", "again"))) != []


LORA = ("--method", "lora", "--lora_rank", "4")
SFT = ("--method", "sft", "--density", "0.1")
TOKENS = ("--token_ratio", "0.4", "--token_pattern", "block")
FOUR_BIT = "load_in_4bit=None, and this run asks for load_in_4bit=True"


@pytest.mark.parametrize(
    ("first", "others"),
    [
        (
            (*LORA, *TOKENS),
            {
                (*LORA, *TOKENS, "--token_ratio", "0.3"): "token_ratio=0.4, and this run asks for token_ratio=0.3",
                (*LORA, *TOKENS[:2]): "token_pattern=block, and this run asks for token_pattern=None",
                LORA: "token_ratio=0.4, and this run asks for token_ratio=None",
                ("--method", "lora", *TOKENS): "'rank': 16",
                (*LORA, *TOKENS, "--load_in_4bit"): FOUR_BIT,
                ("--method", "dense", *TOKENS): "method=lora, and this run asks for method=dense",
            },
        ),
        (
            SFT,
            {
                ("--method", "sft", "--density", "0.2"): "'density': 0.2",
                (*SFT, "--replacement_rate", "0.3"): "'replacement_rate': 0.2",
                (*SFT, "--selection", "momentum"): "'selection': 'momentum'",
                (*SFT, "--load_in_4bit"): FOUR_BIT,
            },
        ),
        (
            (),
            {
                ("--method", "dense"): "was trained with method=hift, and this run asks for method=dense",
                ("--layers_per_group", "2"): "'layers_per_group': 1",
            },
        ),
    ],
    ids=["lora", "sft", "hift"],
)
def test_other_settings_cannot_resume_a_run(
    first: tuple[str, ...], others: dict[tuple[str, ...], str], runs: Runs
) -> None:
    runs.train("out", *first, "--max_steps", "2", *UNMEASURED)
    for words, message in others.items():
        more = (*words, "--resume_from_checkpoint", "true", *UNMEASURED)
        assert message in runs.complaint(*more)


CHECKPOINTING = f"--{RENAMED.get('gradient_checkpointing', 'gradient_checkpointing')}"
KINDS_OF_CHECKPOINTING = [("--gradient_checkpointing",), (CHECKPOINTING,)] + [
    (CHECKPOINTING, f"{CHECKPOINTING}_kwargs", f'{{"use_reentrant": {flag}}}') for flag in ("true", "false")
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "checkpointing"),
    [
        *(((), checkpointing) for checkpointing in KINDS_OF_CHECKPOINTING[:2]),
        *(
            ((*method, *four_bit), checkpointing)
            for method in (LORA, (*SFT, "--reselection_interval", "6"))
            for four_bit in ((), ("--load_in_4bit",))
            for checkpointing in KINDS_OF_CHECKPOINTING[2:]
        ),
    ],
)
def test_activation_checkpointing_of_either_kind_and_name_changes_memory_and_no_bit(
    method: tuple[str, ...], checkpointing: tuple[str, ...], runs: Runs
) -> None:
    # The old name of the argument must not bring up its deprecation; warnings of it are errors here.
    plain, less = (
        runs.train(name, *method, "--max_steps", "8", *more) for name, more in (("plain", ()), ("less", checkpointing))
    )
    assert less["settings"]["gradient_checkpointing"] is True
    assert less["highest_bytes"]["residual"] < plain["highest_bytes"]["residual"]
    assert_same_bits(runs["plain"], runs["less"])


@pytest.mark.slow
def test_all_tokens_are_dense_training(runs: Runs) -> None:
    more = ("--method", "dense", "--optim", "sgd", "--max_steps", "6", "--learning_rate", "0.1")
    runs.train("dense", *more)
    with exact_sums():
        runs.train("exact", *more)
    runs.train("all", *more, "--token_ratio", "1")
    before = saved_weights(runs.base)

    def moved(name: str) -> dict[str, torch.Tensor]:
        return {key: value - before[key] for key, value in saved_weights(runs[name] / "model").items()}

    expected = moved("dense")
    assert all(bool(value.any()) for value in expected.values())
    # Both sum the same products in another order. Without one token in twenty they are 7e-2 apart.
    assert_step_close(moved("all"), expected, moved("exact"), cap=3e-4)


def test_a_selection_saves_activations(runs: Runs) -> None:
    more = ("--method", "dense", "--max_steps", "2")
    dense = runs.train("dense", *more)
    some = runs.train("some", *more, "--token_ratio", "0.25")
    assert some["highest_bytes"]["residual"] < 0.6 * dense["highest_bytes"]["residual"]
    assert some["highest_bytes"]["gradients"] == dense["highest_bytes"]["gradients"]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["dense", "hift", "lora"])
def test_a_classifier_learns_from_some_of_its_tokens(method: str, runs: Runs, tmp_path: Path) -> None:
    more = ("--task", "classification", "--max_steps", "40", "--learning_rate", "3e-2", "--token_ratio", "0.5")
    results = runs.train("out", *more, method=method, data=write_classes(tmp_path))
    assert results["settings"]["token_pattern"] == "random"
    assert results["after"]["eval_accuracy"] == 1.0


def test_responses_of_which_few_are_selected_give_no_loss_that_is_not_finite(runs: Runs) -> None:
    path = runs["rows.jsonl"]
    rows = [{"prompt": f"{number} and {number} are ", "response": str(2 * number)} for number in range(40)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    more = ("--token_ratio", "0.1", "--max_steps", "24", "--method", "lora", *UNMEASURED)
    results = runs.train("out", *more, data=path)
    assert results["num_skipped"] == 0
    assert results["after"]["eval_loss"] < results["before"]["eval_loss"]


@pytest.mark.slow
@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("name", [name for name in COMBINATIONS if "tokens" in name])
def test_a_run_takes_the_selection_off_its_model_in_the_end(
    name: str, fails: bool, runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = runs.assembled("out", *COMBINATIONS[name], "--max_steps", "2")
    model = run.trainer.model
    assert model is not None
    with pytest.raises(RuntimeError, match="has TokenTune attached already"):
        TokenTune(ratio=0.5).attach(model)
    if fails:
        monkeypatch.setattr(run.trainer, "train", Mock(side_effect=ZeroDivisionError))
    with pytest.raises(ZeroDivisionError) if fails else nullcontext():
        execute(run, Console(quiet=True))
    TokenTune(ratio=0.5).attach(model).remove()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("method", ["hift", "sft"])
def test_a_run_unfreezes_what_its_method_froze(method: str, runs: Runs) -> None:
    run = runs.assembled("out", *(("--density", "0.1") if method == "sft" else ()), method=method)
    model = run.trainer.model
    assert isinstance(model, torch.nn.Module)
    assert not all(parameter.requires_grad for parameter in model.parameters())
    run.close()
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())
    assert set(weights(model)) == set(weights(AutoModelForCausalLM.from_pretrained(runs.base)))
