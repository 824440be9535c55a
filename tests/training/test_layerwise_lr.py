"""`--layerwise_lr_decay`: each layer's rate is a factor of that of the layer above it."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from slivertune import HiFTConfig, attach
from slivertune.training.layerwise_lr import LayerwiseTrainer, check_layerwise_lr, split_by_layer
from tests.helpers.models import LAYERS, differing, tiny_bert, tiny_llama, twin, weights
from tests.helpers.reference import decay_split, grouped_optimizer, naive_groups
from tests.training.tiny import quiet_arguments
from tests.training.tiny_runs import UNMEASURED, Runs

LR, DECAY = 1e-2, 0.5


def naive_rates(model: torch.nn.Module) -> dict[str, float]:
    """The head has the rate, each layer below half of that above it."""
    return {name: LR * DECAY**depth for depth, names in enumerate(naive_groups(model, 1)[::-1]) for name in names}


def rates_of(model: torch.nn.Module, optimizer: Any) -> dict[str, float]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found = [(names[id(each)], group["lr"]) for group in optimizer.param_groups for each in group["params"]]
    assert len(found) == len(dict(found)), "a parameter is in two groups"
    return dict(found)


@pytest.mark.parametrize("model", [tiny_llama(), tiny_llama(tied=True), tiny_bert()])
def test_each_parameter_has_its_layers_rate_and_keeps_the_rest(model: torch.nn.Module) -> None:
    optimizer = grouped_optimizer(model, torch.optim.AdamW, decay_split(model), lr=LR)
    decays = [(id(each), group["weight_decay"]) for group in optimizer.param_groups for each in group["params"]]
    split_by_layer(optimizer, model, DECAY)
    assert rates_of(model, optimizer) == pytest.approx(naive_rates(model), rel=1e-12)
    after = [(id(each), group["weight_decay"]) for group in optimizer.param_groups for each in group["params"]]
    assert dict(after) == dict(decays)
    assert optimizer.param_groups[0]["lr"] == LR, "logs show the rate of the first"


@pytest.mark.parametrize("method", ["dense", "hift"])
def test_a_trainer_steps_each_layer_at_its_rate(method: str, tmp_path: Path) -> None:
    model = tiny_llama()
    plain = twin(model)
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(2, 90, (6, 12)).tolist()]
    trainer: Any = LayerwiseTrainer(
        model=model,
        args=quiet_arguments(
            tmp_path,
            max_steps=3,
            per_device_train_batch_size=2,
            learning_rate=LR,
            max_grad_norm=0.0,
            optim="adamw_torch",
        ),
        train_dataset=rows,
        decay=DECAY,
        layers=None,
    )
    if method == "hift":
        attach(trainer, HiFTConfig(layers_per_group=LAYERS, steps_per_group=1, order="bottom2up"))
    seen: list[Any] = []
    own = trainer.compute_loss

    def compute_loss(model: Any, inputs: Any, **more: Any) -> Any:
        seen.append((inputs, more))
        return own(model, dict(inputs), **more)

    trainer.compute_loss = compute_loss
    trainer.train()
    optimizers = {
        name: torch.optim.AdamW([parameter], lr=naive_rates(plain)[name], weight_decay=0.0)
        for name, parameter in plain.named_parameters()
    }
    for number, (inputs, more) in enumerate(seen):
        plain.zero_grad()
        own(plain, inputs, **more).backward()
        for name, optimizer in optimizers.items():
            optimizer.param_groups[0]["lr"] = naive_rates(plain)[name] * ((3 - number) / 3)  # the linear schedule
            optimizer.step()
    assert len(seen) == 3 and differing(weights(model), weights(plain)) == []


def test_a_parameter_that_is_not_of_the_model_is_refused() -> None:
    model = tiny_llama()
    beside = torch.nn.Parameter(torch.zeros(3))
    with pytest.raises(ValueError, match=r"and 1 of 31 are not of the model\. Leave it out"):
        split_by_layer(torch.optim.SGD([*model.parameters(), beside], lr=LR), model, DECAY)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--layerwise_lr_decay", "0"], "layerwise_lr_decay=0.0 must lie in (0, 1]"),
        (["--layerwise_lr_decay", "1.5"], "layerwise_lr_decay=1.5 must lie in (0, 1]"),
        (["--method", "sft", "--layerwise_lr_decay", "0.8"], "and --method sft sets those of all"),
    ],
)
def test_what_it_can_not_do_is_refused(words: list[str], message: str, runs: Runs) -> None:
    method = words[1] if words[0] == "--method" else "hift"
    assert message in runs.complaint(*words[2 if words[0] == "--method" else 0 :], method=method)


@pytest.mark.parametrize("section", ["optimizer", "scheduler"])
def test_a_deepspeed_config_that_sets_the_rates_is_refused(section: str, tmp_path: Path) -> None:
    config = {section: {"type": "its own"}}
    arguments = quiet_arguments(tmp_path)
    arguments.hf_deepspeed_config = SimpleNamespace(config=config)
    with pytest.raises(ValueError, match=f"and the {section} section of this DeepSpeed config sets those of all"):
        check_layerwise_lr(DECAY, arguments, own_optimizer_of=None)
    check_layerwise_lr(1.0, arguments, own_optimizer_of="sft")
    # As `accelerate launch` gives it.
    trainer: Any = LayerwiseTrainer(model=tiny_llama(), args=quiet_arguments(tmp_path), decay=DECAY, layers=None)
    trainer.accelerator = SimpleNamespace(
        state=SimpleNamespace(deepspeed_plugin=SimpleNamespace(deepspeed_config=config))
    )
    with pytest.raises(ValueError, match=f"and the {section} section"):
        trainer.create_optimizer()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("optim", name) for name in ("lomo", "galore_adamw_layerwise")),
        *(("lr_scheduler_type", name) for name in ("reduce_lr_on_plateau", "greedy")),
    ],
)
def test_what_sets_one_rate_for_all_is_refused(name: str, value: str, tmp_path: Path) -> None:
    arguments = quiet_arguments(tmp_path)
    setattr(arguments, name, value)
    with pytest.raises(ValueError, match=f"and --{name} {value} sets those of all"):
        check_layerwise_lr(DECAY, arguments, own_optimizer_of=None)


def test_a_second_call_changes_no_rate(tmp_path: Path) -> None:
    trainer: Any = LayerwiseTrainer(model=tiny_llama(), args=quiet_arguments(tmp_path), decay=DECAY, layers=None)
    before = rates_of(trainer.model, trainer.create_optimizer())
    assert rates_of(trainer.model, trainer.create_optimizer()) == before and len(set(before.values())) == LAYERS


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT asks
def test_the_top_layer_that_trains_has_the_rate() -> None:
    model = get_peft_model(tiny_llama(), LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=LR)
    split_by_layer(optimizer, model, DECAY)
    assert [group["lr"] for group in optimizer.param_groups] == [LR * DECAY**depth for depth in range(LAYERS - 2)]


def test_a_model_whose_blocks_are_not_found_is_refused() -> None:
    model = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"needs the order of the layers: .*or leave out --layerwise_lr_decay"):
        split_by_layer(torch.optim.SGD(model.parameters(), lr=LR), model, DECAY)


def test_a_run_is_resumed_with_its_rates_alone(runs: Runs) -> None:
    runs.train("out", "--max_steps", "4", "--layerwise_lr_decay", "0.5", *UNMEASURED)
    last = str(next(runs["out"].glob("checkpoint-*")))
    said = runs.complaint("--resume_from_checkpoint", last, "--layerwise_lr_decay", "0.8", "--max_steps", "6")
    assert "was trained with layerwise_lr_decay=0.5, and this run asks for layerwise_lr_decay=0.8" in said
