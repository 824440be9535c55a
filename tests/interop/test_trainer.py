from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments

import slivertune
from slivertune import HiFTConfig, SFTConfig, TokenTune
from slivertune.interop.checkpoints import TOKENS_NAME
from slivertune.interop.methods import count_updates
from slivertune.parked.streamed_model import StreamedModel
from tests.helpers.models import assert_same_bits, deterministic, tiny_llama
from tests.helpers.ranks import quick
from tests.training.test_callbacks import ROWS, StopAfter, Watch, collate, make_trainer


def attach_sliver(trainer: Trainer, config: Any = None, *more: TokenTune, **options: Any) -> Any:
    """The optimizer that `attach` has built, HiFT by default."""
    return slivertune.attach(trainer, config or HiFTConfig.paper(), *more, **options).optimizer


def sft_config(**options: Any) -> SFTConfig:
    return SFTConfig(**{"density": 0.1, "reselection_interval": 6, **options})


# ---- what is attached


@pytest.mark.parametrize("name", ["HiFT", "SFT"])
def test_attaching_twice_or_to_a_trainer_with_an_optimizer_is_refused(name: str, tmp_path: Path) -> None:
    config = HiFTConfig.paper() if name == "HiFT" else sft_config()
    trainer = make_trainer(tmp_path)
    optimizer = attach_sliver(trainer, config)
    assert trainer.optimizer is optimizer and type(optimizer).__name__ == name
    with pytest.raises(RuntimeError, match=rf"has an optimizer already\. Give it none, and attach {name} once"):
        slivertune.attach(trainer, config)


def test_the_base_optimizer_is_the_trainers_own(tmp_path: Path) -> None:
    options = {"optim": "sgd", "optim_args": "momentum=0.5", "weight_decay": 0.3, "learning_rate": 0.25}
    stock = make_trainer(tmp_path, **options).create_optimizer()
    hift = attach_sliver(make_trainer(tmp_path, **options))
    assert [group["weight_decay"] for group in hift.param_groups] == [0.3, 0.0]
    ours, theirs = (
        [{**group, "params": len(group["params"])} for group in each.param_groups] for each in (hift, stock)
    )
    assert ours == theirs


def test_settings_of_the_base_optimizer_that_the_trainer_passes_over_are_set(tmp_path: Path) -> None:
    def made(**options: Any) -> Any:
        return attach_sliver(make_trainer(tmp_path, max_grad_norm=0.0, **options), HiFTConfig.all_layers(master="none"))

    adafactor = made(optim="adafactor", optim_args="decay_rate=-0.5, clip_threshold=2,relative_step=false")
    found = [(group["decay_rate"], group["clip_threshold"], group["eps"]) for group in adafactor.param_groups]
    assert found == [(-0.5, 2, (1e-30, 1e-3))] * 2
    assert [group["amsgrad"] for group in made(optim="adamw_torch", optim_args="amsgrad=True").param_groups] == [
        True
    ] * 2
    for optim_args, text in (
        ("threshold=2", "'threshold=2', and Adafactor takes beta1, "),
        ("decay_rate=x", "'decay_rate=x'"),
    ):
        with pytest.raises(ValueError, match=text):
            made(optim="adafactor", optim_args=optim_args)


@pytest.mark.parametrize(
    "settings",
    [
        (HiFTConfig.paper(stream_bytes=4096), TokenTune(ratio=0.4)),
        (HiFTConfig.paper(waiting="int8", gradients="host"),),
        pytest.param((HiFTConfig.paper(weights="host", gradients="stepped"),), marks=pytest.mark.slow),
        pytest.param((sft_config(), TokenTune(ratio=0.4)), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_where_algorithms_must_be_deterministic_the_bits_are_the_same(settings: Any, tmp_path: Path) -> None:
    models = []
    for context in (nullcontext(), deterministic()):
        trainer = make_trainer(tmp_path, model=tiny_llama(), max_steps=7, max_grad_norm=0.0)
        slivertune.attach(trainer, *settings)
        with context:
            trainer.train()
        models.append(trainer.model)
    assert_same_bits(*models)


@pytest.mark.parametrize("waiting", quick([None, "int8"], ["int8"]))
def test_after_training_blocks_on_the_host_still_come_for_an_evaluation_and_for_a_second_trainer(
    waiting: Any, tmp_path: Path
) -> None:
    model, losses, inside = tiny_llama(), list[float](), list[int]()
    blocks: Any = model.model.layers  # type: ignore[union-attr]
    for block in blocks:
        block.mlp.register_forward_pre_hook(lambda mlp, _: inside.append(mlp.up_proj.weight.data_ptr()))
    for _ in range(2):
        trainer = make_trainer(tmp_path, model=model, max_steps=7)
        slivertune.attach(trainer, HiFTConfig.paper(weights="host", waiting=waiting, resident_bytes=0))
        trainer.train()
        outside = [block.mlp.up_proj.weight.data_ptr() for block in blocks]
        inside.clear()
        losses.append(trainer.evaluate(ROWS)["eval_loss"])
        assert inside and not set(inside) & set(outside)
        trainer.train()
    attached = slivertune.attach(make_trainer(tmp_path, model=model), HiFTConfig.paper(weights="host"))
    attached.detach()
    losses.append(make_trainer(tmp_path, model=model).evaluate(ROWS)["eval_loss"])
    assert losses[2] < losses[1] < losses[0]


def test_a_training_ends_well_if_host_memory_for_its_evaluation_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer(tmp_path, model=tiny_llama(), max_steps=2)
    slivertune.attach(trainer, HiFTConfig(weights="host", waiting="int8"))
    monkeypatch.setattr(StreamedModel, "attach_for_inference", Mock(side_effect=OSError("no memory to map")))
    with pytest.warns(UserWarning, match="the training is complete, but .* no memory to map"):
        trainer.train()
    assert trainer.state.global_step == 2 and all(each.requires_grad for each in trainer.model.parameters())


def test_the_base_optimizer_is_the_class_that_the_trainer_was_given(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    trainer.optimizer_cls_and_kwargs = (torch.optim.Adagrad, {"lr": 0.5})
    hift = attach_sliver(trainer)
    assert (hift.base.optimizer_class, hift.param_groups[0]["lr"]) == (torch.optim.Adagrad, 0.5)


def test_sft_has_the_trainers_rate_decay_and_adams_settings(tmp_path: Path) -> None:
    options = {"learning_rate": 0.25, "weight_decay": 0.3, "adam_beta1": 0.8, "adam_beta2": 0.9, "adam_epsilon": 1e-3}
    (group,) = attach_sliver(make_trainer(tmp_path, **options), sft_config()).param_groups
    expected = {"lr": 0.25, "weight_decay": 0.3, "betas": (0.8, 0.9), "eps": 1e-3}
    assert {name: group[name] for name in expected} == expected
    momentum = sft_config(selection="momentum")
    (group,) = attach_sliver(make_trainer(tmp_path, **options), momentum, momentum=0.5).param_groups
    expected = {"lr": 0.25, "weight_decay": 0.3, "momentum": 0.5}
    assert {name: group[name] for name in expected} == expected
    assert group["eps"] < 1e-3 and "betas" not in group, "SM3's own"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        # 16 rows in batches of 2.
        ({"max_steps": 3}, 3),
        ({"max_steps": -1, "num_train_epochs": 2}, 16),
        ({"max_steps": -1, "num_train_epochs": 2, "gradient_accumulation_steps": 3}, 6),
        ({"max_steps": -1, "num_train_epochs": 1.4, "gradient_accumulation_steps": 3}, 5),
        ({"max_steps": -1, "num_train_epochs": 1, "gradient_accumulation_steps": 20}, 1),
        ({"max_steps": -1, "num_train_epochs": 1, "data": ROWS[:15]}, 8),
        ({"max_steps": -1, "num_train_epochs": 1, "data": ROWS[:15], "dataloader_drop_last": True}, 7),
        ({"max_steps": -1, "num_train_epochs": 0.1}, 1),
    ],
)
def test_the_updates_of_a_run_are_counted_as_the_trainer_counts_them(
    options: dict[str, Any], expected: int, tmp_path: Path
) -> None:
    trainer = make_trainer(tmp_path, **options)
    assert count_updates(trainer) == expected
    optimizer = attach_sliver(trainer, sft_config())
    trainer.train()
    assert trainer.state.global_step == trainer.state.max_steps == optimizer.updates == expected


def positions_of(optimizer: Any) -> dict[str, set[int]]:
    return {name: set(delta.indices.tolist()) for name, delta in optimizer.deltas().items()}


def after_each_update(trainer: Trainer, look: Callable[[], Any]) -> list[Any]:
    """Filled while the Trainer trains with what there is to see after each update."""
    seen: list[Any] = []

    class Look(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen.append(look())

    trainer.add_callback(Look())
    return seen


def test_the_end_of_the_run_decides_how_much_a_reselection_replaces(tmp_path: Path) -> None:
    kept = {}
    for max_steps in (6, 60):
        trainer = make_trainer(tmp_path, max_steps=max_steps)
        optimizer = attach_sliver(trainer, sft_config(estimation_steps=2, replacement_rate=1.0))
        seen = after_each_update(trainer, partial(positions_of, optimizer))
        trainer.add_callback(StopAfter(6))
        trainer.train()
        before, after = seen[4:6]
        kept[max_steps] = [len(before[name] & after[name]) / len(before[name]) for name in before]
    # alpha times the share of updates to come: none of 6, nine tenths of 60, rounded down in each tensor.
    assert set(kept[6]) == {1.0}
    assert all(0.1 <= share < 0.1 + 0.02 for share in kept[60])


@pytest.mark.parametrize("selection", ["accumulated_gradient", "momentum"])
def test_the_trainer_clips_the_norm_of_the_trained_weights_gradient(selection: str, tmp_path: Path) -> None:
    limit = 1e-2
    trainer = make_trainer(tmp_path, max_grad_norm=limit, max_steps=8)
    optimizer = attach_sliver(trainer, sft_config(selection=selection))
    seen = after_each_update(trainer, lambda: float(optimizer.grad_norm))
    trainer.train()
    logged = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
    assert len(logged) == len(seen) == 8
    assert min(logged) > limit
    # Clipping divides by the norm plus 1e-6.
    assert all(limit * 0.999 < norm <= limit * 1.0001 for norm in seen)


def test_tokentune_alone_leaves_the_trainers_optimizer_and_goes_off_again(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    attachment = slivertune.attach(trainer, TokenTune(ratio=0.5))
    assert attachment.optimizer is None and trainer.optimizer is None and attachment.tokens is not None
    trainer.train()
    assert attachment.tokens.num_draws == 6
    attachment.detach()
    trainer.model.train()
    trainer.model(**collate(ROWS[:2])).loss.backward()
    assert attachment.tokens.num_draws == 6, "the model is as it was"


@pytest.mark.parametrize(
    ("settings", "error", "text"),
    [
        ((), ValueError, "nothing can't be attached"),
        ((HiFTConfig.paper(), SFTConfig(density=0.1)), ValueError, "HiFTConfig, SFTConfig can't be attached"),
        ((TokenTune(ratio=0.5), TokenTune(ratio=0.5)), ValueError, "TokenTune, TokenTune can't be attached"),
        (("hift",), TypeError, r"\('hift',\) are not all settings\. Pass a HiFTConfig"),
        ((HiFTConfig.paper(layers=("nowhere",)),), ValueError, "layers"),
    ],
)
def test_settings_that_do_not_go_together_or_fit_the_model_are_refused_and_leave_the_trainer_as_it_was(
    settings: tuple[Any, ...], error: type[Exception], text: str, tmp_path: Path
) -> None:
    trainer = make_trainer(tmp_path, max_steps=1)
    with pytest.raises(error, match=text):
        slivertune.attach(trainer, *settings)
    assert trainer.optimizer is None and trainer.optimizer_cls_and_kwargs is None
    assert all(parameter.requires_grad for parameter in trainer.model.parameters())
    trainer.train()


@pytest.mark.parametrize(
    ("options", "config", "text"),
    [
        (
            {"optim": "lomo"},
            HiFTConfig.paper(),
            "--optim lomo can't be HiFT's base optimizer: it updates weights inside",
        ),
        (
            {"load_best_model_at_end": True, "save_only_model": True},
            sft_config(),
            "load_best_model_at_end does not go with save_only_model if SFT trains",
        ),
        (
            {},
            HiFTConfig.paper(gradients="stepped"),
            r"gradients='stepped' does not go with max_grad_norm=1\.0: .*\. Set max_grad_norm to 0",
        ),
        (
            {"max_grad_norm": 0.0, "fp16": True},
            HiFTConfig.paper(gradients="stepped"),
            "gradients='stepped' does not go with fp16=True",
        ),
        ({"_n_gpu": 2}, HiFTConfig.paper(), "2 GPUs are visible to one process"),
        (
            {"use_liger_kernel": True},
            TokenTune(ratio=0.5),
            "TokenTune does not go with use_liger_kernel=True: .* and leave use_liger_kernel out",
        ),
    ],
)
def test_arguments_that_do_not_go_with_a_sliver_are_refused(
    options: dict[str, Any], config: Any, text: str, tmp_path: Path
) -> None:
    trainer = make_trainer(tmp_path)
    for name, value in options.items():
        setattr(trainer.args, name, value)
    with pytest.raises(ValueError, match=text):
        slivertune.attach(trainer, config)
    assert trainer.optimizer is None
    assert all("forward" not in vars(module) for module in trainer.model.modules())


def test_what_slivertune_can_not_prepare_for_is_refused_and_all_else_is_prepared_as_ever(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    hift = attach_sliver(trainer)
    with pytest.raises(ValueError, match=r"'device_placement': \[True, True\]\} has no effect on HiFT's training"):
        trainer.accelerator.prepare(trainer.model, hift, device_placement=[True, True])
    other = nn.Linear(2, 2)
    assert trainer.accelerator.prepare(other, device_placement=[True]) is other


def test_a_trainer_that_makes_its_optimizer_past_the_arguments_is_refused(tmp_path: Path) -> None:
    class Stubborn(Trainer):
        def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
            return self.optimizer

    trainer = Stubborn(model=tiny_llama(), args=TrainingArguments(output_dir=str(tmp_path), use_cpu=True))
    with pytest.raises(RuntimeError, match=r"Stubborn builds its optimizer by itself.*HiFT\.wrap"):
        slivertune.attach(trainer, HiFTConfig.paper())


# ---- the Trainer's own ways


class Doubling(Trainer):
    """A subclass as TRL's: with a loss and an optimizer that pass through the Trainer's own."""

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        return super().create_optimizer()  # type: ignore[no-any-return]

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return 2 * super().compute_loss(*args, **kwargs)


def test_a_subclass_of_the_trainer_is_served_without_another(tmp_path: Path) -> None:
    stock = make_trainer(tmp_path)
    trainer = Doubling(
        model=tiny_llama(), args=stock.args, train_dataset=ROWS, data_collator=collate, callbacks=[watch := Watch()]
    )
    hift = attach_sliver(trainer)
    trainer.train()
    assert hift.updates == 6
    assert all(watch.moved(step) for step in range(2, 7))


def run(tmp_path: Path, config: Any = None, *more: Any, resume: Any = None, stop: int = 8, **options: Any) -> Trainer:
    """Eight updates of dense fine-tuning, or of what is attached; the model is the same at the start."""
    torch.manual_seed(0)
    trainer = make_trainer(tmp_path, StopAfter(stop), **{"max_steps": 8, "max_grad_norm": 0.5, **options})
    if config is not None or more:
        slivertune.attach(trainer, *([] if config is None else [config]), *more)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


ONE_GROUP = HiFTConfig.paper(layers_per_group=5)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_accumulation_steps": 3, "max_grad_norm": 0.1},
        {"label_smoothing_factor": 0.2},
        {"max_grad_norm": 0.0, "lr_scheduler_type": "cosine", "warmup_steps": 3},
        {"neftune_noise_alpha": 5.0, "weight_decay": 0.3, "optim": "adagrad"},
    ],
    ids=lambda options: "+".join(options) or "plain",
)
def test_with_one_group_the_trainer_does_what_it_does_alone(options: dict[str, Any], tmp_path: Path) -> None:
    # Noise and data come from seeds that both runs share, so that each bit must agree.
    dense = run(tmp_path / "dense", **options)
    hift = run(tmp_path / "hift", ONE_GROUP, **options)
    assert_same_bits(dense.model, hift.model)
    theirs, ours = (
        [{key: log[key] for key in ("loss", "grad_norm", "learning_rate")} for log in t.state.log_history[:-1]]
        for t in (dense, hift)
    )
    assert theirs == ours and len(ours) == 8


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "more"),
    [
        (HiFTConfig.paper(), ()),
        (HiFTConfig.paper(order="random", steps_per_group=2), (TokenTune(ratio=0.5),)),
        (sft_config(reselection_interval=4, estimation_steps=3), ()),
        (sft_config(selection="momentum", reselection_interval=2), (TokenTune(ratio=0.5),)),
        (None, (TokenTune(ratio=0.5),)),
    ],
    ids=["hift", "hift and tokens", "sft", "sft by momentum and tokens", "tokens"],
)
def test_a_resumed_run_has_the_bits_of_one_that_never_stopped(config: Any, more: Any, tmp_path: Path) -> None:
    saving = {"save_strategy": "steps", "save_steps": 3}
    whole = run(tmp_path / "whole", config, *more, **saving)
    run(tmp_path / "cut", config, *more, stop=3, **saving)
    # True takes the newest, as the Trainer does it.
    again = run(tmp_path / "cut", config, *more, resume=True, **saving)
    assert again.state.global_step == 8
    assert_same_bits(whole.model, again.model)
    other = run(tmp_path / "whole", config, *more, resume=str(tmp_path / "whole" / "checkpoint-6"))
    assert_same_bits(whole.model, other.model)
    assert (tmp_path / "cut" / "checkpoint-6" / TOKENS_NAME).exists() == bool(more)


def test_tokens_resumed_from_a_checkpoint_without_them_warn(tmp_path: Path) -> None:
    saving = {"save_strategy": "steps", "save_steps": 3}
    run(tmp_path, HiFTConfig.paper(), stop=3, **saving)
    with pytest.warns(UserWarning, match=r"was saved without a selection of tokens \(slivertune_tokens.json\)"):
        run(tmp_path, HiFTConfig.paper(), TokenTune(ratio=0.5), resume=True, **saving)


def test_weights_alone_resume_neither_hift_nor_sft(tmp_path: Path) -> None:
    saving = {"save_strategy": "steps", "save_steps": 3, "save_only_model": True}
    for name, config, text in (
        ("hift", HiFTConfig.paper(), r".*without save_only_model, or start"),
        ("sft", sft_config(), ", so its deltas can't be told"),
    ):
        run(tmp_path / name, config, stop=3, **saving)
        with pytest.raises(RuntimeError, match=f"checkpoint-3 has no optimizer state{text}"):
            run(tmp_path / name, config, resume=True, **saving)


@pytest.mark.parametrize(("gradients", "max_grad_norm"), [("host", 0.05), ("stepped", 0.0)])
def test_a_trainer_accumulates_clips_and_reports_the_same_wherever_gradients_wait(
    gradients: Any, max_grad_norm: float, tmp_path: Path
) -> None:
    models, norms = [], []
    for place in (gradients, "device"):
        trainer = make_trainer(
            tmp_path, max_grad_norm=max_grad_norm, max_steps=8, gradient_accumulation_steps=2, logging_steps=1
        )
        slivertune.attach(trainer, HiFTConfig.paper(gradients=place, layers_per_group=2))
        trainer.train()
        models.append(trainer.model)
        norms.append([log["grad_norm"] for log in trainer.state.log_history if "grad_norm" in log])
    assert_same_bits(*models)
    # The norm of stepped gradients is that of their parts, rounded in another order.
    assert norms[0] == (norms[1] if gradients == "host" else pytest.approx(norms[1], rel=1e-5))
    assert len(norms[0]) == 8 and min(norms[0]) > max_grad_norm
