import re
from pathlib import Path
from typing import Any

import pytest

from slivertune.training.command_line.parse import parse_train_arguments
from tests.training.made_runs import planned_back


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def request_of(words: str) -> Any:
    """What a run of this command line plans."""
    return planned_back(
        parse_train_arguments(["--model", "x", "--dataset", "d.csv", "--max_length", "9", *words.split()])
    )


@pytest.mark.parametrize(
    ("words", "settings"),
    [
        ("--method lora --lora_target_modules q_proj v_proj", {"lora_target_modules": ("q_proj", "v_proj")}),
        ("--method lora --lora_dropout 0.1", {"lora_dropout": 0.1}),
        ("--method sft --packed --redistribute", {"packed": True, "redistribute": True}),
        ("--method sft --num_weights 7 --train_embeddings", {"num_weights": 7, "train_embeddings": True}),
        ("--method sft --equivalent_lora_rank 3", {"equivalent_lora_rank": 3, "density": None}),
        ("--method sft --sft_target_modules q_proj", {"sft_target_modules": ("q_proj",)}),
        ("--method sft --selection momentum --sft_momentum 0.5", {"sft_momentum": 0.5}),
        ("--method hift --steps_per_group 3", {"steps_per_group": 3}),
        ("--method dense --attn_implementation eager", {"attn_implementation": "eager"}),
        ("--method dense --weight_decay 0.1", {"optimizer": "adamw"}),
    ],
)
def test_an_option_that_changes_memory_reaches_the_plan(words: str, settings: dict[str, Any]) -> None:
    request = request_of(words)
    assert {name: getattr(request, name) for name in settings} == settings


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("--label_smoothing_factor 0.1", "plans do not support --label_smoothing_factor"),
        ("--neftune_noise_alpha 5", "plans do not support --neftune_noise_alpha"),
        ("--use_cache true", "plans do not support --use_cache"),
        ("--auto_find_batch_size true", "plans do not support --auto_find_batch_size"),
        ("--attn_implementation flash_attention_2", "plans support --attn_implementation sdpa and eager, not flash_at"),
        ("--optim sgd --weight_decay 0.1", "plans do not support --weight_decay with --optim sgd"),
        ("--optim rmsprop", "a plan does not know --optim rmsprop"),
        (
            '--gradient_checkpointing true --gradient_checkpointing_kwargs {"use_reentrant":true}',
            "plans support checkpointing only without --gradient_checkpointing_kwargs",
        ),
    ],
)
def test_what_a_plan_does_not_make_is_named(words: str, reason: str) -> None:
    with pytest.raises(ValueError, match=re.escape(reason)):
        request_of(f"--method dense {words}")
