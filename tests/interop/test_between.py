"""Changes by a script between `attach`, a training and the next: it trains what it says, or is refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from torch import nn
from transformers import LlamaForCausalLM, Trainer

import slivertune
from slivertune import HiFTConfig, SFTConfig, TokenTune, deltas
from slivertune.deltas.delta_file import DELTA_FILE
from slivertune.interop.loss_weights import LOSS_NAME, loss_weights
from tests.helpers.models import assert_same_bits, differing, tiny_llama, weights
from tests.helpers.ranks import run_ranks
from tests.interop.sentence_runs import sentence_trainer
from tests.training.test_callbacks import ROWS, collate, make_trainer

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
SPARSE = SFTConfig(density=0.2, reselection_interval=6, estimation_steps=2)
SETTINGS: dict[str, tuple[Any, ...]] = {
    "HiFT": (HiFTConfig.paper(),),
    "SFT": (SPARSE,),
    "TokenTune": (TokenTune(ratio=0.5),),
    "HiFT and TokenTune": (HiFTConfig.paper(), TokenTune(ratio=0.5)),
}
EVERY = pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())


# ---- what is refused


@pytest.mark.parametrize("settings", [SETTINGS["HiFT"], SETTINGS["SFT"]], ids=["HiFT", "SFT"])
@pytest.mark.parametrize(
    ("name", "value"), [("learning_rate", 1e-5), ("weight_decay", 0.3), ("optim", "sgd"), ("adam_beta2", 0.5)]
)
def test_arguments_that_are_changed_after_attach_are_refused(
    name: str, value: Any, settings: tuple[Any, ...], tmp_path: Path
) -> None:
    trainer = make_trainer(tmp_path)
    slivertune.attach(trainer, *settings)
    before = weights(trainer.model)
    setattr(trainer.args, name, value)
    with pytest.raises(RuntimeError, match=rf"changed after slivertune\.attach.*: {name} \(.*, now {value!r}\)"):
        trainer.train()
    assert differing(weights(trainer.model), before) == []


def test_arguments_count_where_each_training_makes_its_model(tmp_path: Path) -> None:
    args = make_trainer(tmp_path, max_steps=2).args
    trainer = Trainer(model_init=lambda: tiny_llama(), args=args, train_dataset=ROWS, data_collator=collate)
    attachment = slivertune.attach(trainer, HiFTConfig.paper())
    trainer.args.learning_rate, trainer.args.lr_scheduler_type = 1e-5, "constant"  # type: ignore[assignment]
    trainer.train()
    assert attachment.optimizer.param_groups[0]["lr"] == 1e-5


@EVERY
def test_a_trainer_does_not_train_without_what_was_detached(settings: tuple[Any, ...], tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    slivertune.attach(trainer, *settings).detach()
    with pytest.raises(RuntimeError, match=r"was detached from this Trainer.*\. Make a new Trainer"):
        trainer.train()


def with_prompts(model: Any) -> Any:
    return get_peft_model(model, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))


def with_lora(model: Any) -> Any:
    return get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))


@EVERY
@pytest.mark.parametrize("replace", [lambda model: tiny_llama(seed=3), with_prompts, with_lora])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_another_model_than_the_one_that_was_attached_to_is_refused(
    replace: Callable[[Any], Any], settings: tuple[Any, ...], tmp_path: Path
) -> None:
    trainer = make_trainer(tmp_path)
    slivertune.attach(trainer, *settings)
    trainer.model = trainer.model_wrapped = replace(trainer.model)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"trainer\.model was replaced after slivertune\.attach"):
            trainer.train()


@pytest.mark.parametrize("settings", [SETTINGS["HiFT"], SETTINGS["TokenTune"]], ids=["HiFT", "TokenTune"])
def test_momentum_that_nothing_reads_is_refused(settings: tuple[Any, ...], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"momentum=0\.9 is that of SM3 under SFT"):
        slivertune.attach(make_trainer(tmp_path), *settings, momentum=0.9)


@pytest.mark.parametrize(
    "config", [HiFTConfig.paper(max_grad_norm=5.0), SFTConfig(density=0.1, max_grad_norm=5.0)], ids=["HiFT", "SFT"]
)
def test_only_one_limit_of_the_norm_is_taken(config: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"max_grad_norm=5 of .* and max_grad_norm=1 of .* would both clip"):
        slivertune.attach(make_trainer(tmp_path), config)
    trainer = make_trainer(tmp_path, max_grad_norm=0.0, max_steps=1)
    optimizer = slivertune.attach(trainer, config).optimizer
    trainer.train()
    assert optimizer.updates == 1


@EVERY
@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("_n_gpu", 2, "2 GPUs are visible to one process"),
        ("enable_jit_checkpoint", True, "enable_jit_checkpoint=True saves checkpoints without telling callbacks"),
        ("hub_strategy", "all_checkpoints", "hub_strategy='all_checkpoints' uploads each checkpoint before"),
    ],
)
def test_arguments_that_bypass_what_is_attached_are_refused(
    name: str, value: Any, text: str, settings: tuple[Any, ...], tmp_path: Path
) -> None:
    trainer = make_trainer(tmp_path)
    trainer.args.push_to_hub = True
    setattr(trainer.args, name, value)
    with pytest.raises(ValueError, match=text):
        slivertune.attach(trainer, *settings)


def test_idle_weights_are_not_copied_to_vllm(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, model=tiny_llama(torch.bfloat16))
    trainer.args.use_vllm = True  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=r"use_vllm=True copies all parameters.*waiting='nf4' holds NaN"):
        slivertune.attach(trainer, HiFTConfig.paper(waiting="nf4"))


# ---- the model is another Trainer's


def test_a_selection_that_never_trained_is_not_on_the_model(tmp_path: Path) -> None:
    models = []
    for attaches in (False, True):
        model = tiny_llama()
        if attaches:
            slivertune.attach(make_trainer(tmp_path / "first", model=model), TokenTune(ratio=0.25))
        make_trainer(tmp_path / "second", model=model).train()
        models.append(model)
    assert_same_bits(*models)


def train_twice(rank: int, world: int, config: Any, folder: Path) -> tuple[str, dict[str, torch.Tensor]]:
    """Two trainings under DDP by a sliver, and another of all weights, by a Trainer of its own."""
    model = tiny_llama()
    first = make_trainer(folder / "first", model=model, max_steps=2)
    attachment = slivertune.attach(first, config)
    first.train()
    first.train()
    name = type(first.model_wrapped).__name__
    attachment.detach()
    second = make_trainer(folder / "second", model=model, max_steps=3)
    second.train()
    return f"{name}, {type(second.model_wrapped).__name__}", weights(model)


@pytest.mark.parametrize("config", [HiFTConfig.paper(), SPARSE], ids=["HiFT", "SFT"])
def test_ranks_stay_together_when_a_plain_trainer_follows(config: Any, tmp_path: Path) -> None:
    (names, first), (_, second) = run_ranks(train_twice, 2, config, tmp_path)
    assert names == "LlamaForCausalLM, DistributedDataParallel"
    assert differing(first, second) == []


class Fits(Trainer):
    """Trains past the `train` of the instance."""

    def fit(self) -> None:
        super().train()


def test_a_training_past_train_selects_tokens(tmp_path: Path) -> None:
    made = make_trainer(tmp_path, max_steps=2)
    model: Any = made.model
    trainer = Fits(model=model, args=made.args, train_dataset=ROWS, data_collator=collate)
    attachment = slivertune.attach(trainer, TokenTune(ratio=0.5))
    trainer.fit()
    assert attachment.tokens is not None and attachment.tokens.num_draws == 2


# ---- SFT


class Oom(Trainer):
    """Has no memory for more than two rows."""

    def compute_loss(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if model.training and len(inputs["input_ids"]) > 2:
            raise RuntimeError("CUDA out of memory.")
        return super().compute_loss(model, inputs, *args, **kwargs)


def make_oom(output: Path, batch: int) -> Oom:
    made = make_trainer(
        output,
        auto_find_batch_size=True,
        per_device_train_batch_size=batch,
        max_steps=-1,
        num_train_epochs=2,
        train_sampling_strategy="sequential",
    )
    model: Any = made.model
    return Oom(model=model, args=made.args, train_dataset=ROWS, data_collator=collate)


def test_sft_follows_a_training_that_became_longer(tmp_path: Path) -> None:
    found = []
    for batch in (8, 2):
        trainer = make_oom(tmp_path / str(batch), batch)
        optimizer = slivertune.attach(trainer, SPARSE).optimizer
        assert optimizer.total_steps == 32 // batch
        trainer.train()
        assert optimizer.total_steps == optimizer.updates == trainer.state.max_steps == 16
        assert optimizer.metrics()["reselections"] == 3
        found.append(trainer.model)
    assert_same_bits(found[0], found[1])


def test_a_second_training_that_reselects_nothing_is_said(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    optimizer = slivertune.attach(trainer, SPARSE).optimizer
    trainer.train()
    with pytest.warns(UserWarning, match=r"reselects weights up to update 6, and this training goes on to 12"):
        trainer.train()
    assert optimizer.updates == 12
    with pytest.raises(RuntimeError, match="SFT has made 12 of 6 updates"):
        optimizer.set_total_steps(20)


def test_a_saved_model_has_its_deltas_beside_it(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path / "run")
    slivertune.attach(trainer, SFTConfig(density=0.2, form="layer"))
    trainer.train()
    with pytest.warns(UserWarning, match=rf"has its pretrained weights, and the deltas are beside it \({DELTA_FILE}\)"):
        trainer.save_model(str(tmp_path / "saved"))
    saved = LlamaForCausalLM.from_pretrained(tmp_path / "saved")
    batch = collate(ROWS[:2])
    model: Any = trainer.model
    assert not torch.equal(saved(**batch).logits, model.eval()(**batch).logits)
    with deltas.apply(saved, tmp_path / "saved"):
        torch.testing.assert_close(saved(**batch).logits, model(**batch).logits)


def test_a_merged_model_is_saved_alone(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path / "run", max_steps=1)
    slivertune.attach(trainer, SPARSE)
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    assert not (tmp_path / "saved" / DELTA_FILE).exists()


@pytest.mark.parametrize("form", ["layer", "optimizer"])
def test_a_batch_that_reaches_no_trained_weight_is_no_update(form: Any, tmp_path: Path) -> None:
    model: Any = get_peft_model(tiny_llama(), LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    model.add_adapter("other", LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    trainer = make_trainer(tmp_path, model=model, max_steps=2)
    targets = [name for name, each in model.named_modules() if name.endswith("lora_A.default")]
    optimizer = slivertune.attach(trainer, SFTConfig(density=0.2, targets=targets, form=form)).optimizer
    model.set_adapter("other")
    with pytest.warns(UserWarning, match="no gradient has reached any of the 3 trained tensors"):
        trainer.train()
    assert optimizer.updates == 0


# ---- HiFT


def test_a_second_training_reads_its_own_rate_in_mid_cycle(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, max_steps=7, lr_scheduler_type="linear")
    hift = slivertune.attach(trainer, HiFTConfig.paper()).optimizer
    assert hift.num_groups == 5
    trainer.train()
    assert hift.held_lr[0] == pytest.approx(1e-2 * 2 / 7)
    rates: list[float] = []
    hift.register_step_post_hook(lambda *_: rates.append(hift.held_lr[0]))
    trainer.args.max_steps = 4
    trainer.train()
    # The second cycle has three updates left.
    assert rates == pytest.approx([1e-2, 1e-2, 1e-2, 2.5e-3])


# ---- losses with weights


def test_the_best_model_has_its_loss(tmp_path: Path) -> None:
    pytest.importorskip("sentence_transformers")
    trainer = sentence_trainer("softmax", tmp_path, save_strategy="steps", save_steps=2, max_steps=6)
    trainer.eval_dataset = trainer.train_dataset
    best = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": True}
    for name, value in {"eval_strategy": "steps", "eval_steps": 2, **best}.items():
        setattr(trainer.args, name, value)
    slivertune.attach(trainer, HiFTConfig.paper())
    trainer.train()
    assert Path(trainer.state.best_model_checkpoint, LOSS_NAME).is_file()
    assert not trainer.state.best_model_checkpoint.endswith("-6"), "the last is the best, so that nothing is loaded"
    assert trainer.evaluate()["eval_loss"] == pytest.approx(trainer.state.best_metric, rel=1e-5)


def test_a_frozen_model_in_the_loss_is_not_saved_with_its_weights(tmp_path: Path) -> None:
    pytest.importorskip("sentence_transformers")
    trainer = sentence_trainer("softmax", tmp_path, max_steps=1)
    trainer.loss.guide = guide = tiny_llama()
    own = {"classifier.weight", "classifier.bias"}
    assert set(loss_weights(trainer, trainer.model)) > own
    guide.requires_grad_(False)
    assert set(loss_weights(trainer, trainer.model)) == own
