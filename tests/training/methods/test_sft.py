import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from slivertune.core.ledger import Ledger
from slivertune.sft.config import SFTConfig
from slivertune.training.command_line.parse import parse_train_arguments
from slivertune.training.methods.sft import EMBEDDED_DENSITY, SFTMethod
from slivertune.training.models import LoadedModel, Precision, load_model, open_model
from slivertune.training.options.arguments import ModelArguments
from slivertune.training.options.methods import SFT, SFTOptions
from tests.helpers.models import tiny_llama
from tests.training.test_callbacks import make_trainer
from tests.training.test_models import make_task


def attached(folder: Path, *, seed: int = 42, **settings: Any) -> SFTMethod:
    method = SFTMethod(SFTOptions(**{"density": 0.1, **settings}))
    method.attach(make_trainer(folder, seed=seed))
    return method


@pytest.mark.parametrize(("interval", "updates"), [(20, 20), (8, 8), (6, 12), (3, 9), (0, 8)])
def test_a_line_takes_as_many_intervals_as_make_eight_updates(interval: int, updates: int) -> None:
    arguments = SFTOptions(density=0.1, reselection_interval=interval, estimation_steps=2)
    assert SFTMethod(arguments).logging_steps() == updates


DEFAULTS = SFT.values(SFTOptions())
OLDER: dict[str, Any] = {
    "density": 0.03, "reselection_interval": 30, "estimation_steps": 4, "sft_momentum": 0.5, "train_embeddings": True,
    "sft_target_modules": ["q_proj"],
}  # fmt: skip


@pytest.mark.parametrize(
    ("typed", "own"),
    [
        ({}, {}),
        ({"estimation_steps": 6, "packed": True}, {"estimation_steps": 6, "packed": True}),
        ({"num_weights": 9}, {"num_weights": 9, "density": None}),
    ],
)
def test_a_run_from_before_goes_on_with_the_settings_that_it_began_with(
    typed: dict[str, Any], own: dict[str, Any]
) -> None:
    method = SFTMethod(SFTOptions(**typed))
    method.follow({"method": "sft", "sft": {**DEFAULTS, **OLDER, "unknown": 1}}, frozenset(typed))
    assert method.values() == {**DEFAULTS, **OLDER, **own}
    assert method.momentum == 0.5


def test_a_checkpoint_with_fewer_settings_or_none_leaves_the_others() -> None:
    method = SFTMethod(SFTOptions(density=0.2))
    for facts in (dict[str, Any](), {"sft": {"replacement_rate": 0.5}}):
        method.follow(facts, frozenset({"density"}))
    assert method.values() == {**DEFAULTS, "density": 0.2, "replacement_rate": 0.5}


def test_a_rate_that_nobody_chose_for_sft_is_pointed_at(tmp_path: Path) -> None:
    method = attached(tmp_path)
    (note,) = method.notes(tiny_llama(), learning_rate=5e-5)
    assert note.endswith("--learning_rate was not given, so 5e-05 is used")
    assert method.notes(tiny_llama(), learning_rate=None) == []


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({}, "  chosen  by gradients accumulated over 5 updates, at update 5 and then every 20 updates"),
        ({"selection": "momentum"}, "  chosen  by SM3's accumulators, anew every 20 updates"),
        ({"reselection_interval": 0}, "  chosen  at random, once for the whole run"),
    ],
)
def test_it_says_how_weights_are_chosen(settings: dict[str, Any], line: str, tmp_path: Path) -> None:
    assert attached(tmp_path, **settings).lines()[1] == line


def test_the_runs_seed_decides_the_first_choice(tmp_path: Path) -> None:
    first, same, other = (
        torch.cat([delta.indices for delta in attached(tmp_path, seed=seed).optimizer.deltas().values()])
        for seed in (0, 0, 1)
    )
    assert torch.equal(first, same) and not torch.equal(first, other)


def test_a_ledger_that_is_entered_later_counts_all_state_once_it_is_claimed(tmp_path: Path) -> None:
    method = SFTMethod(SFTOptions(density=0.1, reselection_interval=0))
    trainer = make_trainer(tmp_path)
    method.attach(trainer)
    model: Any = trainer.model
    with Ledger(model) as ledger:
        method.claim_state()
        # Index, delta, pretrained value, two moments, and an age of two bytes.
        assert ledger.current().state == 22 * method.optimizer.num_weights


def test_new_weights_are_refused_and_pretrained_ones_taken_as_they_are() -> None:
    method, model = SFTMethod(SFTOptions()), tiny_llama()
    assert method.adapt(LoadedModel(model=model, new_modules=()), make_task()) is model  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^model.norm, score of LlamaForCausalLM is new, and --method sft trains"):
        method.adapt(LoadedModel(model=model, new_modules=("model.norm", "score")), make_task())  # type: ignore[arg-type]


def test_a_trainer_takes_4_bit_weights_without_adapters_and_they_are_marked_again(
    tiny_base: Path, tmp_path: Path
) -> None:
    source, precision = open_model(ModelArguments(), tiny_base), Precision(loading="fp32", autocast="no")
    loaded = load_model(source, make_task(), precision=precision, four_bit_device=torch.device("cpu"))
    with pytest.raises(ValueError, match="purely quantized models"):
        make_trainer(tmp_path, model=loaded.model)
    method = SFTMethod(SFTOptions(density=0.1))
    method.attach(make_trainer(tmp_path, model=method.adapt(loaded, make_task())))
    assert loaded.model.is_quantized is True
    method.close()


def test_closing_takes_sft_off_and_keeps_what_was_learned(tmp_path: Path) -> None:
    method = SFTMethod(SFTOptions(density=0.1))
    method.close()
    trainer = make_trainer(tmp_path)
    model: Any = trainer.model
    names = [name for name, _ in model.named_parameters()]
    method.attach(trainer)
    trainer.train()
    trained = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    method.close()
    assert [name for name, _ in model.named_parameters()] == names
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert all(torch.equal(tensor, trained[name]) for name, tensor in model.state_dict().items())


RENAMED = {"targets": "sft_target_modules", "embeddings": "train_embeddings"}
MOMENTUM = ("--selection", "momentum")


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_every_choice_of_sft_has_an_option_or_a_reason_to_have_none() -> None:
    config = {item.name for item in dataclasses.fields(SFTConfig)}
    # The seed is the run's and clipping the Trainer's; the form follows the weights, and the layer form's way to a
    # gradient is a choice among dense fp32 weights, which have the optimizer form here.
    left_out = {"seed", "max_grad_norm", "form", "phi_gradient"}
    named = {RENAMED.get(name, name) for name in config - left_out}
    assert {option.name for option in SFT.options()} == {*named, "sft_momentum"}


def test_sfts_settings_and_defaults_reach_its_config() -> None:
    assert SFTOptions().config(seed=0) == SFTConfig()
    given = ["--density", "0.2", "--reselection_interval", "9", "--estimation_steps", "4", "--replacement_rate", "0.5"]
    names = ["--sft_target_modules", "q_proj", "v_proj", "--train_embeddings", "--redistribute", "--packed"]
    arguments = parse_train_arguments(["--method", "sft", *given, *names, "--seed", "7"])
    assert arguments.method.options.config(arguments.training.seed) == SFTConfig(
        density=0.2,
        reselection_interval=9,
        estimation_steps=4,
        replacement_rate=0.5,
        targets=["q_proj", "v_proj"],
        embeddings=True,
        redistribute=True,
        packed=True,
        seed=7,
    )
    momentum = parse_train_arguments(["--method", "sft", *MOMENTUM, "--sft_momentum", "0.9", "--num_weights", "50"])
    assert momentum.method.options.config(seed=0) == SFTConfig(selection="momentum", num_weights=50)
    assert momentum.method.options.momentum == 0.9
    fixed = parse_train_arguments(["--method", "sft", "--reselection_interval", "0", "--equivalent_lora_rank", "3"])
    assert fixed.method.options.config(seed=0) == SFTConfig(reselection_interval=0, equivalent_lora_rank=3)


def test_the_embedded_model_has_a_share_and_a_rate_for_each_update_rule_of_its_own() -> None:
    arguments = parse_train_arguments(["--method", "sft"])
    assert arguments.training.output_dir == "runs/sft"
    assert (arguments.method.options.density, arguments.training.learning_rate) == (EMBEDDED_DENSITY, 8e-3)
    momentum = parse_train_arguments(["--method", "sft", *MOMENTUM, "--equivalent_lora_rank", "2"])
    assert (momentum.method.options.density, momentum.training.learning_rate) == (None, 1e-1)
    other = parse_train_arguments(["--method", "sft", "--model_name_or_path", "gpt2", "--dataset", "d.csv"])
    assert other.method.options == SFTOptions()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--density", "0"], "--density 0.0 must be more than 0 and at most 1"),
        (["--density", "0.1", "--num_weights", "5"], "density and num_weights set the same thing"),
        (["--num_weights", "0"], "--num_weights 0 must be at least 1"),
        (["--equivalent_lora_rank", "0"], "--equivalent_lora_rank 0 must be at least 1"),
        (["--selection", "magic"], "invalid choice: 'magic'"),
        (["--reselection_interval", "5"], "reselection_interval=5 must be greater than estimation_steps=5"),
        (["--reselection_interval", "-1"], "--reselection_interval -1 must be at least 0"),
        (["--estimation_steps", "0"], "--estimation_steps 0 must be at least 1"),
        (["--replacement_rate", "1.5"], "--replacement_rate 1.5 must be at least 0 and at most 1"),
        ([*MOMENTUM, "--sft_momentum", "1"], "--sft_momentum 1.0 must be at least 0 and less than 1"),
        (["--sft_momentum", "0.5"], "--sft_momentum: only SM3 has momentum, with --selection momentum"),
        ([*MOMENTUM, "--estimation_steps", "3"], "--estimation_steps: --selection momentum trains by SM3"),
        ([*MOMENTUM, "--adam_beta2", "0.9", "--adam_epsilon", "1"], "--adam_beta2, --adam_epsilon: --selection"),
        (
            ["--reselection_interval", "0", "--replacement_rate", "0.1", "--redistribute"],
            "--redistribute, --replacement_rate: --reselection_interval 0 keeps the first choice",
        ),
        (["--optim", "adafactor"], "--optim: --method sft is an optimizer itself: AdamW, or SM3"),
        (["--optim", "adamw_torch", "--optim_args", "x=1"], "--optim, --optim_args: --method sft is an optimizer"),
        (
            ["--load_best_model_at_end", "--eval_strategy", "steps", "--eval_steps", "500", "--save_only_model"],
            "load_best_model_at_end does not go with save_only_model if SFT trains",
        ),
    ],
)
def test_what_does_not_hold_together_is_refused_in_one_sentence(arguments: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        parse_train_arguments(["--method", "sft", "--save_steps", "500", *arguments])


def test_adams_settings_are_for_sft_by_adamw_too() -> None:
    given = ["--adam_beta1", "0.8", "--adam_epsilon", "1e-6", "--load_in_4bit", "--load_best_model_at_end", "false"]
    arguments = parse_train_arguments(["--method", "sft", *given])
    assert (arguments.training.adam_beta1, arguments.training.adam_epsilon) == (0.8, 1e-6)
