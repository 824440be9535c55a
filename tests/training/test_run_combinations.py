from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from slivertune.cli import main
from slivertune.core.manifest import find_damage, read_entries, write_manifest
from slivertune.interop.checkpoints import TOKENS_NAME
from tests.helpers.tolerance import assert_step_close, exact_sums
from tests.training.tiny_runs import (
    COMBINATIONS,
    TINY_CYCLE,
    assert_same_bits,
    saved_weights,
    train,
    train_arguments,
    write_classes,
    write_texts,
)

NAMES = {"random": "drawn one by one", "chunks": "chunks of 16", "block": "one block"}


@pytest.mark.slow
@pytest.mark.parametrize("name", COMBINATIONS)
def test_every_combination_lowers_the_loss_and_says_what_it_is(
    name: str, tiny_base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = train(tiny_base, write_texts(tmp_path), tmp_path / "out", *COMBINATIONS[name], "--max_steps", "24")
    assert results["after"]["eval_loss"] < results["before"]["eval_loss"] - 0.1
    assert results["num_skipped"] == 0
    out, settings = capsys.readouterr().out, results["settings"]
    if "tokens" in name:
        assert settings["token_ratio"] == 0.4
        line = f"  tokens  40 % of each sequence carry gradient ({NAMES[settings['token_pattern']]})"
        assert line in out
    else:
        assert settings["token_ratio"] is settings["token_pattern"] is None
        assert "  tokens " not in out
    is_4bit = "--load_in_4bit" in COMBINATIONS[name]
    assert settings["load_in_4bit"] is is_4bit
    assert ("/nf4 on cpu" in out) is is_4bit


@pytest.mark.slow
@pytest.mark.parametrize("name", COMBINATIONS)
def test_a_resumed_run_ends_with_the_same_bits_as_one_that_was_not_stopped(
    name: str, tiny_base: Path, tmp_path: Path
) -> None:
    data = write_texts(tmp_path)
    more = (*COMBINATIONS[name], "--max_steps", str(TINY_CYCLE + 3), "--save_steps", "3", "--sample_tokens", "0")
    whole = train(tiny_base, data, tmp_path / "whole", *more)
    checkpoint = tmp_path / "whole" / "checkpoint-3"
    again = train(tiny_base, data, tmp_path / "again", *more, "--resume_from_checkpoint", str(checkpoint))
    assert again["before"] == whole["before"]
    assert again["after"]["eval_loss"] == whole["after"]["eval_loss"]
    assert_same_bits(tmp_path / "whole", tmp_path / "again")


@pytest.mark.slow
def test_the_selection_is_part_of_a_whole_checkpoint_and_decides_what_comes_next(
    tiny_base: Path, tmp_path: Path
) -> None:
    data = write_texts(tmp_path)
    more = ("--method", "dense", "--token_ratio", "0.4", "--max_steps", "4", "--save_steps", "2")
    train(tiny_base, data, tmp_path / "whole", *more, "--gradient_accumulation_steps", "2")
    checkpoint = tmp_path / "whole" / "checkpoint-2"
    state = checkpoint / TOKENS_NAME
    assert json.loads(state.read_text())["num_draws"] == 4, "two updates of two batches"
    values = read_entries(checkpoint)
    assert values["files"].pop(TOKENS_NAME)["bytes"] == state.stat().st_size
    # As if the selection had not been saved: the same run goes on with other tokens.
    state.write_text(json.dumps({**json.loads(state.read_text()), "num_draws": 0}))
    assert find_damage(checkpoint) is not None
    write_manifest(checkpoint, {"facts": values["facts"]})
    resume = ("--resume_from_checkpoint", str(checkpoint), "--gradient_accumulation_steps", "2")
    train(tiny_base, data, tmp_path / "again", *more, *resume)
    first, second = saved_weights(tmp_path / "whole" / "model"), saved_weights(tmp_path / "again" / "model")
    assert not all(torch.equal(first[name], second[name]) for name in first)


def test_a_checkpoint_without_its_selection_is_not_whole(tiny_base: Path, tmp_path: Path) -> None:
    more = ("--method", "dense", "--token_ratio", "0.4", "--max_steps", "1")
    train(tiny_base, write_texts(tmp_path), tmp_path / "out", *more)
    checkpoint = tmp_path / "out" / "checkpoint-1"
    assert find_damage(checkpoint) is None
    (checkpoint / TOKENS_NAME).unlink()
    assert find_damage(checkpoint) == f"{TOKENS_NAME} is missing"


def test_other_settings_cannot_resume_a_run(
    tiny_base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, output = write_texts(tmp_path), tmp_path / "out"
    lora = ("--method", "lora", "--lora_rank", "4")
    tokens = ("--token_ratio", "0.4", "--token_pattern", "block")
    train(tiny_base, data, output, *lora, *tokens, "--max_steps", "2")
    for more, message in (
        (
            (*lora, "--token_ratio", "0.3", "--token_pattern", "block"),
            "token_ratio=0.4, and this run asks for token_ratio=0.3",
        ),
        ((*lora, "--token_ratio", "0.4"), "token_pattern=block, and this run asks for token_pattern=None"),
        (lora, "token_ratio=0.4, and this run asks for token_ratio=None"),
        (("--method", "lora", *tokens), "'rank': 16"),
        ((*lora, *tokens, "--load_in_4bit"), "load_in_4bit=None, and this run asks for load_in_4bit=True"),
        (("--method", "dense", *tokens), "method=lora, and this run asks for method=dense"),
    ):
        arguments = train_arguments(tiny_base, data, output, *more, "--resume_from_checkpoint", "true")
        assert main(arguments) == 2
        assert message in capsys.readouterr().err


@pytest.mark.slow
def test_all_tokens_are_dense_training(tiny_base: Path, tmp_path: Path) -> None:
    data = write_texts(tmp_path)
    more = ("--method", "dense", "--optim", "sgd", "--max_steps", "6", "--learning_rate", "0.1")
    train(tiny_base, data, tmp_path / "dense", *more)
    with exact_sums():
        train(tiny_base, data, tmp_path / "exact", *more)
    train(tiny_base, data, tmp_path / "all", *more, "--token_ratio", "1")
    before = saved_weights(tiny_base)

    def moved(name: str) -> dict[str, torch.Tensor]:
        return {key: value - before[key] for key, value in saved_weights(tmp_path / name / "model").items()}

    expected = moved("dense")
    assert all(bool(value.any()) for value in expected.values())
    # Both sum the same products in another order. Without one token in twenty they are 7e-2 apart.
    assert_step_close(moved("all"), expected, moved("exact"), cap=3e-4)


def test_a_selection_saves_activations(tiny_base: Path, tmp_path: Path) -> None:
    data = write_texts(tmp_path)
    more = ("--method", "dense", "--max_steps", "8")
    dense = train(tiny_base, data, tmp_path / "dense", *more)
    some = train(tiny_base, data, tmp_path / "some", *more, "--token_ratio", "0.25")
    assert some["highest_bytes"]["residual"] < 0.6 * dense["highest_bytes"]["residual"]
    assert some["highest_bytes"]["gradients"] == dense["highest_bytes"]["gradients"]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["dense", "hift", "lora"])
def test_a_classifier_learns_from_some_of_its_tokens(method: str, tiny_base: Path, tmp_path: Path) -> None:
    more = ("--task", "classification", "--max_steps", "40", "--learning_rate", "3e-2", "--token_ratio", "0.5")
    results = train(tiny_base, write_classes(tmp_path), tmp_path / "out", *more, method=method)
    assert results["settings"]["token_pattern"] == "random"
    assert results["after"]["eval_accuracy"] == 1.0


def test_responses_of_which_few_are_selected_give_no_loss_that_is_not_finite(tiny_base: Path, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [{"prompt": f"{number} and {number} are ", "response": str(2 * number)} for number in range(40)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    more = ("--token_ratio", "0.1", "--max_steps", "24", "--method", "lora")
    results = train(tiny_base, path, tmp_path / "out", *more)
    assert results["num_skipped"] == 0
    assert results["after"]["eval_loss"] < results["before"]["eval_loss"]
